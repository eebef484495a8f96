"""What a worker says it is doing and waits for, as a table."""

from __future__ import annotations

import dataclasses

import pytest

from spotgrpo.consumer.roster import LEFT as LEFT_AS_THE_LEARNER_KNOWS_IT
from spotgrpo.consumer.stall import STATES
from spotgrpo.producer.activity import (
    BLOCKED,
    DRAINING,
    IDLE,
    LEAVES_TASKS,
    LEFT,
    SHOWN_FIRST,
    Activity,
    Held,
    Limits,
    Stage,
)
from spotgrpo.shared.ids import Queues

QUEUES = Queues("r")
LIMITS = Limits(max_inflight=64, engine_stall_s=300.0, reward_timeout_s=120.0)
NOW = 1000.0


def activity(*stages: Stage, **changes: object) -> Activity:
    """A worker that serves v2 and holds a task in each of ``stages``, the first for 40 s, the next for 41 s, …"""
    held = [Held(stage, NOW - 40 - i, min_version=5 + i) for i, stage in enumerate(stages)]
    return dataclasses.replace(Activity(NOW, held, "v2"), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("worker", "state"),
    [
        (activity(), "idle"),
        (activity(serves=None), "waiting for a version"),
        (activity(Stage.ADOPTING), "waiting for a version"),
        (activity(Stage.ADOPTING, serves=None), "waiting for a version"),
        (activity(Stage.RECALLING), "looking for partials"),
        (activity(Stage.QUEUING), "waiting for room"),
        (activity(Stage.SAMPLING), "generating"),
        (activity(Stage.SCORING), "scoring"),
        (activity(Stage.STORING), "storing"),
        (activity(Stage.PUBLISHING), "publishing"),
        # Work is shown before waiting.
        (activity(Stage.ADOPTING, Stage.QUEUING, Stage.SAMPLING), "generating"),
        (activity(Stage.ADOPTING, Stage.SCORING), "scoring"),
        (activity(Stage.PUBLISHING, Stage.SAMPLING), "generating"),
        (activity(Stage.ADOPTING, Stage.PUBLISHING), "publishing"),
        # A broker that takes nothing matters once there is something to give.
        (activity(Stage.PUBLISHING, Stage.SAMPLING, is_blocked=True), "publishing blocked"),
        (activity(Stage.SAMPLING, is_blocked=True), "generating"),
        (activity(is_blocked=True), "idle"),
        # The end.
        (activity(Stage.SAMPLING, is_draining=True), "draining"),
        (activity(Stage.PUBLISHING, is_blocked=True, is_draining=True), "draining"),
        (activity(is_draining=True, has_left=True), "left"),
    ],
)
def test_the_state_follows_from_what_is_held(worker: Activity, state: str) -> None:
    assert worker.state == state


def test_every_stage_has_its_place() -> None:
    assert sorted(SHOWN_FIRST) == sorted(Stage)


def test_the_learner_knows_every_state_that_a_worker_reports() -> None:
    assert {*Stage, IDLE, BLOCKED, DRAINING, LEAVES_TASKS} == set(STATES)
    assert LEFT == LEFT_AS_THE_LEARNER_KNOWS_IT


@pytest.mark.parametrize(
    ("worker", "said"),
    [
        (
            activity(),
            f"no task in {QUEUES.tasks}; the learner hands out none, or is not there",
        ),
        (
            activity(is_connected=False),
            f"there is no connection to {QUEUES.tasks}, so no task comes",
        ),
        (activity(serves=None), "there is no version to serve yet"),
        (
            activity(serves=None, refused_why="v0: its sha256 is another"),
            "there is no version to serve yet (the newest is refused: v0: its sha256 is another)",
        ),
        (
            activity(Stage.ADOPTING, Stage.ADOPTING, trouble="the bucket is away"),
            "2 tasks waiting for version 5 or newer, v2 is served (the bucket is away), for 41 s",
        ),
        (
            activity(Stage.ADOPTING, serves=None, refused_why="v5: probe", trouble="away"),
            "1 task waiting for version 5 or newer, none is served (the newest is refused: v5: probe; away), for 40 s",
        ),
        (
            activity(Stage.RECALLING),
            "1 task waiting for the bucket to say whether another worker left partials, for 40 s",
        ),
        (
            activity(Stage.QUEUING),
            "1 task waiting for room in the engine (worker.max_inflight = 64), for 40 s",
        ),
        (
            activity(Stage.SAMPLING, inflight=8),
            (
                "1 task in the engine with 8 sequences (without a token for worker.engine_stall_s = 300 s this "
                "worker ends), for 40 s"
            ),
        ),
        (
            activity(Stage.SCORING),
            "1 task waiting for rewards (worker.reward_timeout_s = 120), for 40 s",
        ),
        (
            activity(Stage.STORING),
            "1 task waiting for the bucket to take a group that is too big for a message, for 40 s",
        ),
        (
            activity(Stage.PUBLISHING),
            f"1 task waiting for {QUEUES.rollouts} to confirm the group, for 40 s",
        ),
        (
            activity(Stage.PUBLISHING, Stage.SCORING, is_blocked=True),
            (
                f"1 task waiting for rewards (worker.reward_timeout_s = 120), for 41 s; 1 task waiting for "
                f"{QUEUES.rollouts} to confirm the group, which takes none now: an alarm, a full queue, or no "
                f"connection, for 40 s"
            ),
        ),
    ],
)
def test_every_wait_has_a_sentence(worker: Activity, said: str) -> None:
    assert worker.waits_for(QUEUES, LIMITS) == said


@pytest.mark.parametrize(
    ("worker", "is_idle"),
    [
        (activity(), True),
        (activity(is_connected=False), False),
        (activity(serves=None), False),
        (activity(Stage.SCORING), False),
    ],
)
def test_idle_is_a_worker_with_nothing_wrong(worker: Activity, is_idle: bool) -> None:
    assert worker.is_idle == is_idle
