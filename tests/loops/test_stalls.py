"""A learner that waits says for what: every state has its sentence. One story a test."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from spotgrpo.shared.config import LogConfig
from spotgrpo.shared.errors import StoreUnavailable
from spotgrpo.shared.memory.broker import MemoryBroker
from spotgrpo.shared.memory.store import MemoryStore
from spotgrpo.shared.ports import Message
from spotgrpo.shared.wire import Json, Report, encode_report
from tests.tools.loop_world import RUN, BookkeepingTrainer, ThreadWorker, World, config_of

STALL_S = 0.3


class Waiting:
    """A learner on a thread, and what it says."""

    def __init__(self, world: World, caplog: pytest.LogCaptureFixture) -> None:
        self._world, self._caplog = world, caplog
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, standby_s: float = 30.0, **train: object) -> None:
        config = config_of(**train).model_copy(update={"log": LogConfig(stall_warn_s=standby_s)})
        learner = self._world.learner(config, stopping=self._stopping, stall_warn_s=STALL_S)
        self._threads.append(threading.Thread(target=learner.run, daemon=True))
        self._threads[-1].start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()

    def says(self, text: str, seconds: float = 10.0) -> None:
        """Wait until it does, in something it says from now on."""
        already = len(self._caplog.messages)
        deadline = time.monotonic() + seconds
        while not any(text in message for message in self._caplog.messages[already:]):
            assert time.monotonic() < deadline, self._caplog.messages[already:]
            time.sleep(0.02)


@pytest.fixture
def learner(world: World, caplog: pytest.LogCaptureFixture) -> Iterator[Waiting]:
    with caplog.at_level(logging.INFO):
        waiting = Waiting(world, caplog)
        yield waiting
        world.server.start()
        waiting.stop()


@pytest.fixture
def worker(world: World, learner: Waiting) -> Iterator[Callable[..., None]]:
    """A worker that takes tasks, never answers, and says what it is told to say, again and again."""
    learner.start()
    broker = MemoryBroker(world.server, RUN)
    broker.declare()
    consumer, publisher = broker.consumer(world.queues.tasks, 2), broker.publisher()
    says: dict[str, Json] = {}
    over = threading.Event()

    def report_for_ever() -> None:
        while not over.wait(0.05):
            if says:
                report = Report("w1", "worker", time.time(), dict(says))
                publisher.broadcast(world.queues.telemetry, Message(encode_report(report)))

    thread = threading.Thread(target=report_for_ever, daemon=True)
    thread.start()
    yield says.update
    over.set()
    thread.join(10)
    consumer.close()


def test_no_worker_at_all(world: World, learner: Waiting) -> None:
    learner.start()
    learner.says("no worker has been seen: start one with `spotgrpo worker …`")
    learner.says(
        f"waiting for groups in {world.queues.rollouts} (0 there); 6 tasks outstanding, 6 of them not"
    )


def test_workers_that_are_connected_and_silent(
    learner: Waiting, worker: Callable[..., None]
) -> None:
    del worker
    learner.says("0 workers seen in the last minute, 1 connected: they are connected, but silent")


@pytest.mark.parametrize(
    ("report", "said"),
    [
        ({"state": "waiting for a version"}, "1 of 1 wait for a version"),
        ({"state": "publishing blocked", "tasks": 1}, "1 of 1 cannot publish"),
        (
            {"state": "scoring", "tasks": 2, "inflight": 0},
            "1 of 1 have generated and wait for rewards",
        ),
        (
            {"state": "generating", "tasks": 2, "inflight": 7},
            "w1 generating, no version, 7 in flight",
        ),
    ],
)
def test_workers_that_say_what_keeps_them(
    learner: Waiting, worker: Callable[..., None], report: dict[str, Json], said: str
) -> None:
    worker(report)
    learner.says(said)


def test_a_broker_that_does_not_answer(world: World, learner: Waiting) -> None:
    learner.start()
    learner.says("no worker has been seen")
    world.server.stop()
    learner.says("the broker does not answer")
    world.server.start()
    learner.says("no worker has been seen")


def test_a_standby_says_who_leads(world: World, learner: Waiting) -> None:
    learner.start()
    learner.says("no worker has been seen")
    leader = world.latest().writer
    learner.start(standby_s=0.1)
    learner.says(f"standing by; {leader} as epoch 1, at version 0; latest.json last moved")
    learner.says("standing by")


def test_a_commit_that_does_not_land(world: World, learner: Waiting) -> None:
    class Down(MemoryStore):
        is_down = False

        def create(self, key: str, body: bytes) -> None:
            if self.is_down and "/versions/" in key and "/v00000000." not in key:
                raise StoreUnavailable("away")
            super().create(key, body)

    world.store = store = Down()
    store.is_down = True
    learner.start(max_steps=3)
    with ThreadWorker(world):
        learner.says("for the commit up to version 1 to reach the bucket")
        store.is_down = False
        learner.says("version 3/3")


def test_the_step_record_counts_the_workers_that_were_seen(world: World) -> None:
    broker = MemoryBroker(world.server, RUN)
    broker.declare()
    publisher = broker.publisher()

    def report() -> None:
        for name in ("a", "b", "a"):
            body = encode_report(Report(name, "worker", time.time(), {"state": "idle"}))
            publisher.broadcast(world.queues.telemetry, Message(body))

    with ThreadWorker(world):
        world.learner(config_of(max_steps=2), BookkeepingTrainer(report)).run()
    lines = (world.folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["workers"] for line in lines] == [2, 2]
