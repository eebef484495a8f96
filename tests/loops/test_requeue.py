"""Dead tasks tried again because a person asked, whatever dies between; one story a test."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from spotgrpo.consumer.audit import read_chain
from spotgrpo.consumer.dead import ask_again, list_dead
from spotgrpo.consumer.ledger import Ledger, decode_ledger
from spotgrpo.consumer.requeue import encode_request
from spotgrpo.shared.config import Config
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.memory.store import MemoryStore
from spotgrpo.shared.steps import Step, observe
from spotgrpo.shared.wire import Group, Task
from tests.tools.loop_world import (
    BookkeepingTrainer,
    ThreadWorker,
    World,
    answer,
    config_of,
    flatten,
)


class Killed(Exception):
    """Stands for SIGKILL: unwinds the learner at a chosen point."""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Learners look for requests all the time, and nobody watches their steps once the test is over."""
    monkeypatch.setattr("spotgrpo.consumer.requeue.LOOK_S", 0.0)
    yield
    observe(None)


def poisoning(*indexes: int, until: int = 1) -> Callable[[ThreadWorker, Task], Sequence[Group]]:
    """A worker whose attempts up to ``until`` at some prompts are sampled at a temperature that is not the run's."""

    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        group = answer(task, worker.serving())
        if task.task_id.index in indexes and task.task_id.attempt <= until:
            group = replace(group, sampling=replace(group.sampling, temperature=0.5))
        return [group]

    return act


def run_until_dead(world: World, *indexes: int, stop_at: int = 2) -> None:
    """A learner that stops after a few steps, with these first attempts dead and not retried."""
    stopping = threading.Event()
    trainer = BookkeepingTrainer(lambda: stopping.set() if len(trainer.steps) == stop_at else None)
    with ThreadWorker(world, poisoning(*indexes)):
        world.learner(config(), trainer, stopping).run()
    assert [one.task for one in list_dead(world.store, world.keys).tasks] == [
        str(TaskId(index)) for index in indexes
    ]


def config(max_steps: int = 8) -> Config:
    return config_of(max_steps=max_steps, max_attempts=1)


def expect_trained_once(world: World, *tasks: TaskId) -> None:
    """Books that balance, and weights that hold each of ``tasks`` once; nothing is asked for any more."""
    report = world.audit()
    assert report.balanced, report.to_dict()
    trained = flatten(world.durable_steps())
    assert [trained.count(str(task)) for task in tasks] == [1] * len(tasks)
    assert len(trained) == len(set(trained)) == report.trained
    assert not list(world.store.list(world.keys.requeues))
    assert not list(world.store.list(world.keys.dead_letters))


def ledgers(world: World) -> list[Ledger]:
    """All that are in the bucket, committed or not."""
    keys = [info.key for info in world.store.list(world.keys.ledgers)]
    return [decode_ledger(world.store.get(key).body) for key in keys]


def test_a_dead_task_is_tried_again_by_the_learner_that_runs(world: World) -> None:
    asked: list[str] = []

    def ask() -> None:
        dead = list_dead(world.store, world.keys).tasks
        if not asked and dead and dead[0].stands == "can be requeued":
            asked.extend(ask_again(world.store, world.keys, None).tasks)

    with ThreadWorker(world, poisoning(1)):
        summary = world.learner(config(20), BookkeepingTrainer(ask)).run()
    assert asked == [str(TaskId(1))]
    assert summary["groups_dead"] == 1
    expect_trained_once(world, TaskId(1, 2))


def test_a_request_waits_for_a_learner_to_run(world: World) -> None:
    run_until_dead(world, 1)
    ask_again(world.store, world.keys, [str(TaskId(1))])
    with ThreadWorker(world):
        world.learner(config()).run()
    expect_trained_once(world, TaskId(1, 2))


def test_a_request_of_a_finished_run_takes_effect_when_more_steps_are_allowed(world: World) -> None:
    with ThreadWorker(world, poisoning(1)):
        world.learner(config(3)).run()
    assert ask_again(world.store, world.keys, None).finished
    with ThreadWorker(world):
        world.learner(config(3)).run()
        assert list(world.store.list(world.keys.requeues)), "there is nothing left to train it in"
        world.learner(config(6)).run()
    expect_trained_once(world, TaskId(1, 2))


@pytest.mark.parametrize(
    "step",
    [Step.LEARNER_STATE_STORED, Step.LEARNER_DURABLE, Step.LEARNER_ACKED, Step.LEARNER_ISSUED],
)
def test_a_learner_killed_around_the_commit_issues_the_next_attempt_once(
    world: World, step: Step
) -> None:
    run_until_dead(world, 1)
    ask_again(world.store, world.keys, None)
    again = TaskId(1, 2)
    died: list[Step] = []

    def kill(at: Step) -> None:
        if at is step and not died and any(again in ledger.issued for ledger in ledgers(world)):
            died.append(at)
            raise Killed

    observe(kill)
    with ThreadWorker(world):
        with pytest.raises(Killed):
            world.learner(config()).run()
        assert list(world.store.list(world.keys.requeues))
        world.learner(config()).run()
    assert died
    expect_trained_once(world, again)
    issued = [task for ledger in read_chain(world.store, world.latest()) for task in ledger.issued]
    assert issued.count(again) == 1


@pytest.mark.parametrize("folder", ["dead/", "requeue/"])
def test_a_learner_killed_while_it_deletes_issues_the_next_attempt_once(
    world: World, folder: str
) -> None:
    class Fatal(MemoryStore):
        is_fatal = False

        def delete(self, keys: Sequence[str]) -> None:
            if self.is_fatal and any(folder in key for key in keys):
                self.is_fatal = False
                raise Killed
            super().delete(keys)

    world.store = store = Fatal()
    run_until_dead(world, 1)
    ask_again(world.store, world.keys, None)
    store.is_fatal = True
    with ThreadWorker(world):
        with pytest.raises(Killed):
            world.learner(config()).run()
        world.learner(config()).run()
    expect_trained_once(world, TaskId(1, 2))


def test_a_learner_killed_again_and_again_still_issues_it_once(world: World) -> None:
    run_until_dead(world, 1, 2)
    ask_again(world.store, world.keys, None)
    left = [Step.LEARNER_STATE_STORED, Step.LEARNER_DURABLE, Step.LEARNER_ISSUED]

    def kill(at: Step) -> None:
        if left and at is left[0]:
            left.pop(0)
            raise Killed

    observe(kill)
    with ThreadWorker(world):
        while left:
            with pytest.raises(Killed):
                world.learner(config()).run()
        world.learner(config()).run()
    expect_trained_once(world, TaskId(1, 2), TaskId(2, 2))


def test_requests_for_other_tasks_are_refused_and_dropped(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    run_until_dead(world, 1)
    for task in (TaskId(0), TaskId(400)):
        with pytest.raises(ConfigError, match=f"TASK = '{task}'"):
            ask_again(world.store, world.keys, [str(task)])
        world.store.create(world.keys.requeue(task), encode_request(task))
    with ThreadWorker(world), caplog.at_level(logging.WARNING):
        world.learner(config()).run()
    assert f"try task {TaskId(0)} again is dropped" in caplog.text
    assert f"try task {TaskId(400)} again is dropped" in caplog.text
    assert not list(world.store.list(world.keys.requeues))
    assert world.audit().issued_twice == []
    assert str(TaskId(400)) not in flatten(world.durable_steps())


def test_many_requests_at_once_leave_no_more_outstanding_than_can_be_trained(world: World) -> None:
    indexes = range(1, 6)
    run_until_dead(world, *indexes, stop_at=1)
    assert len(ask_again(world.store, world.keys, None).tasks) == len(indexes)
    for index in range(900, 905):
        world.store.create(world.keys.requeue(TaskId(index)), encode_request(TaskId(index)))
    with ThreadWorker(world):
        world.learner(config(20)).run()
    assert max(len(ledger.outstanding) for ledger in ledgers(world)) <= 6
    expect_trained_once(world, *(TaskId(index, 2) for index in indexes))


def test_an_attempt_that_dies_again_can_be_asked_for_again(world: World) -> None:
    run_until_dead(world, 1)

    ask_again(world.store, world.keys, None)
    with ThreadWorker(world, poisoning(1, until=2)):
        world.learner(config(9)).run()
    assert ask_again(world.store, world.keys, None).tasks == (str(TaskId(1, 2)),)
    with ThreadWorker(world):
        world.learner(config(14)).run()
    expect_trained_once(world, TaskId(1, 3))
