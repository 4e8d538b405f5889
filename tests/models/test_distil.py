"""The parts of distillation that need no torch."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli_server.models.carve.kept import finished_lines
from coli_server.models.carve.plan import LAST_RATE, Plan, Source, cut, drawn, packed, rate_factor
from coli_server.models.carve.prompts import all_prompts, prompts


def test_prompts_are_distinct_lines_and_no_gap_in_a_template_is_left() -> None:
    assert len(set(prompts())) == len(prompts()) >= 90
    assert len(set(all_prompts())) == len(all_prompts()) >= 350
    assert set(prompts()) < set(all_prompts())
    assert all(line == line.strip() != "" and not set(line) & set("{}\n") for line in all_prompts())


@pytest.mark.parametrize("steps", [1, 30, 1000])
def test_the_rate_rises_then_falls_to_its_last_part(steps: int) -> None:
    factors = [rate_factor(step, steps) for step in range(steps)]
    assert all(0 < factor <= 1 for factor in factors)
    top = factors.index(max(factors))
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert factors[top:] == sorted(factors[top:], reverse=True)
    if steps == 1000:
        assert math.isclose(factors[-1], LAST_RATE, rel_tol=0.01)
        assert 15 <= top < 25


@given(st.lists(st.integers(), max_size=40), st.integers(1, 9))
def test_cut_text_is_the_text_up_to_less_than_a_window(ids: list[int], window: int) -> None:
    windows = cut(ids, window)
    assert all(len(found) == window for found in windows)
    joined = list(itertools.chain(*windows))
    assert joined == ids[: len(joined)]
    assert len(ids) - len(joined) < window


def test_packed_dialogues_keep_their_tokens_in_order_and_change_places() -> None:
    dialogues = [[number * 100 + place for place in range(7)] for number in range(20)]
    joined = list(itertools.chain(*packed(dialogues, 10, seed=1)))
    assert len(joined) == 140
    pieces = [joined[first : first + 7] for first in range(0, 140, 7)]
    assert sorted(pieces) == dialogues != pieces


def _sources() -> list[Source]:
    kinds = [[[kind * 1000 + number] * 4 for number in range(50)] for kind in range(3)]
    return [Source(kinds[0], 6), Source(kinds[1], 3), Source(kinds[2], 1)]


def test_a_step_reads_the_same_windows_whatever_ran_before() -> None:
    plan = Plan(batch=5, window=4)
    first = [drawn(_sources(), plan, step) for step in range(6)]
    np.testing.assert_array_equal(drawn(_sources(), plan, 3), first[3])
    assert len({step.tobytes() for step in first}) == 6
    assert first[0].shape == (5, 4)
    assert not np.array_equal(drawn(_sources(), Plan(batch=5, window=4, seed=6), 3), first[3])


def test_windows_come_from_each_kind_of_text_by_its_share() -> None:
    plan = Plan(batch=8, window=4)
    kinds = np.concatenate([drawn(_sources(), plan, step)[:, 0] // 1000 for step in range(500)])
    np.testing.assert_allclose(np.bincount(kinds) / kinds.size, [0.6, 0.3, 0.1], atol=0.03)


@pytest.mark.parametrize("rest", ["", "[[3, 4], [5", "["])
def test_a_line_that_was_cut_off_is_made_again(tmp_path: Path, rest: str) -> None:
    file = tmp_path / "lines"
    assert finished_lines(file) == []
    file.write_text("[[1, 2]]\n[[3]]\n" + rest)
    assert finished_lines(file) == [[[1, 2]], [[3]]]
    assert file.read_text() == "[[1, 2]]\n[[3]]\n"
