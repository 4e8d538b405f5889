"""Line charts as SVG text, for reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 720, 440
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 170, 50, 60
# Colours that people with any colour vision can tell apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")


@dataclass(frozen=True, slots=True)
class Series:
    """A named line through points (x, y)."""

    name: str
    points: tuple[tuple[float, float], ...]


def line_chart(title: str, x_label: str, y_label: str, series: Sequence[Series]) -> str:
    """A chart whose y axis begins at 0; `series` have at least one point together."""
    xs = [x for line in series for x, _ in line.points]
    ys = [y for line in series for _, y in line.points]
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(0.0, max(ys))
    x_scale = (_WIDTH - _LEFT - _RIGHT) / ((max(xs) - min(xs)) or 1.0)
    y_scale = (_HEIGHT - _TOP - _BOTTOM) / (max(ys) or 1.0)

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + (x - min(xs)) * x_scale, _HEIGHT - _BOTTOM - y * y_scale

    parts = [_text(_WIDTH / 2, 28, title, size=16)]
    for x in x_ticks:
        at, bottom = place(x, 0)
        parts += [_line(at, bottom, at, bottom + 5), _text(at, bottom + 20, f"{x:g}")]
    for y in y_ticks:
        left, at = place(min(xs), y)
        parts.append(_line(left, at, _WIDTH - _RIGHT, at, "#dddddd"))
        parts.append(_text(left - 8, at + 4, f"{y:g}", anchor="end"))
    parts.append(_text((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - 16, x_label))
    parts.append(_text(18, _TOP - 16, y_label, anchor="start"))
    for number, line in enumerate(series):
        colour = _COLOURS[number % len(_COLOURS)]
        points = " ".join(f"{px:.1f},{py:.1f}" for px, py in (place(x, y) for x, y in line.points))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        legend = _TOP + 10 + 20 * number
        parts.append(_line(_WIDTH - _RIGHT + 16, legend, _WIDTH - _RIGHT + 40, legend, colour, 2))
        parts.append(_text(_WIDTH - _RIGHT + 46, legend + 4, line.name, anchor="start"))
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'font-family="sans-serif" font-size="12">\n'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>\n{body}\n</svg>\n'
    )


def ticks(low: float, high: float) -> list[float]:
    """Round numbers from `low` to `high`, about six of them; at least one."""
    if high <= low:
        return [low]
    rough = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [round(n * step, 10) for n in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _text(x: float, y: float, text: str, *, anchor: str = "middle", size: int = 12) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = "#000000", width: int = 1) -> str:
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" '
        f'stroke-width="{width}"/>'
    )
