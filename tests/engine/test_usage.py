"""What an engine learns about the use of experts, how it is kept, and pins made of it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from coli_server.engine import Engine
from coli_server.engine import usage as usage_module
from coli_server.engine.service import SYSTEM
from coli_server.engine.step import Span
from coli_server.engine.store import StoreOptions
from coli_server.errors import ConfigurationError
from coli_server.experts import PINNED
from coli_server.routing import RoutePolicy
from coli_server.telemetry.counters import Counters
from support.served import MODELS, TINY, Served

EXPECTED = dict(np.load(TINY / "expected.npz"))
PROMPT = EXPECTED["ids_1"].tolist()
Open = Callable[..., Engine]
Serve = Callable[..., Served]


@pytest.fixture
def open_engine() -> Iterator[Open]:
    opened: list[Engine] = []

    def open_(folder: Path = TINY, **options: object) -> Engine:
        opened.append(Engine.open(folder, warm=False, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_
    for engine in opened:
        engine.close()


def learn(open_engine: Open, folder: Path, tokens: int = 12, **options: object) -> Path:
    """Run a generation that is remembered in `folder`; the file."""
    engine = open_engine(store=StoreOptions(history=folder), **options)
    engine.generate(PROMPT, tokens, ignore_eos=True)
    assert engine.usage is not None
    engine.usage.save()
    return engine.usage.file


def counts(file: Path) -> np.ndarray:
    return np.array(list(json.loads(file.read_text())["layers"].values()))


def test_decoded_tokens_teach_and_prompts_do_not(open_engine: Open, tmp_path: Path) -> None:
    engine = open_engine(store=StoreOptions(history=tmp_path))
    engine.generate(PROMPT, 1)
    assert engine.usage is not None
    assert not engine.usage.history.changed
    file = learn(open_engine, tmp_path / "other", tokens=13)
    assert counts(file).sum(axis=1) == pytest.approx([12 * engine.k] * 2, abs=0.5)


def test_substitutes_do_not_teach_but_true_choices_do(open_engine: Open, tmp_path: Path) -> None:
    """What happens to be in memory would otherwise confirm itself."""
    policy = RoutePolicy(mode="max-rank", j=0, m=16)
    engine = open_engine(policy=policy, experts_per_layer=4, store=StoreOptions(history=tmp_path))
    sequence = engine.new_sequence(policy, engine.new_kv(40))
    ids = [7, 100, 200, 300, 400, 44, 55, 66]
    engine.step([Span(sequence, (3,), prompt=True, length=1)])
    for i in ids:
        engine.step([Span(sequence, (i,), prompt=False, length=sequence.position + 1)])
    assert sequence.counters.route_swaps > 0
    assert engine.usage is not None
    learned = engine.usage.history.counts
    chosen_only_from = {int(e) for e in np.flatnonzero(engine.cache.resident(1))}
    wanted = {int(e) for e in np.flatnonzero(learned[0])}
    assert wanted - chosen_only_from, "the router wanted experts that were never loaded"


def test_a_second_run_goes_on_learning(open_engine: Open, tmp_path: Path) -> None:
    first = counts(learn(open_engine, tmp_path)).sum()
    assert counts(learn(open_engine, tmp_path)).sum() == pytest.approx(2 * first, rel=0.01)


def test_closing_an_engine_saves(tmp_path: Path) -> None:
    engine = Engine.open(TINY, warm=False, store=StoreOptions(history=tmp_path))
    engine.generate(PROMPT, 6, ignore_eos=True)
    engine.close()
    assert [file.name for file in tmp_path.iterdir()] == [f"glm4_moe-{engine.identity[:16]}.json"]


def test_a_service_saves_when_it_stops_and_from_time_to_time(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(store=StoreOptions(history=tmp_path))
    served.run(PROMPT, 6)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(usage_module, "SAVE_SECONDS", 0.0)
    served.run(PROMPT, 6)  # the service thread saves behind a step, without being stopped
    served.run(PROMPT, 2)
    file = (
        tmp_path / f"glm4_moe-{served.engine.identity[:16]}.json"
    )  # beside it a newer one may be half written
    assert file.exists()
    monkeypatch.setattr(usage_module, "SAVE_SECONDS", 1e9)
    before = counts(file).sum()
    served.run(PROMPT, 6)
    assert served.service.stop(30)
    assert counts(file).sum() > before


def test_an_idle_service_wakes_up_to_save(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_module, "SAVE_SECONDS", 0.2)
    served = serve(store=StoreOptions(history=tmp_path))
    served.run(PROMPT, 6)
    for _ in range(600):
        if any(not file.name.startswith(".") for file in tmp_path.iterdir()):
            break
        served.service._thread.join(0.05)
    else:
        pytest.fail("nothing was saved")


def test_pins_are_the_most_wanted_and_leave_k_slots(open_engine: Open, tmp_path: Path) -> None:
    file = learn(open_engine, tmp_path)
    heard: list[tuple[int, int]] = []
    engine = open_engine(
        experts_per_layer=8,
        store=StoreOptions(history=tmp_path, pin="auto", pin_ram=1 << 40),
        progress=lambda done, total: heard.append((done, total)),
    )
    for slot, layer in enumerate(engine.cache.layers):
        pinned = np.flatnonzero(engine.cache.state(layer) == PINNED)
        assert len(pinned) == 8 - engine.k
        learned = counts(file)[slot]
        assert learned[pinned].min() >= np.sort(learned)[-len(pinned)]
    assert heard[-1] == (engine.cache.pinned, engine.cache.pinned)


def test_half_of_the_room_is_pinned_without_a_limit(open_engine: Open, tmp_path: Path) -> None:
    learn(open_engine, tmp_path)
    engine = open_engine(experts_per_layer=8, store=StoreOptions(history=tmp_path, pin="auto"))
    assert engine.cache.pinned == (8 - engine.k) * 2 // 2


def test_output_is_the_same_with_pins(open_engine: Open, tmp_path: Path) -> None:
    learn(open_engine, tmp_path)
    plain = open_engine(experts_per_layer=8).logits(PROMPT)
    pinned = open_engine(experts_per_layer=8, store=StoreOptions(history=tmp_path, pin="auto"))
    assert pinned.cache.pinned > 0
    assert pinned.logits(PROMPT).tobytes() == plain.tobytes()


def test_hits_of_pins_are_counted_apart_and_their_reads_belong_to_the_system(
    open_engine: Open, serve: Serve, tmp_path: Path
) -> None:
    learn(open_engine, tmp_path)
    served = serve(experts_per_layer=8, store=StoreOptions(history=tmp_path, pin="auto"))
    finished, _ = served.run(PROMPT, 12)
    found = finished.counters
    assert found.hits_pin > 0
    assert found.lookups == found.hits_pin + found.hits_lru + found.misses
    snapshot = served.service.snapshot()
    assert snapshot.sessions[SYSTEM].loads == snapshot.pinned_experts > 0
    total = sum(snapshot.sessions.values(), Counters())
    assert total.loads == served.engine.cache.counters.loads


def test_a_history_file_of_another_model_is_refused(open_engine: Open, tmp_path: Path) -> None:
    file = learn(open_engine, tmp_path)
    with pytest.raises(ConfigurationError, match="was learned on another model"):
        open_engine(MODELS / "olmoe", store=StoreOptions(pin=str(file)))
    engine = open_engine(experts_per_layer=8, store=StoreOptions(pin=str(file)))
    assert engine.cache.pinned > 0


def test_a_model_with_other_routers_is_another_model(open_engine: Open, tmp_path: Path) -> None:
    """A fine-tuned copy has the same names, shapes and configuration."""
    folder = tmp_path / "tuned"
    shutil.copytree(TINY, folder)
    engine = open_engine(folder)
    assert engine.identity == open_engine().identity
    router = engine.model.routed[0].router.data
    file = folder / "model.safetensors"
    data = file.read_bytes()
    raw = np.ascontiguousarray(router).tobytes()
    assert data.count(raw) == 1
    file.write_bytes(data.replace(raw, bytes(raw[:-2]) + b"\x00\x00"))
    assert open_engine(folder).identity != engine.identity


def test_a_broken_history_is_reported_and_replaced(
    open_engine: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = learn(open_engine, tmp_path)
    file.write_bytes(file.read_bytes()[:100])
    with caplog.at_level(logging.WARNING, "coli.engine"):
        engine = open_engine(experts_per_layer=8, store=StoreOptions(history=tmp_path, pin="auto"))
    assert f"{file}: not valid JSON" in caplog.text
    assert engine.cache.pinned == 0
    engine.generate(PROMPT, 6, ignore_eos=True)
    assert engine.usage is not None
    engine.usage.save()
    assert counts(file).sum() > 0


def test_a_broken_file_given_by_name_stops_the_start(open_engine: Open, tmp_path: Path) -> None:
    file = tmp_path / "h.json"
    file.write_text("{")
    with pytest.raises(ConfigurationError, match=r"PIN=.*h\.json: not valid JSON"):
        open_engine(store=StoreOptions(pin=str(file)))


def test_a_folder_that_cannot_be_written_is_only_reported(
    open_engine: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    engine = open_engine(store=StoreOptions(history=blocked / "below"))
    engine.generate(PROMPT, 6, ignore_eos=True)
    assert engine.usage is not None
    engine.usage.save()
    assert "the usage history cannot be saved" in caplog.text
