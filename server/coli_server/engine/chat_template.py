"""Chat templates: programs in Jinja2 that come with a model folder, and are not trusted.

They run in Jinja2's sandbox, with the helpers that published templates use, and within limits: steps (turns
of loops, calls, filters), the size of every text, and the size that a filter or a method could make of its
arguments. A template that would pass a limit fails, at once and by name, however it tries.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, ClassVar, NoReturn

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes
from jinja2.visitor import NodeTransformer

from coli_server.errors import ColiError, ModelError

MAX_SOURCE = 1 << 20  # characters of a template
MAX_STEPS = 100_000  # of one rendering; published templates need a few dozen for each message
STEPS_A_MESSAGE = 1_000
_ITEMS_A_STEP = 2  # of a list that a filter or a method goes through
_GLANCES = frozenset(["length", "count", "first", "last", "default", "d"])  # filters that go through nothing
_CHARACTERS_A_STEP = 1_000  # of a text that an operator, a filter or a method makes
MAX_TEXT = 16 << 20  # characters of any one text
MAX_PRODUCT = 1 << 28  # characters that a filter or method could make of its arguments
_WIDE_FORMAT = re.compile(r"\d{5}")  # a field width, in a format string

TRIALS: tuple[tuple[str, ...], ...] = (("user",), ("user", "assistant", "user"), ("system", "user"))


class TextError(ColiError):
    """A text or a dialogue that this model's tokenizer or chat template cannot take."""

    code: ClassVar[str] = "BAD_REQUEST"


class LimitError(jinja2.TemplateRuntimeError):
    """The template runs too long or makes too large a text."""


class ChatTemplate:
    """A compiled chat template. `render` may be called from any thread."""

    def __init__(self, source: str, where: str, names: Mapping[str, str]) -> None:
        """`where` is the file that `source` comes from; `names` are special tokens by name (`bos_token`).

        Raises ModelError for a template that is not valid, reaches for private attributes, or passes a limit
        on one of the `TRIALS`.
        """
        self._names = dict(names)
        self.source = source
        if len(source) > MAX_SOURCE:
            raise ModelError(f"{where}: the chat template is longer than {MAX_SOURCE} characters")
        try:
            self._template = _Environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(
                f"{where}: the chat template is not valid (line {error.lineno}): {error.message}"
            ) from None
        except RecursionError:
            raise ModelError(f"{where}: the chat template is nested too deeply") from None
        for roles in TRIALS:
            self._try(roles, where)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The dialogue as text, up to where the assistant's next turn begins. Raises TextError."""
        try:
            return self._render(messages)
        except jinja2.TemplateError as error:
            raise TextError(f"the chat template refuses this dialogue: {str(error)[:200]}") from None
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise TextError(f"the chat template failed: {type(error).__name__}: {str(error)[:200]}") from None
        except (MemoryError, RecursionError) as error:
            raise TextError(f"the chat template failed: {type(error).__name__}") from None

    def _render(self, messages: Sequence[Mapping[str, str]]) -> str:
        _budget.steps = MAX_STEPS + STEPS_A_MESSAGE * len(messages)
        return self._template.render(
            messages=messages, tools=None, documents=None, add_generation_prompt=True, **self._names
        )

    def _try(self, roles: Sequence[str], where: str) -> None:
        """A dialogue may be refused, system messages for instance; hanging and breaking out may not be."""
        try:
            self._render([{"role": role, "content": "Hello"} for role in roles])
        except (LimitError, jinja2.exceptions.SecurityError, MemoryError, RecursionError) as error:
            raise ModelError(
                f"{where}: the chat template: {str(error)[:200] or type(error).__name__}"
            ) from None
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            return


class _Budget(threading.local):
    """Steps that this thread's rendering may still take."""

    steps = 0

    def spend(self, steps: int) -> None:
        self.steps -= steps
        if self.steps < 0:
            raise LimitError("it runs too long")


_budget = _Budget()


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The sandbox with the helpers of published templates, and with every way to grow under control."""

    intercepted_binops = frozenset(["+", "-", "*", "/", "//", "%", "**"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # the optimizer would compute constant expressions before any limit holds
            extensions=[jinja2.ext.loopcontrols, _GenerationTag],
        )
        self.filters |= {"tojson": _to_json, "_turns": _turns, "_sized": _sized, "_guarded": _guarded}
        del self.globals["lipsum"]  # filler text of any length, which no chat template needs
        self.globals |= {
            "range": _range,
            "raise_exception": _raise_exception,
            "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        }

    @staticmethod
    def concat(pieces: Iterable[str]) -> str:
        """Join what a template or a block of it writes."""
        kept, total = [], 0
        for piece in pieces:
            total += len(piece)
            _check_length(total)
            kept.append(piece)
        return "".join(kept)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _budget.spend(1)
        if operator == "*":
            _check_product(left, [right])
        elif operator == "**" and not (abs(left) <= 1 << 32 and abs(right) <= 32):
            raise LimitError("it computes a number that is too large")
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return _sized(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        receiver = getattr(getattr(obj, "__wrapped__", obj), "__self__", None)  # the sandbox wraps str.format
        if isinstance(receiver, str) and getattr(obj, "__name__", "").startswith("format"):
            _check_format(receiver)
        _spend_on(receiver)
        _check_product(receiver, [*args, *kwargs.values()])
        return _sized(super().call(context, obj, *args, **kwargs))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        guarded = _Guards().visit(tree)
        assert isinstance(guarded, nodes.Template)
        guarded.set_environment(self)
        return guarded


class _Guards(NodeTransformer):
    """Puts a count into every loop, a size check behind every `~`, and a guard before every filter."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802
        if node.recursive:
            _refuse(node, "a recursive loop")
        self.generic_visit(node)
        assert isinstance(node.iter, nodes.Expr)
        node.iter = _filter(node.iter, "_turns")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, "_sized")

    def visit_Filter(self, node: nodes.Filter) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if node.node is None:  # the filter of a block, which has no value to look at yet
            if node.args or node.kwargs:
                _refuse(node, f"the filter {node.name!r} with arguments on a block")
            return node
        node.args = [nodes.Const(node.name, lineno=node.lineno), *node.args]
        node.name = "_guarded"
        return node

    def visit_Getattr(self, node: nodes.Getattr) -> nodes.Node:  # noqa: N802
        if node.attr.startswith("_"):
            _refuse(node, f"the private attribute {node.attr!r}")
        self.generic_visit(node)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        if isinstance(node.arg, nodes.Const) and str(node.arg.value).startswith("__"):
            _refuse(node, f"the private attribute {node.arg.value!r}")
        self.generic_visit(node)
        return node


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filter(value: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _refuse(node: nodes.Node, what: str) -> NoReturn:
    raise jinja2.TemplateSyntaxError(f"{what} is not allowed", node.lineno)


def _turns(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        _budget.spend(1)
        yield item


def _range(*bounds: int) -> range:
    numbers = range(*bounds)
    if len(numbers) > MAX_STEPS:
        raise LimitError("it runs too long")
    return numbers


def _sized(value: Any) -> Any:
    if isinstance(value, str):
        _budget.spend(len(value) // _CHARACTERS_A_STEP)
        _check_length(len(value))
    elif isinstance(value, list | tuple) and len(value) > MAX_STEPS:
        raise LimitError("it makes too long a list")
    return value


@jinja2.pass_context
def _guarded(context: Any, value: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """The filter `name`, which other code may not call with arguments that let it grow without bound."""
    if isinstance(value, str) and name == "format":
        _check_format(value)
    if name == "join" and isinstance(value, Iterable) and not isinstance(value, str):
        value = list(_turns(value))
        _check_length(sum(len(str(item)) for item in value))
    _spend_on(None if name in _GLANCES else value)
    _check_product(value, [*args, *kwargs.values()])
    return _sized(context.environment.call_filter(name, value, args, kwargs, context, context.eval_ctx))


def _spend_on(value: Any) -> None:
    many = isinstance(value, Sized) and not isinstance(value, str)
    _budget.spend(4 + (len(value) // _ITEMS_A_STEP if many else 0))


def _check_length(length: int) -> None:
    if length > MAX_TEXT:
        raise LimitError(f"it makes a text of more than {MAX_TEXT} characters")


def _check_product(value: Any, arguments: Iterable[Any]) -> None:
    """Refuse arguments whose sizes multiply to more than any filter or method should make."""
    size = _extent(value)
    for argument in arguments:
        if size * _extent(argument) > MAX_PRODUCT:
            raise LimitError("it makes too large a text or list")


def _extent(value: Any) -> int:
    if isinstance(value, int):
        return max(1, abs(value))
    if isinstance(value, list | tuple):
        return max(1, len(value) + sum(len(item) for item in value if isinstance(item, str)))
    return max(1, len(value)) if isinstance(value, str | bytes) else 1


def _check_format(form: str) -> None:
    if _WIDE_FORMAT.search(form):
        raise LimitError("it formats a field that is too wide")


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
