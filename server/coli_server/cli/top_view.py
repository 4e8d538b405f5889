"""What `coli top` shows: lines of text made from samples, for any size of terminal from 80x24 down."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group
from rich.text import Text

from coli_server.cli.watch import Figures, Lost, News, Sample, number

HISTORY = 600  # samples that sparklines remember: more columns than terminals have
_BLOCKS = "▁▂▃▄▅▆▇█"
_LABEL = 11
_VALUE = 14
_OUTCOMES = ("stop", "length", "cancelled", "deadline", "drained", "error")


@dataclass(frozen=True, slots=True)
class Point:
    """What happened between two samples: tokens a second, and shares in percent (None: nothing to share)."""

    tok_s: float
    hit: float | None
    swap: float | None

    @property
    def agree(self) -> float | None:
        return None if self.swap is None else 100 - self.swap


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the sessions table; `key` sorts by it."""

    key: str
    title: str
    figure: str
    width: int


COLUMNS = (
    Column("n", "session", "", 0),
    Column("c", "conn", "connections", 5),
    Column("r", "run", "requests_current", 4),
    Column("a", "total", "requests_total", 9),
    Column("p", "prompt", "prompt_tokens_total", 9),
    Column("t", "tokens", "generated_tokens_total", 9),
    Column("h", "hit %", "hit_pct", 7),
    Column("s", "swap %", "swap_pct", 7),
)
_BY_KEY = {column.key: column for column in COLUMNS}


@dataclass(slots=True)
class View:
    """The state of the screen: the newest sample, what came before in short, and how sessions are sorted."""

    address: str
    sample: Sample | None = None
    lost: str | None = None
    points: deque[Point] = field(default_factory=lambda: deque(maxlen=HISTORY))
    column: Column = _BY_KEY["t"]
    descending: bool = True

    def take(self, news: News) -> None:
        """A new sample, or the reason why there is none. Counters that fell mean another daemon."""
        if isinstance(news, Lost):
            self.lost = news.reason
            return
        before, self.sample, self.lost = self.sample, news, None
        if before is not None:
            if news.number("uptime_seconds") < before.number("uptime_seconds"):
                self.points.clear()
            elif (point := point_between(before, news)) is not None:
                self.points.append(point)

    def press(self, key: str) -> None:
        """Sort sessions by the column of `key`; a second time the other way round."""
        column = _BY_KEY.get(key)
        if column is not None:
            self.descending = not self.descending if column is self.column else bool(column.figure)
            self.column = column

    def render(self, width: int, height: int) -> Group:
        """Exactly `height` lines, none wider than `width`."""
        lines = self._lines(width)
        body = [line for _, line in zip(range(height - 1), lines, strict=False)]
        body += [Text()] * (height - 1 - len(body))
        keys = " ".join(f"{column.key} {column.title.removesuffix(' %')}" for column in COLUMNS)
        body.append(Text(f"q quit  sort: {keys}", style="reverse"))
        for line in body:
            line.no_wrap = True
            line.truncate(width, overflow="ellipsis")
        return Group(*body)

    def _lines(self, width: int) -> Iterator[Text]:
        if self.lost is not None:
            yield Text(f"no answer from {self.address}: {self.lost}; trying again", style="bold red")
        if self.sample is None:
            if self.lost is None:
                yield Text(f"asking {self.address} ...")
            return
        sample = self.sample
        yield from header(sample)
        yield from self._sparklines(width)
        yield from bars(sample, width)
        yield from heat(sample, width)
        yield latency(sample)
        yield from self._sessions(sample, width)

    def _sparklines(self, width: int) -> Iterator[Text]:
        points = [*self.points][-max(width - _LABEL - _VALUE, 1) :]
        shares: tuple[tuple[str, Sequence[float | None], str], ...] = (
            ("hit", [point.hit for point in points], "green"),
            ("swap", [point.swap for point in points], "yellow"),
            ("agreement", [point.agree for point in points], "cyan"),
        )
        speeds = [point.tok_s for point in points]
        now = f"{speeds[-1]:.1f}/s" if speeds else "-"
        yield labelled("tokens", now, spark(speeds, max([*speeds, 1.0])), "magenta")
        for name, values, colour in shares:
            latest = next((value for value in reversed(values) if value is not None), None)
            yield labelled(name, "-" if latest is None else f"{latest:.1f} %", spark(values, 100.0), colour)

    def _sessions(self, sample: Sample, width: int) -> Iterator[Text]:
        if sample.sessions is None:
            yield Text("sessions are shown to whoever may see them: an administrator's token", style="dim")
            return
        wide = max(width - sum(column.width for column in COLUMNS), 8)
        title = Text()
        for column in COLUMNS:
            mark = ("↓" if self.descending else "↑") if column is self.column else ""
            word = f"{column.title}{mark}"
            title.append(word.ljust(wide) if not column.figure else word.rjust(column.width))
        title.stylize("bold")
        yield title
        for name in self._sorted(sample.sessions):
            figures = sample.sessions[name]
            cells = [name[: wide - 1].ljust(wide)]
            cells += [short(figures, column).rjust(column.width) for column in COLUMNS[1:]]
            yield Text("".join(cells), style="" if number(figures, "requests_current") else "dim")

    def _sorted(self, sessions: Mapping[str, Figures]) -> list[str]:
        names = sorted(sessions)
        if not self.column.figure:
            return names[::-1] if self.descending else names
        return sorted(
            names, key=lambda name: number(sessions[name], self.column.figure), reverse=self.descending
        )


def point_between(before: Sample, after: Sample) -> Point | None:
    """What the counters of two samples say of the time between; None when they were started anew there."""
    seconds = after.moment - before.moment

    def grown(name: str) -> float:
        return after.number(name) - before.number(name)

    lookups, hits = grown("lookups"), grown("hits_pin") + grown("hits_lru")
    slots, swaps, tokens = grown("route_slots"), grown("route_swaps"), grown("generated_tokens_total")
    if seconds <= 0 or min(lookups, hits, slots, swaps, tokens) < 0:
        return None
    return Point(
        tokens / seconds,
        100 * hits / lookups if lookups else None,
        100 * swaps / slots if slots else None,
    )


def spark(values: Sequence[float | None], top: float) -> str:
    """One block for each value between 0 and `top`; a blank for none."""
    last = len(_BLOCKS) - 1
    return "".join(" " if v is None else _BLOCKS[min(round(v / top * last), last)] for v in values)


def labelled(label: str, value: str, drawn: str, colour: str) -> Text:
    return Text.assemble(f"{label:<{_LABEL}}", (f"{value:>{_VALUE - 2}}  ", "bold"), (drawn, colour))


def header(sample: Sample) -> Iterator[Text]:
    """Who serves what, in which mode; what it has to do."""
    figures = sample.figures
    yield Text.assemble(
        ("coli ", "bold"),
        figures.get("version", ""),
        "  ",
        (figures.get("model", "").replace("%20", " "), "bold"),
        f"  up {duration(sample.number('uptime_seconds'))}  ",
        state(sample),
    )
    yield Text.assemble("mode  ", (describe(figures.get("mode", "")), "bold cyan"))
    ended = sum(sample.number(f"requests_{outcome}_total") for outcome in _OUTCOMES)
    yield Text(
        f"running {figures.get('requests_running')}  waiting {figures.get('requests_waiting')}  "
        f"ended {ended:.0f}  failed {figures.get('requests_error_total')}  "
        f"connections {figures.get('connections_current')}  sessions {figures.get('sessions_current')}"
    )


def state(sample: Sample) -> tuple[str, str]:
    """The daemon's state as a word, and its colour."""
    if sample.number("draining"):
        return "draining", "bold yellow"
    if sample.number("engine_stalled"):
        return "standing still", "bold red"
    return "ready", "bold green"


def describe(mode: str) -> str:
    """The mode in words: `max-rank,J=2,M=12,shared,pilot` is a list of what is on."""
    first, *rest = mode.replace("%20", " ").split(",")
    words = ["stock routing" if first == "stock" else f"cache-aware routing: {first}"]
    words += [word.replace("pilot", "reads ahead") for word in rest]
    return ", ".join(words)


def bars(sample: Sample, width: int) -> Iterator[Text]:
    """Memory that is used, of that which may be."""
    for label, used, most in (
        ("experts", "cache_bytes", "cache_capacity_bytes"),
        ("KV caches", "kv_bytes", "kv_capacity_bytes"),
        ("process", "rss_bytes", "ram_bytes"),
    ):
        yield bar(label, sample.number(used), sample.number(most), width)


def bar(label: str, used: float, most: float, width: int) -> Text:
    """`used` bytes of `most`, drawn; red when it is more than that."""
    text = f"{size(used)} of {size(most)}"
    room = max(width - _LABEL - len(text) - 2, 1)
    filled = min(round(room * used / most), room) if most else 0
    colour = "red" if used > most else "blue"
    line = Text.assemble(f"{label:<{_LABEL}}", ("█" * filled, colour), ("░" * (room - filled), "dim"))
    return line.append(f"  {text}")


def heat(sample: Sample, width: int) -> Iterator[Text]:
    """A block for each MoE layer: the share of its experts that are in memory."""
    residents = [int(word) for word in sample.figures.get("layers_resident", "-").split(",") if word != "-"]
    experts = sample.number("model_experts")
    if not residents or not experts:
        return
    shown = residents[: max(width - _LABEL - _VALUE, 1)]
    line = Text(f"{'layers':<{_LABEL}}{f'{min(residents)}-{max(residents)}/{experts:.0f}':>{_VALUE - 2}}  ")
    for count in shown:
        part = count / experts
        line.append(spark([part], 1.0), style=_heat_colour(part))
    yield line


def _heat_colour(part: float) -> str:
    return "red" if part < 1 / 3 else "yellow" if part < 2 / 3 else "green"


def latency(sample: Sample) -> Text:
    def ms(name: str) -> str:
        return f"{sample.number(name):.0f}"

    return Text(
        f"first token {ms('ttft_ms_p50')} ms (p99 {ms('ttft_ms_p99')})  "
        f"between tokens {ms('itl_ms_p50')} ms (p99 {ms('itl_ms_p99')})  "
        f"loop {sample.number('event_loop_lag_ms_p99'):.1f} ms"
    )


def short(figures: Figures, column: Column) -> str:
    value = number(figures, column.figure)
    return f"{value:.1f}" if column.figure.endswith("_pct") else f"{value:.0f}"


def size(count: float) -> str:
    """Bytes in the unit that leaves one to four digits."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    """Hours, minutes and seconds, and days before them."""
    whole = int(seconds)
    days, rest = divmod(whole, 86_400)
    clock = f"{rest // 3600}:{rest // 60 % 60:02}:{rest % 60:02}"
    return f"{days}d {clock}" if days else clock
