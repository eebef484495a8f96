"""Groups that a graceful stop cuts at token k carry on at token k, with whole worker loops."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import pytest

from spotgrpo.producer.engines.base import Chunk, GenerationRequest, RequestRefused
from spotgrpo.producer.worker import Worker
from spotgrpo.shared.errors import ConfigError, SpotGRPOError, StoreUnavailable
from spotgrpo.shared.ids import PolicyVersion, TaskId
from spotgrpo.shared.memory.broker import MemoryConsumer
from spotgrpo.shared.memory.store import MemoryStore
from spotgrpo.shared.ports import Delivery, Message
from spotgrpo.shared.steps import Step, observe
from spotgrpo.shared.wire import (
    Group,
    Partial,
    Sampling,
    Task,
    VersionRun,
    decode_partial,
    encode_partial,
)
from tests.loops.test_worker_loop import Bench, run, serves, until, working
from tests.tools.loop_world import ThreadWorker, World, answer, config_of
from tests.tools.scripted_engine import ScriptedEngine, scripted_token

V0, V1 = PolicyVersion(1, 0), PolicyVersion(1, 1)
TOKENS = 24


class Recording(ScriptedEngine):
    """Writes down every token that it sampled, by task, seed and position."""

    def __init__(self, token_s: float = 0.0) -> None:
        super().__init__(token_s)
        self.sampled: Counter[tuple[str, int, int]] = Counter()

    async def submit(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        task, position = request.request_id.rpartition(".")[0], len(request.prefix_ids)
        async for chunk in super().submit(request):
            for _ in chunk.token_ids:
                self.sampled[task, request.seed, position] += 1
                position += 1
            yield chunk


class Ahead(Recording):
    """Samples some tokens ahead of who reads them, as an engine on a thread of its own may."""

    async def submit(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        unread: list[Chunk] = []
        async for chunk in super().submit(request):
            unread.append(chunk)
            if len(unread) == 5 or chunk.finish is not None:
                for one in unread:
                    await asyncio.sleep(self.token_s)
                    yield one
                unread.clear()


class TroubledStore(MemoryStore):
    """A bucket that answers creates of partials late, with an error, or never."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Exception | None = None
        self.is_silent = False
        self.slow_s = 0.0
        self.waiting = 0
        self.release = threading.Event()

    def create(self, key: str, body: bytes) -> None:
        if "/partials/" in key:
            time.sleep(self.slow_s)
            if self.is_silent:
                self.waiting += 1
                self.release.wait(30)
            if self.error is not None:
                raise self.error
        super().create(key, body)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, store=TroubledStore())
    bench.open()
    yield bench
    bench.broker.close()


@pytest.fixture
def troubled(bench: Bench) -> Iterator[TroubledStore]:
    assert isinstance(bench.store, TroubledStore)
    yield bench.store
    bench.store.release.set()


def partials(bench: Bench) -> list[Partial]:
    """All partials in the bucket, in the order of their keys."""
    listed = bench.store.list(bench.keys.partials)
    return [decode_partial(bench.store.get(info.key).body) for info in listed]


async def drained(
    bench: Bench,
    engine: Recording,
    *,
    after: int,
    worker_id: str = "w1",
    drain_s: float = 0.0,
) -> Worker:
    """A worker that is told to stop once it has sampled ``after`` tokens in all; over when it has left."""
    async with working(bench, engine, worker_id=worker_id, drain_s=drain_s) as (
        worker,
        stopping,
        running,
    ):
        await until(lambda: engine.sampled.total() >= after)
        stopping.set()
        await running
    return worker


async def finished(bench: Bench, engine: Recording, count: int = 1) -> tuple[list[Group], Worker]:
    """What a fresh worker makes of the tasks in the queue."""
    async with working(bench, engine, worker_id="last") as (worker, _, _):
        groups = await bench.answers(count)
        await until(lambda: not worker._jobs)
    return groups, worker


def expect_scripted(group: Group, versions: Sequence[VersionRun], seed: int) -> None:
    """Tokens and logprobs are what the engine samples there under the recorded versions."""
    rollout = group.rollouts[seed]
    assert rollout.versions == tuple(versions)
    by_position = [run.version for run in rollout.versions for _ in range(run.tokens)]
    wanted = [scripted_token(seed, version, at) for at, version in enumerate(by_position)]
    assert rollout.token_ids.tolist() == [token for token, _ in wanted]
    assert rollout.logprobs.tolist() == [logprob for _, logprob in wanted]


@pytest.mark.parametrize("kind", [Recording, Ahead])
def test_a_drained_group_carries_on_where_it_stood_and_no_token_is_sampled_twice(
    bench: Bench, kind: type[Recording]
) -> None:
    async def story() -> None:
        bench.commit(0)
        bench.ask(0, tokens=TOKENS)
        first, second = kind(0.02), Recording()
        leaver = await drained(bench, first, after=12)
        (partial,) = partials(bench)
        assert partial.tokens == first.sampled.total() < 2 * TOKENS
        assert bench.ready(bench.queues.tasks) == 1
        assert leaver._values()["partials_saved"] == 1
        (group,), worker = await finished(bench, second)
        for seed in (0, 1):
            expect_scripted(group, [VersionRun(V0, TOKENS)], seed)
            kept = partial.rollouts[seed]
            k = len(kept.token_ids)
            assert group.rollouts[seed].token_ids[:k].tobytes() == kept.token_ids.tobytes()
            assert group.rollouts[seed].logprobs[:k].tobytes() == kept.logprobs.tobytes()
        both = first.sampled + second.sampled
        assert both == Counter({("00000000.1", s, p): 1 for s in (0, 1) for p in range(TOKENS)})
        values = worker._values()
        assert (values["partials_resumed"], values["partials_stale"]) == (1, 0)
        assert values["tokens_resumed"] == partial.tokens
        assert bench.ready(bench.queues.tasks) == 0

    run(story)


def test_the_next_version_carries_on_what_the_one_before_began(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        bench.ask(0, tokens=TOKENS)
        await drained(bench, Recording(0.02), after=12)
        kept = [len(rollout.token_ids) for rollout in partials(bench)[0].rollouts]
        bench.commit(1)
        (group,), _ = await finished(bench, Recording())
        for seed in (0, 1):
            runs = [VersionRun(V0, kept[seed]), VersionRun(V1, TOKENS - kept[seed])]
            expect_scripted(group, runs, seed)

    run(story)


def test_a_second_drain_saves_the_longer_partial(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        bench.ask(0, tokens=TOKENS)
        engines = [Recording(0.02), Recording(0.02), Recording()]
        await drained(bench, engines[0], after=10)
        bench.commit(1)
        await drained(bench, engines[1], after=10, worker_id="w2")
        short, long = partials(bench)
        assert long.tokens > short.tokens
        assert long.rollouts[0].versions[0] == short.rollouts[0].versions[0]
        (group,), _ = await finished(bench, engines[2])
        sampled = sum((engine.sampled for engine in engines), Counter())
        assert set(sampled.values()) == {1}
        assert len(sampled) == 2 * TOKENS
        for seed in (0, 1):
            k = len(short.rollouts[seed].token_ids)
            expect_scripted(group, [VersionRun(V0, k), VersionRun(V1, TOKENS - k)], seed)

    run(story)


def test_a_partial_that_is_too_stale_begins_afresh_and_is_counted(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        bench.ask(0, tokens=TOKENS)
        await drained(bench, Recording(0.02), after=6)
        bench.commit(3)  # max_staleness is 2
        engine = Recording()
        (group,), worker = await finished(bench, engine)
        expect_scripted(group, [VersionRun(PolicyVersion(1, 3), TOKENS)], 0)
        assert engine.sampled.total() == 2 * TOKENS
        values = worker._values()
        assert (values["partials_resumed"], values["partials_stale"]) == (0, 1)

    run(story)


@pytest.mark.parametrize("fault", ["away", "refuses", "silent"])
def test_a_bucket_that_takes_no_partial_does_not_keep_the_task(
    bench: Bench,
    troubled: TroubledStore,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fault: str,
) -> None:
    monkeypatch.setattr("spotgrpo.producer.patience.HAND_BACK_S", 1.0)
    troubled.is_silent = fault == "silent"
    if fault == "away":
        troubled.error = StoreUnavailable("the bucket is away")
    elif fault == "refuses":
        troubled.error = ConfigError("bucket.access_key_id", "w", "403")

    async def story() -> None:
        bench.commit(0)
        for index in range(4):
            bench.ask(index, tokens=TOKENS)
        began = time.monotonic()
        await drained(bench, Recording(0.02), after=16)
        assert time.monotonic() - began < 4.0
        assert bench.ready(bench.queues.tasks) == 4
        assert not partials(bench)
        troubled.error, troubled.is_silent = None, False
        groups, worker = await finished(bench, Recording(), 4)
        assert len(groups) == 4
        assert worker._values()["partials_stale"] == 0

    run(story)
    if fault == "refuses":
        assert caplog.text.count("403") == 1


class Killed(BaseException):
    """The process is gone."""


def test_rule_9_the_partial_is_stored_before_the_task_is_given_back(bench: Bench) -> None:
    def die(step: Step) -> None:
        if step is Step.WORKER_PARTIAL_STORED:
            raise Killed

    async def story() -> None:
        bench.commit(0)
        bench.ask(0, tokens=TOKENS)
        first, second = Recording(0.02), Recording()
        observe(die)
        with pytest.raises(Killed):
            await drained(bench, first, after=10)
        observe(None)
        await until(lambda: bench.ready(bench.queues.tasks) == 1)
        (group,), _ = await finished(bench, second)
        expect_scripted(group, [VersionRun(V0, TOKENS)], 1)
        assert set((first.sampled + second.sampled).values()) == {1}

    try:
        run(story)
    finally:
        observe(None)


def test_a_worker_that_is_killed_without_a_notice_leaves_no_partial(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        bench.ask(0, tokens=TOKENS)
        engine = Recording(0.02)
        async with working(bench, engine) as (_, _, running):
            await until(lambda: engine.sampled.total() >= 10)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        (group,), worker = await finished(bench, Recording())
        expect_scripted(group, [VersionRun(V0, TOKENS)], 0)
        assert not partials(bench)
        assert worker._values()["partials_stale"] == 0

    run(story)


def test_a_group_that_only_waits_to_be_published_is_not_sampled_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = bench.server.try_store
    full = True

    def try_store(name: str, message: Message) -> bool:
        return not (full and name == bench.queues.rollouts) and store(name, message)

    monkeypatch.setattr(bench.server, "try_store", try_store)

    async def story() -> None:
        nonlocal full
        bench.commit(0)
        bench.ask(0, tokens=4)
        await drained(bench, Recording(), after=8)
        (partial,) = partials(bench)
        assert {rollout.finish for rollout in partial.rollouts} == {"length"}
        full = False
        engine = Recording()
        (group,), _ = await finished(bench, engine)
        assert engine.sampled.total() == 0
        expect_scripted(group, [VersionRun(V0, 4)], 1)
        assert [rollout.reward for rollout in group.rollouts] == [4.0, 4.0]

    run(story)


def test_what_was_not_begun_goes_back_while_the_rest_is_finished(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        engine = Recording(0.02)
        async with working(bench, engine, max_inflight=2, drain_s=10.0) as (
            worker,
            stopping,
            going,
        ):
            bench.ask(0, tokens=TOKENS)
            await until(lambda: engine.sampled.total() >= 4)
            bench.ask(1, tokens=TOKENS)
            await until(lambda: len(worker._jobs) == 2)
            stopping.set()
            await until(lambda: bench.ready(bench.queues.tasks) == 1)
            assert engine.sampled.total() < 2 * TOKENS
            (group,) = await bench.answers(1)
            await going
        assert group.task_id == TaskId(0)
        assert not partials(bench)
        assert bench.ready(bench.queues.tasks) == 1

    run(story)


def test_a_task_that_comes_in_the_moment_of_the_stop_goes_back_while_the_rest_is_finished(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, coming = MemoryConsumer.take, threading.Event()

    def take(self: MemoryConsumer, timeout_s: float | None = None) -> Delivery | None:
        delivery = plain(self, timeout_s)
        if delivery is not None and delivery.message.message_id == str(TaskId(1)):
            coming.set()
            time.sleep(0.2)  # taken, and the event loop does not have it yet
        return delivery

    monkeypatch.setattr(MemoryConsumer, "take", take)

    async def story() -> None:
        bench.commit(0)
        engine = Recording(0.05)
        async with working(bench, engine, drain_s=10.0) as (_, stopping, going):
            bench.ask(0, tokens=TOKENS)
            await until(lambda: engine.sampled.total() >= 4)
            bench.ask(1, tokens=TOKENS)
            await until(coming.is_set)
            stopping.set()
            await until(lambda: bench.ready(bench.queues.tasks) == 1)
            assert engine.sampled.total() < 2 * TOKENS
            await bench.answers(1)
            await going
        assert bench.ready(bench.queues.tasks) == 1

    run(story)


def test_a_drain_leaves_in_time_where_the_machine_has_little_left(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        bench.ask(0, tokens=1000)
        engine = Recording(0.01)
        async with working(bench, engine, drain_s=60.0) as (_, stopping, running):
            await until(lambda: engine.sampled.total() >= 8)
            began = time.monotonic()
            stopping.ask("notice", within_s=2.0)
            await running
            assert time.monotonic() - began < 2.0
        assert partials(bench)[0].tokens == engine.sampled.total()
        assert bench.ready(bench.queues.tasks) == 1

    run(story)


class Stuck(Recording):
    """Samples three tokens a request and then computes for ever."""

    async def pause(self) -> None:
        if self.sampled.total() >= 6:
            await asyncio.sleep(3600)


def test_an_engine_that_does_not_stop_in_time_keeps_neither_tokens_nor_task(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotgrpo.producer.patience.HAND_BACK_S", 1.5)

    async def story() -> None:
        bench.commit(0)
        bench.ask(0, tokens=TOKENS)
        engine = Stuck()
        await drained(bench, engine, after=6)
        assert partials(bench)[0].tokens == 6
        assert bench.ready(bench.queues.tasks) == 1

    run(story)


def test_a_partial_of_another_question_under_the_same_name_is_not_used(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        bench.ask(0, tokens=TOKENS)
        await drained(bench, Recording(0.02), after=6)
        (info,) = bench.store.list(bench.keys.partials)
        partial = decode_partial(bench.store.get(info.key).body)
        other = Partial(**{**vars(partial), "sampling": Sampling(TOKENS, temperature=0.5)})
        bench.store.delete([info.key])
        bench.store.create(info.key, encode_partial(other))
        bench.store.create(bench.keys.partial(TaskId(0), "x", 1), b"junk")
        engine = Recording()
        (group,), _ = await finished(bench, engine)
        assert engine.sampled.total() == 2 * TOKENS
        expect_scripted(group, [VersionRun(V0, TOKENS)], 0)

    run(story)


class Choosy(Recording):
    """Refuses prefixes, as a real engine refuses tokens that its model does not have."""

    async def submit(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        if request.prefix_ids:
            raise RequestRefused("a token id is not one of the model's")
        async for chunk in super().submit(request):
            yield chunk


def test_a_partial_that_the_engine_refuses_does_not_cost_the_task(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        bench.commit(0)
        bench.ask(0, tokens=TOKENS)
        await drained(bench, Recording(0.02), after=10)
        (group,), _ = await finished(bench, Choosy())
        expect_scripted(group, [VersionRun(V0, TOKENS)], 0)
        assert bench.ready(bench.queues.dead) == 0

    run(story)
    assert "is not used" in caplog.text


def test_an_engine_that_dies_in_a_drain_keeps_neither_tokens_nor_task_and_is_an_error(
    bench: Bench,
) -> None:
    async def story() -> None:
        bench.commit(0)
        bench.ask(0, tokens=1000)
        engine = Recording(0.02)
        async with working(bench, engine, drain_s=30.0) as (_, stopping, running):
            await until(lambda: engine.sampled.total() >= 10)
            stopping.set()
            await asyncio.sleep(0.05)
            engine.dead = True
            with pytest.raises(SpotGRPOError, match="the engine died"):
                await asyncio.wait_for(running, 5)
        assert partials(bench)[0].tokens == engine.sampled.total()
        assert bench.ready(bench.queues.tasks) == 1

    run(story)


def test_rule_9_partials_are_looked_for_only_where_a_task_comes_again(
    bench: Bench, troubled: TroubledStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []
    monkeypatch.setattr(troubled, "list", lambda prefix: iter(listed.append(prefix) or ()))

    async def story() -> None:
        bench.commit(0)
        async with working(bench, Recording()) as (worker, _, _):
            await until(lambda: serves(worker, 0))
            bench.ask(0)
            await bench.answers(1)
        assert not listed

    run(story)


def test_rule_9_partials_go_with_the_commit_that_settles_their_task(world: World) -> None:
    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        world.store.create(world.keys.partial(task.task_id, "w", 1), b"tokens")
        return [answer(task, worker.serving())]

    with ThreadWorker(world, act):
        world.learner(config_of(max_steps=4)).run()
    left = {world.keys.task_of(info.key) for info in world.store.list(world.keys.partials)}
    assert world.audit().balanced
    assert not left


def test_rule_9_a_partial_that_comes_after_its_task_was_settled_goes_with_the_next_commit(
    world: World,
) -> None:
    """A save may be under way while the group is published, or another worker may hold a copy of the task."""
    first: list[TaskId] = []
    late: list[str] = []

    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        first.append(task.task_id)
        if 3 <= worker.serving().number < 6:
            late.append(world.keys.partial(first[0], "w", task.task_id.index))
            world.store.create(late[-1], b"tokens")
        return [answer(task, worker.serving())]

    with ThreadWorker(world, act):
        world.learner(config_of(max_steps=8)).run()
    assert late
    assert not [info.key for info in world.store.list(world.keys.partials) if info.key in late]
