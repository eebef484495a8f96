"""What a run says of its lags, its drops, and of who waited for whom."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest

from spotgrpo.consumer import balance
from spotgrpo.shared.ids import PolicyVersion
from spotgrpo.shared.memory.broker import MemoryBroker
from spotgrpo.shared.ports import Message
from spotgrpo.shared.wire import Group, Report, Task, encode_report
from tests.tools.loop_world import RUN, ThreadWorker, World, answer, config_of


def records(world: World) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (world.folder / "metrics.jsonl").read_text().splitlines()]


def test_every_group_of_a_run_is_in_the_histograms_and_drops_have_a_cause_and_a_length(
    world: World,
) -> None:
    late = set()

    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        version = worker.serving()
        if version.number >= 2 and task.task_id.index % 4 == 0 and task.task_id.attempt == 1:
            late.add(str(task.task_id))  # as if it had taken the worker all the time
            return [answer(task, PolicyVersion(version.epoch, 0), worker="slow", tokens=3)]
        return [answer(task, version)]

    with ThreadWorker(world, act):
        summary = world.learner(config_of(max_steps=10, max_staleness=1)).run()
    last = records(world)[-1]
    assert last["dropped_in_flight"] == summary["groups_stale"] == len(late) > 0
    assert last["dropped_in_queue"] == last["dropped_quarantine"] == 0
    assert last["stale_by_worker"] == {"slow": len(late)}
    assert last["dropped_by_length"] == {"4": len(late)}
    assert last["batched_by_length"] == {"2": summary["groups_trained"]}
    in_flight, in_queue = (
        last[f"staleness_{where}_histogram"] for where in ("in_flight", "in_queue")
    )
    assert sum(in_flight) == sum(in_queue) == summary["groups_trained"] + len(late)
    assert sum(in_flight[2:]) == len(late)
    assert last["frac_reward_zero_std"] == 0.0


def test_a_run_says_who_waited_for_whom_in_figures_and_in_words(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(balance, "FIRST_S", 0.0)
    publisher, seconds = MemoryBroker(world.server, RUN).publisher(), iter(range(1000))

    def act(worker: ThreadWorker, task: Task) -> Sequence[Group]:
        """With a report for each task: a second of work, and one for want of tasks."""
        second = float(next(seconds))
        values = {"state": "idle", "busy_s": second, "idle_s": {"tasks": second, "blocked": 0.0}}
        report = Report("w", "worker", 0.0, values)  # type: ignore[arg-type]
        publisher.broadcast(world.queues.telemetry, Message(encode_report(report)))
        return [answer(task, worker.serving())]

    with ThreadWorker(world, act), caplog.at_level(logging.INFO):
        summary = world.learner(config_of(max_steps=6)).run()
    found = records(world)
    assert {record["rollout/backpressure_share"] for record in found} <= {0.0, 0.5}
    waited = sum(record["rollout/backpressure_s"] for record in found)
    assert waited == sum(record["rollout/no_task_s"] for record in found) > 0
    assert summary["backpressure_share"] == 0.5
    assert 0.0 <= float(str(summary["rollout_wait_share"])) <= 1.0
    for text in (caplog.text, str(summary["balance"])):
        assert "workers idled 50%" in text
    publisher.close()
