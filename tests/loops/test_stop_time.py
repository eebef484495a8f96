"""Servers that do not answer at all hold no stop up."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spotgrpo.shared.memory.broker import MemoryPublisher
from spotgrpo.shared.memory.store import MemoryStore
from spotgrpo.shared.ports import Message, ObjectStore
from tests.loops.test_learner_faults import Background, has_issued, until
from tests.loops.test_worker_loop import Bench, serves, working
from tests.loops.test_worker_loop import until as until_async
from tests.tools.loop_world import World, config_of
from tests.tools.scripted_engine import ScriptedEngine

SOON_S = 8.0


class Hanging:
    """A bucket that does not come back from some calls, until the test is over."""

    def __init__(self, store: ObjectStore) -> None:
        self.store, self.over = store, threading.Event()
        self.name, self.part, self.hangs = "", "", 0

    def hang(self, name: str, part: str = "") -> None:
        self.name, self.part = name, part

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if name == self.name and self.part in str(args[0]):
                self.hangs += 1
                self.over.wait(60)
            return getattr(self.store, name)(*args)

        return call


@pytest.fixture
def bucket() -> Iterator[Hanging]:
    bucket = Hanging(MemoryStore())
    yield bucket
    bucket.over.set()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    bench.open()
    yield bench
    bench.broker.close()


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("compare_and_swap", "run.json"),
        ("get", "latest.json"),
        ("list", "versions/"),
        ("compare_and_swap", "latest.json"),
        ("list", "requeue/"),
    ],
)
def test_a_learner_stops_though_the_bucket_does_not_come_back(
    world: World, bucket: Hanging, name: str, part: str
) -> None:
    """At its start, in the takeover, and while it waits for groups."""
    bucket.hang(name, part)
    stopping = threading.Event()
    learner = Background(world.learner(config_of(), stopping=stopping, store=bucket).run)
    until(lambda: bucket.hangs > 0)
    stopping.set()
    assert learner.ends(SOON_S)


def test_a_learner_that_asks_whether_it_owns_the_run_stops(world: World, bucket: Hanging) -> None:
    stopping = threading.Event()
    learner = Background(world.learner(config_of(), stopping=stopping, store=bucket).run)
    until(has_issued(world))
    bucket.hang("get", "latest.json")
    world.server.stop()
    until(lambda: bucket.hangs > 0)
    stopping.set()
    assert learner.ends(SOON_S)


def test_a_worker_and_its_loop_end_though_neither_server_comes_back(
    bench: Bench, bucket: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotgrpo.producer.publishing.MAX_MESSAGE_BYTES", 10)
    bucket.store = bench.store

    async def story() -> None:
        bench.commit(0)
        async with working(bench, ScriptedEngine(), bucket, drain_s=0.0) as (worker, _, _):
            await until_async(lambda: serves(worker, 0))
            bucket.hang("create", "groups/")
            bench.ask(0)
            await until_async(lambda: bucket.hangs == 1)
            bucket.hang("get_if_changed")
            await until_async(lambda: bucket.hangs == 2)

    assert_ends(story)


def test_a_worker_ends_though_its_publisher_does_not_come_back(
    bench: Bench, bucket: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = threading.Event()

    def publish(_self: MemoryPublisher, queue: str, message: Message) -> None:
        published.set()
        bucket.over.wait(60)

    async def story() -> None:
        bench.commit(0)
        async with working(bench, ScriptedEngine(), drain_s=0.0) as (worker, _, _):
            await until_async(lambda: serves(worker, 0))
            bench.ask(0)
            await until_async(lambda: bench.ready(bench.queues.tasks) == 0)
            monkeypatch.setattr(MemoryPublisher, "publish", publish)
            await until_async(published.is_set)

    monkeypatch.setattr(ScriptedEngine, "token_s", 0.2, raising=False)
    assert_ends(story)


def assert_ends(story: Callable[[], Any]) -> None:
    """That the loop ends, and leaves no thread behind for which the process would wait."""
    before = set(threading.enumerate())
    worker = Background(lambda: asyncio.run(story()))
    assert worker.ends(25)
    assert worker.error is None
    left = [one for one in threading.enumerate() if one not in before and not one.daemon]
    assert left == []


STUCK = """
import signal, sys, threading, time
from spotgrpo.shared.stopping import Stopping
threading.Thread(target=time.sleep, args=(60,)).start()
with Stopping().on_signals(float(sys.argv[1])) as stopping:
    print("ready", flush=True)
    try:
        time.sleep(60)
    finally:
        time.sleep(60)
"""


def test_a_second_ctrl_c_ends_the_process_whatever_it_waits_for() -> None:
    command = [sys.executable, "-c", STUCK, "0.5"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(10) == 130
    finally:
        process.kill()
        process.communicate()
