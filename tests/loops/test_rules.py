"""Settlement rules that need a whole learner, each by its number."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest

from spotgrpo.consumer.audit import read_newest
from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.memory.broker import MemoryLeaderConsumer, MemoryPublisher
from spotgrpo.shared.memory.store import MemoryStore
from spotgrpo.shared.ports import Message, Stored
from spotgrpo.shared.steps import Step, observe
from spotgrpo.shared.wire import Group, Task
from tests.loops.test_learner_faults import Background, until
from tests.tools.loop_world import (
    BookkeepingTrainer,
    ThreadWorker,
    World,
    answer,
    config_of,
)


class Killed(Exception):
    """Stands for SIGKILL: unwinds the learner at a chosen point."""


def stopping_at(steps: int) -> tuple[BookkeepingTrainer, threading.Event]:
    """A trainer that has its learner told to stop in its n-th step."""
    stopping = threading.Event()
    trainer = BookkeepingTrainer(lambda: stopping.set() if len(trainer.steps) == steps else None)
    return trainer, stopping


def watch_tasks(world: World, monkeypatch: pytest.MonkeyPatch) -> list[Message]:
    """Tasks as learners publish them; each has to be outstanding in the committed ledger by then."""
    sent: list[Message] = []
    publish = MemoryPublisher.publish

    def look(self: MemoryPublisher, queue: str, message: Message) -> Future[None]:
        if queue == world.queues.tasks:
            task = TaskId.parse(str(message.headers["task"]))
            committed = read_newest(world.store, world.latest())
            settled = {one for tasks in committed.settled.values() for one in tasks}
            assert task in {*committed.outstanding, *settled}, f"{task} is published uncommitted"
            sent.append(message)
        return publish(self, queue, message)

    monkeypatch.setattr(MemoryPublisher, "publish", look)
    return sent


def test_rule_4_an_id_is_in_a_committed_ledger_before_its_task_is_published(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = watch_tasks(world, monkeypatch)
    with ThreadWorker(world):
        world.learner(config_of(max_steps=4)).run()
    assert len(sent) == 8
    assert not any("again" in message.headers for message in sent)


def test_rule_4_a_takeover_publishes_at_once_what_the_last_ledger_issued(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner before died with its commit landed and none of the tasks published."""
    sent = watch_tasks(world, monkeypatch)

    def kill(at: Step) -> None:
        if at is Step.LEARNER_ACKED:
            raise Killed

    observe(kill)
    try:
        with ThreadWorker(world), pytest.raises(Killed):
            world.learner(config_of()).run()
    finally:
        observe(None)
    issued = read_newest(world.store, world.latest()).issued
    assert issued
    already = [message.message_id for message in sent]
    assert not {*already} & {*map(str, issued)}
    sent.clear()
    with ThreadWorker(world):
        world.learner(config_of()).run()
    at_once = sent[: len(issued)]
    assert [message.message_id for message in at_once] == [str(task) for task in issued]
    assert [message.headers.get("again") for message in sent] == [1] * len(issued) + [None] * (
        len(sent) - len(issued)
    )
    assert world.audit().balanced


def test_rule_4_a_takeover_publishes_what_was_issued_while_the_broker_was_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner takes two steps on what it holds, commits both, and dies before the broker is back."""
    sent = watch_tasks(world, monkeypatch)
    workers, stopping = ThreadWorker(world), threading.Event()
    trainer = BookkeepingTrainer(lambda: outage() if len(trainer.steps) == 1 else wait_for_six())

    def wait_for_six() -> None:
        until(lambda: trainer.steps or len(workers.answered) >= 6)

    def outage() -> None:
        workers.__exit__()
        world.server.stop()

    workers.__enter__()
    learner = Background(world.learner(config_of(), trainer, stopping).run)
    until(lambda: len(trainer.steps) == 3 and world.latest().durable.version == 3)
    before = read_newest(world.store, world.latest())
    until(lambda: {*map(str, before.issued)} <= {one.message_id for one in sent})
    never_published = {str(task) for task, at in before.outstanding.items() if at >= 2}
    assert len(never_published) >= 4
    for publisher in world.server.publishers:  # it is gone, with what it still had to publish
        publisher._held.clear()
    stopping.set()
    assert learner.ends()
    world.server.start()
    sent.clear()
    with ThreadWorker(world):
        other = Background(world.learner(config_of(reissue_after_s=10_000.0)).run)
        until(lambda: len(sent) >= len(never_published))
        at_once = sent[: len(never_published)]
        assert other.ends()
    assert {one.message_id for one in at_once} == never_published
    assert all("again" in one.headers for one in at_once)
    assert world.audit().balanced


def test_rule_7_a_takeover_leads_reads_claims_restores_publishes_and_then_consumes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    class Watched(MemoryStore):
        def get(self, key: str) -> Stored:
            events.extend(["read"] * key.endswith("latest.json"))
            return super().get(key)

        def compare_and_swap(self, key: str, body: bytes, expected: str | None) -> str | None:
            events.extend(["claim"] * key.endswith("latest.json"))
            return super().compare_and_swap(key, body, expected)

    class Restoring(BookkeepingTrainer):
        def restore(self, state: bytes) -> None:
            events.append("restore")
            super().restore(state)

    lead, start, publish = (
        MemoryLeaderConsumer.lead,
        MemoryLeaderConsumer.start,
        MemoryPublisher.publish,
    )

    def watched(name: str, call):  # type: ignore[no-untyped-def]
        def first(*args, **options):  # type: ignore[no-untyped-def]
            events.append(name)
            return call(*args, **options)

        return first

    world.store = Watched()
    trainer, stopping = stopping_at(2)
    with ThreadWorker(world):
        world.learner(config_of(), trainer, stopping).run()
    monkeypatch.setattr(MemoryLeaderConsumer, "lead", watched("lead", lead))
    monkeypatch.setattr(MemoryLeaderConsumer, "start", watched("consume", start))
    monkeypatch.setattr(MemoryPublisher, "publish", watched("publish", publish))
    events.clear()
    stopping.clear()
    threading.Timer(1.0, stopping.set).start()
    world.learner(config_of(), Restoring(), stopping).run()
    order = list(dict.fromkeys(events))
    assert order == ["lead", "read", "claim", "restore", "publish", "consume"]


def test_rule_4_a_learner_that_never_waits_for_groups_misses_a_lost_task_all_the_same(
    world: World,
) -> None:
    """Its worker is faster than its steps: there is always a batch, and some task waits whenever one looks."""
    lost = TaskId(1)
    seen: list[TaskId] = []

    def act(worker: ThreadWorker, task: Task) -> list[Group]:
        is_lost = task.task_id == lost and lost not in seen
        seen.append(task.task_id)
        return [] if is_lost else [answer(task, worker.serving())]

    steps = 14
    trainer = BookkeepingTrainer(lambda: time.sleep(0.15))
    config = config_of(max_steps=steps, reissue_after_s=0.3)
    with ThreadWorker(world, act):
        world.learner(config, trainer).run()
    assert seen.count(lost) == 2
    step = next(i for i, tasks in enumerate(world.durable_steps()) if str(lost) in tasks)
    assert step < steps - 4, "only at the end, when there was nothing else to do"
    assert world.audit().balanced
