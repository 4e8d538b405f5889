"""Every setting of the daemon once: its name, variable, flag, default, accepted values and explanation.

A flag wins over the environment, which wins over the file of `--config`, which wins over the default.
Nothing here is expensive to import: command lines, documents and protocol option words are all made from
these fields.
"""

# ruff: noqa: RUF009 (each field's default is the description of a setting, made by a call)

from __future__ import annotations

import argparse
import os
import pathlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from decimal import Decimal
from ipaddress import ip_address
from typing import Any, Protocol, get_args

from coli_server.errors import ConfigurationError
from coli_server.ranges import FLAG, INT32_MAX, ROUTING, Activations, Choices, NumberRange

NETWORK = "Network"
MODEL = "Model and memory"
STORE = "Expert store"
ROUTES = "Cache-aware routing"
LIMITS = "Limits"
OPERATION = "Operation"

TOKENS = "COLI_TOKENS"
"""The variable for tokens, `NAME=TOKEN` with blanks between them. It is no setting: settings are shown."""

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,6})?)([KMGT]?)(?:i?B)?", re.ASCII | re.IGNORECASE)
_LISTEN = re.compile(r"(?:(?P<host>\[[0-9a-fA-F:.]+\]|[^:\s\[\]]*):)?(?P<port>[0-9]{1,5})", re.ASCII)

_HOST = re.compile(r"[0-9A-Za-z.:_%-]{1,255}", re.ASCII)


class Accepts(Protocol):
    """What a setting accepts. `str()` of it says so to a person: "a number in (0, 1]"."""

    def parse(self, word: str) -> Any:
        """The value that `word` spells; raises ValueError for anything else."""


@dataclass(frozen=True, slots=True)
class Size:
    """A number of bytes, with an optional unit (powers of 1024), between `low` and `high`."""

    low: int
    high: int

    def parse(self, word: str) -> int:
        if match := _SIZE.fullmatch(word):
            size = int(Decimal(match[1]) * _UNITS[match[2].upper()])
            if self.low <= size <= self.high:
                return size
        raise ValueError(f"must be {self}")

    def __str__(self) -> str:
        return f"a size in [{format_size(self.low)}, {format_size(self.high)}] with a unit K, M, G or T"


@dataclass(frozen=True, slots=True)
class Path:
    """The name of a file or folder: any text but an empty one."""

    def parse(self, word: str) -> str:
        if not word or "\0" in word:
            raise ValueError(f"must be {self}")
        return word

    def __str__(self) -> str:
        return "a path"


@dataclass(frozen=True, slots=True)
class Host:
    """The name or number of a host, without a port."""

    def parse(self, word: str) -> str:
        if not _HOST.fullmatch(word):
            raise ValueError(f"must be {self}")
        return word

    def __str__(self) -> str:
        return "the name or address of a host"


@dataclass(frozen=True, slots=True, init=False)
class PathOr:
    """The name of a file or folder, or one of some words that mean something else."""

    words: tuple[str, ...]

    def __init__(self, *words: str) -> None:
        object.__setattr__(self, "words", words)

    def parse(self, word: str) -> str:
        if not word or "\0" in word:
            raise ValueError(f"must be {self}")
        return word

    def __str__(self) -> str:
        return f"{', '.join(self.words)} or a path"


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen: a TCP `host` and `port` (0 = any free one), or the `path` of a Unix socket."""

    host: str = ""
    port: int = 0
    path: str | None = None

    @property
    def loopback(self) -> bool:
        """Whether only programs of this machine can reach the address."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Listen:
    """`HOST:PORT`, `PORT` alone (loopback), or `unix:PATH`. An IPv6 host stands in brackets."""

    def parse(self, word: str) -> Address:
        if word.startswith("unix:") and len(word) > len("unix:") and "\0" not in word:
            return Address(path=word.removeprefix("unix:"))
        match = _LISTEN.fullmatch(word)
        if match and int(match["port"]) <= 65535:
            return Address((match["host"] or "127.0.0.1").strip("[]"), int(match["port"]))
        raise ValueError(f"must be {self}")

    def __str__(self) -> str:
        return "HOST:PORT, PORT (0 to 65535, on 127.0.0.1) or unix:PATH"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting as people see it. `default` is a word that `accepts` can read, or None for "not given"."""

    name: str
    env: str
    flag: str
    default: str | None
    accepts: Accepts
    metavar: str
    group: str
    help: str

    def parse(self, word: str, source: str) -> Any:
        """The value of `word`, which came from `source`; raises ConfigurationError naming all of it."""
        try:
            return self.accepts.parse(word)
        except ValueError:
            raise ConfigurationError(
                f"{self.env} is {word!r} (from {source}), must be {self.accepts}"
            ) from None

    def format(self, value: Any) -> str:
        """The word that spells `value`; empty for a value that was not given."""
        if isinstance(self.accepts, Choices):
            return next(word for word, known in self.accepts.values if known == value)
        if value is None:
            return ""
        if isinstance(self.accepts, Size):
            return format_size(value)
        if isinstance(value, float):
            return f"{value:.15g}"
        return str(value)


def _setting(
    group: str, default: str | None, accepts: Accepts, metavar: str, help: str, *, env: str | None = None
) -> Any:
    value = None if default is None else accepts.parse(default)
    return field(default=value, metadata={"setting": (group, default, accepts, metavar, help, env)})


def _routing(name: str, default: str, metavar: str, help: str) -> Any:
    return _setting(ROUTES, default, ROUTING[name], metavar, help, env=name.upper())


def _whole(low: int, high: int) -> NumberRange:
    return NumberRange(low, high, integer=True)


def _seconds(low: float = 0) -> NumberRange:
    # A day: longer waits are meant to be "never", which 0 says where it is allowed.
    return NumberRange(low, 86_400)


@dataclass(frozen=True, slots=True)
class Settings:
    """A checked value for every setting. Sizes are in bytes, times in seconds."""

    listen: Address = _setting(
        NETWORK, "127.0.0.1:7311", Listen(), "ADDRESS", "where to listen: HOST:PORT, PORT or unix:PATH"
    )
    insecure_bind: bool = _setting(
        NETWORK,
        "0",
        FLAG,
        "0|1",
        "1 = allow an address that other machines can reach, without asking anybody for a token",
    )
    token_file: str | None = _setting(
        NETWORK, None, Path(), "FILE", "clients must name a token of this file: lines NAME=TOKEN"
    )
    tls_cert: str | None = _setting(
        NETWORK, None, Path(), "FILE", "certificate chain, PEM; connections are encrypted"
    )
    tls_key: str | None = _setting(
        NETWORK, None, Path(), "FILE", "its private key, PEM; without it the key is in the certificate's file"
    )

    metrics_port: int | None = _setting(
        NETWORK,
        None,
        _whole(0, 65_535),
        "PORT",
        "where HTTP answers /metrics, /healthz and /readyz; 0 = nowhere; without it 9311, if that is free",
    )
    metrics_host: str = _setting(
        NETWORK, "127.0.0.1", Host(), "HOST", "the address of that port; who reaches it is asked for no token"
    )

    model: str | None = _setting(
        MODEL,
        None,
        Path(),
        "FOLDER",
        "a model folder, or OWNER/NAME of the Hugging Face hub; without it the default model is fetched once",
    )
    ram: int | None = _setting(
        MODEL,
        None,
        Size(2**20, 2**50),
        "SIZE",
        "memory of the whole process; without it 80 % of what is available at the start",
    )
    experts_per_layer: int | None = _setting(
        MODEL,
        None,
        _whole(1, INT32_MAX),
        "N",
        "experts cached in each layer at most (no more than --ram has room for, nor than the model has)",
    )
    context: int | None = _setting(
        MODEL,
        None,
        _whole(16, 2**24),
        "TOKENS",
        "room of one request, prompt and answer; without it as much as model and memory allow",
    )
    kv_ram: int | None = _setting(
        MODEL,
        None,
        Size(2**10, 2**50),
        "SIZE",
        "memory for KV caches, part of --ram; without it a quarter of that at most",
    )
    threads: int = _setting(MODEL, "0", _whole(0, 1024), "N", "compute threads; 0 = one for each core")
    activations: Activations = _setting(
        MODEL,
        "float32",
        Choices(tuple((name, name) for name in get_args(Activations))),
        "TYPE",
        "bfloat16 = round what bfloat16 weights are multiplied with: faster, less exact; needs AVX512-BF16",
    )

    pilot: bool = _setting(
        STORE, "0", FLAG, "0|1", "1 = guess the experts of the next layer and read them ahead", env="PILOT"
    )
    readers: int = _setting(STORE, "4", _whole(1, 64), "N", "experts that are read at the same time")
    direct: bool = _setting(
        STORE, "0", FLAG, "0|1", "1 = read past the page cache, where the file system can"
    )
    mirror: str | None = _setting(
        STORE,
        None,
        Path(),
        "FOLDER",
        "copies of the model's weight files on another disk, which share the reads",
    )
    pin: str = _setting(
        STORE,
        "auto",
        PathOr("auto", "off"),
        "auto|off|FILE",
        "experts kept in memory for good: auto = those that this model has used most, or by a history's FILE",
        env="PIN",
    )
    pin_ram: int | None = _setting(
        STORE,
        None,
        Size(0, 2**50),
        "SIZE",
        "memory for them, part of --ram; without it half of what is beyond K experts a layer",
        env="PIN_RAM",
    )
    evict: str = _setting(
        STORE,
        "lru",
        Choices(tuple((word, word) for word in ("lru", "lfu", "learned"))),
        "POLICY",
        "which expert a full layer gives up: lru (last used), lfu (least used lately), learned (by its rate)",
    )
    trace: str | None = _setting(
        STORE, None, Path(), "FILE", "record routing in this file, for `coli bench cache`"
    )
    history: str | None = _setting(
        STORE,
        None,
        PathOr("off"),
        "FOLDER",
        "where the use of experts is remembered, or off; without it in Coli's cache folder",
    )

    cache_route: bool = _routing("cache_route", "0", "0|1", "1 = prefer experts that are in memory")
    route_mode: str = _routing(
        "route_mode", "max-rank", "MODE", "how they are preferred: max-rank or cache-prior"
    )
    route_j: int = _routing(
        "route_j", "2", "J", "the best J experts of a token are always taken, resident or not"
    )
    route_m: int = _routing(
        "route_m", "12", "M", "max-rank: how far down the ranking a substitute may come from"
    )
    route_p: float = _routing(
        "route_p",
        "0",
        "P",
        "max-rank: the window is the smallest ranking prefix with this gate mass; 0 = use ROUTE_M",
    )
    route_alpha: float = _routing("route_alpha", "1", "A", "factor on the gate mass of substituted experts")
    route_lambda: float = _routing(
        "route_lambda", "0.1", "L", "cache-prior: how strongly residents are preferred"
    )
    route_agree: bool | None = _routing(
        "route_agree", "auto", "auto|0|1", "agreement and KL meters; auto = on together with CACHE_ROUTE"
    )
    route_scope: str = _routing(
        "route_scope",
        "shared",
        "SCOPE",
        "which residency the router sees: shared (the cache) or session (its own)",
    )
    route_capacity: int = _routing(
        "route_capacity",
        "0",
        "N",
        "session scope: experts remembered in each layer; 0 = half of them, at least K",
    )
    route_prefill: bool = _routing(
        "route_prefill", "0", "0|1", "1 = also for prompt tokens, not for decoding alone"
    )

    max_connections: int = _setting(LIMITS, "256", _whole(1, 65_536), "N", "open connections")
    connections_per_address: int = _setting(
        LIMITS, "0", _whole(0, 65_536), "N", "open connections from one address; 0 = no limit of its own"
    )
    requests_per_connection: int = _setting(
        LIMITS, "8", _whole(1, 1024), "N", "requests of one connection that run or wait at the same time"
    )
    requests_per_session: int = _setting(
        LIMITS, "64", _whole(1, 65_536), "N", "requests of one session that run or wait at the same time"
    )
    max_running: int = _setting(
        LIMITS, "16", _whole(1, 1024), "N", "requests that the engine computes together; the others wait"
    )
    queue_length: int = _setting(
        LIMITS, "64", _whole(1, 65_536), "N", "requests that may wait; one more answers BUSY"
    )
    queue_seconds: float = _setting(
        LIMITS,
        "0",
        _seconds(),
        "SECONDS",
        "end a request that has waited in the queue for so long, as past its deadline; 0 = never",
    )
    max_sessions: int = _setting(
        LIMITS,
        "1024",
        _whole(1, 2**20),
        "N",
        "named sessions kept; a new one takes the place of the longest idle",
    )
    session_seconds: float = _setting(
        LIMITS,
        "86400",
        _seconds(),
        "SECONDS",
        "forget a named session that nobody has used for so long; 0 = never",
    )
    line_bytes: int = _setting(LIMITS, "64K", Size(256, 2**26), "SIZE", "longest command line")
    payload_bytes: int = _setting(LIMITS, "1M", Size(1, 2**26), "SIZE", "longest payload announced by bytes=")
    output_buffer_bytes: int = _setting(
        LIMITS, "1M", Size(4096, 2**30), "SIZE", "reply bytes that may wait for a slow reader"
    )
    write_seconds: float = _setting(
        LIMITS,
        "30",
        _seconds(0.1),
        "SECONDS",
        "how long a full output buffer may stand still before SLOW_READER",
    )
    half_command_seconds: float = _setting(
        LIMITS,
        "30",
        _seconds(0.1),
        "SECONDS",
        "how long half a line or payload may stand still before TIMEOUT",
    )
    idle_seconds: float = _setting(
        LIMITS, "0", _seconds(), "SECONDS", "close a connection that does nothing for so long; 0 = never"
    )

    drain_seconds: float = _setting(
        OPERATION, "30", _seconds(), "SECONDS", "how long running requests may go on after SIGTERM or SIGINT"
    )
    log_level: str = _setting(
        OPERATION,
        "info",
        Choices(tuple((word, word) for word in ("debug", "info", "warning", "error"))),
        "LEVEL",
        "least important messages to log: debug, info, warning or error",
    )
    log_format: str = _setting(
        OPERATION,
        "text",
        Choices((("text", "text"), ("json", "json"))),
        "FORMAT",
        "a line of text, or a JSON object, for each message",
    )
    log_prompts: bool = _setting(
        OPERATION, "0", FLAG, "0|1", "1 = prompts and answers are logged; without it no text of a client is"
    )
    step_seconds: float = _setting(
        OPERATION,
        "600",
        _seconds(),
        "SECONDS",
        "fail what runs when one step of the engine takes longer: not ready any more; 0 = wait for ever",
    )
    step_exit_seconds: float = _setting(
        OPERATION,
        "60",
        _seconds(),
        "SECONDS",
        "end the process with an error when such a step lasts so much longer; 0 = never",
    )
    session_dir: str | None = _setting(
        OPERATION, None, Path(), "FOLDER", "keep the dialogues of named sessions here, over a restart"
    )
    config: str | None = _setting(
        OPERATION,
        None,
        Path(),
        "FILE",
        "lines NAME=VALUE that count where the environment has no such variable; read again on SIGHUP",
    )

    def words(self) -> dict[str, str]:
        """Every setting's value as a word that the command line would accept; empty where none was given."""
        return {setting.name: setting.format(getattr(self, setting.name)) for setting in SETTINGS.values()}


def _table() -> dict[str, Setting]:
    table = {}
    for item in fields(Settings):
        group, default, accepts, metavar, help, env = item.metadata["setting"]
        env = env or f"COLI_{item.name.upper()}"
        flag = "--" + item.name.replace("_", "-")
        table[item.name] = Setting(item.name, env, flag, default, accepts, metavar, group, help)
    return table


SETTINGS: Mapping[str, Setting] = _table()
"""Every setting by its name, in the order in which it is explained."""


def format_size(size: int) -> str:
    """A size in bytes with the largest unit that leaves a whole number: `64K`, `1M`, `1000`."""
    for unit, factor in reversed(_UNITS.items()):
        if size >= factor and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def add_arguments(parser: argparse.ArgumentParser, names: Iterable[str] = SETTINGS) -> None:
    """Give `parser` a flag for each of the settings, in groups. Values stay words, for `given` and `load`."""
    groups: dict[str, Any] = {}
    for setting in (SETTINGS[name] for name in names):
        group = groups.setdefault(setting.group, None) or parser.add_argument_group(setting.group)
        groups[setting.group] = group
        default = "" if setting.default is None else f", default {setting.default}"
        switch: dict[str, Any] = {"nargs": "?", "const": "1"} if setting.accepts is FLAG else {}
        group.add_argument(
            setting.flag,
            dest=setting.name,
            metavar=setting.metavar,
            default=None,
            help=f"{setting.help} [{setting.env}{default}]".replace("%", "%%"),
            **switch,
        )


def given(flags: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """The words that the user gave, by name of setting: from flags, else from the environment."""
    words = {name: environ[setting.env] for name, setting in SETTINGS.items() if setting.env in environ}
    words.update({name: flags[name] for name in SETTINGS if flags.get(name) is not None})
    return words


def load(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Read and check every setting; `flags` are the parsed arguments (None = not given) by name.

    Raises ConfigurationError naming the setting, its value, where it came from and what is accepted.
    """
    values = {}
    environ = environment(flags, environ)
    for name, word in given(flags, environ).items():
        source = "the environment" if flags.get(name) is None else SETTINGS[name].flag
        values[name] = SETTINGS[name].parse(word, source)
    return Settings(**values)


def environment(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Mapping[str, str]:
    """`environ` over the variables of the file that `flags` or `environ` name as `--config`, if they do."""
    config = given(flags, environ).get("config")
    return environ if config is None else {**read_config(config), **environ}


def read_config(path: str) -> dict[str, str]:
    """Variables from a file of `NAME=VALUE` lines; `#` begins a comment line. Values may stand in quotes.

    Raises ConfigurationError for a file that cannot be read, a line of another form, an unknown name.
    """
    known = {TOKENS, *(setting.env for setting in SETTINGS.values())} - {SETTINGS["config"].env}
    try:
        text = pathlib.Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigurationError(f"{SETTINGS['config'].env} is {path!r}: {reason}") from None
    values = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals or name not in known:
            raise ConfigurationError(f"{path}, line {number}: must be NAME=VALUE with the name of a setting")
        quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
        values[name] = value[1:-1] if quoted else value
    return values


def policy_arguments(settings: Settings) -> dict[str, Any]:
    """The keyword arguments of the `RoutePolicy` that these settings ask for."""
    return {
        "mode": settings.route_mode if settings.cache_route else "off",
        "j": settings.route_j,
        "m": settings.route_m,
        "p": settings.route_p,
        "alpha": settings.route_alpha,
        "lam": settings.route_lambda,
        "scope": settings.route_scope,
        "capacity": settings.route_capacity,
        "prefill": settings.route_prefill,
        "agree": settings.route_agree,
    }


def markdown_table() -> str:
    """The settings as a Markdown table, for the README."""
    lines = ["| variable | flag | default | accepted | meaning |", "|---|---|---|---|---|"]
    for setting in SETTINGS.values():
        default = "none" if setting.default is None else f"`{setting.default}`"
        cells = (f"`{setting.env}`", f"`{setting.flag}`", default, str(setting.accepts), setting.help)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def cache_folder(environment: Mapping[str, str] = os.environ) -> pathlib.Path:
    """Where Coli keeps what it can make again: $COLI_CACHE, else $XDG_CACHE_HOME/coli, else ~/.cache/coli."""
    if chosen := environment.get("COLI_CACHE"):
        return pathlib.Path(chosen).expanduser().absolute()
    # The XDG specification has relative paths ignored.
    if (base := environment.get("XDG_CACHE_HOME", "")).startswith("/"):
        return pathlib.Path(base) / "coli"
    return pathlib.Path.home() / ".cache" / "coli"
