"""Reply lines made from what the engine and the telemetry hold."""

from __future__ import annotations

from coli_server.engine.api import Failed, Finished, TextChunk, TokenLogprob
from coli_server.errors import ColiError
from coli_server.protocol import replies
from coli_server.protocol.errors import CODES, ProtocolError
from coli_server.protocol.replies import Routing, Summary
from coli_server.routing import RoutePolicy
from coli_server.telemetry import counters as ratios
from coli_server.telemetry.counters import Counters


def refusal(error: Exception, id: str | None) -> bytes:
    """The ERR line for an exception. Only errors raised on purpose say to the client what happened."""
    if isinstance(error, ProtocolError):
        return replies.error(error.code, error.message, id=error.id or id, details=error.details)
    if isinstance(error, ColiError):
        return replies.error(error.code, str(error), id=id)
    return replies.error("INTERNAL", CODES["INTERNAL"].when, id=id)


def failure(event: Failed, id: str) -> bytes:
    """The ERR line for a request that the engine gave up."""
    return replies.error(event.code, event.message, id=id)


def token(id: str, chunk: TextChunk) -> bytes:
    """The TOK line for a piece of an answer, with its log-probabilities if the request asked for them."""
    logprobs = [_logprobs(candidates) for candidates in chunk.logprobs] or None
    return replies.token(id, chunk.text, logprobs)


def done(id: str, event: Finished, *, seed: int, policy: RoutePolicy) -> bytes:
    """The DONE line with the request's own figures."""
    counters = event.counters
    summary = Summary(
        finish=event.finish,
        tokens=event.tokens,
        prompt_tokens=event.prompt_tokens,
        seed=seed,
        ttft_ms=(event.ttft_seconds or 0.0) * 1000,
        tok_s=ratios.tok_s(counters),
        hit_pct=ratios.hit_pct(counters),
        lookups=counters.lookups,
        routing=routing(counters, policy),
        mode=policy.mode if policy.active else policy.describe(),
        scope=policy.scope,
    )
    return replies.done(id, summary)


def scored(id: str, event: Finished, policy: RoutePolicy) -> bytes:
    """The DONE line of a SCORE; one that was ended early has no score."""
    counters = event.counters
    return replies.scored(
        id,
        logprob=event.score.logprob if event.score else None,
        tokens=event.tokens,
        greedy=event.score is not None and event.score.greedy,
        finish=event.finish,
        prompt_tokens=event.prompt_tokens,
        hit_pct=ratios.hit_pct(counters),
        lookups=counters.lookups,
        routing=routing(counters, policy),
        mode=policy.mode if policy.active else policy.describe(),
        scope=policy.scope,
    )


def stat_line(event: Finished | None, policy: RoutePolicy | None, *, rss_bytes: int) -> bytes:
    """The older one-line form of STAT, of a session's last request; zeros when there was none."""
    counters = event.counters if event else Counters()
    return replies.stat_line(
        tokens=event.tokens if event else 0,
        tok_s=ratios.tok_s(counters),
        hit_pct=ratios.hit_pct(counters),
        rss_gb=rss_bytes / 1e9,
        prompt_tokens=event.prompt_tokens if event else 0,
        length_limited=event is not None and event.finish == "length",
        routing=routing(counters, policy) if policy and policy.active else None,
    )


def routing(counters: Counters, policy: RoutePolicy) -> Routing:
    """What the router's meters say; agreement and KL only where they were measured."""
    return Routing(
        swap_pct=ratios.swap_pct(counters),
        swaps=counters.route_swaps,
        slots=counters.route_slots,
        agree=ratios.route_agree(counters) if policy.meters else None,
        kl=ratios.route_kl(counters) if policy.meters else None,
    )


def _logprobs(candidates: tuple[TokenLogprob, ...]) -> dict[str, object]:
    chosen, *best = ({"id": one.id, "text": one.text, "logprob": round(one.logprob, 6)} for one in candidates)
    return {**chosen, "top": best}
