"""Which side waits for which: seconds, shares and the sentence that says what to scale."""

from __future__ import annotations

import pytest

from spotgrpo.consumer.balance import (
    CAUSES,
    EVERY_S,
    FIRST_S,
    Balance,
    Fleet,
    LearnerSeconds,
    figures,
    seconds_of,
    sentence,
)
from spotgrpo.consumer.roster import Roster
from spotgrpo.producer.activity import Activity, Held, Stage
from spotgrpo.producer.usage import CAUSES as AS_WORKERS_CALL_THEM
from spotgrpo.producer.usage import Usage, why_empty
from spotgrpo.shared.wire import Report


def fleet(busy: float = 0.0, **idle: float) -> Fleet:
    return Fleet(busy, dict.fromkeys(CAUSES, 0.0) | idle)


def learner(rollouts: float = 0.0, commit: float = 0.0, whole: float = 300.0) -> LearnerSeconds:
    return LearnerSeconds(whole, rollouts, commit)


@pytest.mark.parametrize(
    ("seconds", "workers", "text"),
    [
        (
            learner(186),
            fleet(900),
            "the learner waited 62% of the last 5 min for rollouts: add workers",
        ),
        (
            learner(186),
            fleet(),
            "the learner waited 62% of the last 5 min for rollouts: add workers (none is heard of)",
        ),
        (
            learner(30),
            fleet(600, tasks=400),
            "workers idled 40% of the last 5 min for want of tasks: the learner is the limit",
        ),
        (
            learner(120),
            fleet(500, tasks=500),
            (
                "the learner waited 40% of the last 5 min for rollouts while workers idled 50% for want of tasks: more "
                "can be outstanding with a larger train.max_staleness or train.groups_per_step"
            ),
        ),
        (
            learner(30),
            fleet(900, tasks=50),
            "learner and workers kept each other busy over the last 5 min",
        ),
        (
            learner(commit=40, whole=100),
            fleet(100),
            "the learner waited 40% of the last 100 s for the bucket: a faster link to it, or train.durable_every",
        ),
        (
            learner(),
            fleet(50, blocked=50),
            (
                "workers had 50% of their places empty over the last 5 min since the broker took no groups: the "
                "rollouts "
                "queue is full, or an alarm of the broker is on"
            ),
        ),
        (
            learner(150),
            fleet(70, too_slow=30),
            (
                "the learner waited 50% of the last 5 min for rollouts: add workers; workers left 30% of their places "
                "empty, since they could finish nothing within train.max_staleness: raise it, or replace the slow ones"
            ),
        ),
        (
            learner(),
            fleet(70, version=30),
            (
                "workers had 30% of their places empty for want of a version: see what they refuse, and their link to "
                "the bucket"
            ),
        ),
    ],
)
def test_a_sentence_says_which_side_to_scale(
    seconds: LearnerSeconds, workers: Fleet, text: str
) -> None:
    assert sentence(seconds, workers) == text


def test_a_record_has_the_seconds_since_the_last_one_and_a_sentence_comes_now_and_then() -> None:
    balance, workers = Balance(began=100.0), fleet(10.0, tasks=5.0)
    balance.waited.rollouts = 4.0
    first = balance.record(110.0, workers)
    assert (first["perf/rollout_wait_share"], first["rollout/backpressure_s"]) == (0.4, 5.0)
    workers.grow({"busy": 0.0, "blocked": 1.0}, {"busy": 6.0, "blocked": 3.0})
    balance.waited.rollouts = 5.0
    second = balance.record(120.0, workers)
    assert (second["perf/rollout_wait_share"], second["rollout/busy_s"]) == (0.1, 6.0)
    assert (second["rollout/backpressure_s"], second["rollout/backpressure_share"]) == (2.0, 0.25)
    assert not balance.say(100.0 + FIRST_S - 1, workers)
    assert balance.say(100.0 + FIRST_S, workers).startswith("workers idled 22% of the last 60 s")
    balance.waited.rollouts = 5.0 + EVERY_S
    assert not balance.say(100.0 + FIRST_S + EVERY_S - 1, workers)
    said = balance.say(100.0 + FIRST_S + EVERY_S, workers)
    assert said.startswith("the learner waited 100% of the last 5 min for rollouts")
    whole = balance.whole(1100.0, workers)
    assert whole["rollout_wait_share"] == pytest.approx(0.305)
    assert whole["backpressure_share"] == pytest.approx(7 / 23)


def test_without_a_second_of_anything_there_are_figures_all_the_same() -> None:
    assert set(figures(LearnerSeconds(), Fleet()).values()) == {0.0}


def test_the_roster_adds_up_what_workers_report_from_the_first_report_on() -> None:
    roster = Roster(None)

    def heard(worker: str, busy_s: object, **idle: object) -> None:
        values = {"state": "generating", "busy_s": busy_s, "idle_s": idle}
        roster.heard(Report(worker, "worker", 0.0, values))  # type: ignore[arg-type]

    heard("a", 1000.0, tasks=50.0)
    assert roster.fleet.total_s == 0.0
    heard("b", 0.0)
    heard("a", 1004.0, tasks=51.0, blocked=2.0)
    heard("b", 3.0, tasks="many", other=5.0)
    assert (roster.fleet.busy_s, roster.fleet.share("tasks")) == (7.0, 0.1)
    heard("a", 1.0)  # not less than nothing, whatever it says
    assert roster.fleet.total_s == 10.0


def test_what_a_worker_reports_is_read_by_its_own_names() -> None:
    assert CAUSES == AS_WORKERS_CALL_THEM
    assert seconds_of({"busy_s": 1, "idle_s": {"tasks": 2.0, "new": 3.0}}) == {
        "busy": 1.0,
        "tasks": 2.0,
    }
    assert seconds_of({"idle_s": 7}) == {}


@pytest.mark.parametrize(
    ("stages", "changes", "cause"),
    [
        ([], {}, "tasks"),
        ([], {"serves": None}, "version"),
        ([Stage.SAMPLING, Stage.ADOPTING], {}, "version"),
        ([Stage.PUBLISHING], {"is_blocked": True}, "blocked"),
        ([Stage.SCORING], {"is_blocked": True}, "tasks"),
        ([Stage.SAMPLING], {"leaves_tasks": True}, "too_slow"),
    ],
)
def test_empty_places_have_a_cause(
    stages: list[Stage], changes: dict[str, object], cause: str
) -> None:
    tasks = [Held(stage, 0.0) for stage in stages]
    activity = Activity(**{"now": 1.0, "tasks": tasks, "serves": "v1", **changes})  # type: ignore[arg-type]
    assert why_empty(activity) == cause


def test_usage_splits_time_by_the_share_of_places_that_were_taken() -> None:
    usage = Usage(places=4, at=10.0)
    usage.note(12.0, 6.0, "tasks")  # 6 of 8 seconds of places
    usage.note(16.0, 6.0, "blocked")
    assert (usage.busy_s, usage.idle_s["tasks"], usage.idle_s["blocked"]) == (1.5, 0.5, 4.0)
