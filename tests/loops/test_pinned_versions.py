"""A worker in a run that evaluates: tasks that are pinned to a version, in memory, one story a test."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotgrpo.producer.worker import Worker
from spotgrpo.shared.ids import PolicyVersion
from spotgrpo.shared.wire import Group
from tests.loops.test_worker_loop import Bench, FaultyStore, run, serves, until, working
from tests.tools.scripted_engine import ScriptedEngine

KEEP = 4  # three in use, and the one that is evaluated


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, store=FaultyStore())
    bench.open()
    yield bench
    bench.broker.close()


def v(number: int) -> PolicyVersion:
    return PolicyVersion(1, number)


def sampled_by(group: Group) -> set[PolicyVersion]:
    return {one.version for rollout in group.rollouts for one in rollout.versions}


async def serve_up_to(bench: Bench, worker: Worker, first: int, last: int) -> None:
    """Commit and adopt one after the other."""
    for number in range(first, last + 1):
        bench.commit(number)
        await until(lambda n=number: serves(worker, n))  # type: ignore[misc]


async def dead_letter(bench: Bench) -> str:
    """The task id of the next one."""
    await until(lambda: bench.ready(bench.queues.dead) > 0)
    delivery = bench.broker.consumer(bench.queues.dead, 1).take(5.0)
    assert delivery is not None
    return delivery.message.message_id


def test_what_is_evaluated_stays_loaded_while_newer_versions_come(bench: Bench) -> None:
    async def story() -> None:
        engine = ScriptedEngine(max_versions=KEEP)
        async with working(bench, engine, evaluates=True) as (worker, _, _):
            await serve_up_to(bench, worker, 0, 1)
            bench.ask(0, pinned=v(1))
            await bench.answers(1)
            await serve_up_to(bench, worker, 2, 8)
            await until(lambda: set(engine.loaded) == {v(1), v(7), v(8)})
            folder = engine.loaded[v(1)]
            bench.ask(1, pinned=v(1))
            bench.ask(2)
            found = await bench.answers(2)
            assert engine.loaded[v(1)] == folder, "it was loaded once more"
        assert {frozenset(sampled_by(group)) for group in found} == {
            frozenset({v(1)}),
            frozenset({v(8)}),
        }

    run(story)


def test_a_version_that_has_gone_is_loaded_again_to_be_evaluated(bench: Bench) -> None:
    """So does a worker that came when it was no longer the newest."""

    async def story() -> None:
        engine = ScriptedEngine(max_versions=KEEP)
        async with working(bench, engine, evaluates=True) as (worker, _, _):
            await serve_up_to(bench, worker, 0, 5)
            assert v(1) not in engine.loaded
            bench.ask(0, pinned=v(1))
            (group,) = await bench.answers(1)
            assert sampled_by(group) == {v(1)}
            assert len(engine.loaded) <= KEEP
            assert serves(worker, 5), "training goes on with the newest"
            await serve_up_to(bench, worker, 6, 9)
            assert v(1) in engine.loaded

    run(story)


def test_no_adoption_waits_for_evaluations_however_many_there_are(bench: Bench) -> None:
    """Requests on the pinned version overlap without end; ordinary ones fill all other places."""

    async def story() -> None:
        engine = ScriptedEngine(token_s=0.01, max_versions=KEEP)
        async with working(bench, engine, evaluates=True, max_inflight=16) as (worker, _, _):
            await serve_up_to(bench, worker, 0, 0)
            bench.ask(0, pinned=v(0), tokens=300)
            await until(lambda: v(0) in engine.served)
            for number in (1, 2, 3):
                await serve_up_to(bench, worker, number, number)
                bench.ask(number, tokens=60)
                await until(lambda n=number: v(n) in engine.served)  # type: ignore[misc]
            bench.commit(4)
            await until(lambda: serves(worker, 4))
            assert worker._w.policy._loaded[v(0)].in_flight, "the evaluation is not over"

    run(story)


def test_an_adoption_that_waits_for_room_goes_on_where_a_version_becomes_pinned(
    bench: Bench,
) -> None:
    """That version takes no ordinary place any more, and no request has to end for it."""

    async def story() -> None:
        engine = ScriptedEngine(max_versions=KEEP)
        async with working(bench, engine, evaluates=True) as (worker, _, _):
            policy = worker._w.policy
            for number in range(3):
                await serve_up_to(bench, worker, number, number)
                held = policy.loaded(v(number))
                assert held is not None
                policy.hold(held)
            bench.commit(3)
            await until(lambda: policy._is_crowded)
            assert policy.pinned(v(0)) is not None
            await until(lambda: serves(worker, 3))

    run(story)


def test_an_older_version_can_be_evaluated_after_a_newer_one_that_could_not_be_had(
    bench: Bench,
) -> None:
    async def story() -> None:
        engine = ScriptedEngine(max_versions=KEEP)
        async with working(bench, engine, evaluates=True) as (worker, _, _):
            await serve_up_to(bench, worker, 0, 6)
            assert isinstance(bench.store, FaultyStore)
            bench.store.flipped = bench.keys.version(v(2), "adapter_model.safetensors")
            bench.ask(0, pinned=v(2))
            await dead_letter(bench)
            bench.ask(1, pinned=v(1))
            (group,) = await bench.answers(1)
        assert sampled_by(group) == {v(1)}

    run(story)


def test_a_task_waits_for_the_version_that_it_is_pinned_to(bench: Bench) -> None:
    async def story() -> None:
        engine = ScriptedEngine(max_versions=KEEP)
        async with working(bench, engine, evaluates=True) as (worker, _, _):
            await serve_up_to(bench, worker, 0, 0)
            bench.ask(0, pinned=v(2), min_version=2)
            await until(lambda: bool(worker._jobs))
            bench.commit(2)
            (group,) = await bench.answers(1)
        assert sampled_by(group) == {v(2)}

    run(story)


@pytest.mark.parametrize("why", ["no room", "not stored", "damaged", "something newer is pinned"])
def test_a_task_whose_version_cannot_be_had_is_never_sampled_on_another(
    bench: Bench, why: str
) -> None:
    async def story() -> None:
        engine = ScriptedEngine(max_versions=KEEP)
        async with working(bench, engine, evaluates=why != "no room") as (worker, _, running):
            await serve_up_to(bench, worker, 0, 5)
            assert isinstance(bench.store, FaultyStore)
            if why == "not stored":
                bench.store.delete([bench.keys.manifest(v(1))])
            elif why == "damaged":
                bench.store.flipped = bench.keys.version(v(1), "adapter_model.safetensors")
            elif why == "something newer is pinned":
                bench.ask(7, pinned=v(2))
                await bench.answers(1)
            task = bench.ask(0, pinned=v(1))
            assert await dead_letter(bench) == str(task.task_id)
            bench.ask(1)
            (group,) = await bench.answers(1)
            assert sampled_by(group) == {v(5)}
            assert not running.done()
        assert v(1) not in engine.served

    run(story)


def test_a_bucket_that_is_away_holds_up_the_evaluation_alone(bench: Bench) -> None:
    async def story() -> None:
        engine = ScriptedEngine(max_versions=KEEP)
        async with working(bench, engine, evaluates=True) as (worker, _, _):
            await serve_up_to(bench, worker, 0, 5)
            assert isinstance(bench.store, FaultyStore)
            bench.store.disk_is_full = True
            bench.ask(0, pinned=v(1))
            await until(lambda: bool(worker._jobs))
            bench.ask(1)
            (group,) = await bench.answers(1)
            assert sampled_by(group) == {v(5)}
            bench.store.disk_is_full = False
            (group,) = await bench.answers(1)
            assert sampled_by(group) == {v(1)}

    run(story)


class ThoroughEngine(ScriptedEngine):
    """One that, like the real ones, loads to the end whoever waited for it."""

    def __init__(self) -> None:
        super().__init__(max_versions=KEEP)
        self.begun = 0
        self.may_load = asyncio.Event()
        self.may_load.set()

    async def load(self, version: PolicyVersion, folder: Path) -> int:
        return await asyncio.shield(asyncio.create_task(self._load(version, folder)))

    async def _load(self, version: PolicyVersion, folder: Path) -> int:
        self.begun += 1
        await self.may_load.wait()
        return await super().load(version, folder)


def test_a_task_that_goes_back_while_its_version_is_loaded_leaves_nothing_unknown_behind(
    bench: Bench,
) -> None:
    async def story() -> None:
        engine = ThoroughEngine()
        async with working(bench, engine, evaluates=True) as (worker, _, running):
            await serve_up_to(bench, worker, 0, 5)
            engine.may_load.clear()
            begun = engine.begun
            bench.ask(0, pinned=v(1))
            await until(lambda: engine.begun > begun)
            (job,) = worker._jobs.values()
            await worker._gate._give_back(job, "it was not begun")
            engine.may_load.set()
            (group,) = await bench.answers(1)
            assert sampled_by(group) == {v(1)}
            await serve_up_to(bench, worker, 6, 9)
            assert not running.done()
            folders = set((bench.folder / "cache" / "w1").iterdir())
            assert folders == set(engine.loaded.values()), "what is kept is what is loaded"

    run(story)
