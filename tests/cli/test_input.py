"""Messages of several lines."""

from __future__ import annotations

import pytest

from coli_server.cli.input import joined


def said(*lines: str | type[BaseException]) -> list[str]:
    rest = iter(lines)

    def read(_: bool) -> str | None:
        line = next(rest, None)
        if isinstance(line, type):
            raise line
        return line

    return list(joined(read))


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        ((), []),
        (("one", "two"), ["one", "two"]),
        (("one \\", "two \\", "three", "four"), ["one \ntwo \nthree", "four"]),
        (("ends with \\",), ["ends with "]),
        (('"""', "a", "", "  b", '"""', "next"), ["a\n\n  b", "next"]),
        (('"""a', 'b"""', "next"), ["a\nb", "next"]),
        (('"""a"""',), ["a"]),
        (('"""', "no end \\"), ["no end \\"]),
        (("",), [""]),
    ],
)
def test_lines_become_messages(lines: tuple[str, ...], messages: list[str]) -> None:
    assert said(*lines) == messages


def test_ctrl_c_drops_what_was_begun_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert said("first", "begun \\", KeyboardInterrupt, "second", KeyboardInterrupt, "third") == [
        "first",
        "second",
        "third",
    ]
    assert capsys.readouterr().out.count("ends the conversation") == 2
