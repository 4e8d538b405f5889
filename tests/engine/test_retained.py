"""What is kept of a key/value cache when its request is over."""

from __future__ import annotations

import pytest

from coli_server.engine import Engine
from coli_server.engine.api import GenerationRequest
from coli_server.engine.retained import KvStore
from coli_server.routing import RoutePolicy
from support.served import TINY


@pytest.mark.parametrize(("new", "copied"), [(3, False), (60, True)])
def test_a_cache_is_copied_only_where_that_saves_memory(new: int, *, copied: bool) -> None:
    """Found as one gap of 600 ms: a prompt of 2,000 tokens had been read, and its whole cache was copied."""
    engine = Engine.open(TINY, warm=False)
    store = KvStore(engine)
    request = GenerationRequest(
        key=1,
        session="s",
        kind="gen",
        prompt=tuple(range(60)),
        max_tokens=new,
        policy=RoutePolicy(mode="off"),
    )
    cache = store.take(request)
    assert cache is not None
    cache.append(request.prompt, stock=True)
    store.give_back(request, cache, retain=True)
    held = 60 if copied else 60 + new
    assert store.nbytes == held * engine.memory.kv_token_bytes
    again = store.take(request)
    assert again is not None
    assert (again.keys[0] is cache.keys[0]) is not copied
    assert again.ids == list(request.prompt[:-1])
    engine.close()
