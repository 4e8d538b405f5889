"""Limits that an arm's quality must keep, written down before it is measured."""

from __future__ import annotations

from dataclasses import dataclass

from coli_server.bench.summary import Quality
from coli_server.errors import ConfigurationError
from coli_server.ranges import NumberRange

DEFAULT = "ppl=1%,top1=95%,kl=0.02"

_ACCEPTED = {
    "ppl": NumberRange(0, 1000),
    "top1": NumberRange(0, 100),
    "kl": NumberRange(0, 1000),
}
_UNITS = {"ppl": "%", "top1": "%", "kl": ""}
_MEANING = {
    "ppl": "perplexity increase",
    "top1": "top-1 agreement",
    "kl": "divergence in nats",
}


@dataclass(frozen=True, slots=True)
class Gate:
    """One limit. ppl: percent, perplexity may rise by it. top1: percent, the least agreement. kl: nats, the
    greatest mean divergence."""

    name: str
    limit: float


@dataclass(frozen=True, slots=True)
class Verdict:
    arm: str
    gate: Gate
    figure: float
    passed: bool

    def __str__(self) -> str:
        unit = " %" if _UNITS[self.gate.name] else ""
        side = "at least" if self.gate.name == "top1" else "at most"
        return (
            f"gate {self.gate.name} {self.arm}: {_MEANING[self.gate.name]} {self.figure:.4g}{unit}, "
            f"{side} {self.gate.limit:g}{unit}: {'pass' if self.passed else 'FAIL'}"
        )


def parse_gates(words: str) -> tuple[Gate, ...]:
    """Gates from `ppl=1%,top1=95%,kl=0.02` or a part of it. Raises ConfigurationError."""
    gates: dict[str, Gate] = {}
    for word in words.split(","):
        name, _, value = word.strip().partition("=")
        if name not in _ACCEPTED or name in gates:
            raise ConfigurationError(
                f"--gate={words}: {word!r} must be one of ppl=N%, top1=N% and kl=N, once"
            )
        try:
            limit = _ACCEPTED[name].parse(value.removesuffix(_UNITS[name]))
        except ValueError as error:
            raise ConfigurationError(f"--gate={words}: {name} {error}") from None
        gates[name] = Gate(name, float(limit))
    return tuple(gates.values())


def judge(arm: str, quality: Quality, gates: tuple[Gate, ...]) -> list[Verdict]:
    """A verdict for each gate."""
    figures = {"ppl": quality.increase.value, "top1": quality.top1.value, "kl": quality.kl.value}
    return [
        Verdict(
            arm,
            gate,
            figures[gate.name],
            figures[gate.name] >= gate.limit if gate.name == "top1" else figures[gate.name] <= gate.limit,
        )
        for gate in gates
    ]
