"""Reply lines: exact bytes, and nothing that goes in can add a line or a word."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coli_server.protocol import CODES, VERBS, ProtocolError, Routing, Summary, replies

ROUTING = Routing(swap_pct=3.1049, swaps=231, slots=7440, agree=96.8951, kl=0.04096)
SUMMARY = Summary(
    finish="length",
    tokens=32,
    prompt_tokens=5,
    seed=0,
    ttft_ms=41.04,
    tok_s=28.314,
    hit_pct=81.17,
    lookups=7440,
    routing=ROUTING,
    mode="max-rank",
    scope="shared",
)
NASTY = "a\nb\rc\0d\x1b[2Je\x7ff\x85g\u2028h\u2029i\tj k"


def test_fixed_lines() -> None:
    assert replies.PONG == b"PONG\n"
    assert replies.OK == b"OK\n"
    assert replies.BYE == b"OK bye\n"
    assert replies.RESET == b"RESET\n"
    assert replies.version("0.1.0") == b"VERSION 0.1.0 protocol=1\n"
    assert replies.session("my.chat", new=True) == b"OK session=my.chat new=1\n"


def test_lines_of_a_generation() -> None:
    assert replies.ack("7", prompt_tokens=5, session="~1") == b"ACK 7 prompt_tokens=5 session=~1\n"
    assert replies.prefill("7", done=512, total=2048) == b"INFO 7 prefill=512/2048\n"
    assert replies.queued("7", place=2) == b"INFO 7 queue=2\n"
    assert replies.generating("7", tokens=9) == b"INFO 7 tokens=9\n"
    assert replies.token("7", " there") == b'TOK 7 " there"\n'
    assert replies.done("7", SUMMARY) == (
        b"DONE 7 finish=length tokens=32 prompt_tokens=5 seed=0 ttft_ms=41.0 tok_s=28.31 hit_pct=81.2 "
        b"lookups=7440 swap_pct=3.1 route_swaps=231 route_slots=7440 route_agree=96.9 route_kl=0.0410 "
        b"mode=max-rank scope=shared\n"
    )


def test_figures_that_were_not_measured_are_left_out() -> None:
    routing = Routing(swap_pct=0.0, swaps=0, slots=0, agree=None, kl=None)
    summary = Summary("cancelled", 0, 5, 0, 0.0, 0.0, 0.0, 0, routing, "stock", "shared")
    assert replies.done("7", summary) == (
        b"DONE 7 finish=cancelled tokens=0 prompt_tokens=5 seed=0 ttft_ms=0.0 tok_s=0.00 "
        b"hit_pct=0.0 lookups=0 swap_pct=0.0 route_swaps=0 route_slots=0 mode=stock scope=shared\n"
    )


@pytest.mark.parametrize(
    ("routing", "words"),
    [
        (None, b""),
        (ROUTING, b" swap_pct=3.1 route_swaps=231 route_slots=7440 route_agree=96.9 route_kl=0.0410"),
    ],
)
def test_stat_line(routing: Routing | None, words: bytes) -> None:
    line = replies.stat_line(
        tokens=32,
        tok_s=28.314,
        hit_pct=81.17,
        rss_gb=1.4549,
        prompt_tokens=5,
        length_limited=True,
        routing=routing,
    )
    assert line == b"STAT 32 28.31 81.2 1.45 5 1" + words + b"\n"


def test_stat_is_one_block_that_ends_in_end() -> None:
    assert replies.stat([]) == b"END\n"
    assert replies.stat([("pid", 12), ("model", "my model\nEND"), ("mode", ""), ("tok_s", 1.5)]) == (
        b"STAT pid 12\nSTAT model my_model_END\nSTAT mode -\nSTAT tok_s 1.5\nEND\n"
    )


def test_help_lists_every_verb_and_explains_each() -> None:
    general = replies.help_text().decode().splitlines()
    assert general[-1] == "END"
    for verb in VERBS.values():
        assert any(line.startswith(verb.usage) and verb.help in line for line in general)
        lines = replies.help_text(verb.name).decode().splitlines()
        assert lines[0] == verb.usage
        assert lines.index("END") == len(lines) - 1
    chat = replies.help_text("CHAT").decode()
    assert "system" in chat
    assert "bytes" in chat
    assert "  ids" not in chat
    assert "STATS" in replies.help_text("STAT").decode()
    assert "  seed" not in replies.help_text("SET").decode()


class TestErrors:
    def test_words_stand_before_the_message(self) -> None:
        assert replies.error("NOT_FOUND", "no request 7") == b"ERR NOT_FOUND no request 7\n"
        assert replies.error("BUSY", "the queue is full", id="7", details={"retry_ms": 500}) == (
            b"ERR BUSY id=7 retry_ms=500 the queue is full\n"
        )

    def test_it_is_always_one_line(self) -> None:
        line = replies.error("INTERNAL", NASTY)
        assert line == b"ERR INTERNAL a b c d [2Je f g h i j k\n"
        assert replies.error("INTERNAL", "\n") == f"ERR INTERNAL {CODES['INTERNAL'].when}\n".encode()
        assert len(replies.error("INTERNAL", "x" * 100_000)) < 1100

    def test_a_message_cannot_pass_for_an_id(self) -> None:
        assert replies.error("BAD_OPTION", "id=9 is taken") == b"ERR BAD_OPTION refused: id=9 is taken\n"

    def test_the_table_is_closed(self) -> None:
        with pytest.raises(ValueError, match="NOPE"):
            replies.error("NOPE", "x")

    @pytest.mark.parametrize("code", CODES)
    def test_the_table_says_which_errors_close(self, code: str) -> None:
        closes = CODES[code].closes  # type: ignore[index]
        assert ProtocolError(code, "x").close == (closes == "always")  # type: ignore[arg-type]
        for close in (True, False):
            if closes in ("sometimes", "always" if close else "never"):
                assert ProtocolError(code, "x", close=close).close is close  # type: ignore[arg-type]
            else:
                with pytest.raises(ValueError, match="closes the connection"):
                    ProtocolError(code, "x", close=close)  # type: ignore[arg-type]

    def test_equality_is_that_of_the_line(self) -> None:
        one = ProtocolError("BUSY", "x", id="7", details={"retry_ms": 1})
        assert one == ProtocolError("BUSY", "x", id="7", details={"retry_ms": 1})
        assert hash(one) == hash(ProtocolError("BUSY", "x", id="7", details={"retry_ms": 1}))
        assert one != ProtocolError("BUSY", "x", id="8", details={"retry_ms": 1})
        assert one != "BUSY"
        assert "BUSY" in repr(one)


class TestTokens:
    def test_line_ends_of_every_kind_are_escaped(self) -> None:
        line = replies.token("1", NASTY)
        assert len(line.decode().splitlines()) == 1
        assert line.decode()[:-1].isprintable()
        assert json.loads(line[6:]) == NASTY

    def test_half_a_surrogate_pair_does_not_break_the_line(self) -> None:
        assert replies.token("1", "a\ud800") == b'TOK 1 "a\\ud800"\n'

    def test_other_characters_stay_readable(self) -> None:
        assert replies.token("1", ' é😀"\\') == 'TOK 1 " é😀\\"\\\\"\n'.encode()

    def test_logprobs_are_a_second_word_of_json(self) -> None:
        logprobs = [{"id": 5, "text": " a", "logprob": -0.25, "top": []}]
        assert replies.token("1", " a", logprobs) == (
            b'TOK 1 " a" [{"id":5,"text":" a","logprob":-0.25,"top":[]}]\n'
        )
        with pytest.raises(ValueError, match="JSON"):
            replies.token("1", " a", [float("-inf")])


def test_replies_take_the_line_end_of_the_client() -> None:
    block = replies.stat([("pid", 1)])
    assert replies.with_newline(block, b"\n") is block
    assert replies.with_newline(block, b"\r\n") == b"STAT pid 1\r\nEND\r\n"


@given(st.text(), st.text(), st.sampled_from(sorted(CODES)))
def test_no_text_adds_a_line_or_a_control_character(first: str, second: str, code: str) -> None:
    blocks = [
        replies.token(first, second, [second]),
        replies.error(code, second, id=first),
        replies.ack(first, prompt_tokens=1, session=second),
        replies.session(first, new=False),
        replies.version(first),
    ]
    for block in blocks:
        line = block.decode()
        assert len(line.splitlines()) == 1
        assert line.endswith("\n")
    assert replies.stat([(first, second)]).count(b"\n") == 2
    assert len(replies.stat([(first, second)]).split(b"\n")[0].split(b" ")) == 3


@given(st.text(st.characters()))
def test_a_token_text_is_read_back_exactly(text: str) -> None:
    assert json.loads(replies.token("1", text)[6:]) == text
