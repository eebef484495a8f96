"""A worker keeps its engine full: places are taken anew one by one, whatever else of a group still runs."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from spotgrpo.producer.engines.base import Chunk, GenerationRequest
from spotgrpo.shared.ids import TaskId
from tests.loops.test_worker_loop import Bench, run, serves, until, working
from tests.tools.scripted_engine import ScriptedEngine

GROUP, INFLIGHT = 4, 8


class Gated(ScriptedEngine):
    """Ends a completion when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: defaultdict[tuple[str, int], asyncio.Event] = defaultdict(asyncio.Event)
        self.running: set[tuple[str, int]] = set()
        self.begun: list[tuple[str, int]] = []
        self.most = 0

    async def submit(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        key = request.request_id.rpartition(".")[0], request.seed
        self.running.add(key)
        self.begun.append(key)
        self.most = max(self.most, len(self.running))
        try:
            await self.gates[key].wait()
        finally:
            self.running.discard(key)
        async for chunk in super().submit(request):
            yield chunk

    def end(self, task: int, *seeds: int) -> None:
        """Let these completions of a task end."""
        for seed in seeds:
            self.gates[str(TaskId(task)), seed].set()

    def runs(self, task: int) -> list[int]:
        """The seeds of a task that are in the engine."""
        return sorted(seed for name, seed in self.running if name == str(TaskId(task)))


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    bench.open()
    bench.commit(0)
    yield bench
    bench.broker.close()


def test_a_place_is_taken_anew_as_soon_as_one_completion_ends(bench: Bench) -> None:
    async def story() -> None:
        engine = Gated()
        async with working(bench, engine, max_inflight=INFLIGHT):
            for index in range(3):
                bench.ask(index, tokens=1, group_size=GROUP)
            await until(lambda: len(engine.running) == INFLIGHT)
            assert not engine.runs(2)
            engine.end(0, 1)
            await until(lambda: engine.runs(2) == [0])
            engine.end(1, 3)
            await until(lambda: engine.runs(2) == [0, 1])
            assert (engine.runs(0), engine.runs(1)) == ([0, 2, 3], [0, 1, 2])
            for index in range(3):
                engine.end(index, *range(GROUP))
            await bench.answers(3)
        assert engine.most == INFLIGHT

    run(story)


def test_groups_that_wait_for_their_last_completion_keep_no_place_and_no_task_from_others(
    bench: Bench,
) -> None:
    """More of them than the prefetch window holds: tasks are asked for beyond it."""
    tasks = 9

    async def story() -> None:
        engine = Gated()
        async with working(bench, engine, max_inflight=INFLIGHT) as (worker, _, _):
            for index in range(tasks):
                bench.ask(index, tokens=1, group_size=GROUP)
            for index in range(tasks):
                engine.end(index, *range(1, GROUP))
            last = [(str(TaskId(index)), 0) for index in range(INFLIGHT)]
            await until(lambda: sorted(engine.running) == last)
            assert len(worker._jobs) > worker._prefetch
            assert bench.ready(bench.queues.rollouts) == 0
            for index in range(tasks):
                engine.end(index, 0)
            groups = await bench.answers(tasks)
            await until(lambda: not worker._jobs)
        assert sorted(group.task_id.index for group in groups) == list(range(tasks))
        assert engine.most == INFLIGHT
        assert bench.ready(bench.queues.tasks) == 0

    run(story)


def test_a_group_of_more_completions_than_the_engine_takes_runs_in_turn(bench: Bench) -> None:
    async def story() -> None:
        engine = Gated()
        async with working(bench, engine, max_inflight=3):
            bench.ask(0, tokens=1, group_size=7)
            for seed in range(7):
                await until(lambda: len(engine.running) == min(3, 7 - seed))  # noqa: B023
                engine.end(0, seed)
            await bench.answers(1)
        assert engine.most == 3
        assert engine.begun == [(str(TaskId(0)), seed) for seed in range(7)]

    run(story)


def test_tasks_that_wait_for_a_version_draw_no_others_from_the_queue(bench: Bench) -> None:
    tasks = 12

    async def story() -> None:
        async with working(bench, ScriptedEngine(), max_inflight=INFLIGHT) as (worker, _, _):
            for index in range(tasks):
                bench.ask(index, min_version=1, group_size=GROUP)
            await until(lambda: len(worker._jobs) == worker._prefetch)
            await until(lambda: serves(worker, 0))
            for _ in range(20):
                await asyncio.sleep(0.01)
                assert len(worker._jobs) == worker._prefetch
            bench.commit(1)
            await bench.answers(tasks)

    run(story)
