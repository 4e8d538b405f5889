"""STAT as pairs of a name and a word, made from plain mappings of values in the order of the table."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from urllib.parse import quote

from coli_server.telemetry import counters as ratios
from coli_server.telemetry.counters import Counters
from coli_server.telemetry.table import FIGURES, Figure

Value = bool | int | float | str | None

_COUNTERS = tuple(figure.name for figure in FIGURES if figure.session and figure.kind == "counter")
_DECIMALS = {"%": 4, "nats": 6, "s": 3, "ms": 3, "tokens/s": 2}


def counter_values(counters: Counters, *, agree: bool) -> dict[str, Value]:
    """Every counter that sessions have, and the ratios of them. Without `agree` its meters are left out."""
    values: dict[str, Value] = {name: getattr(counters, name) for name in _COUNTERS}
    values["tok_s"] = ratios.tok_s(counters)
    values["swap_pct"] = ratios.swap_pct(counters)
    values["hit_pct"] = ratios.hit_pct(counters)
    if agree:
        values["route_agree"] = ratios.route_agree(counters)
        values["route_kl"] = ratios.route_kl(counters)
        values["route_mass_kept"] = ratios.route_mass_kept(counters)
    return values


def render(values: Mapping[str, Value], section: str = "all") -> Iterator[tuple[str, str]]:
    """The figures of `section` (`all`, a name of SECTIONS, or `session`) that `values` has, as words."""
    for figure in FIGURES:
        wanted = section in ("all", figure.section) or (section == "session" and figure.session)
        if wanted and figure.name in values:
            yield figure.name, format_figure(figure, values[figure.name])


def format_figure(figure: Figure, value: Value) -> str:
    """The word for a figure's value, rounded as its unit asks for."""
    if figure.unit in _DECIMALS and isinstance(value, int | float):
        return f"{value:.{_DECIMALS[figure.unit]}f}"
    return format_value(value)


def format_value(value: Value) -> str:
    """One word without blanks or control characters: these are written as %20 and the like; `-` for none."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, float):
        return f"{value:.6f}".rstrip("0").rstrip(".") if math.isfinite(value) else "-"
    if value is None or value == "":
        return "-"
    return "".join(
        char if char.isprintable() and not char.isspace() else _escape(char) for char in str(value)
    )


def _escape(char: str) -> str:
    return quote(char, errors="surrogatepass")
