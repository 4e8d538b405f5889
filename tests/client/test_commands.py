from __future__ import annotations

from typing import Any

import pytest

from coli_client import commands


def test_a_generation_carries_its_options_and_its_text_by_length() -> None:
    request = commands.generate(
        "é\n", "a-1", {"max": 32, "temp": 0, "stop": ["a b", "\n"], "cache_route": True}
    )
    assert request.id == "a-1"
    assert request.data == (
        b'GEN id=a-1 max=32 temp=0 stop="a b" stop="\\n" cache_route=1 bytes=3\n' + "é\n".encode() + b"\n"
    )


def test_the_callers_id_wins() -> None:
    assert commands.chat("x", "auto", {"id": "mine"}).data == b"CHAT id=mine bytes=1\nx\n"


def test_token_ids_are_a_text_of_numbers() -> None:
    assert commands.generate([1, 22, 0], "a", {}).data == b"GEN id=a ids=1 bytes=6\n1,22,0\n"


def test_every_option_of_the_server_is_known_and_no_other() -> None:
    from coli_server.protocol.options import OPTIONS, SETTABLE

    assert set(commands.Options.__annotations__) | {"bytes", "ids"} == set(OPTIONS)
    for name in commands.Options.__annotations__:
        value: Any = "x" if name in ("id", "system", "stop", "route_mode", "route_scope") else 1
        if name in SETTABLE:
            assert commands.set_option(name, value).data.startswith(b"SET " + name.encode())
        else:
            with pytest.raises(ValueError, match="belongs to one request"):
                commands.set_option(name, value)


@pytest.mark.parametrize("name", ["tmp", "bytes", "ids", "max ", "", "MAX"])
def test_an_unknown_option_is_an_error_before_sending(name: str) -> None:
    with pytest.raises(TypeError, match="unknown option"):
        commands.generate("x", "a", {name: 1})
    with pytest.raises(TypeError, match="unknown option"):
        commands.set_option(name, 1)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max": True}, TypeError, "max must be an int, not bool"),
        ({"max": 3.0}, TypeError, "max must be an int, not float"),
        ({"max": 2**70}, ValueError, "max must fit 64 bits"),
        ({"temp": False}, TypeError, "temp must be an int"),
        ({"cache_route": 2}, ValueError, "cache_route must be True or False"),
        ({"cache_route": "1"}, TypeError, "cache_route must be a bool, not str"),
        ({"stop": 3}, TypeError, "stop must be a str or a sequence of str, not int"),
        ({"stop": b"x"}, TypeError, "stop must be a str or a sequence of str, not bytes"),
        ({"stop": ["a", 3]}, TypeError, "stop must be a str, not int"),
        ({"stop": list("abcde")}, ValueError, "stop has 5 strings; at most 4"),
        ({"system": "\ud800"}, ValueError, "system holds half a surrogate pair at character 0"),
        (
            {"system": "x" * 70_000},
            ValueError,
            "the options take 70027 bytes as a line; a line may have 65536",
        ),
        ({"id": "a b"}, ValueError, "id='a b' must be 1 to 64 of"),
        ({"id": "x" * 65}, ValueError, "must be 1 to 64 of"),
        ({"id": "x\n"}, ValueError, "must be 1 to 64 of"),
        ({"id": "é"}, ValueError, "must be 1 to 64 of"),
        ({"route_mode": None}, TypeError, "route_mode must be a str, not NoneType"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        commands.generate("x", "a", options)


@pytest.mark.parametrize("prompt", [b"abc", bytearray(b"a"), 5, None, {"a": 1}, [1.5], ["1"], [True]])
def test_a_prompt_is_a_text_or_token_ids(prompt: Any) -> None:
    with pytest.raises(TypeError, match=r"prompt|token id"):
        commands.generate(prompt, "a", {})


def test_token_ids_are_not_negative() -> None:
    with pytest.raises(ValueError, match="negative"):
        commands.generate([1, -1], "a", {})


def test_half_a_surrogate_pair_is_not_a_prompt() -> None:
    with pytest.raises(ValueError, match="prompt holds half a surrogate pair at character 1"):
        commands.generate("a\udc00", "a", {})


def test_agreement_may_be_automatic() -> None:
    assert commands.set_option("route_agree", "auto").data == b"SET route_agree auto\n"
    assert commands.set_option("route_agree", False).data == b"SET route_agree 0\n"


def test_stat_names_a_section_and_a_session() -> None:
    assert commands.stat().data == b"STAT\n"
    assert commands.stat("cache").data == b"STAT cache\n"
    assert commands.stat("session", "~1").data == b"STAT session ~1\n"
    with pytest.raises(ValueError, match="goes with section='session' only"):
        commands.stat("cache", "a")
    with pytest.raises(ValueError, match="stat_line"):
        commands.stat("line")
    with pytest.raises(ValueError, match="stat_reset"):
        commands.stat("reset")
