"""Key/value caches that are kept between the requests of a session, under one budget for all of them."""

from __future__ import annotations

from collections import OrderedDict
from typing import get_args

from coli_server.engine.api import GenerationRequest, Kind
from coli_server.engine.engine import Engine
from coli_server.engine.kv import KvCache

WASTE = 16
"""A cache of which less than one part in so many is unused is retained as it is. To copy the hundreds of
megabytes of a long prompt takes as long as several steps, and all running sequences wait.
"""


class KvStore:
    """Hands out KV caches and takes them back. What may be reused by whom: docs/CACHE_ROUTE.md, KV.

    GEN, CHAT and SCORE of one session keep a cache each; a cache is in use by one request at a time, and
    none ever passes to another session. Retained caches give way, oldest first, when a new
    request needs the memory.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._budget = engine.memory.kv_bytes
        self._retained: OrderedDict[tuple[str, Kind], KvCache] = OrderedDict()
        self._in_use = 0
        self.evictions = 0

    @property
    def nbytes(self) -> int:
        """Bytes reserved by running requests and held by retained caches."""
        return self._in_use + sum(kv.nbytes for kv in self._retained.values())

    def take(self, request: GenerationRequest) -> KvCache | None:
        """A cache with room for `request` that holds as much of its prompt as may be reused.

        At least the prompt's last token is left to compute. None when running requests use the memory.
        """
        capacity = len(request.prompt) + request.max_tokens
        needed = self._engine.memory.kv_token_bytes * capacity
        if self._in_use + needed > self._budget:
            return None
        kept = self._retained.pop((request.session, request.kind), None)
        while self._retained and self.nbytes + needed > self._budget:
            self._retained.popitem(last=False)
            self.evictions += 1
        if kept is not None:
            kept.truncate(self._reusable(kept, request))
        kv = kept.resized(capacity) if kept is not None and kept.length else self._engine.new_kv(capacity)
        self._in_use += needed
        return kv

    def give_back(self, request: GenerationRequest, kv: KvCache, *, retain: bool) -> None:
        """The request is over. Its cache is retained where a later request may use any of it."""
        self._in_use -= kv.nbytes
        kv.origin = request.policy
        if request.kind != "chat":
            kv.truncate(kv.stock)
        if retain and kv.length and not (request.policy.active and request.policy.prefill):
            self._retained[request.session, request.kind] = _without_waste(kv)
            self._retained.move_to_end((request.session, request.kind))

    def forget(self, session: str) -> None:
        """Drop what is retained for `session`."""
        for kind in get_args(Kind):
            self._retained.pop((session, kind), None)

    def _reusable(self, kv: KvCache, request: GenerationRequest) -> int:
        """How many leading tokens of `kv` may serve `request`."""
        policy, limit = request.policy, self._engine.reuse_limit
        if policy.active and policy.prefill:
            return 0
        longest = max(kv.length, len(request.prompt) + request.max_tokens)
        if limit is not None and longest > limit:
            return 0
        same_dialogue = request.kind == "chat" and kv.origin == policy
        if policy.active and policy.scope == "session":
            # Memory decides whether a cache survives, and nothing but the request may decide its bytes: read
            # again by the stock router, an answer's tokens are always the same.
            same_dialogue = False
        allowed = min(kv.length if same_dialogue else kv.stock, len(request.prompt) - 1)
        common = 0
        while common < allowed and kv.ids[common] == request.prompt[common]:
            common += 1
        return common


def _without_waste(kv: KvCache) -> KvCache:
    unused = kv.capacity - kv.length
    return kv if unused * WASTE < kv.capacity else kv.resized(kv.length)
