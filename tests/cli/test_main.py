import os
import subprocess
import sys

import pytest

from coli_server import __version__
from coli_server.cli import COMMANDS, main
from coli_server.settings import SETTINGS


def coli(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process of its own, with nothing in the environment but `env`."""
    command = [sys.executable, "-m", "coli_server.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", **env})


def status_of(*words: str) -> int | str | None:
    """The exit status of a command in this process, whichever way it ends."""
    try:
        return main(words)
    except SystemExit as ended:
        return ended.code


def test_without_a_command_the_usage_goes_to_stderr_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert all(f"  {name}" in err for name in COMMANDS)


@pytest.mark.parametrize("word", ["help", "--help", "-h"])
def test_help_lists_every_command(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name}" in out for name in COMMANDS)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "test"])
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(name, "--help") == 0
    assert capsys.readouterr().out.startswith(f"usage: coli {name}")


def test_help_of_serve_explains_every_setting_in_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("serve", "--help") == 0
    out = " ".join(capsys.readouterr().out.split())
    for setting in SETTINGS.values():
        assert f"{setting.group}:" in out
        assert f"{setting.flag} " in out
        assert f"[{setting.env}" in out


@pytest.mark.parametrize("word", ["version", "--version"])
def test_version(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    assert capsys.readouterr().out == f"coli {__version__}\n"


def test_an_unknown_command_is_named_with_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre"]) == 2
    assert capsys.readouterr().err == "coli: unknown command 'sevre'; did you mean 'serve'?\n"


def test_a_mistyped_flag_is_not_taken_for_another_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of("serve", "--route-pre", "1") == 2
    assert "--route-pre" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["serve"], ["chat"], ["gen", "text"]])
def test_a_wrong_setting_ends_the_command_with_one_line_that_names_it(command: list[str]) -> None:
    done = coli(*command, "--model", "/nowhere", ROUTE_ALPHA="2")
    assert done.returncode == 2
    assert done.stderr == "coli: ROUTE_ALPHA is '2' (from the environment), must be a number in (0, 1]\n"


def test_a_wrong_request_option_names_its_flag() -> None:
    done = coli("gen", "text", "--top-p", "0")
    assert done.returncode == 2
    assert done.stderr == "coli: top_p is '0' (from --top-p), must be a number in (0, 1]\n"


def test_no_daemon_is_one_line_and_status_1() -> None:
    done = coli("stat", "--connect", "127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.startswith("coli: cannot connect to 127.0.0.1:1")
    assert "is a daemon running?" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_missing_package_is_named_with_the_extra_that_brings_it() -> None:
    # A search path without the site's packages: what a base install has, which is no package at all.
    code = (
        "import sys; import coli_server, coli_client; from coli_server.cli import main\n"
        "sys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
        "sys.exit(main(['serve', '--model', '/nowhere']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("coli: serve needs the Python package ")
    assert done.stderr.endswith("pip install 'coli[server]'\n")


@pytest.mark.parametrize(
    "words", [["version"], ["stat", "--connect", "127.0.0.1:1"], ["chat", "--connect", "127.0.0.1:1"]]
)
def test_commands_of_the_base_install_load_none_of_the_servers_packages(words: list[str]) -> None:
    code = (
        "import sys; from coli_server.cli import main; main(sys.argv[1:])\n"
        "print({'numpy', 'numba', 'tqdm', 'jinja2', 'coli_server.engine'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("set()\n")


@pytest.mark.parametrize(("words", "status"), [(["version"], 141), (["serve", "--help"], 0)])
def test_a_reader_that_goes_away_is_no_error(words: list[str], status: int) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "coli_server.cli", *words]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (status, "")


def test_gen_without_a_prompt_says_what_it_needs() -> None:
    done = coli("gen")
    assert done.returncode == 2
    assert "prompt" in done.stderr
    assert "Traceback" not in done.stderr
