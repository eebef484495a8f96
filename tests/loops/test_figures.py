"""What every step says of itself: in ``metrics.jsonl``, in telemetry, and as warnings in the log."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest

from spotgrpo.consumer.breakdown import Moments
from spotgrpo.shared.wire import Group, Task
from tests.tools.loop_world import BookkeepingTrainer, Stats, ThreadWorker, World, answer, config_of


class FarTrainer(BookkeepingTrainer):
    """Its policy is far from those that sampled."""

    def step(self, groups: Sequence[Group]) -> Stats:
        advantages = {group.task_id: Moments.of([0.5, -0.5]) for group in groups}
        return replace(super().step(groups), mismatch_kl=0.5, base_kl=0.25, advantages=advantages)


def with_source(worker: ThreadWorker, task: Task) -> Sequence[Group]:
    group = answer(task, worker.serving())
    source = "odd" if task.task_id.index % 2 else "even"
    first = replace(group.rollouts[0], reward_parts={"r": None, "s": 0.0})
    return [replace(group, row={"source": source}, rollouts=(first, *group.rollouts[1:]))]


def test_each_step_is_taken_apart_by_source_and_function_and_warned_of_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with ThreadWorker(world, with_source):
        world.learner(config_of(max_steps=4, max_staleness=0), FarTrainer()).run()
    lines = (world.folder / "metrics.jsonl").read_text().splitlines()
    for record in map(json.loads, lines):
        assert record["groups_by_source"] == {"even": 1, "odd": 1}
        assert record["reward_by_source"] == {"even": 0.5, "odd": 0.5}
        assert record["advantage_std_by_source"] == {"even": 0.5, "odd": 0.5}
        assert (record["advantage_mean"], record["advantage_std"]) == (0.0, 0.5)
        assert (record["rewards/r/none"], record["rewards/r/mean"]) == (2, 1.0)
        assert (record["rewards/s/none"], record["rewards/s/mean"]) == (2, 0.0)
        assert (record["kl"], record["mismatch_kl"]) == (0.25, 0.5)
        assert record["mismatched"] == []
    warned = [one.getMessage() for one in caplog.records if "(mismatch_kl)" in one.getMessage()]
    assert len(warned) == 1
    assert warned[0].startswith("step to version 1: the policy is 0.5 nats from those that sampled")
    said = [one.getMessage() for one in caplog.records if "version 4/4" in one.getMessage()]
    assert "entropy 1  mismatch_kl 0.5  ratio_max 1  grad_norm 1" in said[0]
