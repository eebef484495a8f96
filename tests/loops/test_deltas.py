"""Versions that come as deltas: from the learner's upload to what a worker serves, one story a test."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from spotgrpo.consumer import deltas as making
from spotgrpo.consumer.commit import BucketWriter
from spotgrpo.producer.worker import Worker
from spotgrpo.shared.config import Config
from spotgrpo.shared.delta import HEAD, LENGTH, apply_delta, encode_delta
from spotgrpo.shared.errors import StoreUnavailable
from spotgrpo.shared.ids import Keys, PolicyVersion
from spotgrpo.shared.manifest import ADAPTER_WEIGHTS, Manifest, sha256_hex
from spotgrpo.shared.memory.store import MemoryStore
from spotgrpo.shared.ports import ObjectStore, Stored
from tests.loops.test_worker_loop import Bench, run, serves, until, working
from tests.tools.adapters import safetensors_of
from tests.tools.loop_world import BookkeepingTrainer, ThreadWorker, World, config_of
from tests.tools.scripted_engine import ScriptedEngine

VALUES = 4000


def weights(number: int) -> bytes:
    """A bf16 adapter; those of two numbers next to each other differ little."""
    values = np.random.default_rng(0).integers(0, 1 << 16, VALUES, dtype=np.uint16)
    values[: 100 * number] += np.uint16(number)
    return safetensors_of({"a": ("BF16", values.tobytes())})


class Shop(MemoryStore):
    """Writes down what was downloaded; one object can be missing, or have a byte flipped."""

    def __init__(self) -> None:
        super().__init__()
        self.downloaded: list[str] = []
        self.missing = self.flipped = self.unreachable = ""

    def get(self, key: str) -> Stored:
        stored = super().get("" if key == self.missing else key)
        if key == self.unreachable:
            raise StoreUnavailable("not now")
        if key == self.flipped:
            return Stored(stored.body[:-1] + bytes([stored.body[-1] ^ 1]), stored.etag)
        return stored

    def download(self, key: str, path: Path, size: int, sha256: str) -> None:
        self.downloaded.append(key)
        super().download(key, path, size, sha256)


class Deltas(Bench):
    """A bench whose versions offer deltas."""

    store: Shop

    def open(self) -> None:
        super().open()
        self.writer = BucketWriter(self.store, self.keys, threading.Event(), deltas=True)

    def commit_weights(self, number: int) -> None:
        files = {"adapter_config.json": b"{}", ADAPTER_WEIGHTS: weights(number)}
        self.commit(number, files=files, parent=number - 1)

    def key(self, number: int, name: str = making.DELTA_FILE) -> str:
        return self.keys.version(PolicyVersion(1, number), name)

    def whole(self, number: int) -> bool:
        """Whether the whole weights of that version were downloaded."""
        return self.key(number, ADAPTER_WEIGHTS) in self.store.downloaded


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Deltas]:
    bench = Deltas(tmp_path, store=Shop())
    bench.open()
    yield bench
    bench.broker.close()


def counts(worker: Worker) -> tuple[int, int]:
    """Deltas and falls back, as the worker's report has them."""
    values = worker._values()
    return int(str(values["deltas"])), int(str(values["deltas_fell_back"]))


def served(engine: ScriptedEngine, number: int) -> bytes:
    """The weights that the engine was given."""
    return (engine.loaded[PolicyVersion(1, number)] / ADAPTER_WEIGHTS).read_bytes()


def test_a_worker_adopts_version_after_version_through_deltas(bench: Deltas) -> None:
    async def story() -> None:
        engine = ScriptedEngine()
        bench.commit_weights(0)
        async with working(bench, engine) as (worker, _, _):
            for number in range(4):
                if number:
                    bench.commit_weights(number)
                await until(lambda n=number: serves(worker, n))  # type: ignore[misc]
                assert served(engine, number) == weights(number)
                folder = engine.loaded[PolicyVersion(1, number)]
                names = {path.name for path in folder.iterdir()}
                assert names == {"adapter_config.json", ADAPTER_WEIGHTS}
            assert counts(worker) == (3, 0)
        assert [bench.whole(number) for number in range(4)] == [True, False, False, False]

    run(story)


def test_a_late_joiner_takes_the_whole_file_and_deltas_from_then_on(bench: Deltas) -> None:
    async def story() -> None:
        engine = ScriptedEngine()
        for number in range(3):
            bench.commit_weights(number)
        async with working(bench, engine) as (worker, _, _):
            await until(lambda: serves(worker, 2))
            assert served(engine, 2) == weights(2)
            assert counts(worker) == (0, 1)
            bench.commit_weights(3)
            await until(lambda: serves(worker, 3))
            assert counts(worker) == (1, 1)
        assert not any(bench.whole(number) for number in (0, 1, 3))

    run(story)


def foreign(parent: bytes, new: bytes) -> bytes | None:
    """Well made, for another pair of versions."""
    return encode_delta(weights(7), weights(9))


def too_big(parent: bytes, new: bytes) -> bytes | None:
    return bytes(len(new))


def rubbish(parent: bytes, new: bytes) -> bytes | None:
    return b"not a delta"


def bomb(parent: bytes, new: bytes) -> bytes | None:
    """Claims planes of 16 GiB."""
    found = bytearray(encode_delta(parent, new) or b"")
    at = HEAD.size + 2 * LENGTH.size
    found[at + 4 : at + 14] = bytes([0xC0, 0x58]) + (1 << 34).to_bytes(8, "little")
    return bytes(found)


@pytest.mark.parametrize("fault", ["flipped", "missing", "unreachable"])
def test_a_delta_that_cannot_be_had_costs_nothing_but_the_whole_file(
    bench: Deltas, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    setattr(bench.store, fault, bench.key(1))
    falls_back(bench, caplog)


@pytest.mark.parametrize("make", [foreign, too_big, rubbish, bomb])
def test_a_delta_that_is_not_what_it_should_be_costs_nothing_but_the_whole_file(
    bench: Deltas,
    make: Callable[[bytes, bytes], bytes | None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def once(parent: bytes, new: bytes) -> bytes | None:
        return make(parent, new) if new == weights(1) else encode_delta(parent, new)

    monkeypatch.setattr(making, "encode_delta", once)
    falls_back(bench, caplog)
    assert (bench.key(1) in bench.store.downloaded) == (make is not too_big)


def falls_back(bench: Deltas, caplog: pytest.LogCaptureFixture) -> None:
    """Version 1 comes whole and right, with one line, and version 2 as a delta to it."""

    async def story() -> None:
        engine = ScriptedEngine()
        bench.commit_weights(0)
        async with working(bench, engine) as (worker, _, _):
            await until(lambda: serves(worker, 0))
            bench.commit_weights(1)
            await until(lambda: serves(worker, 1))
            assert served(engine, 1) == weights(1)
            assert counts(worker) == (0, 1)
            bench.commit_weights(2)
            await until(lambda: serves(worker, 2))
            assert served(engine, 2) == weights(2)
            assert counts(worker) == (1, 1)
            assert worker._w.policy.counts.refused == 0
        assert [bench.whole(number) for number in range(3)] == [True, True, False]

    caplog.set_level(logging.WARNING, "spotgrpo.producer")
    run(story)
    assert caplog.text.count("comes whole") == 1


@pytest.mark.parametrize("fault", ["changed", "gone"])
def test_weights_that_are_not_what_they_were_are_not_built_upon(bench: Deltas, fault: str) -> None:
    async def story() -> None:
        engine = ScriptedEngine()
        bench.commit_weights(0)
        async with working(bench, engine) as (worker, _, _):
            await until(lambda: serves(worker, 0))
            path = engine.loaded[PolicyVersion(1, 0)] / ADAPTER_WEIGHTS
            if fault == "gone":
                path.unlink()
            else:
                path.write_bytes(weights(0)[:-1] + b"?")
            bench.commit_weights(1)
            await until(lambda: serves(worker, 1))
            assert served(engine, 1) == weights(1)
            assert counts(worker) == (0, 1)

    run(story)


# ---- the learner's side -----------------------------------------------------------------------------------------


class RealWeights(BookkeepingTrainer):
    """Its adapter is one that deltas can be made of."""

    def adapter_files(self) -> dict[str, bytes]:
        return {**super().adapter_files(), ADAPTER_WEIGHTS: weights(len(self.steps))}


def with_deltas(encoding: str, **train: object) -> Config:
    config = config_of(**train)
    return Config.model_validate({**dict(config), "sync": {"encoding": encoding}})


def manifests(store: ObjectStore, keys: Keys) -> dict[PolicyVersion, Manifest]:
    found = {}
    for info in store.list(keys.versions):
        if info.key.endswith("/manifest.json"):
            manifest = Manifest.from_bytes(store.get(info.key).body)
            found[manifest.policy] = manifest
    return found


def test_the_learner_offers_deltas_that_lead_from_file_to_file(world: World) -> None:
    with ThreadWorker(world):
        world.learner(with_deltas("delta", max_steps=5, keep_every=1), RealWeights()).run()
    found = manifests(world.store, world.keys)
    assert len(found) == 6
    for version, manifest in found.items():
        if version.number < 2:  # this process stored no parent of theirs
            assert manifest.delta is None
            continue
        delta = manifest.delta
        assert delta is not None
        assert delta.parent == manifest.parent == f"v{version.number - 1:08d}.e0001"
        assert delta.parent_sha256 == sha256_hex(weights(version.number - 1))
        body = world.store.get(world.keys.version(version, delta.name)).body
        assert (len(body), sha256_hex(body)) == (delta.size, delta.sha256)
        assert delta.name not in {entry.name for entry in manifest.files}
        whole = world.store.get(world.keys.version(version, ADAPTER_WEIGHTS)).body
        assert apply_delta(weights(version.number - 1), body, len(whole)) == whole


def test_full_is_full(world: World) -> None:
    with ThreadWorker(world):
        world.learner(with_deltas("full", max_steps=3), RealWeights()).run()
    assert all(manifest.delta is None for manifest in manifests(world.store, world.keys).values())
    assert not any("delta" in info.key for info in world.store.list(world.keys.versions))


def test_the_first_version_after_a_takeover_offers_none(world: World) -> None:
    config = with_deltas("delta", max_steps=6, keep_every=1)
    stopping = threading.Event()
    trainer = RealWeights(lambda: stopping.set() if len(trainer.steps) == 2 else None)
    with ThreadWorker(world):
        world.learner(config, trainer, stopping).run()
        before = world.latest().durable.version
        world.learner(config, RealWeights()).run()
    offered = {
        version.number: manifest.delta is not None
        for version, manifest in manifests(world.store, world.keys).items()
        if version.epoch == 2
    }
    assert before < 6
    assert offered == {number: number > before + 1 for number in range(before + 1, 7)}


def test_retention_removes_a_delta_with_its_version(world: World) -> None:
    with ThreadWorker(world):
        world.learner(with_deltas("delta", max_steps=8), RealWeights()).run()
    kept = {version.number for version in manifests(world.store, world.keys)}
    deltas = {
        PolicyVersion.parse(info.key.split("/")[-2]).number
        for info in world.store.list(world.keys.versions)
        if info.key.endswith(making.DELTA_FILE)
    }
    assert deltas == kept == {5, 6, 7, 8}


def test_an_adapter_that_no_delta_can_be_made_of_is_stored_whole(world: World) -> None:
    with ThreadWorker(world):
        world.learner(with_deltas("delta", max_steps=3)).run()  # its adapter is JSON
    assert all(manifest.delta is None for manifest in manifests(world.store, world.keys).values())


def test_a_version_that_grew_from_another_one_than_the_last_stored_offers_none() -> None:
    maker = making.DeltaMaker(wanted=True)
    files = {ADAPTER_WEIGHTS: weights(1)}
    maker.stored(PolicyVersion(1, 1), files)
    stored: list[str] = []
    for parent in (PolicyVersion(1, 0), PolicyVersion(2, 1), None):
        assert maker.begin(parent, files, lambda name, _: stored.append(name)).result() is None
    assert not stored
    found = maker.begin(PolicyVersion(1, 1), files, lambda name, _: stored.append(name)).result()
    assert found is not None
    assert stored == [found.name]
