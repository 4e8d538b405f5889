"""From option words to what the engine wants: a request's options over its session's over the daemon's."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping
from typing import Any

from coli_server.engine.api import SamplingOptions
from coli_server.protocol.options import DEFAULTS, OPTIONS
from coli_server.ranges import ROUTING
from coli_server.routing import RoutePolicy
from coli_server.settings import Settings


def daemon_options(settings: Settings) -> dict[str, Any]:
    """The value of every option that neither a request nor its session sets; None for one without default."""
    routing = {name: getattr(settings, name) for name in ROUTING}
    return {**dict.fromkeys(OPTIONS), **DEFAULTS, **routing}


def layered(*layers: Mapping[str, Any]) -> Mapping[str, Any]:
    """A frozen view of option mappings over one another, the first one on top."""
    return ChainMap(*(dict(layer) for layer in layers))


def policy_of(options: Mapping[str, Any]) -> RoutePolicy:
    """The routing policy that complete `options` ask for; `cache_route` turns `route_mode` on."""
    return RoutePolicy(
        mode=options["route_mode"] if options["cache_route"] else "off",
        j=options["route_j"],
        m=options["route_m"],
        p=options["route_p"],
        alpha=options["route_alpha"],
        lam=options["route_lambda"],
        scope=options["route_scope"],
        capacity=options["route_capacity"],
        prefill=options["route_prefill"],
        agree=options["route_agree"],
    )


def sampling_of(options: Mapping[str, Any]) -> SamplingOptions:
    """How tokens are drawn under complete `options`."""
    return SamplingOptions(
        temperature=options["temp"],
        top_p=options["top_p"],
        top_k=options["top_k"],
        min_p=options["min_p"],
        repeat_penalty=options["repeat_penalty"],
        seed=options["seed"],
    )
