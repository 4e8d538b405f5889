"""The seam between the daemon and an engine: frozen, picklable values and nothing else.

The daemon submits `GenerationRequest` values and receives tuples of events. So an engine can live in a
thread, in another process or on another machine without the daemon knowing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from coli_server.routing import RoutePolicy
from coli_server.telemetry.counters import Counters
from coli_server.telemetry.histogram import NOTHING_SEEN, HistogramSnapshot

SYSTEM = "~system"
"""The session of work that belongs to no request: pins and prefetch."""

Kind = Literal["gen", "chat", "score"]
Finish = Literal["stop", "length", "cancelled", "deadline", "drained"]


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """How the next token is drawn. `temperature=0` is greedy; `top_k=0` means no limit."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Everything an engine needs to answer one GEN, CHAT or SCORE.

    `key` is unique in the process; `session` is the owner of counters and reusable KV. A `chat` request
    may also reuse the KV of this session's generated tokens, a `gen` request only KV of stock prefill.
    A `score` request draws nothing: it feeds `continuation` behind `prompt` and asks how likely it was; its
    `max_tokens` is the length of the continuation.
    `deadline` is a `time.monotonic()` value in seconds. `logprobs` is how many alternatives to report.
    """

    key: int
    session: str
    kind: Kind
    prompt: tuple[int, ...]
    max_tokens: int
    policy: RoutePolicy
    sampling: SamplingOptions = SamplingOptions()
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    continuation: tuple[int, ...] = ()
    deadline: float | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One candidate token: its id, its text and its natural log-probability under the stock softmax."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Started:
    """The request left the queue."""

    key: int


@dataclass(frozen=True, slots=True)
class Progress:
    """`done` of `total` prompt tokens have been read."""

    key: int
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class TextChunk:
    """Complete characters that may be sent now, and the tokens that they came from.

    `logprobs` has one entry for each of `ids` when the request asked for them: the chosen token first,
    then the best alternatives.
    """

    key: int
    text: str
    ids: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Score:
    """How likely a continuation was: the sum of its tokens' natural log-probabilities, and whether each of
    them was the likeliest one (ties go to the lower id)."""

    logprob: float
    greedy: bool


@dataclass(frozen=True, slots=True)
class Finished:
    """The request ended well (one of the five outcomes); its own counters, and times in seconds.

    `score` is there when a `score` request came to its end; its `tokens` are those that were scored.
    """

    key: int
    finish: Finish
    counters: Counters
    tokens: int
    prompt_tokens: int
    ttft_seconds: float | None
    decode_seconds: float
    score: Score | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The request alone failed; `code` is MODEL or INTERNAL, `message` is safe to send."""

    key: int
    code: str
    message: str
    counters: Counters


Event = Started | Progress | TextChunk | Finished | Failed


@dataclass(frozen=True, slots=True)
class LayerUse:
    """What routing did to each MoE layer lately (see docs/CACHE_ROUTE.md, starvation and lock-in)."""

    distinct_experts_min: int = 0
    distinct_experts_median: float = 0.0
    longest_swap_run: int = 0


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """A consistent picture of an engine between two steps. The daemon reads the newest and never waits.

    `sessions` maps the session of each request to its counters; `closed` is the sum over dropped ones;
    the session `~system` holds the work of no session. Global figures are `closed` plus all of `sessions`.
    `layers_resident` has the number of experts in memory for each MoE layer, of `experts` that it has.
    """

    sessions: Mapping[str, Counters] = field(default_factory=dict)
    closed: Counters = field(default_factory=Counters)
    load_errors: int = 0
    load_seconds: float = 0.0
    wait_seconds: float = 0.0
    evictions: int = 0
    slots_per_layer: int = 0
    cache_bytes: int = 0
    cache_capacity_bytes: int = 0
    pinned_experts: int = 0
    prefetch_issued: int = 0
    prefetch_used: int = 0
    prefetch_late: int = 0
    prefetch_wasted: int = 0
    prefetch_failed: int = 0
    prefetch_in_flight: int = 0
    kv_bytes: int = 0
    kv_capacity_bytes: int = 0
    kv_evictions: int = 0
    layer_use: LayerUse = LayerUse()
    experts: int = 0
    layers_resident: tuple[int, ...] = ()
    expert_load: HistogramSnapshot = NOTHING_SEEN
    expert_wait: HistogramSnapshot = NOTHING_SEEN
    heartbeat: float = 0.0  # time.monotonic() of the end of the last step
