import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli_server.daemon.sessions import Sessions
from coli_server.protocol.errors import ProtocolError
from coli_server.telemetry.counters import Counters


def make(ended: list[str], *, limit: int = 3, lifetime: float = 10.0) -> Sessions:
    return Sessions(limit=limit, lifetime=lifetime, on_end=ended.append)


def test_an_anonymous_session_ends_with_its_connection_and_its_number_is_not_used_again() -> None:
    ended: list[str] = []
    sessions = make(ended)
    first = sessions.open_anonymous(0.0)
    sessions.detach(first, 1.0)
    assert ended == ["~1/1"]
    assert sessions.open_anonymous(2.0).name == "~2"


def test_a_named_session_outlives_its_connection_and_is_found_again() -> None:
    ended: list[str] = []
    sessions = make(ended)
    first, new = sessions.attach("a", 0.0)
    assert new
    first.say("hello", "hi")
    sessions.detach(first, 1.0)
    again, new = sessions.attach("a", 2.0)
    assert not new
    assert again is first
    assert again.dialogue[1] == {"role": "assistant", "content": "hi"}
    assert ended == []


def test_a_named_session_ends_after_its_lifetime_unless_somebody_is_attached() -> None:
    ended: list[str] = []
    sessions = make(ended)
    left, _ = sessions.attach("left", 0.0)
    sessions.attach("kept", 0.0)
    sessions.detach(left, 1.0)
    sessions.sweep(10.9)
    assert ended == []
    sessions.sweep(11.0)
    assert ended == ["left/1"]
    assert sessions.get("kept") is not None


def test_over_the_limit_the_longest_idle_session_makes_room() -> None:
    ended: list[str] = []
    sessions = make(ended, limit=2)
    for name, moment in (("old", 1.0), ("new", 2.0)):
        sessions.detach(sessions.attach(name, 0.0)[0], moment)
    sessions.attach("third", 3.0)
    assert ended == ["old/1"]


def test_when_all_sessions_are_in_use_a_new_one_is_refused_and_anonymous_ones_are_not() -> None:
    sessions = make([], limit=1)
    sessions.attach("a", 0.0)
    sessions.open_anonymous(0.0)
    with pytest.raises(ProtocolError) as refused:
        sessions.attach("b", 0.0)
    assert refused.value.code == "BUSY"
    assert refused.value.details["retry_ms"] > 0


def test_system_prompt_and_dialogue_come_before_the_new_turn() -> None:
    session = make([]).open_anonymous(0.0)
    session.say("one", "two")
    assert [message["role"] for message in session.messages("be kind", "three")] == [
        "system",
        "user",
        "assistant",
        "user",
    ]
    assert session.messages("", "three")[0] == {"role": "user", "content": "one"}
    assert len(session.dialogue) == 2  # asking for messages does not say anything


@given(st.lists(st.tuples(st.sampled_from(["open", "attach", "leave", "count"]), st.integers(0, 3))))
def test_figures_of_all_are_those_of_closed_and_living_sessions_whatever_happens(
    steps: list[tuple[str, int]],
) -> None:
    sessions = make([], limit=2, lifetime=3.0)
    attached = []
    expected = 0
    for moment, (step, number) in enumerate(steps):
        if step == "open":
            attached.append(sessions.open_anonymous(moment))
        elif step == "attach":
            try:
                attached.append(sessions.attach(f"s{number}", moment)[0])
            except ProtocolError:
                assert all(not one.idle for one in sessions if not one.anonymous)
        elif attached and step == "leave":
            sessions.detach(attached.pop(number % len(attached)), moment)
        elif attached:
            attached[number % len(attached)].outcomes.add(Counters(requests_total=number))
            expected += number
        sessions.sweep(moment)
        assert sessions.outcomes().requests_total == expected
        assert {one.name for one in attached} <= {one.name for one in sessions}


async def test_chats_of_one_session_have_their_turns_in_the_order_in_which_they_asked() -> None:
    session = make([]).open_anonymous(0.0)
    done: list[int] = []

    async def chat(number: int) -> None:
        async with session.turn:
            await asyncio.sleep(0)
            done.append(number)

    await asyncio.gather(*(chat(number) for number in range(5)))
    assert done == [0, 1, 2, 3, 4]
