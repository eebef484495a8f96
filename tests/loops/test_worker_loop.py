"""Whole worker loops on in-memory ports, one story a test."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from spotgrpo.consumer.commit import BucketWriter, NewVersion
from spotgrpo.producer.engines.base import Chunk, EngineSpec, GenerationRequest
from spotgrpo.producer.engines.ends import Ends
from spotgrpo.producer.engines.threaded import Running, ThreadedEngine
from spotgrpo.producer.policy import PolicyWatcher
from spotgrpo.producer.rewards import Rewards
from spotgrpo.producer.worker import Wiring, Worker
from spotgrpo.shared.asked_store import PatientStore
from spotgrpo.shared.config import RewardConfig, WorkerConfig
from spotgrpo.shared.errors import ConfigError, SpotGRPOError, StoreUnavailable
from spotgrpo.shared.ids import PolicyVersion, TaskId
from spotgrpo.shared.manifest import Durable, Latest, Probe
from spotgrpo.shared.memory.broker import MemoryBroker, MemoryConsumer, MemorySubscription
from spotgrpo.shared.memory.store import MemoryStore
from spotgrpo.shared.ports import Broker, Delivery, Message, ObjectStore, Stored
from spotgrpo.shared.stopping import Stopping
from spotgrpo.shared.wire import Float32Array, Group, Sampling, Task, decode_group, encode_task
from tests.tools.loop_world import RUN, World, config_of, document_of
from tests.tools.scripted_engine import VOCABULARY, ScriptedEngine

REWARDS = (
    "def length(completions, **kwargs):\n    return [float(len(text)) for text in completions]\n"
)


class Letters:
    """Token ids as letters."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(96 + one % 26) for one in token_ids)


class Bench(World):
    """A world with a broker view of the learner's, and a bucket to put versions into."""

    def view(self) -> Broker:
        """The broker as one more role sees it."""
        return MemoryBroker(self.server, RUN)

    def open(self) -> None:
        self.broker = self.view()
        self.broker.declare()
        self.publisher = self.broker.publisher()
        self.rollouts = self.broker.consumer(self.queues.rollouts, 1000)
        self.writer = BucketWriter(self.store, self.keys, threading.Event())
        self.etag: str | None = None
        (self.folder / "rewards.py").write_text(REWARDS)

    def commit(
        self,
        number: int,
        *,
        epoch: int = 1,
        modules: int = 1,
        finished: bool = False,
        shift: float = 0.0,
        files: dict[str, bytes] | None = None,
        parent: int | None = None,
    ) -> None:
        """Store a version and let ``latest.json`` serve it. With ``files`` it is a real one, and has no probe."""
        version = PolicyVersion(epoch, number)
        probe = Probe(
            token_ids=[1, 2, 3], version_logprobs=[-1.0 + shift] * 2, base_logprobs=[-1.0] * 2
        )
        names = {"adapter_config.json": b"{}", "adapter_model.safetensors": f"{version}".encode()}
        grew_from = PolicyVersion(epoch, parent) if parent is not None else None
        new = NewVersion(
            version, grew_from, files or names, modules, "0" * 64, lambda: None if files else probe
        )
        stored = self.writer.store_version(new)
        durable = Durable(
            version=number, epoch=epoch, manifest=stored.manifest, manifest_sha256=stored.sha256,
            state="s", state_sha256="0" * 64, ledger="l", ledger_sha256="0" * 64,
        )  # fmt: skip
        latest = Latest(
            epoch=epoch,
            writer="w",
            nonce=str(number),
            serving=stored.serving(),
            durable=durable,
            finished=finished,
        )
        self.etag = self.store.compare_and_swap(self.keys.latest, latest.to_bytes(), self.etag)
        assert self.etag
        self.publisher.broadcast(self.queues.versions, Message(b"new"))

    def ask(
        self,
        index: int,
        *,
        min_version: int = 0,
        tokens: int = 4,
        group_size: int = 2,
        prompt_ids: tuple[int, ...] = (1, 2),
        temperature: float = 1.0,
        pinned: PolicyVersion | None = None,
    ) -> Task:
        """Publish a task."""
        task = Task(
            run=RUN, task_id=TaskId(index), prompt_ids=prompt_ids, prompt="p", row={},
            sampling=Sampling(tokens, temperature), seeds=tuple(range(group_size)), min_version=min_version,
            pinned=pinned,
        )  # fmt: skip
        self.publisher.publish(
            self.queues.tasks, Message(encode_task(task), str(task.task_id))
        ).result(5)
        return task

    async def answers(self, count: int) -> list[Group]:
        """The next ``count`` groups from the rollouts queue."""
        found = []
        for _ in range(count):
            delivery = await asyncio.to_thread(self.rollouts.take, 10.0)
            assert delivery is not None, f"only {len(found)} of {count} groups came"
            self.rollouts.ack([delivery.handle])
            found.append(decode_group(delivery.message.body))
        return found


class FaultyStore(MemoryStore):
    """A bucket that can be down, refuse its user, hand out one object with a flipped byte, or meet a full disk."""

    down = False
    refuses = False
    disk_is_full = False
    flipped = ""

    def get(self, key: str) -> Stored:
        stored = super().get(key)
        if key == self.flipped:
            return Stored(stored.body[:-1] + bytes([stored.body[-1] ^ 1]), stored.etag)
        return stored

    def get_if_changed(self, key: str, etag: str | None) -> Stored | None:
        if self.down:
            raise StoreUnavailable("the bucket is down")
        if self.refuses:
            raise ConfigError("bucket.url", "memory", "403: the token has run out")
        return super().get_if_changed(key, etag)

    def download(self, key: str, path: Path, size: int, sha256: str) -> None:
        if self.disk_is_full:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        super().download(key, path, size, sha256)


def serves(worker: Worker, number: int, epoch: int = 1) -> bool:
    """True once the worker serves that version."""
    current = worker._w.policy.current
    return current is not None and current.version == PolicyVersion(epoch, number)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    bench.open()
    yield bench
    bench.broker.close()


@contextlib.asynccontextmanager
async def working(
    bench: Bench,
    engine: ScriptedEngine,
    store: ObjectStore | None = None,
    worker_id: str = "w1",
    stall_warn_s: float = 30.0,
    evaluates: bool = False,
    **options: object,
) -> AsyncIterator[tuple[Worker, Stopping, asyncio.Task[None]]]:
    """A running worker; told to stop at the end of the block."""
    config = WorkerConfig.model_validate(
        {"poll_s": 0.05, "drain_s": 5.0, "max_inflight": 8, **options}
    )
    document = document_of(config_of()).model_copy(update={"evaluates": evaluates})
    stopping = Stopping()
    cache = bench.folder / "cache" / worker_id
    policy = PolicyWatcher(
        store or bench.store,
        bench.keys,
        engine,
        document,
        cache_dir=cache,
        poll_s=0.05,
        keep=engine.max_versions,
    )
    wiring = Wiring(
        config=config, document=document, store=store or bench.store, broker=bench.view(),
        engine=engine, policy=policy,
        rewards=Rewards.resolve([RewardConfig(function="rewards.py:length")], bench.folder),
        tokenizer=Letters(), stopping=stopping, worker_id=worker_id,
        stall_warn_s=stall_warn_s,
    )  # fmt: skip
    worker = Worker(wiring)
    running = asyncio.create_task(worker.run())
    try:
        yield worker, stopping, running
    finally:
        stopping.set()
        await asyncio.wait({running}, timeout=20)
        assert running.done(), "the worker did not stop"


async def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait until ``true()``."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not true():
        assert asyncio.get_running_loop().time() < deadline, "it never came true"
        await asyncio.sleep(0.01)


def run(story: Callable[[], Awaitable[None]]) -> None:
    """Run an async story."""
    asyncio.run(asyncio.wait_for(story(), 40))  # type: ignore[arg-type]


def test_a_task_becomes_a_scored_group_and_is_acked_after_it(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        task = bench.ask(0)
        async with working(bench, ScriptedEngine()):
            (group,) = await bench.answers(1)
        assert group.task_id == task.task_id
        assert [rollout.reward for rollout in group.rollouts] == [4.0, 4.0]
        assert {rollout.versions[0].version for rollout in group.rollouts} == {PolicyVersion(1, 0)}
        assert group.rollouts[0].token_ids.tolist() != group.rollouts[1].token_ids.tolist()
        assert bench.ready(bench.queues.tasks) == 0

    run(story)


def test_an_adoption_does_not_touch_running_requests(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        engine = ScriptedEngine(token_s=0.02)
        async with working(bench, engine):
            bench.ask(0, tokens=40)
            await until(lambda: len(engine.served) == 2)
            bench.commit(1)
            await until(lambda: PolicyVersion(1, 1) in engine.loaded)
            bench.ask(1, tokens=2)
            new, old = await bench.answers(2)
        assert {rollout.versions for rollout in old.rollouts} == {old.rollouts[0].versions}
        assert old.rollouts[0].versions[0].version.number == 0
        assert len(old.rollouts[0].token_ids) == 40
        assert new.rollouts[0].versions[0].version.number == 1

    run(story)


def test_a_task_waits_for_a_version_that_is_new_enough(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        engine = ScriptedEngine()
        async with working(bench, engine) as (worker, _, _):
            bench.ask(0, min_version=2)
            await until(lambda: bool(worker._jobs))
            assert not engine.served
            bench.commit(2)
            (group,) = await bench.answers(1)
        assert group.rollouts[0].versions[0].version.number == 2

    run(story)


@pytest.mark.parametrize("fault", ["modules", "probe", "bytes"])
def test_a_version_that_fails_a_check_is_never_served(tmp_path: Path, fault: str) -> None:
    async def story() -> None:
        store = FaultyStore()
        bench = Bench(tmp_path, store=store)
        bench.open()
        bench.commit(0)
        engine = ScriptedEngine()
        async with working(bench, engine) as (worker, _, _):
            await until(lambda: serves(worker, 0))
            if fault == "bytes":
                store.flipped = bench.keys.version(PolicyVersion(1, 1), "adapter_model.safetensors")
            bench.commit(
                1, modules=2 if fault == "modules" else 1, shift=0.5 if fault == "probe" else 0.0
            )
            await until(lambda: worker._w.policy.counts.refused == 1)
            bench.ask(1)
            (group,) = await bench.answers(1)
            bench.commit(2)
            await until(lambda: serves(worker, 2))
        assert group.rollouts[0].versions[0].version.number == 0
        assert PolicyVersion(1, 1) not in engine.served
        bench.broker.close()

    run(story)


@pytest.mark.parametrize("name", ["manifest.json", "adapter_model.safetensors"])
def test_a_version_that_comes_damaged_is_tried_again_ever_more_rarely_until_it_comes_right(
    tmp_path: Path, name: str
) -> None:
    """A bucket, or what is before it, may have handed out other bytes than it has."""

    async def story() -> None:
        store = FaultyStore()
        bench = Bench(tmp_path, store=store)
        bench.open()
        bench.commit(0)
        async with working(bench, ScriptedEngine()) as (worker, _, _):
            policy = worker._w.policy
            await until(lambda: serves(worker, 0))
            store.flipped = bench.keys.version(PolicyVersion(1, 1), name)
            bench.commit(1)
            await until(lambda: policy.counts.refused == 1)
            await until(lambda: [one.pause_s for one in policy._refused.values()] > [0.15])
            assert policy.counts.refused == 1, "a version counts once"
            assert serves(worker, 0)
            assert "v00000001" in policy.refused_why
            store.flipped = ""
            await until(lambda: serves(worker, 1))
            assert (policy.refused_why, policy.counts.refused) == ("", 1)
        bench.broker.close()

    run(story)


def test_few_refused_versions_are_remembered(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spotgrpo.producer.policy.MOST_REFUSED", 2)

    async def story() -> None:
        bench.commit(0)
        async with working(bench, ScriptedEngine()) as (worker, _, _):
            policy = worker._w.policy
            for number in range(1, 5):
                bench.commit(number, modules=2)
                await until(lambda n=number: policy.counts.refused == n)  # type: ignore[misc]
            assert len(policy._refused) == 2
            assert "v00000004" in policy.refused_why

    run(story)


def test_a_passing_probe_is_reported(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        engine = ScriptedEngine()
        engine.logprob_shift[PolicyVersion(1, 1)] = 0.5
        async with working(bench, engine) as (worker, _, _):
            await until(lambda: serves(worker, 0))
            bench.commit(1, shift=0.5)
            await until(lambda: worker._w.policy.counts.adopted == 2)
            assert worker._w.policy.counts.probes == {"inconclusive": 1, "pass": 1}

    run(story)


def test_old_versions_are_unloaded_once_idle(bench: Bench) -> None:
    async def story() -> None:
        engine = ScriptedEngine(max_versions=3)
        bench.commit(0)
        async with working(bench, engine) as (worker, _, _):
            for number in range(1, 12):
                bench.commit(number)
                await until(functools.partial(serves, worker, number))
                assert len(engine.loaded) <= 3
            assert len(list((bench.folder / "cache" / "w1").iterdir())) == len(engine.loaded)

    run(story)


def test_a_takeover_puts_workers_back_to_the_durable_version(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        bench.commit(1)
        durable = Latest.from_bytes(bench.store.get(bench.keys.latest).body)
        async with working(bench, ScriptedEngine()) as (worker, _, _):
            await until(lambda: serves(worker, 1))
            bench.commit(2)
            await until(lambda: serves(worker, 2))
            again = durable.model_copy(update={"epoch": 2, "nonce": "taken over"})
            assert bench.store.compare_and_swap(bench.keys.latest, again.to_bytes(), bench.etag)
            await until(lambda: serves(worker, 1))
            bench.ask(0)
            (group,) = await bench.answers(1)
        assert group.rollouts[0].versions[0].version == PolicyVersion(1, 1)

    run(story)


def test_draining_hands_unfinished_tasks_back_and_loses_none(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        for index in range(6):
            bench.ask(index, tokens=1000)
        engine = ScriptedEngine(token_s=0.01)
        async with working(bench, engine, drain_s=0.1) as (_, stopping, running):
            await until(lambda: len(engine.served) == 8)
            stopping.set()
            await running
        assert bench.ready(bench.queues.tasks) == 6
        assert bench.ready(bench.queues.rollouts) == 0

    run(story)


def test_draining_finishes_what_fits_into_the_notice(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        engine = ScriptedEngine(token_s=0.02)
        async with working(bench, engine, drain_s=10.0) as (_, stopping, running):
            bench.ask(0, tokens=20)
            await until(lambda: len(engine.served) == 2)
            stopping.set()
            await running
        (group,) = await bench.answers(1)
        assert len(group.rollouts[0].token_ids) == 20
        assert bench.ready(bench.queues.tasks) == 0

    run(story)


def test_workers_leave_when_the_run_is_finished(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        async with working(bench, ScriptedEngine()) as (_, stopping, running):
            bench.ask(0)
            await bench.answers(1)
            bench.commit(1, finished=True)
            await running
            assert not stopping.is_set()

    run(story)


def test_a_dead_engine_ends_the_worker_with_its_error(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        engine = ScriptedEngine(token_s=0.01)
        async with working(bench, engine) as (_, _, running):
            bench.ask(0, tokens=1000)
            await until(lambda: len(engine.served) == 2)
            engine.dead = True
            with pytest.raises(SpotGRPOError, match="the engine died"):
                await running
        await until(lambda: bench.ready(bench.queues.tasks) == 1)

    run(story)


def test_a_silent_engine_ends_the_worker(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        engine = ScriptedEngine(token_s=3600)
        async with working(bench, engine, engine_stall_s=0.5) as (_, _, running):
            bench.ask(0)
            with pytest.raises(SpotGRPOError, match="no token"):
                await running

    run(story)


def test_a_worker_that_hears_of_a_version_in_the_moment_of_its_end_ends(bench: Bench) -> None:
    """Cancelled in each of the turns that the event loop takes to bring the news."""

    async def story() -> None:
        bench.commit(0)
        for turns in range(5):
            engine = ScriptedEngine()
            async with working(bench, engine, worker_id=f"w{turns}") as (worker, _, _):
                await until(lambda worker=worker: serves(worker, 0))
            policy = worker._w.policy
            watching = asyncio.create_task(policy.run())
            await asyncio.sleep(0.02)
            policy.wake()
            for _ in range(turns):
                await asyncio.sleep(0)
            watching.cancel()
            await asyncio.wait({watching}, timeout=2)
            assert watching.cancelled(), turns

    run(story)


class StuckEngine(ThreadedEngine):
    """Holds its thread at the first token, as a hanging driver does: no order is taken any more."""

    name = "stuck"
    engine_version = "1"
    max_versions = 4

    def __init__(self) -> None:
        spec = EngineSpec(model="none", lora_rank=1, lora_alpha=1.0, target_modules=("q_proj",))
        super().__init__(spec)
        self.held = threading.Event()
        self.is_stuck = False

    def _open(self) -> Ends:
        return Ends(Letters(), frozenset(), 64, VOCABULARY)

    def _put_on(self, version: PolicyVersion, folder: Path) -> int:
        return 1

    def _logprobs(self, version: PolicyVersion | None, token_ids: tuple[int, ...]) -> Float32Array:
        return np.full(len(token_ids) - 1, -1.0, dtype=np.float32)

    def _sample(self) -> list[tuple[Running, Chunk]]:
        self.is_stuck = True
        self.held.wait(60)
        return []

    def _take_off(self, version: PolicyVersion) -> None: ...
    def _take(self, running: Running) -> None: ...
    def _drop(self, running: Running) -> None: ...
    def _free(self) -> None: ...


def test_an_engine_stuck_in_native_code_ends_the_worker_and_frees_its_tasks(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version came meanwhile, which it was asked to load."""
    monkeypatch.setattr("spotgrpo.producer.engines.threaded.CLOSE_S", 0.5)

    async def story() -> None:
        bench.commit(0)
        engine = StuckEngine()
        await engine.start()
        async with working(bench, engine, engine_stall_s=1.0) as (_, _, running):
            bench.ask(0)
            await until(lambda: engine.is_stuck)
            bench.commit(1)
            with pytest.raises(SpotGRPOError, match="no token"):
                await asyncio.wait_for(asyncio.shield(running), 10)
            assert bench.ready(bench.queues.tasks) == 1
        engine.held.set()

    run(story)


def test_a_redelivered_task_is_not_generated_a_second_time(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        engine = ScriptedEngine(token_s=0.02)
        async with working(bench, engine):
            bench.ask(0, tokens=30)
            await until(lambda: len(engine.served) == 2)
            bench.server.drop_connections()
            await bench.answers(1)
            await until(lambda: bench.ready(bench.queues.tasks) == 0)
            assert len(engine.served) == 2

    run(story)


def test_an_unreadable_task_is_dead_lettered(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        bench.publisher.publish(bench.queues.tasks, Message(b"junk", "x")).result(5)
        async with working(bench, ScriptedEngine()):
            await until(lambda: bench.ready(bench.queues.dead) == 1)

    run(story)


def test_workers_go_on_while_the_bucket_is_down(tmp_path: Path) -> None:
    async def story() -> None:
        store = FaultyStore()
        bench = Bench(tmp_path, store=store)
        bench.open()
        bench.commit(0)
        async with working(bench, ScriptedEngine()) as (worker, _, _):
            bench.ask(0)
            await bench.answers(1)
            store.down = True
            for index in range(1, 4):
                bench.ask(index)
            groups = await bench.answers(3)
            assert {group.rollouts[0].versions[0].version.number for group in groups} == {0}
            bench.commit(1)
            store.down = False
            await until(lambda: serves(worker, 1))
        bench.broker.close()

    run(story)


def tasks_consumer(bench: Bench) -> MemoryConsumer:
    """The worker's consumer of tasks."""
    return next(one for one in bench.server.consumers if one._source == bench.queues.tasks)


def test_every_delivery_of_a_copied_task_is_acked(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        engine = ScriptedEngine(token_s=0.02)
        async with working(bench, engine):
            for index in range(6):  # more copies than the prefetch window has slots
                bench.ask(index, tokens=10)
                bench.ask(index, tokens=10)
                await bench.answers(1)
            await until(lambda: not tasks_consumer(bench)._unsettled)
            assert len(engine.served) == 12
            assert bench.ready(bench.queues.tasks) == 0

    run(story)


def test_a_copied_task_is_handed_back_once(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        engine = ScriptedEngine(token_s=0.05)
        async with working(bench, engine, drain_s=0.0) as (worker, stopping, running):
            bench.ask(0, tokens=1000)
            bench.ask(0, tokens=1000)
            await until(lambda: [len(job.handles) for job in worker._jobs.values()] == [2])
            stopping.set()
            await running
        assert bench.ready(bench.queues.tasks) == 1

    run(story)


def test_waiting_for_a_version_is_no_stall_of_the_engine(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        async with working(bench, ScriptedEngine(), engine_stall_s=0.2) as (_, _, running):
            bench.ask(0, min_version=1)
            await asyncio.sleep(2.5)  # the watch looks once a second
            assert not running.done()
            bench.commit(1)
            await bench.answers(1)

    run(story)


def test_a_task_that_waits_for_a_version_takes_no_room_from_others(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        async with working(bench, ScriptedEngine(), max_inflight=2) as (worker, _, _):
            bench.ask(0, min_version=1)
            await until(lambda: bool(worker._jobs))
            bench.ask(1)
            (group,) = await bench.answers(1)
            assert group.task_id == TaskId(1)
            bench.commit(1)
            await bench.answers(1)

    run(story)


def test_a_drain_without_a_broker_ends_without_an_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("spotgrpo.producer.patience.HAND_BACK_S", 0.3)

    async def story() -> None:
        bench.commit(0)
        engine = ScriptedEngine(token_s=0.05)
        async with working(bench, engine, drain_s=0.1) as (_, stopping, running):
            bench.ask(0, tokens=1000)
            await until(lambda: len(engine.served) == 2)
            bench.server.stop()
            stopping.set()
            await running
        assert "could not hand 1 unfinished tasks back" in caplog.text
        bench.server.start()
        assert bench.ready(bench.queues.tasks) == 1

    run(story)


def test_a_drain_ends_though_the_window_of_the_publisher_is_full(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotgrpo.producer.patience.HAND_BACK_S", 0.3)

    async def story() -> None:
        bench.commit(0)
        for index in range(90):
            bench.ask(index, tokens=1)
        monkeypatch.setattr(bench.server, "try_store", lambda _name, _message: False)
        async with working(bench, ScriptedEngine(), drain_s=0.1, max_inflight=400) as (
            _,
            stopping,
            running,
        ):
            await until(lambda: any(len(one._held) == 64 for one in bench.server.publishers))
            stopping.set()
            await running
        assert bench.ready(bench.queues.tasks) == 90

    run(story)


class Choosy(ScriptedEngine):
    """Refuses what a real engine refuses, and lives on."""

    async def submit(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        Ends(None, frozenset(), 512, VOCABULARY).check_ids(request.prompt_ids)
        async for chunk in super().submit(request):
            yield chunk


def test_a_task_that_the_engine_refuses_is_dead_lettered_and_the_next_one_done(
    bench: Bench,
) -> None:
    async def story() -> None:
        bench.commit(0)
        bench.ask(0, prompt_ids=(1, VOCABULARY))
        bench.ask(1)
        async with working(bench, Choosy()) as (worker, _, running):
            (group,) = await bench.answers(1)
            await until(lambda: bench.ready(bench.queues.dead) == 1)
            assert group.task_id == TaskId(1)
            await until(lambda: not worker._jobs)
            assert not running.done()
        assert bench.ready(bench.queues.tasks) == 0

    run(story)


def test_an_ended_subscription_is_not_asked_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    take = MemorySubscription.take

    def counted(self: MemorySubscription, timeout_s: float | None = None) -> Delivery | None:
        asked.append(timeout_s)
        return take(self, timeout_s)

    monkeypatch.setattr(MemorySubscription, "take", counted)

    async def story() -> None:
        bench.commit(0)
        async with working(bench, ScriptedEngine()) as (worker, _, _):
            await until(lambda: serves(worker, 0))
            for one in list(bench.server.consumers):
                if isinstance(one, MemorySubscription):
                    one.close()  # RabbitMQ does so where the permission is taken away
            before = len(asked)
            await asyncio.sleep(0.7)
            assert len(asked) - before <= 2
            bench.commit(1)  # polling finds it
            await until(lambda: serves(worker, 1))

    run(story)


def test_a_worker_that_comes_before_the_learner_of_a_resumed_run_stays(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(1, finished=True)
        async with working(bench, ScriptedEngine()) as (worker, stopping, running):
            await until(lambda: serves(worker, 1))
            await asyncio.sleep(0.3)
            assert not running.done()
            bench.commit(2)
            await until(lambda: serves(worker, 2))
            bench.commit(3, finished=True)
            await running
            assert not stopping.is_set()

    run(story)


def test_a_worker_of_a_run_that_stays_finished_leaves_after_a_while(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(1, finished=True)
        async with working(bench, ScriptedEngine()) as (worker, stopping, running):
            worker._w.policy._finished_grace_s = 0.5
            await running
            assert serves(worker, 1)
            assert not stopping.is_set()

    run(story)


def test_a_bucket_that_refuses_for_a_while_does_not_end_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        store = FaultyStore()
        bench = Bench(tmp_path, store=store)
        bench.open()
        bench.commit(0)
        async with working(bench, ScriptedEngine(), PatientStore(store)) as (worker, _, running):
            await until(lambda: serves(worker, 0))
            store.refuses = True
            await until(lambda: "403" in caplog.text)
            bench.ask(0)
            await bench.answers(1)
            assert not running.done()
            bench.commit(1)
            store.refuses = False
            await until(lambda: serves(worker, 1))
        assert caplog.text.count("403") == 1
        bench.broker.close()

    run(story)


def test_a_full_disk_keeps_the_served_version_until_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        store = FaultyStore()
        bench = Bench(tmp_path, store=store)
        bench.open()
        bench.commit(0)
        async with working(bench, ScriptedEngine()) as (worker, _, running):
            await until(lambda: serves(worker, 0))
            store.disk_is_full = True
            bench.commit(1)
            await until(lambda: "No space left" in caplog.text)
            bench.ask(0)
            await bench.answers(1)
            assert not running.done()
            store.disk_is_full = False
            await until(lambda: serves(worker, 1))
        assert caplog.text.count("worker.cache_dir") == 1
        bench.broker.close()

    run(story)
