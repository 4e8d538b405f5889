import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli_server.telemetry.counters import Counters
from coli_server.telemetry.stat import counter_values, format_value, render
from coli_server.telemetry.table import FIGURES

COUNTERS = Counters(
    generated_tokens_total=64,
    decode_steps=63,
    decode_seconds=2.0,
    route_slots=480,
    route_swaps=15,
    route_rows=60,
    route_kl_sum=1.5,
    route_mass_sum=57.0,
    lookups=480,
    hits_pin=80,
    hits_lru=280,
    misses=120,
)


def test_ratios_are_derived_from_counters() -> None:
    values = dict(render(counter_values(COUNTERS, agree=True)))
    assert values["hit_pct"] == "75.0000"
    assert values["swap_pct"] == "3.1250"
    assert values["route_agree"] == "96.8750"
    assert values["route_kl"] == "0.025000"
    assert values["route_mass_kept"] == "0.95"
    assert values["tok_s"] == "31.50"
    assert values["hits_pin"] == "80"


def test_without_agreement_its_names_are_left_out() -> None:
    names = dict(render(counter_values(COUNTERS, agree=False))).keys()
    assert not {"route_agree", "route_kl", "route_mass_kept"} & names
    assert {"route_swaps", "swap_pct"} <= names


def test_counters_of_nothing_have_every_ratio() -> None:
    values = counter_values(Counters(), agree=True)
    assert (values["hit_pct"], values["swap_pct"], values["route_agree"]) == (0.0, 0.0, 100.0)
    assert (values["route_kl"], values["route_mass_kept"], values["tok_s"]) == (0.0, 1.0, 0.0)


def test_counter_values_are_exactly_the_counters_and_ratios_of_a_session() -> None:
    expected = {figure.name for figure in FIGURES if figure.session and figure.kind != "setting"}
    assert counter_values(Counters(), agree=True).keys() == expected


@pytest.mark.parametrize("section", ["all", "server", "route", "cache", "latency", "session"])
def test_a_section_holds_its_figures_in_the_order_of_the_table(section: str) -> None:
    values = {figure.name: 1 for figure in FIGURES}
    expected = [
        figure.name
        for figure in FIGURES
        if section in ("all", figure.section) or (section == "session" and figure.session)
    ]
    assert [name for name, _ in render(values, section)] == expected


@given(st.text(st.characters()) | st.floats() | st.integers() | st.booleans() | st.none())
def test_a_value_is_always_one_word(value: str | float | int | bool | None) -> None:
    word = format_value(value)
    assert word
    assert not re.search(r"[\s\x00-\x1f\x7f]", word)
    word.encode()


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (True, "1"),
        (False, "0"),
        (7, "7"),
        (0.5, "0.5"),
        (1.0, "1"),
        (None, "-"),
        ("", "-"),
        ("a b", "a%20b"),
        ("\udcff", "%ED%B3%BF"),
    ],
)
def test_words(value: str | float | None, word: str) -> None:
    assert format_value(value) == word
