"""Chunks of prompt tokens beside decoding sequences, from durations that the tests make up."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from coli_server.engine.pacing import LEAST, LIMIT, REFRESH, ChunkPacer

MOST = 128
Cost = Callable[[int], float]


def run(pacer: ChunkPacer, steps: int, cost: Cost, decoding: int = 4) -> list[int]:
    """Prompt tokens of `steps` steps, where one with n prompt tokens takes `cost(n)` seconds."""
    chunks = []
    for _ in range(steps):
        chunk = pacer.chunk(decoding)
        pacer.observe(decoding, chunk, cost(chunk))
        chunks.append(chunk)
    return chunks


def experts(count: int) -> Cost:
    """Four sequences of a layer of `count` experts, 8 a token; memory is read, then arithmetic is done."""

    def seconds(tokens: int) -> float:
        wanted = count * (1 - (1 - 8 / count) ** (4 + tokens))
        return 0.02 + 0.003 * wanted + 0.004 * tokens

    return seconds


def reading(chunks: list[int]) -> list[int]:
    return [chunk for chunk in chunks if chunk]


def test_a_slow_piece_that_was_longer_than_asked_says_nothing_about_shorter_ones() -> None:
    pacer, cost = ChunkPacer(MOST), experts(64)
    before = reading(run(pacer, 100, cost))[-1]
    for _ in range(10):
        pacer.observe(4, before + 40, 10 * cost(before))
    assert abs(reading(run(pacer, 2, cost))[0] - before) <= 1


def test_the_first_step_beside_a_number_of_sequences_decodes_only() -> None:
    pacer = ChunkPacer(MOST)
    assert run(pacer, 2, experts(64)) == [0, LEAST]
    assert run(pacer, 2, experts(64), decoding=5) == [0, LEAST]


def test_a_step_that_reads_takes_about_the_limit_of_one_that_does_not() -> None:
    for count in (16, 64, 256):
        cost = experts(count)
        settled = reading(run(ChunkPacer(MOST), 200, cost))[60:]
        limit = max(LIMIT * cost(0), cost(LEAST))
        assert all(cost(chunk - 1) <= limit for chunk in settled), "at most a token over it"
        assert all(chunk == LEAST or cost(chunk + 4) >= limit for chunk in settled), "and hardly under it"


def test_cheap_prompt_tokens_come_in_the_largest_chunks() -> None:
    assert reading(run(ChunkPacer(MOST), 100, lambda tokens: 1 + tokens / 1000))[-1] == MOST


def test_dear_prompt_tokens_still_come() -> None:
    chunks = run(ChunkPacer(MOST), 100, lambda tokens: 1 + 50 * tokens)
    assert set(reading(chunks)) == {LEAST}


def test_one_slow_step_hardly_matters() -> None:
    """A read error tried again, another process: the next steps are as they were."""
    pacer, cost = ChunkPacer(MOST), experts(64)
    before = reading(run(pacer, 100, cost))[-1]
    pacer.observe(4, pacer.chunk(4), 100 * cost(before))
    after = reading(run(pacer, 20, cost))
    assert after[0] >= before // 2
    assert after[-1] >= before - 1


def test_decode_only_steps_that_waited_for_the_disk_do_not_raise_the_limit() -> None:
    pacer, cost = ChunkPacer(MOST), experts(64)
    for _ in range(3):
        pacer.observe(4, 0, 100 * cost(0))
    chunks = reading(run(pacer, 60, cost))
    assert max(cost(chunk) for chunk in chunks) <= 1.2 * LIMIT * cost(0)


def test_decode_only_steps_are_measured_again_while_prompts_queue() -> None:
    pacer = ChunkPacer(MOST)
    run(pacer, 100, experts(64))
    twice: Cost = lambda tokens: 2 * experts(64)(tokens)  # noqa: E731
    chunks = run(pacer, 20 * REFRESH, twice)
    assert 18 <= chunks.count(0) <= 20
    assert reading(chunks)[-1] >= reading(run(ChunkPacer(MOST), 200, twice))[-1] - 2


def test_a_last_short_piece_says_nothing_about_long_ones() -> None:
    pacer, cost = ChunkPacer(MOST), experts(64)
    before = max(reading(run(pacer, 100, cost))[-20:])
    for _ in range(50):
        pacer.observe(4, 1, cost(1))
    assert max(run(pacer, 2, cost)) <= before


Steps = st.lists(st.tuples(st.integers(1, 4), st.floats(0, 1e6), st.booleans()), max_size=300)


@given(Steps, st.integers(1, 256))
def test_a_prompt_goes_on_at_least_every_second_step_whatever_steps_take(
    steps: list[tuple[int, float, bool]], most: int
) -> None:
    """`False`: the step failed, and nobody knows how long it would have taken."""
    pacer = ChunkPacer(most)
    waits = dict.fromkeys(range(1, 5), 0)
    for decoding, seconds, succeeds in steps:
        chunk = pacer.chunk(decoding)
        assert chunk == 0 or min(LEAST, most) <= chunk <= most
        waits[decoding] = 0 if chunk else waits[decoding] + 1
        assert waits[decoding] <= 1
        if succeeds:
            pacer.observe(decoding, chunk, seconds)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=200))
def test_a_chunk_grows_slowly_whatever_steps_take(seconds: list[float]) -> None:
    pacer = ChunkPacer(MOST)
    last = LEAST
    for took in seconds:
        chunk = pacer.chunk(4)
        pacer.observe(4, chunk, took)
        if chunk:
            assert last // 2 <= chunk <= last + max(1, last // 8)
            last = chunk
