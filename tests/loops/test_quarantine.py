"""Workers whose engine does not sample what it says: alarmed of, and never trained where the run asks for that."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from spotgrpo.shared.ids import PolicyVersion
from spotgrpo.shared.wire import Float32Array, Group, Task
from tests.loops.test_learner_faults import Background, until
from tests.loops.test_learner_loop import expect_sound_books
from tests.tools.loop_world import (
    BookkeepingTrainer,
    ThreadWorker,
    World,
    answer,
    config_of,
    flatten,
)

FAULTS: dict[str, Callable[[Float32Array], Float32Array]] = {
    "another temperature": lambda logprobs: logprobs * np.float32(1.5),
    "the base": lambda logprobs: logprobs - np.float32(0.3),
}


def spoilt(group: Group, fault: str = "the base") -> Group:
    """The group with logprobs as an engine with that fault gives them."""
    rollouts = tuple(replace(one, logprobs=FAULTS[fault](one.logprobs)) for one in group.rollouts)
    return replace(group, rollouts=rollouts)


def hot(fault: str = "the base") -> Callable[[ThreadWorker, Task], Sequence[Group]]:
    """Answers as a worker of that name, with that fault."""
    return lambda worker, task: [spoilt(answer(task, worker.serving(), "hot"), fault)]


def well(worker: ThreadWorker, task: Task) -> Sequence[Group]:
    return [answer(task, worker.serving(), "well")]


def records(world: World) -> list[dict[str, Any]]:
    lines = (world.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@contextlib.contextmanager
def two_workers(world: World, fault: str) -> Iterator[tuple[ThreadWorker, ThreadWorker]]:
    """One of each; the one that is well does nothing before the other has."""
    has_begun = threading.Event()

    def second(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        assert has_begun.wait(10)
        return well(worker, task)

    def first(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        has_begun.set()
        return hot(fault)(worker, task)

    with ThreadWorker(world, first, prefetch=1) as bad, ThreadWorker(world, second, 1) as good:
        yield bad, good


@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_that_does_not_sample_what_it_says_is_alarmed_of_once(
    world: World, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    with two_workers(world, fault) as (bad, _):
        summary = world.learner(config_of(max_steps=8, max_staleness=0)).run()
    assert set(bad.answered) & set(flatten(world.durable_steps()))
    assert caplog.text.count("worker hot does not sample what it says") == 1
    assert "worker well" not in caplog.text
    assert summary["groups_quarantined"] == 0
    shown = [found for record in records(world) if (found := record["mismatch_by_worker"])]
    assert all(found.get("well", 0.0) == 0.0 for found in shown)
    assert any(found.get("hot", 0.0) > 0.2 for found in shown)
    assert any(record["mismatch_kl_by_worker"].get("hot", 0.0) > 0.03 for record in records(world))
    expect_sound_books(world, steps=8)


@pytest.mark.parametrize("fault", FAULTS)
def test_with_quarantine_no_group_of_such_a_worker_is_ever_trained(
    world: World, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """Not even its first; others are trained, the run comes to its end and its books balance."""
    with two_workers(world, fault) as (bad, good):
        config = config_of(max_steps=8, max_staleness=0, quarantine=True, max_attempts=100)
        summary = world.learner(config).run()
    trained = set(flatten(world.durable_steps()))
    assert bad.answered
    assert not trained & set(bad.answered)
    assert trained <= set(good.answered)
    assert summary["ended"] == "done"
    expect_sound_books(world, steps=8)
    last = records(world)[-1]
    assert last["quarantined"] == ["hot"]
    assert last["groups_quarantined"] == last["quarantined_by_worker"]["hot"] >= 1
    assert world.audit().stale >= last["groups_quarantined"]
    assert not last["stale_by_worker"]
    assert "its groups are not trained until they fit again" in caplog.text


def test_a_worker_that_fits_again_is_trained_again(world: World) -> None:
    """Its groups are looked at once a version while it is in quarantine."""
    is_cured = threading.Event()
    cured_from: list[str] = []

    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        group = answer(task, worker.serving(), "hot", tokens=40)
        if not is_cured.is_set():
            return [spoilt(group)]
        cured_from.append(str(task.task_id))
        return [group]

    trainer = BookkeepingTrainer(lambda: is_cured.set() if len(trainer.steps) == 4 else None)
    config = config_of(max_steps=30, max_staleness=0, quarantine=True, max_attempts=100)
    with ThreadWorker(world, act, prefetch=1) as bad:
        with ThreadWorker(world, well, prefetch=1):
            learner = Background(world.learner(config, trainer).run)
            until(is_cured.is_set)
        assert learner.ends(20)
    trained = set(flatten(world.durable_steps()))
    assert trained & set(cured_from)
    assert not trained & (set(bad.answered) - set(cured_from))
    assert any(record["quarantined"] for record in records(world))
    assert records(world)[-1]["quarantined"] == []
    expect_sound_books(world, steps=30)


def test_while_all_workers_are_in_quarantine_the_learner_says_so_and_goes_on_with_the_next(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    config = config_of(max_steps=3, quarantine=True)
    with ThreadWorker(world, hot()):
        learner = Background(world.learner(config, stall_warn_s=0.2).run)
        until(lambda: "groups of hot are not trained" in caplog.text)
        assert not learner.ends(0.0)
    assert world.audit().balanced
    assert world.audit().trained == 0
    with ThreadWorker(world, well):
        assert learner.ends()
    expect_sound_books(world, steps=3)


def test_of_groups_with_a_lag_nothing_is_known_and_none_is_refused(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        number = worker.serving().number
        if number < 1:
            return well(worker, task)
        return [spoilt(answer(task, PolicyVersion(1, number - 1), "late"))]

    with ThreadWorker(world, act):
        world.learner(config_of(max_steps=6, max_staleness=1, quarantine=True)).run()
    assert "does not sample" not in caplog.text
    assert not records(world)[-1]["groups_quarantined"]
    assert all("late" not in record["mismatch_by_worker"] for record in records(world))
    expect_sound_books(world, steps=6)
