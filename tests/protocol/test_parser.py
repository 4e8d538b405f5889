"""From one line to a command: verbs, options, numbers and texts."""

from __future__ import annotations

import json

import pytest

from coli_server.protocol import OPTIONS, SETTABLE, VERBS, Command, Framer, OptionValue, ProtocolError


def command(line: str | bytes) -> Command:
    (event,) = Framer().feed((line.encode() if isinstance(line, str) else line) + b"\n")
    assert isinstance(event, Command), event
    return event


def refusal(line: str | bytes) -> ProtocolError:
    (event,) = Framer().feed((line.encode() if isinstance(line, str) else line) + b"\n")
    assert isinstance(event, ProtocolError), event
    assert not event.close
    return event


class TestVerbs:
    @pytest.mark.parametrize("verb", ["PING", "VERSION", "HELP", "STAT", "RESET", "QUIT"])
    def test_a_bare_verb_in_any_case(self, verb: str) -> None:
        for word in (verb, verb.lower(), verb.title(), f" \t{verb} \t"):
            assert command(word) == Command(verb)

    def test_stats_is_stat(self) -> None:
        assert command("stats settings ") == Command("STAT", arguments=("settings",))

    @pytest.mark.parametrize(
        "word", ["PINGS", "\ufeffPING", "ſtat", "PıNG", "PING:", "SCORES", "AUTHS", "PING\r\r"]
    )
    def test_anything_else_is_unknown(self, word: str) -> None:
        # Unicode's upper case of a long s is S, and of a dotless i is I.
        error = refusal(word)
        assert error.code == "UNKNOWN_VERB"
        assert str(error).isprintable()
        assert str(error).isascii()

    @pytest.mark.parametrize(
        "line", ["PING x", "VERSION 1", "RESET all", "QUIT now", "HELP a b", "STAT a b c"]
    )
    def test_too_many_words(self, line: str) -> None:
        assert refusal(line).code == "BAD_REQUEST"

    @pytest.mark.parametrize("line", ["SESSION", "CANCEL", "SET", "SET temp", "SET temp ", "GEN", "CHAT "])
    def test_too_few_words(self, line: str) -> None:
        error = refusal(line)
        assert error.code == "BAD_REQUEST"
        assert f"usage: {line.split()[0]}" in error.message

    @pytest.mark.parametrize(
        "line", ["PING id=1", "STAT max=3", "SESSION temp=1 a", "CANCEL id=7", "SET temp=1"]
    )
    def test_an_option_of_another_verb(self, line: str) -> None:
        assert refusal(line).code == "BAD_OPTION"

    def test_a_line_without_a_verb(self) -> None:
        assert refusal("temp=1 GEN hello").code == "BAD_REQUEST"

    def test_help_takes_a_verb(self) -> None:
        assert command("help stats") == Command("HELP", arguments=("STAT",))
        assert refusal("HELP me").code == "UNKNOWN_VERB"

    def test_stat_sections(self) -> None:
        assert command("STAT LINE").arguments == ("line",)
        assert command("STAT session").arguments == ("session",)
        assert command("STAT session my.chat").arguments == ("session", "my.chat")
        assert command("STAT session ~12").arguments == ("session", "~12")
        for line in ("STAT slabs", "STAT route now", "STAT session a/b", "STAT session ~"):
            assert refusal(line).code == "BAD_REQUEST"

    @pytest.mark.parametrize("verb", ["SESSION", "CANCEL"])
    def test_ids_of_sessions_and_requests(self, verb: str) -> None:
        for good in ("a", "A.b_c-9", "x" * 64, "-", "END"):
            assert command(f"{verb} {good}").arguments == (good,)
        for bad in ("x" * 65, "~1", "a/b", "é", "a\x1b", "a:b", '"a"'):
            assert refusal(f"{verb} {bad}").code == "BAD_REQUEST"


class TestText:
    @pytest.mark.parametrize("verb", ["GEN", "CHAT"])
    @pytest.mark.parametrize(
        ("rest", "text"),
        [
            ("Once upon a time", "Once upon a time"),
            ("  two  blanks  ", "two  blanks  "),
            ("Tab\there", "Tab\there"),
            ("-- max=3 is no option", "max=3 is no option"),
            ("--  one blank is dropped", " one blank is dropped"),
            ("--\ttab", "tab"),
            ("--x is text", "--x is text"),
            ("a -- b", "a -- b"),
            ("-- --", "--"),
            ("Max=3", "Max=3"),
            ("x max=3", "x max=3"),
            ("=3", "=3"),
            ("3=3", "3=3"),
            ('"one\\nJSON \\"string\\""', 'one\nJSON "string"'),
            ('"\\u00e9\\ud83d\\ude00\\u0000"', "é😀\0"),
            ('-- "decoded"', "decoded"),
            ('"a" and "b"', '"a" and "b"'),
            ('"open', '"open'),
            ('"', '"'),
            ('"bad \\q"', '"bad \\q"'),
            ('"tab\there"', '"tab\there"'),
            ('"blank after" ', '"blank after" '),
            ("[1]", "[1]"),
            ("日本語 \U0001f600 e\u0301", "日本語 \U0001f600 e\u0301"),
        ],
    )
    def test_the_text_begins_at_the_first_word_that_is_no_option(
        self, verb: str, rest: str, text: str
    ) -> None:
        assert command(f"{verb} {rest}") == Command(verb, text=text)

    @pytest.mark.parametrize("line", ["GEN", "GEN ", "GEN --", "GEN -- ", 'GEN ""', 'GEN -- ""', "GEN max=3"])
    def test_an_empty_text_is_refused(self, line: str) -> None:
        assert refusal(line).code == "BAD_REQUEST"

    def test_a_nul_byte_is_refused_on_a_line_but_not_in_a_json_string(self) -> None:
        assert refusal(b"GEN a\0b").code == "BAD_REQUEST"
        assert refusal(b"PING\0").code == "BAD_REQUEST"
        assert command('GEN "a\\u0000b"').text == "a\0b"

    @pytest.mark.parametrize(
        "line", [b"GEN \xff", b"\xc3\x28", b"GEN stop=\xed\xa0\x80 x", b"GEN \xf4\x90\x80\x80"]
    )
    def test_bytes_that_are_not_utf8_are_refused(self, line: bytes) -> None:
        assert refusal(line).code == "BAD_UTF8"

    @pytest.mark.parametrize(
        "line",
        [
            'GEN "\\ud800"',
            'GEN "a\\udc00b"',
            'GEN "\\ude00\\ud83d"',
            'CHAT system="\\ud800" hi',
            'SET stop "\\udfff"',
        ],
    )
    def test_half_a_surrogate_pair_in_json_is_refused(self, line: str) -> None:
        assert refusal(line).code == "BAD_UTF8"

    def test_token_ids(self) -> None:
        assert command("GEN ids=1 1,2,003").token_ids == (1, 2, 3)
        assert command('GEN ids=1 "0"') == Command("GEN", token_ids=(0,))
        assert command("GEN ids=0 1,2") == Command("GEN", text="1,2")
        assert command("GEN ids=1 bytes=3\n4,5").token_ids == (4, 5)

    @pytest.mark.parametrize(
        "text", ["1, 2", "1,,2", ",1", "1,", "-1", "+1", "1_0", "a", "1.0", "2147483648", "9" * 11, "١", "1 "]
    )
    def test_token_ids_are_digits_and_commas(self, text: str) -> None:
        assert refusal(f"GEN ids=1 {text}").code == "BAD_REQUEST"


class TestOptions:
    def test_all_of_them(self) -> None:
        line = (
            "GEN id=a.7 max=32 temp=0.5 top_p=.9 top_k=40 min_p=5e-2 repeat_penalty=1.1 seed=7 stop=END "
            'stop="\\n\\n" logprobs=2 deadline_ms=1000 cache_route=1 route_mode=cache-prior route_j=2 '
            "route_m=12 route_p=0.9 route_alpha=0.5 route_lambda=0.1 route_scope=session route_capacity=8 "
            "route_prefill=0 route_agree=auto Once"
        )
        assert command(line) == Command(
            "GEN",
            id="a.7",
            options={
                "max": 32,
                "temp": 0.5,
                "top_p": 0.9,
                "top_k": 40,
                "min_p": 0.05,
                "repeat_penalty": 1.1,
                "seed": 7,
                "stop": ("END", "\n\n"),
                "logprobs": 2,
                "deadline_ms": 1000,
                "cache_route": True,
                "route_mode": "cache-prior",
                "route_j": 2,
                "route_m": 12,
                "route_p": 0.9,
                "route_alpha": 0.5,
                "route_lambda": 0.1,
                "route_scope": "session",
                "route_capacity": 8,
                "route_prefill": False,
                "route_agree": None,
            },
            text="Once",
        )

    def test_any_value_may_be_a_json_string(self) -> None:
        assert command('GEN id="7" temp="0.5" stop="a b" x') == Command(
            "GEN", id="7", options={"temp": 0.5, "stop": ("a b",)}, text="x"
        )
        assert command('GEN stop=a"b"c x').options == {"stop": ('a"b"c',)}

    @pytest.mark.parametrize("value", ['"a"b', '"a', '"', '"a\\"'])
    def test_a_quoted_value_ends_at_its_quote(self, value: str) -> None:
        error = refusal(f"GEN id=7 stop={value}")
        assert (error.code, error.id) == ("BAD_OPTION", "7")

    def test_a_string_that_is_not_json_is_refused(self) -> None:
        for value in ('"\\q"', '"\\u12"', '"tab\there"'):
            assert refusal(f"GEN stop={value} x").code == "BAD_OPTION"

    def test_an_unknown_option_is_refused_and_never_text(self) -> None:
        error = refusal("GEN id=7 maximum=3 hello")
        assert (error.code, error.id) == ("BAD_OPTION", "7")
        assert error.message == 'unknown option "maximum"; put -- before a text that begins like one'

    def test_given_twice_is_refused_but_for_stop(self) -> None:
        assert refusal("GEN max=1 max=1 x").message == "option max is given twice"
        assert refusal("GEN id=a id=b x").message == "option id is given twice"
        assert command("GEN stop=a stop=a stop=b stop=c x").options == {"stop": ("a", "a", "b", "c")}
        assert refusal("GEN stop=a stop=b stop=c stop=d stop=e x").code == "BAD_OPTION"

    @pytest.mark.parametrize(
        "word",
        [
            "max=0",
            "max=",
            "max=-1",
            "max=1_0",
            "max=1e3",
            "max=99999999999999999999",
            "max=" + "9" * 5000,
            "temp=nan",
            "temp=inf",
            "temp=-0.5",
            "temp=1e9",
            "temp=",
            "top_p=0",
            "top_p=1.1",
            "top_k=1.0",
            "seed=-1",
            "stop=",
            'stop=""',
            "id=",
            "id=~1",
            "id=a/b",
            "id=" + "x" * 65,
            "ids=2",
            "ids=true",
            "logprobs=21",
            "deadline_ms=0",
            "cache_route=yes",
            "route_mode=off",
            "route_p=1",
            "route_alpha=0",
            "route_scope=",
            "route_agree=2",
        ],
    )
    def test_a_value_outside_its_range_names_option_value_and_range(self, word: str) -> None:
        name, _, value = word.partition("=")
        error = refusal(f"GEN {word} x")
        assert error.code == "BAD_OPTION"
        assert error.message.startswith(f"option {name} must be {OPTIONS[name].range_text}, not ")
        assert len(error.message) < 250
        assert value.strip('"')[:40] in error.message

    @pytest.mark.parametrize("line", ["GEN system=x y", "CHAT ids=1 1,2"])
    def test_options_that_mean_nothing_to_the_verb(self, line: str) -> None:
        assert refusal(line).code == "BAD_OPTION"

    def test_the_system_prompt_may_be_empty(self) -> None:
        assert command('CHAT system="" hi') == Command("CHAT", options={"system": ""}, text="hi")
        assert command("CHAT system= hi") == Command("CHAT", options={"system": ""}, text="hi")

    def test_a_refused_line_keeps_its_valid_id(self) -> None:
        assert refusal("FOO id=7 x").id == "7"
        assert refusal(b"GEN \xff id=7").id is None
        assert refusal(b"GEN id=7 \xff").id == "7"
        assert refusal(b"GEN id=\xff id=7 x").id == "7"
        assert refusal("GEN id=a/b x").id is None


class TestSet:
    @pytest.mark.parametrize(
        ("rest", "name", "value"),
        [
            ("temp 0.5", "temp", 0.5),
            ("temp\t0.5 ", "temp", 0.5),
            ('temp "0.5"', "temp", 0.5),
            ("max 7", "max", 7),
            ("cache_route 1", "cache_route", True),
            ("route_agree auto", "route_agree", None),
            ("system You are terse.", "system", "You are terse."),
            ('system "a\\nb"', "system", "a\nb"),
            ('system ""', "system", ""),
            ("stop END", "stop", ("END",)),
            ('stop ""', "stop", ()),
            ("bytes=4 system\na\r\nb", "system", "a\r\nb"),
            ("bytes=3 temp\n0.5", "temp", 0.5),
            ("bytes=0 system\n", "system", ""),
        ],
    )
    def test_a_value_for_the_session(self, rest: str, name: str, value: OptionValue) -> None:
        assert command(f"SET {rest}") == Command("SET", options={name: value})

    @pytest.mark.parametrize("name", ["id", "seed", "bytes", "ids", "deadline_ms"])
    def test_options_of_one_request_cannot_be_kept(self, name: str) -> None:
        assert name not in SETTABLE
        assert refusal(f"SET {name} 1").code == "BAD_OPTION"

    @pytest.mark.parametrize(
        "line", ["SET nothing 1", "SET TEMP 1", "SET temp 1 2", "SET temp hot", "SET max 0"]
    )
    def test_a_bad_name_or_value(self, line: str) -> None:
        assert refusal(line).code == "BAD_OPTION"

    def test_a_value_and_a_payload(self) -> None:
        assert refusal("SET bytes=1 temp 0\n1").code == "BAD_REQUEST"


def test_size_is_that_of_the_line_and_its_payload() -> None:
    assert command("GEN ids=1 1,2,3").size == len("GEN ids=1 1,2,3")
    assert command("GEN bytes=5\nhello").size == len("GEN bytes=5") + len("hello")


def test_every_settable_option_can_be_set_and_every_option_is_taken_by_a_verb() -> None:
    for name in SETTABLE:
        error = refusal(f"SET {name}")
        assert error.code == "BAD_REQUEST"
    for option in OPTIONS.values():
        assert set(option.verbs) <= set(VERBS)
        assert option.verbs or option.name == "bytes"


def test_the_parser_never_quotes_more_than_a_little() -> None:
    for line in (
        "x" * 60_000,
        "GEN max=" + "1" * 60_000,
        "GEN " + "x" * 60_000 + "=",
        "HELP " + "\x1b" * 60_000,
    ):
        assert len(refusal(line).message) < 400


@pytest.mark.parametrize(
    "text", ["plain", 'say "hi"', "a\nb\r\nQUIT", "\0\x1b\x7f", "\u2028\u2029\x85", "😀", "\\n"]
)
def test_json_quoting_carries_every_text(text: str) -> None:
    for ascii_only in (True, False):
        assert command(f"GEN {json.dumps(text, ensure_ascii=ascii_only)}").text == text
