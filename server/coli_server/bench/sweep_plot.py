"""The sweep as a picture: misses against perplexity, a panel for each size of the cache. Plain SVG."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

from coli_server.bench.chart import ticks

if TYPE_CHECKING:
    from coli_server.bench.sweep import Panel, Point, SweepReport

WIDTH, HEIGHT = 440, 380
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 36, 92
COLOURS = {"max-rank": "#0072b2", "cumulative": "#e69f00", "cache-prior": "#009e73"}
MOST_PERCENT = 15.0
"""Of perplexity: points beyond are counted in a note, or they would press all others together."""


def plot(report: SweepReport) -> str:
    """An SVG document."""
    width = WIDTH * len(report.panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" '
        f'viewBox="0 0 {width} {HEIGHT}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{HEIGHT}" fill="white"/>',
    ]
    for n, panel in enumerate(report.panels):
        parts += [f'<g transform="translate({n * WIDTH} 0)">', *_panel(report, panel), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _panel(report: SweepReport, panel: Panel) -> list[str]:
    shown = [point for point in panel.points if point.quality.increase.value <= MOST_PERCENT]
    axes = _Axes(panel, shown)
    title = f"{report.model}: cache of {panel.capacity} of {report.experts} experts a layer"
    parts = [_text(WIDTH / 2, 20, title, "middle", 'font-weight="bold"'), *axes.draw()]
    parts += _line(axes, panel.belady_miss_pct, "#d55e00", "stock choices, Belady", 12)
    parts += _line(axes, panel.stock_miss_pct, "#666666", "stock choices, LRU", -4)
    front = [point for point in panel.front if point in shown]
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in _stairs(axes, front))
    parts.append(f'<polyline points="{corners}" fill="none" stroke="#999999" stroke-width="1.5"/>')
    for point in shown:
        x, y = axes.place(point.quality.increase.value, point.miss_pct)
        ring = ' stroke="black"' if point in front else ""
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{COLOURS[point.method]}"{ring}>'
            f"<title>{escape(point.mode)}: {point.miss_pct:.1f} % misses, "
            f"{point.quality.increase.value:+.2f} % perplexity</title></circle>"
        )
    return parts + _legend(len(panel.points) - len(shown))


class _Axes:
    """Where a point of (perplexity increase, miss rate), both in percent, lies in a panel."""

    def __init__(self, panel: Panel, points: list[Point]) -> None:
        xs = [0.0, 1.0, *(point.quality.increase.value for point in points)]
        ys = [panel.stock_miss_pct, panel.belady_miss_pct, *(point.miss_pct for point in points)]
        self._x = min(xs) - 0.3, max(xs) * 1.05
        self._y = 0.0, max(ys) * 1.1 + 1e-9

    def place(self, x: float, y: float) -> tuple[float, float]:
        (x0, x1), (y0, y1) = self._x, self._y
        across = LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - RIGHT)
        down = HEIGHT - BOTTOM - (y - y0) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)
        return across, down

    def draw(self) -> list[str]:
        """Frame, ticks and names."""
        left, bottom = self.place(self._x[0], 0.0)
        right, top = self.place(self._x[1], self._y[1])
        parts = [
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}" '
            'fill="none" stroke="black"/>'
        ]
        for tick in ticks(*self._x):
            x, _ = self.place(tick, 0.0)
            parts.append(f'<path d="M{x:.1f} {bottom:.1f}v4" stroke="black"/>')
            parts.append(_text(x, bottom + 16, f"{tick:g}", "middle"))
        for tick in ticks(*self._y):
            _, y = self.place(self._x[0], tick)
            parts.append(f'<path d="M{left:.1f} {y:.1f}h-4" stroke="black"/>')
            parts.append(_text(left - 7, y + 4, f"{tick:g}", "end"))
        parts.append(_text((left + right) / 2, bottom + 32, "perplexity increase, %", "middle"))
        middle = (top + bottom) / 2
        parts.append(_text(14, middle, "misses, %", "middle", f'transform="rotate(-90 14 {middle:.1f})"'))
        return parts

    @property
    def ends(self) -> tuple[float, float]:
        return self._x


def _line(axes: _Axes, y: float, colour: str, name: str, above: int) -> list[str]:
    (left, down), (right, _) = axes.place(axes.ends[0], y), axes.place(axes.ends[1], y)
    return [
        f'<path d="M{left:.1f} {down:.1f}H{right:.1f}" stroke="{colour}" stroke-dasharray="5 3"/>',
        _text(right - 4, down + above, name, "end", f'fill="{colour}"'),
    ]


def _stairs(axes: _Axes, front: list[Point]) -> list[tuple[float, float]]:
    """The border of what can be had: for a price, the fewest misses."""
    corners: list[tuple[float, float]] = []
    for point in front:
        x, y = axes.place(point.quality.increase.value, point.miss_pct)
        if corners:
            corners.append((x, corners[-1][1]))
        corners.append((x, y))
    return corners


def _legend(beyond: int) -> list[str]:
    parts, x, y = [], LEFT, HEIGHT - 38
    for method, colour in COLOURS.items():
        parts.append(f'<circle cx="{x}" cy="{y - 4}" r="3.5" fill="{colour}"/>')
        parts.append(_text(x + 8, y, method, "start"))
        x += 110
    notes = "ringed and joined: the Pareto front"
    if beyond:
        notes += f"; {beyond} settings beyond +{MOST_PERCENT:g} % are left out"
    return [*parts, _text(LEFT, y + 18, notes, "start")]


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}>{escape(text)}</text>'
