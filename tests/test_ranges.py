"""The ranges of routing and sampling options: strict words, exact ends, one explanation."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli_server.ranges import FLAG, FLAG_OR_AUTO, ROUTING, SAMPLING, Choices, NumberRange

RANGES = {**ROUTING, **SAMPLING}
INTEGERS = {name: r for name, r in RANGES.items() if isinstance(r, NumberRange) and r.integer}
NUMBERS = {name: r for name, r in RANGES.items() if isinstance(r, NumberRange) and not r.integer}


@pytest.mark.parametrize(
    "word", ["", " 1", "1 ", "+1", "-1", "1_0", "0x1", "1.0", "1e0", "١", "²", "1\n", "9" * 21]
)
@pytest.mark.parametrize("name", INTEGERS)
def test_an_integer_is_ascii_digits_and_nothing_else(name: str, word: str) -> None:
    with pytest.raises(ValueError, match="must be an integer in"):
        INTEGERS[name].parse(word)


@pytest.mark.parametrize(
    "word",
    ["", " 1", "1 ", "+1", "-0", "0_1.0", "inf", "nan", "1e", "1e9999", "0x1p0", "٠", ".", "0.5\n", "1,0"],
)
@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_plain_decimal(name: str, word: str) -> None:
    with pytest.raises(ValueError, match="must be a number in"):
        NUMBERS[name].parse(word)


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("route_j", ["0", "007", "2147483647"], ["2147483648"]),
        ("route_m", ["1"], ["0"]),
        ("route_p", ["0", "0.999", "5e-1", ".5", "0."], ["1", "1.0"]),
        ("route_alpha", ["1", "1e-5"], ["0", "0.0", "1e-999", "1.01"]),
        ("route_lambda", ["0", "1"], ["1.0001"]),
        ("max", ["1"], ["0"]),
        ("top_p", ["1", "0.1"], ["0"]),
        ("temp", ["0", "100"], ["100.1"]),
        ("seed", ["9223372036854775807"], ["9223372036854775808"]),
        ("logprobs", ["0", "20"], ["21"]),
        ("deadline_ms", ["1", "604800000"], ["0", "604800001"]),
        ("cache_route", ["0", "1"], ["2", "true", "yes", "", "01"]),
        ("route_agree", ["auto", "0", "1"], ["AUTO", ""]),
        ("route_mode", ["max-rank", "cache-prior"], ["off", "Max-Rank"]),
        ("route_scope", ["shared", "session"], ["global"]),
    ],
)
def test_the_ends_are_exact(name: str, good: list[str], bad: list[str]) -> None:
    for word in good:
        assert RANGES[name].contains(RANGES[name].parse(word)), word
    for word in bad:
        with pytest.raises(ValueError, match="must be"):
            RANGES[name].parse(word)


def test_words_become_typed_values() -> None:
    assert FLAG.parse("1") is True
    assert FLAG_OR_AUTO.parse("auto") is None
    assert type(SAMPLING["top_k"].parse("40")) is int
    assert type(SAMPLING["temp"].parse("1")) is float


@pytest.mark.parametrize("value", [math.nan, math.inf, -1, True, "1", None, 10**400])
def test_contains_refuses_what_is_no_number_of_the_interval(value: object) -> None:
    assert not any(r.contains(value) for r in [*INTEGERS.values(), *NUMBERS.values()])


def test_contains_tells_a_flag_from_an_integer() -> None:
    assert FLAG.contains(True)
    assert not FLAG.contains(1)
    assert not FLAG.contains(None)


def test_the_explanations_read_well() -> None:
    assert str(ROUTING["route_p"]) == "a number in [0, 1)"
    assert str(ROUTING["route_alpha"]) == "a number in (0, 1]"
    assert str(SAMPLING["max"]) == "an integer in [1, 2147483647]"
    assert str(FLAG) == "0 or 1"
    assert str(FLAG_OR_AUTO) == "auto, 0 or 1"
    assert isinstance(ROUTING["route_mode"], Choices)
    assert str(ROUTING["route_mode"]) == "max-rank or cache-prior"


@given(st.text(max_size=40) | st.from_regex(r"[0-9.eE+-]*", fullmatch=True), st.sampled_from(sorted(RANGES)))
def test_any_word_is_a_value_of_the_range_or_a_value_error(word: str, name: str) -> None:
    try:
        value = RANGES[name].parse(word)
    except ValueError:
        return
    assert RANGES[name].contains(value)


@given(st.sampled_from(sorted(NUMBERS)), st.data())
def test_what_python_prints_is_read_back(name: str, data: st.DataObject) -> None:
    interval = NUMBERS[name]
    number = data.draw(
        st.floats(interval.low, interval.high, exclude_min=interval.low_open, exclude_max=interval.high_open)
    )
    assert interval.parse(repr(abs(number))) == number
