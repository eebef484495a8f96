"""A whole worker that its cloud gives notice to."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotgrpo.producer.notices import NoticeWatch
from spotgrpo.shared.config import WorkerConfig
from tests.loops.test_worker_loop import Bench, run, until, working
from tests.tools.metadata_servers import (
    AwsMetadata,
    AzureMetadata,
    GcpMetadata,
    MetadataServer,
    serving,
)
from tests.tools.scripted_engine import ScriptedEngine


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    bench.open()
    yield bench
    bench.broker.close()


def give_notice(server: MetadataServer) -> None:
    """State the end as that cloud does."""
    if isinstance(server, AwsMetadata):
        server.interrupt(in_s=120)
    elif isinstance(server, GcpMetadata):
        server.preempted = "TRUE"
    elif isinstance(server, AzureMetadata):
        server.schedule("Preempt", in_s=30)


@pytest.mark.parametrize("kind", [AwsMetadata, GcpMetadata, AzureMetadata])
def test_a_worker_drains_after_its_clouds_notice_and_leaves_its_tasks_to_others(
    bench: Bench, kind: type[MetadataServer]
) -> None:
    async def story() -> None:
        bench.commit(0)
        for index in range(3):
            bench.ask(index, tokens=1000)
        engine = ScriptedEngine(token_s=0.01)
        with serving(kind()) as server:
            config = WorkerConfig(notice_url=server.url)
            async with working(bench, engine, drain_s=0.1) as (_, stopping, running):
                with NoticeWatch(config, stopping, poll_s=0.02):
                    await until(lambda: len(engine.served) == 6)
                    assert not running.done()
                    give_notice(server)
                    await running
                    assert stopping.remaining_s is not None
        assert bench.ready(bench.queues.tasks) == 3
        assert bench.ready(bench.queues.rollouts) == 0

    run(story)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_worker_drains_after_a_signal_and_leaves_its_tasks_to_others(
    bench: Bench, number: signal.Signals
) -> None:
    async def story() -> None:
        bench.commit(0)
        for index in range(3):
            bench.ask(index, tokens=1000)
        engine = ScriptedEngine(token_s=0.01)
        async with working(bench, engine, drain_s=0.1) as (_, stopping, running):
            await until(lambda: len(engine.served) == 6)
            with stopping.on_signals():
                os.kill(os.getpid(), number)
                await running
        assert stopping.reason == number.name
        assert bench.ready(bench.queues.tasks) == 3
        assert bench.ready(bench.queues.rollouts) == 0

    run(story)


def test_a_worker_without_a_notice_works_on_beside_its_watch(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        with serving(AwsMetadata()) as server:
            config = WorkerConfig(notice_url=server.url)
            async with working(bench, ScriptedEngine()) as (_, stopping, running):
                with NoticeWatch(config, stopping, poll_s=0.02):
                    bench.ask(0)
                    await bench.answers(1)
                    await until(lambda: len(server.requests) > 10)
                    assert not stopping.is_set()
                    assert not running.done()

    run(story)


def test_tasks_that_a_worker_on_notice_hands_back_are_done_by_another(bench: Bench) -> None:
    async def story() -> None:
        bench.commit(0)
        bench.ask(0, tokens=200)
        slow = ScriptedEngine(token_s=0.05)
        with serving(AwsMetadata()) as server:
            config = WorkerConfig(notice_url=server.url)
            async with working(bench, slow, drain_s=0.1) as (_, stopping, running):
                with NoticeWatch(config, stopping, poll_s=0.02):
                    await until(lambda: len(slow.served) == 2)
                    server.recommend()
                    await running
        shutil.rmtree(bench.folder / "cache")  # the other machine has its own
        async with working(bench, ScriptedEngine()):
            (group,) = await bench.answers(1)
        assert len(group.rollouts[0].token_ids) == 200
        await until(lambda: bench.ready(bench.queues.tasks) == 0)

    run(story)
