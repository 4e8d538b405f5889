"""The usage history: what it learns, that its file is whole or refused, and which pins it asks for."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli_server.experts import HistoryError, UsageHistory, choose_pins
from coli_server.experts.history import HALF_LIFE

LAYERS, EXPERTS = (1, 4), 6


def make(identity: str = "abc") -> UsageHistory:
    return UsageHistory(LAYERS, EXPERTS, identity)


def rows(*choices: list[int]) -> np.ndarray:
    return np.array(choices, np.int32)


def test_choices_are_counted_by_layer_and_expert():
    history = make()
    history.observe(0, rows([1, 2], [1, 5]))
    history.observe(1, rows([0, 5]))
    decay = 0.5 ** (1 / HALF_LIFE)
    assert history.counts[0].tolist() == [0, 2, 1, 0, 0, 1]
    assert history.counts[1].tolist() == [1, 0, 0, 0, 0, 1]
    history.observe(1, rows([0, 5]))
    assert history.counts[1][0] == pytest.approx(1 + decay)


def test_an_old_choice_counts_half_after_a_half_life():
    history = make()
    history.observe(0, rows(*[[0]] * 100))
    before = history.counts[0][0]
    for _ in range(HALF_LIFE // 500):
        history.observe(0, rows(*[[1]] * 500))
    assert history.counts[0][0] == pytest.approx(before / 2)
    assert history.counts[0][1] > history.counts[0][0]


def test_counts_stay_bounded_for_ever():
    history = make()
    for _ in range(1000):
        history.observe(0, rows(*[[3]] * 1000))
    assert history.counts[0][3] < 2 * HALF_LIFE


def test_a_saved_history_is_read_back(tmp_path):
    history = make()
    history.observe(0, rows([1, 2]))
    assert history.changed
    history.save(tmp_path / "new" / "history.json")
    assert not history.changed
    other = make()
    other.load(tmp_path / "new" / "history.json")
    assert other.counts.tolist() == history.counts.tolist()


def test_a_crash_while_saving_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "history.json"
    history = make()
    history.observe(0, rows([1, 2]))
    history.save(file)
    old = file.read_bytes()
    history.observe(0, rows([3, 4]))

    def crash(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", crash)
    with pytest.raises(OSError, match="No space left"):
        history.save(file)
    assert file.read_bytes() == old
    assert list(tmp_path.iterdir()) == [file], "no half file is left lying about"
    assert history.changed


@pytest.mark.parametrize("cut", [0, 1, 10, 50, -1])
def test_a_file_cut_short_is_refused(tmp_path, cut):
    file = tmp_path / "history.json"
    history = make()
    history.save(file)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(HistoryError, match=r"history\.json: not valid JSON"):
        history.load(file)


def valid() -> dict[str, object]:
    return {
        "format": "coli-usage",
        "version": 1,
        "model": "abc",
        "experts": EXPERTS,
        "layers": {str(layer): [1.0] * EXPERTS for layer in LAYERS},
    }


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "x"}, "not a usage history"),
        ({"version": 2}, r"version 2 is not known \(accepted: 1\)"),
        ({"model": "other"}, "was learned on another model"),
        ({"layers": {"1": [0] * EXPERTS}}, "its layers are not those of the model"),
        ({"layers": 3}, "its layers are not those of the model"),
        ({"layers": {"1": [0] * EXPERTS, "4": [0]}}, "layer 4 must have 6 counts"),
        ({"layers": {"1": [-1] * EXPERTS, "4": [0] * EXPERTS}}, "layer 1 must have 6 counts"),
        ({"layers": {"1": [True] * EXPERTS, "4": [0] * EXPERTS}}, "layer 1 must have 6 counts"),
        ({"layers": {"1": ["1"] * EXPERTS, "4": [0] * EXPERTS}}, "layer 1 must have 6 counts"),
        ({"layers": {"1": [10**30] * EXPERTS, "4": [0] * EXPERTS}}, "layer 1 must have 6 counts"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_reason(tmp_path, change, reason):
    file = tmp_path / "history.json"
    file.write_text(json.dumps(valid() | change))
    history = make()
    history.observe(0, rows([2, 3]))
    with pytest.raises(HistoryError, match=reason):
        history.load(file)
    assert history.counts[0].tolist() == [0, 0, 1, 1, 0, 0], "nothing has changed"


def test_not_a_number_is_refused(tmp_path):
    file = tmp_path / "history.json"
    file.write_text(json.dumps(valid()).replace("1.0", "NaN", 1))
    with pytest.raises(HistoryError, match="not valid JSON"):
        make().load(file)


def test_a_missing_file_is_a_history_error(tmp_path):
    with pytest.raises(HistoryError, match="No such file"):
        make().load(tmp_path / "none.json")


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_raise(tmp_path_factory, data):
    file = tmp_path_factory.mktemp("history") / "h.json"
    file.write_bytes(data)
    with pytest.raises(HistoryError):
        make().load(file)


def test_the_most_wanted_of_all_layers_are_pinned_first():
    counts = np.array([[10, 30, 20, 40.0], [97, 1, 1, 1.0]])
    assert choose_pins(counts, (1, 4), (3, 3), (10, 10), 30) == {4: [0], 1: [3, 1]}


def test_room_and_budget_are_kept():
    counts = np.array([[4, 3, 2, 1.0], [4, 3, 2, 1.0]])
    assert choose_pins(counts, (1, 4), (1, 2), (10, 100), 215) == {1: [0], 4: [0, 1]}
    assert choose_pins(counts, (1, 4), (4, 4), (10, 100), 99) == {1: [0, 1, 2, 3]}
    assert choose_pins(counts, (1, 4), (4, 4), (10, 100), 0) == {}


def test_experts_never_wanted_are_not_pinned():
    counts = np.array([[0, 5, 0, 0.0], [0, 0, 0, 0.0]])
    assert choose_pins(counts, (1, 4), (4, 4), (1, 1), 100) == {1: [1]}
