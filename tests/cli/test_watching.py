"""What `coli top` and `coli stat --watch` refuse, before any daemon is asked."""

from __future__ import annotations

import pytest

from coli_server.cli import main
from support.ports import free_port


@pytest.mark.parametrize("word", ["0", "-1", "x", "1e9"])
@pytest.mark.parametrize(("command", "flag"), [("top", "--interval"), ("stat", "--watch")])
def test_an_interval_out_of_range_is_refused(
    capsys: pytest.CaptureFixture[str], command: str, flag: str, word: str
) -> None:
    assert main([command, f"{flag}={word}"]) == 2
    assert f"{flag} is '{word}', must be a number in" in capsys.readouterr().err


def test_top_without_a_terminal_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top"]) == 2
    assert capsys.readouterr() == ("", "coli: coli top needs a terminal; coli stat --watch writes lines\n")


def test_stat_watch_needs_a_daemon_to_begin_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stat", "--watch", "--connect", str(free_port())]) == 1
    assert "cannot connect" in capsys.readouterr().err
