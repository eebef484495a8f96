"""A worker takes no task that it could not finish in time, and leaves none lying for ever."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotgrpo.producer.activity import Stage
from spotgrpo.producer.drain import Job
from spotgrpo.producer.worker import Worker
from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.manifest import Latest
from tests.loops.test_worker_loop import Bench, run, until, working
from tests.tools.scripted_engine import ScriptedEngine

TOKENS = 20


class PacedBench(Bench):
    """Versions that say how long a step takes."""

    def paced(self, number: int, step_s: float) -> None:
        """Serve a version, of a run whose steps take ``step_s`` and whose completions have TOKENS."""
        self.commit(number)
        latest = Latest.from_bytes(self.store.get(self.keys.latest).body)
        lately = latest.model_copy(
            update={"step_s": step_s, "group_tokens": float(TOKENS), "nonce": f"p{number}"}
        )
        self.etag = self.store.compare_and_swap(self.keys.latest, lately.to_bytes(), self.etag)
        assert self.etag


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[PacedBench]:
    bench = PacedBench(tmp_path)
    bench.open()
    yield bench
    bench.broker.close()


def versions_come(bench: PacedBench, first: int, every_s: float) -> asyncio.Task[None]:
    """A learner whose steps take ``every_s``, for ever."""

    async def come() -> None:
        number = first
        while True:
            bench.paced(number, every_s)
            await asyncio.sleep(every_s)
            number += 1

    return asyncio.create_task(come())


def jobs(worker: Worker) -> list[Job]:
    return list(worker._jobs.values())


def held(worker: Worker) -> list[int]:
    return sorted(job.task.task_id.index for job in jobs(worker))


def test_a_worker_gives_back_early_what_it_cannot_finish_in_time_and_takes_no_more(
    bench: PacedBench, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        with caplog.at_level(logging.INFO):
            learner = versions_come(bench, 1, every_s=0.3)
            engine = ScriptedEngine(token_s=0.2)  # 4 s a group, 13 versions
            async with working(bench, engine, admission=True, max_inflight=4) as (worker, _, _):
                for index in range(3):
                    bench.ask(index, tokens=TOKENS)
                await until(lambda: worker._gate.asks)
                await until(lambda: not worker._jobs)
                assert bench.ready(bench.queues.tasks) == 3
                assert worker._values()["tasks_given_back"] == 3
                await asyncio.sleep(0.6)
                assert worker._values()["state"] == "leaving tasks to faster workers"
                idle = worker._values()["idle_s"]
                assert isinstance(idle, dict)
                assert idle["too_slow"]
            learner.cancel()
        assert bench.ready(bench.queues.rollouts) == 0
        assert caplog.text.count("tasks are taken one by one now") == 1
        assert "goes back to the queue, since it would be too late here" in caplog.text

    run(story)


def test_it_takes_them_once_nobody_else_does(bench: PacedBench) -> None:
    """Each is given back once at most, and done then; nothing is lost on the way."""

    async def story() -> None:
        learner = versions_come(bench, 1, every_s=0.15)
        engine = ScriptedEngine(token_s=0.05)  # 1 s a group, 7 versions
        async with working(bench, engine, admission=True, max_inflight=4) as (worker, _, _):
            for index in range(3):
                bench.ask(index, tokens=TOKENS)
            await until(lambda: worker._gate.given_back >= 3)
            learner.cancel()  # versions come no more: the faster workers have left
            groups = await bench.answers(3)
        assert {group.task_id for group in groups} == {TaskId(index) for index in range(3)}
        assert bench.ready(bench.queues.tasks) == 0

    run(story)


def test_a_worker_that_is_told_to_stop_while_it_gives_back_loses_nothing(bench: PacedBench) -> None:
    async def story() -> None:
        learner = versions_come(bench, 1, every_s=0.2)
        engine = ScriptedEngine(token_s=0.3)
        async with working(bench, engine, admission=True, max_inflight=4, drain_s=0.0) as (
            worker,
            stopping,
            _,
        ):
            for index in range(6):
                bench.ask(index, tokens=TOKENS)
            await until(lambda: worker._gate.asks)
            stopping.set()
        learner.cancel()
        other = bench.view().consumer(bench.queues.tasks, 10)
        seen = set()
        while (delivery := await asyncio.to_thread(other.take, 0.1)) is not None:
            seen.add(delivery.message.message_id)
        assert seen == {str(TaskId(index)) for index in range(6)}
        other.close()

    run(story)


def test_a_worker_that_keeps_up_is_never_held_back(bench: PacedBench) -> None:
    async def story() -> None:
        learner = versions_come(bench, 1, every_s=0.3)
        engine = ScriptedEngine(token_s=0.01)  # 0.2 s a group
        async with working(bench, engine, admission=True, max_inflight=4) as (worker, _, _):
            for index in range(12):
                bench.ask(index, tokens=TOKENS)
            await bench.answers(12)
            assert not worker._gate.asks
            assert worker._gate.given_back == 0
        learner.cancel()

    run(story)


def test_an_outage_of_the_broker_is_not_the_workers_own_time(bench: PacedBench) -> None:
    async def story() -> None:
        learner = versions_come(bench, 1, every_s=0.3)
        engine = ScriptedEngine(token_s=0.01)  # 0.2 s a group
        async with working(bench, engine, admission=True, max_inflight=4) as (worker, _, _):
            for index in range(2):
                bench.ask(index, tokens=TOKENS)
            await until(lambda: held(worker) == [0, 1])
            bench.server.stop()
            await until(lambda: all(job.stage is Stage.PUBLISHING for job in jobs(worker)))
            await asyncio.sleep(2.4)  # eight versions
            bench.server.start()
            for index in range(2, 10):
                bench.ask(index, tokens=TOKENS)
            await bench.answers(10)
            assert not worker._gate.asks
            assert worker._gate.given_back == 0
        learner.cancel()

    run(story)


def test_a_worker_that_was_stopped_and_goes_on_does_not_think_itself_slow(
    bench: PacedBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotgrpo.producer.outages.STANDS_STILL_S", 0.8)

    async def story() -> None:
        learner = versions_come(bench, 1, every_s=0.3)
        engine = ScriptedEngine(token_s=0.01)  # 0.2 s a group
        async with working(bench, engine, admission=True, max_inflight=4) as (worker, _, _):
            for index in range(10):
                bench.ask(index, tokens=TOKENS)
            await until(
                lambda: any(draft.token_ids for job in jobs(worker) for draft in job.drafts)
            )
            time.sleep(2.4)  # noqa: ASYNC251 - as SIGSTOP: nothing of this process runs
            await bench.answers(10)
            assert not worker._gate.asks
            assert worker._gate.given_back == 0
        learner.cancel()

    run(story)


def test_what_is_pinned_is_never_too_late(bench: PacedBench) -> None:
    """An evaluation's version is as old as it is."""

    async def story() -> None:
        bench.paced(1, 0.1)
        engine = ScriptedEngine(token_s=0.1)
        async with working(bench, engine, admission=True, max_inflight=4, evaluates=True) as (
            worker,
            _,
            _,
        ):
            await until(lambda: worker._w.policy.current is not None)
            current = worker._w.policy.current
            assert current is not None
            bench.ask(0, tokens=TOKENS, pinned=current.version)
            await until(lambda: held(worker) == [0])
            learner = versions_come(bench, 2, every_s=0.1)
            await bench.answers(1)
            assert worker._gate.given_back == 0
            learner.cancel()

    run(story)
