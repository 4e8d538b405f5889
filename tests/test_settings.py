import argparse
import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given as hypothesis_given
from hypothesis import strategies as st

from coli_server.errors import ConfigurationError
from coli_server.ranges import ROUTING
from coli_server.settings import (
    SETTINGS,
    Address,
    Listen,
    Settings,
    Size,
    add_arguments,
    format_size,
    given,
    load,
    policy_arguments,
)


def parse(*argv: str) -> dict[str, object]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_arguments(parser)
    return vars(parser.parse_args(argv))


def test_without_flags_and_environment_everything_has_its_documented_default() -> None:
    settings = load(parse(), {})
    assert settings == Settings()
    assert settings.listen == Address("127.0.0.1", 7311)
    assert settings.cache_route is False
    assert settings.route_mode == "max-rank"
    assert (settings.route_j, settings.route_m, settings.route_p) == (2, 12, 0.0)
    assert (settings.route_alpha, settings.route_lambda) == (1.0, 0.1)
    assert settings.route_agree is None
    assert (settings.route_scope, settings.route_capacity, settings.route_prefill) == ("shared", 0, False)
    assert (settings.drain_seconds, settings.requests_per_connection) == (30.0, 8)
    assert (settings.line_bytes, settings.payload_bytes) == (65_536, 1_048_576)


def test_a_flag_wins_over_the_environment_which_wins_over_the_default() -> None:
    assert load(parse(), {"ROUTE_J": "5"}).route_j == 5
    assert load(parse("--route-j", "7"), {"ROUTE_J": "5"}).route_j == 7
    assert load(parse("--cache-route", "0"), {"CACHE_ROUTE": "1"}).cache_route is False


def test_a_switch_needs_no_value() -> None:
    settings = load(parse("--cache-route", "--route-prefill=1"), {})
    assert settings.cache_route is True
    assert settings.route_prefill is True


def test_abbreviated_flags_are_refused() -> None:
    with pytest.raises(SystemExit):
        parse("--route", "2")


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("CACHE_ROUTE", "2"),
        ("CACHE_ROUTE", ""),
        ("CACHE_ROUTE", "true"),
        ("ROUTE_MODE", "maxrank"),
        ("ROUTE_J", "-1"),
        ("ROUTE_J", "1_0"),
        ("ROUTE_J", "2.0"),
        ("ROUTE_M", "0"),
        ("ROUTE_P", "1"),
        ("ROUTE_ALPHA", "0"),
        ("ROUTE_ALPHA", "1.5"),
        ("ROUTE_LAMBDA", "nan"),
        ("ROUTE_AGREE", "maybe"),
        ("ROUTE_SCOPE", "global"),
        ("ROUTE_CAPACITY", "x"),
        ("ROUTE_PREFILL", "yes"),
        ("COLI_RAM", "2X"),
        ("COLI_RAM", "-1G"),
        ("COLI_EXPERTS_PER_LAYER", "0"),
        ("COLI_LISTEN", "127.0.0.1:70000"),
        ("COLI_LISTEN", "unix:"),
        ("COLI_LISTEN", "a b:1"),
        ("COLI_DRAIN_SECONDS", "inf"),
        ("COLI_MODEL", ""),
    ],
)
def test_a_wrong_value_is_refused_with_setting_value_source_and_range(name: str, word: str) -> None:
    setting = next(setting for setting in SETTINGS.values() if setting.env == name)
    for flags, environ, source in (
        ({}, {name: word}, "the environment"),
        ({setting.name: word}, {}, setting.flag),
    ):
        with pytest.raises(ConfigurationError) as raised:
            load(flags, environ)
        assert str(raised.value) == f"{name} is {word!r} (from {source}), must be {setting.accepts}"


def test_a_wrong_value_in_the_environment_does_not_matter_when_a_flag_is_given() -> None:
    assert load(parse("--route-j", "1"), {"ROUTE_J": "x"}).route_j == 1


@pytest.mark.parametrize(
    ("word", "address", "loopback"),
    [
        ("7312", Address("127.0.0.1", 7312), True),
        (":0", Address("127.0.0.1", 0), True),
        ("localhost:1", Address("localhost", 1), True),
        ("[::1]:7311", Address("::1", 7311), True),
        ("0.0.0.0:7311", Address("0.0.0.0", 7311), False),
        ("coli.example:7311", Address("coli.example", 7311), False),
        ("unix:/run/coli.sock", Address(path="/run/coli.sock"), True),
    ],
)
def test_listen_addresses(word: str, address: Address, loopback: bool) -> None:
    assert Listen().parse(word) == address
    assert address.loopback is loopback
    assert Listen().parse(str(address)) == address


@hypothesis_given(st.integers(1, 2**50))
def test_sizes_survive_being_written_and_read(size: int) -> None:
    assert Size(1, 2**50).parse(format_size(size)) == size


@pytest.mark.parametrize(
    ("word", "size"), [("1.5G", 3 * 2**29), ("512m", 2**29), ("2GiB", 2**31), ("4096", 4096)]
)
def test_sizes(word: str, size: int) -> None:
    assert Size(1, 2**40).parse(word) == size


def test_words_spell_settings_so_that_loading_them_gives_the_same_settings() -> None:
    settings = load({}, {"ROUTE_ALPHA": "0.9", "ROUTE_AGREE": "0", "COLI_RAM": "3G", "COLI_MODEL": "/a b"})
    words = {name: word for name, word in settings.words().items() if word}
    assert load(words, {}) == settings


def test_given_tells_what_the_user_said_and_nothing_else() -> None:
    words = given(parse("--route-j", "1"), {"ROUTE_J": "3", "ROUTE_M": "9", "ROUTE_X": "1"})
    assert words == {"route_j": "1", "route_m": "9"}


def test_every_routing_option_is_a_setting_of_the_same_name() -> None:
    for name in ROUTING:
        assert (SETTINGS[name].env, SETTINGS[name].flag) == (name.upper(), "--" + name.replace("_", "-"))


def test_variables_and_flags_are_unique() -> None:
    assert (
        len({setting.env for setting in SETTINGS.values()})
        == len(SETTINGS)
        == len(dataclasses.fields(Settings))
    )


def test_policy_arguments_say_off_unless_cache_route_is_on() -> None:
    assert policy_arguments(load({}, {"ROUTE_MODE": "cache-prior"}))["mode"] == "off"
    on = policy_arguments(load({}, {"CACHE_ROUTE": "1", "ROUTE_MODE": "cache-prior", "ROUTE_LAMBDA": "0.5"}))
    assert on == {
        "mode": "cache-prior",
        "j": 2,
        "m": 12,
        "p": 0.0,
        "alpha": 1.0,
        "lam": 0.5,
        "scope": "shared",
        "capacity": 0,
        "prefill": False,
        "agree": None,
    }


def test_importing_settings_loads_no_array_library() -> None:
    code = "import sys, coli_server.settings; print({'numpy', 'numba', 'asyncio'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
