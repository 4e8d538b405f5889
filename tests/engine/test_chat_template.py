"""Chat templates: what published ones need works, and a hostile one can neither hang nor break out."""

from __future__ import annotations

from pathlib import Path

import pytest

from coli_server.engine.chat_template import MAX_SOURCE, ChatTemplate, TextError
from coli_server.errors import ModelError

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
DIALOGUE = [
    {"role": "system", "content": " be kind "},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<think>hm</think>\n\nhello"},
    {"role": "user", "content": "and?"},
]


def render(source: str) -> str:
    return ChatTemplate(source, "chat_template.jinja", NAMES).render(DIALOGUE)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{% endfor %}",
            "<s>[system][user][assistant][user]",
        ),
        (
            "{%- for m in messages -%}\n  {{ m.content | trim }};\n{%- endfor -%}",
            "be kind;hi;<think>hm</think>\n\nhello;and?;",
        ),
        (
            (
                "{% if add_generation_prompt %}A{% endif %}{% if tools %}T{% endif %}{% if tools is "
                "none %}N{% endif %}"
            ),
            "AN",
        ),
        (
            (
                "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% if m.role == 'user' and"
                " not ns.n %}{% set ns.n = loop.revindex0 %}{% endif %}{% endfor %}{{ ns.n }}"
            ),
            "3",
        ),
        (
            (
                "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ loop.index "
                "}}{% if loop.last %}!{% endif %}{% if loop.index == 3 %}{% break %}{% endif %}{% "
                "endfor %}"
            ),
            "23",
        ),
        (
            "{{ messages[2].content.split('</think>')[-1].lstrip('\\n') }}",
            "hello",
        ),
        (
            "{{ messages[1] | tojson }}",
            '{"role": "user", "content": "hi"}',
        ),
        (
            (
                "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | "
                "join(', ') }}"
            ),
            "hi, and?",
        ),
        (
            (
                "{% macro turn(m) %}<{{ m.role }}>{% endmacro %}{% for m in messages %}{{ turn(m) "
                "}}{% endfor %}"
            ),
            "<system><user><assistant><user>",
        ),
        (
            ("{% for m in messages %}{% generation %}{{ m.role[0] }}{% endgeneration %}{% endfor %}"),
            "suau",
        ),
        (
            "{{ '%s-%03d' % ('a', 7) }}{{ 'x' * 3 }}{{ (1 + 2) ~ 'b' }}{{ '{}'.format(5) }}",
            "a-007xxx3b5",
        ),
        (
            "{{ strftime_now('%Y')[:2] }}",
            "20",
        ),
        (
            "{% for i in range(messages | length) %}{{ i }}{% endfor %}",
            "0123",
        ),
        (
            "{% set a, b = 1, 2 %}{{ a }}{{ b }}",
            "12",
        ),
        (
            ("{{ eos_token if messages[-1].role is defined and messages[-1].nothing is not defined }}"),
            "</s>",
        ),
        (
            "{% filter upper %}{{ messages[1].content }}{% endfilter %}",
            "HI",
        ),
    ],
)
def test_what_published_templates_need(source: str, expected: str) -> None:
    assert render(source) == expected


LOOPS = {
    "nested loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "calls that double": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a huge range": "{% for a in range(10 ** 12) %}{% endfor %}",
    "a list that feeds itself": "{% set l = [1] %}{% for a in l * 99999999 %}{% endfor %}",
    "filters in a loop": (
        "{% set l = range(99999) | list %}{% for a in range(99999) %}{{ l | sort | length }}{% endfor %}"
    ),
}
SIZES = {
    "a product": "{{ 'a' * 10 ** 9 }}",
    "doubling with a plus": (
        "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}"
    ),
    "doubling with a tilde": (
        "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}"
    ),
    "squaring by replace": (
        "{% set n = namespace(s='aaaa') %}{% for i in range(9) %}{% set n.s = n.s | replace('a', n.s) %}"
        "{% endfor %}"
    ),
    "squaring by a method": (
        "{% set n = namespace(s='aaaa') %}{% for i in range(9) %}{% set n.s = n.s.replace('a', n.s) %}"
        "{% endfor %}"
    ),
    "a field width": "{{ '%999999999d' % 1 }}",
    "a format filter": "{{ '%999999999d' | format(1) }}",
    "a format method": "{{ '{:>999999999}'.format(1) }}",
    "centring": "{{ 'a' | center(999999999) }}",
    "centring by a method": "{{ 'a'.center(999999999) }}",
    "indenting": "{{ 'a\nb' | indent(999999999) }}",
    "much output": "{% for i in range(9999) %}{{ 'a' * 99999 }}{% endfor %}",
    "output inside a macro": (
        "{% macro f() %}{% for i in range(9999) %}{{ 'a' * 99999 }}{% endfor %}{% endmacro %}"
        "{% set x = f() %}"
    ),
    "joining": "{% set s = 'a' * 9999999 %}{{ ([s] * 9999) | join }}",
    "a power": "{{ (10 ** 9) ** 999999 }}",
}
PRIVATE = {
    "a class": "{{ ''.__class__.__mro__ }}",
    "a subscript": "{{ ''['__class__'] }}",
    "the attr filter": "{{ ('' | attr('__class__')).x }}",
    "a built subscript": "{% set n = '__cla' ~ 'ss__' %}{{ messages[n].x }}{{ ''[n].x }}",
    "a function's globals": "{{ raise_exception.__globals__ }}",
    "changing messages": "{{ messages.append(1) }}",
}  # fmt: skip


@pytest.mark.parametrize("source", LOOPS.values(), ids=LOOPS)
def test_a_template_that_runs_for_ever_is_refused_at_load(source: str) -> None:
    with pytest.raises(ModelError, match=r"chat_template\.jinja: the chat template"):
        ChatTemplate(source, "chat_template.jinja", NAMES)


@pytest.mark.parametrize("source", SIZES.values(), ids=SIZES)
def test_a_template_that_makes_huge_texts_is_refused_at_load(source: str) -> None:
    with pytest.raises(ModelError, match=r"chat_template\.jinja: the chat template"):
        ChatTemplate(source, "chat_template.jinja", NAMES)


@pytest.mark.parametrize("source", PRIVATE.values(), ids=PRIVATE)
def test_a_template_that_reaches_for_attributes_is_refused_at_load(source: str) -> None:
    with pytest.raises(ModelError, match=r"chat_template\.jinja: the chat template"):
        ChatTemplate(source, "chat_template.jinja", NAMES)


@pytest.mark.parametrize("wrapped", [*LOOPS.values(), *SIZES.values()], ids=[*LOOPS, *SIZES])
def test_what_only_some_dialogues_set_off_is_refused_then(wrapped: str) -> None:
    head, _, tail = wrapped.rpartition("{% endmacro %}")
    source = f"{head}{_}{{% if messages | length == 4 %}}{tail}{{% endif %}}"
    with pytest.raises(TextError, match="chat template"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{",
        "{% include 'x' %}{% endfor %}",
        "{% for a in [] recursive %}{% endfor %}",
        "{{ " + "(" * 5000,
    ],
    ids=["tag", "brace", "end", "recursive", "deep"],
)
def test_a_template_that_is_not_valid_is_refused_at_load(source: str) -> None:
    with pytest.raises(ModelError, match=r"chat_template\.jinja: the chat template"):
        ChatTemplate(source, "chat_template.jinja", NAMES)


def test_a_template_may_read_no_file(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    with pytest.raises(TextError):
        render(f"{{% include '{tmp_path}/secret' %}}")


def test_the_fields_of_a_format_string_see_no_private_attribute() -> None:
    assert render("[{{ '{0.__class__}'.format(1) }}]") == "[]"


def test_a_template_of_megabytes_is_refused() -> None:
    with pytest.raises(ModelError, match="longer than"):
        ChatTemplate("a" * (MAX_SOURCE + 1), "chat_template.jinja", NAMES)


def test_an_error_in_a_template_is_a_bad_request_and_not_a_crash() -> None:
    for source in ("{{ messages[9].content.x }}", "{{ 1 // 0 }}", "{{ 'a' + 1 }}", "{{ nothing() }}"):
        with pytest.raises(TextError):
            render(source)


def test_long_dialogues_have_steps_enough() -> None:
    source = (
        "{% for m in messages %}{% if loop.index0 == messages | length - 1 %}!{% endif %}"
        "{{ '<' ~ m.role ~ '>' + m.content | trim + eos_token }}{% endfor %}"
    )
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "hello"} for i in range(4000)]
    assert ChatTemplate(source, "here", NAMES).render(messages).count("hello") == 4000
