"""A worker that waits says for what, and long outages cost neither tasks nor memory nor a flood of lines."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotgrpo.producer.partials import Partials
from spotgrpo.producer.run import wait_for_queues, wait_for_run
from spotgrpo.producer.worker import MOST_HELD, Worker
from spotgrpo.shared.errors import BrokerUnavailable, StoreUnavailable
from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.memory.broker import MemoryBroker, MemoryBrokerServer
from spotgrpo.shared.memory.store import MemoryStore
from spotgrpo.shared.ports import ObjectInfo
from spotgrpo.shared.stopping import Stopping
from spotgrpo.shared.wire import Json, decode_report
from tests.loops.test_worker_loop import Bench, FaultyStore, run, serves, until, working
from tests.tools.loop_world import RUN, config_of, document_of
from tests.tools.scripted_engine import ScriptedEngine

STALL_S = 0.2


@pytest.fixture(autouse=True)
def _hears_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spotgrpo")


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    bench.open()
    yield bench
    bench.broker.close()


def says(caplog: pytest.LogCaptureFixture, text: str) -> Callable[[], bool]:
    """True once ``text`` was said."""
    return lambda: text in caplog.text


# ---- reports --------------------------------------------------------------------------------------------------


def test_a_worker_reports_at_once_and_says_goodbye(bench: Bench) -> None:
    news = bench.broker.subscribe(bench.queues.telemetry)
    assert news is not None

    def report() -> dict[str, Json]:
        delivery = news.take(5.0)
        assert delivery is not None
        return dict(decode_report(delivery.message.body).values)

    async def story() -> None:
        async with working(bench, ScriptedEngine(), report_s=3600.0):
            first = await asyncio.to_thread(report)
            assert (first["state"], first["version"]) == ("waiting for a version", None)
            bench.commit(0)
            bench.ask(0)
            await bench.answers(1)
        last = await asyncio.to_thread(report)
        assert (last["state"], last["groups"]) == ("left", 1)

    run(story)


def test_a_refused_version_is_reported_with_its_reason_until_another_is_served(
    bench: Bench,
) -> None:
    async def story() -> None:
        bench.commit(0)
        async with working(bench, ScriptedEngine()) as (worker, _, _):
            await until(lambda: serves(worker, 0))
            assert worker._values()["refused_why"] == ""
            bench.commit(1, modules=2)
            why = "v00000001.e0001: the adapter went on 1 modules, not on 2"
            await until(lambda: worker._values()["refused_why"] == why)
            await asyncio.sleep(0.2)  # looked at again, and still not served
            assert worker._values()["refused_why"] == why
            assert worker._w.policy._folders == 2, "it was fetched again"
            bench.commit(2)
            await until(lambda: serves(worker, 2))
            assert worker._values()["refused_why"] == ""

    run(story)


def test_states_follow_a_task_on_its_way(bench: Bench) -> None:
    async def story() -> None:
        engine = ScriptedEngine(token_s=0.05)
        bench.commit(0)
        async with working(bench, engine, drain_s=0.0) as (worker, stopping, running):
            await until(lambda: worker._values()["state"] == "idle")
            bench.ask(0, min_version=1, tokens=10)
            await until(lambda: worker._values()["state"] == "waiting for a version")
            bench.commit(1)
            await until(lambda: worker._values()["state"] == "generating")
            bench.server.stop()
            await until(lambda: worker._values()["state"] == "publishing blocked")
            bench.server.start()
            await until(lambda: worker._values()["state"] == "idle")
            stopping.set()
            await running
        assert worker._values()["state"] == "left"

    run(story)


# ---- what is said ---------------------------------------------------------------------------------------------


def test_an_idle_worker_says_so_once_and_that_it_goes_on(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        bench.commit(0)
        async with working(bench, ScriptedEngine(), stall_warn_s=STALL_S):
            await until(says(caplog, f"no task in {bench.queues.tasks}; the learner hands out"))
            await asyncio.sleep(10 * STALL_S)
            assert caplog.text.count("nothing done for") == 1
            bench.ask(0)
            await until(says(caplog, "going on after"))

    run(story)


def test_each_wait_is_named(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        engine = ScriptedEngine(token_s=0.02)
        async with working(bench, engine, stall_warn_s=STALL_S):
            await until(says(caplog, "there is no version to serve yet"))
            bench.commit(0)
            bench.ask(0, min_version=1)
            await until(says(caplog, "1 task waiting for version 1 or newer, v00000000.e0001 is"))
            bench.commit(1)
            await bench.answers(1)
            engine.token_s = 10 * STALL_S
            bench.ask(1, tokens=1)
            await until(says(caplog, "1 task in the engine with 2 sequences"))
            await bench.answers(1)
            engine.token_s = 0.1
            bench.ask(2, tokens=2)
            await until(lambda: len(engine.served) == 6)
            bench.server.stop()
            await until(says(caplog, f"for {bench.queues.rollouts} to confirm the group, which"))
            bench.server.start()
            await bench.answers(1)

    run(story)


def test_a_slow_reward_is_named(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    (bench.folder / "rewards.py").write_text(
        "import time\n"
        "def length(completions, **kwargs):\n"
        "    time.sleep(1.0)\n"
        "    return [1.0 for _ in completions]\n"
    )

    async def story() -> None:
        bench.commit(0)
        async with working(bench, ScriptedEngine(), stall_warn_s=STALL_S):
            bench.ask(0)
            await until(says(caplog, "1 task waiting for rewards (worker.reward_timeout_s = 300)"))
            await bench.answers(1)

    run(story)


def test_queues_and_run_are_waited_for_aloud_through_outages_too(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotgrpo.producer.run.LOOK_AGAIN_S", 0.05)
    server, found = MemoryBrokerServer(), []
    broker, stopping = MemoryBroker(server, RUN), Stopping()
    answers = broker.wait_until_declared

    def answer(timeout_s: float | None = None) -> bool:
        if caplog.text.count("waiting for") == 1:
            raise BrokerUnavailable("gone for longer than the start deadline")
        return answers(timeout_s)

    monkeypatch.setattr(broker, "wait_until_declared", answer)

    def wait() -> None:
        found.append(wait_for_queues(broker, broker.queues, stopping, STALL_S))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()

    async def story() -> None:
        await until(says(caplog, "no learner has declared them: is the run id right?"))
        await until(says(caplog, "gone for longer than the start deadline"))
        broker.declare()
        await until(lambda: found == [True])

    run(story)


def test_a_broker_that_was_never_reached_ends_the_start() -> None:
    class Away(MemoryBroker):
        def wait_until_declared(self, timeout_s: float | None = None) -> bool:
            raise BrokerUnavailable("no answer within the start deadline")

    broker = Away(MemoryBrokerServer(), RUN)
    with pytest.raises(BrokerUnavailable):
        wait_for_queues(broker, broker.queues, Stopping(), 30.0)


def test_a_stop_before_the_broker_was_reached_is_no_error() -> None:
    stopping = Stopping()

    class Away(MemoryBroker):
        def wait_until_declared(self, timeout_s: float | None = None) -> bool:
            stopping.set()
            raise BrokerUnavailable("told to stop")

    broker = Away(MemoryBrokerServer(), RUN)
    assert not wait_for_queues(broker, broker.queues, stopping, 30.0)


def test_run_json_is_waited_for_aloud(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("spotgrpo.producer.run.LOOK_AGAIN_S", 0.05)
    bench, found = Bench(tmp_path), []

    def wait() -> None:
        found.append(wait_for_run(bench.store, bench.keys, Stopping(), STALL_S))

    threading.Thread(target=wait, daemon=True).start()

    async def story() -> None:
        await until(says(caplog, f"for {bench.keys.run_json}, which a learner writes ("))
        document = document_of(config_of())
        bench.store.create(bench.keys.run_json, document.to_bytes())
        await until(lambda: found == [document])

    run(story)


# ---- long outages ---------------------------------------------------------------------------------------------


def held(worker: Worker) -> int:
    return len(worker._jobs)


def test_a_worker_without_a_broker_takes_no_more_and_all_goes_out_once_after(bench: Bench) -> None:
    """The window bounds what it holds, whatever the outage lasts."""
    tasks = 40

    async def story() -> None:
        bench.commit(0)
        engine = ScriptedEngine(token_s=0.05)
        async with working(bench, engine, poll_s=0.05) as (worker, _, _):
            for index in range(tasks):
                bench.ask(index, tokens=10)
            await until(lambda: len(engine.served) == 8)
            bench.server.stop()
            window = worker._prefetch
            assert held(worker) <= window
            await until(lambda: not worker._submitted)
            await asyncio.sleep(1.0)
            assert 0 < held(worker) <= window
            assert len(engine.served) <= 2 * window
            engine.token_s = 0.0
            bench.server.start()
            groups = await bench.answers(tasks)
            await until(lambda: not worker._jobs)
        assert sorted(group.task_id for group in groups) == [TaskId(i) for i in range(tasks)]
        assert bench.rollouts.take(0.2) is None  # each of them once
        assert bench.ready(bench.queues.tasks) == 0

    run(story)


def test_connections_that_are_lost_again_and_again_do_not_fill_a_worker_that_cannot_publish(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every new channel lets a window of tasks in, while those of the old ones wait for a queue that is full."""
    tasks = 60

    async def story() -> None:
        bench.commit(0)
        for index in range(tasks):
            bench.ask(index, tokens=1)
        takes_groups = bench.server.try_store
        monkeypatch.setattr(bench.server, "try_store", lambda name, message: "rollouts" not in name)
        async with working(bench, ScriptedEngine()) as (worker, _, _):
            most = MOST_HELD * worker._prefetch
            for _ in range(12):
                await asyncio.sleep(0.1)
                bench.server.stop()
                ready = bench.server.queues[bench.queues.tasks].ready
                ready.rotate(-worker._prefetch)  # what came back is last, as if others took it
                bench.server.start()
                assert held(worker) <= most
            assert held(worker) == most
            monkeypatch.setattr(bench.server, "try_store", takes_groups)
            bench.server.work()
            found = {group.task_id for group in await bench.answers(tasks)}
            while len(found) < tasks:  # some came twice: their first delivery was another channel's
                found |= {group.task_id for group in await bench.answers(1)}

    run(story)


class BigGroups(FaultyStore):
    """A bucket that is away takes no groups either."""

    def create(self, key: str, body: bytes) -> None:
        if self.down:
            raise StoreUnavailable("the bucket is down")
        super().create(key, body)


def test_a_bucket_that_is_away_holds_up_neither_takes_nor_small_groups_and_is_said_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """More big groups wait for it than the process has threads to spare."""
    monkeypatch.setattr("spotgrpo.producer.publishing.MAX_MESSAGE_BYTES", 3000)
    monkeypatch.setattr("spotgrpo.shared.retry.LONGEST_WAIT_S", 0.1)

    async def story() -> None:
        store = BigGroups()
        bench = Bench(tmp_path, store=store)
        bench.open()
        bench.commit(0)
        async with working(bench, ScriptedEngine(), max_inflight=100) as (worker, _, _):
            await until(lambda: serves(worker, 0))
            store.down = True
            for index in range(40):
                bench.ask(index, tokens=400)
            await until(lambda: held(worker) == 40 and not worker._submitted)
            bench.ask(40, tokens=2)
            (small,) = await bench.answers(1)
            assert small.task_id == TaskId(40)
            await asyncio.sleep(1.0)
            store.down = False
            for _ in range(40):
                assert await asyncio.to_thread(bench.rollouts.take, 10.0)
            await until(says(caplog, "new versions can be had again"))
        assert caplog.text.count("trying again") == 1
        assert caplog.text.count("works again") == 1
        assert caplog.text.count("going on with v00000000") == 1
        assert caplog.text.count("new versions can be had again") == 1
        bench.broker.close()

    run(story)


def test_partials_that_cannot_be_looked_for_are_said_once_not_once_a_task(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("spotgrpo.producer.partials.FIND_S", 0.1)

    class Unlisted(MemoryStore):
        down = True

        def list(self, prefix: str) -> Iterator[ObjectInfo]:
            if self.down:
                raise StoreUnavailable("the bucket is down")
            return super().list(prefix)

    async def story() -> None:
        store = Unlisted()
        partials = Partials(store, bench.keys, "w", max_staleness=2)
        tasks = [bench.ask(index) for index in range(5)]
        for store.down in (True, False, True):
            assert not any([await partials.find(task) for task in tasks])

    run(story)
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "cannot look for partials, tasks begin afresh",
        "partials can be looked for again",
        "cannot look for partials, tasks begin afresh",
    ]
