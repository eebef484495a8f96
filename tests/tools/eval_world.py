"""Runs in memory that evaluate: held-out prompts, and who answers them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spotgrpo.consumer.held_out import HeldOut
from spotgrpo.consumer.learner import Learner
from spotgrpo.consumer.prompts import PromptRow
from spotgrpo.shared.config import Config
from spotgrpo.shared.eval_config import EvalConfig
from spotgrpo.shared.ids import held_out_prompt
from spotgrpo.shared.wire import Group, Task
from tests.tools.loop_world import BookkeepingTrainer, ThreadWorker, World, answer, config_of

PROMPTS = 4


def evaluating(every: int, given: dict[str, object] | None = None, **train: object) -> Config:
    """A configuration that evaluates; ``given`` goes to the eval table, keywords to the train table."""
    table = {"every": every, "split": "test", "prompts": PROMPTS, **(given or {})}
    return config_of(**train).model_copy(update={"eval": EvalConfig.model_validate(table)})


def held_out_of(config: Config) -> HeldOut:
    """As many prompts of one token as it asks for."""
    rows = tuple(PromptRow(f"h{i}", (1 + i,), {"n": i}) for i in range(config.eval.prompts))
    return HeldOut.of(config, rows, "3" * 64)


def learner_of(
    world: World,
    config: Config,
    trainer: BookkeepingTrainer | None = None,
    stopping: threading.Event | None = None,
) -> Learner:
    """A learner that evaluates."""
    return world.learner(config, trainer, stopping, held_out=held_out_of(config))


def eval_answer(task: Task, reward: float | None) -> Group:
    """A group for a held-out task as a worker would publish it, all its rewards alike."""
    assert task.pinned is not None
    group = answer(task, task.pinned)
    rollouts = tuple(
        replace(one, reward=reward, reward_parts={"r": reward}) for one in group.rollouts
    )
    return replace(group, kind="eval", rollouts=rollouts)


@dataclass
class Clerk:
    """What a ThreadWorker does: training is answered, held-out tasks as ``answers`` says.

    Args:
        reward: of a held-out prompt: version number and prompt → reward.
        answers: of a held-out task and its answer, what to publish; all of it where it is None.
    """

    reward: Callable[[int, int], float | None]
    answers: Callable[[Task, Group], Sequence[Group]] | None = None
    asked: list[Task] = field(default_factory=list)

    def __call__(self, worker: ThreadWorker, task: Task) -> Sequence[Group]:
        if task.kind == "train":
            return [answer(task, worker.serving())]
        assert task.pinned is not None
        self.asked.append(task)
        group = eval_answer(task, self.reward(task.pinned.number, held_out_prompt(task.task_id)))
        return [group] if self.answers is None else self.answers(task, group)

    def prompts_asked(self, number: int) -> list[int]:
        """Of the version of that number, in order."""
        found = [
            task.task_id for task in self.asked if task.pinned and task.pinned.number == number
        ]
        return [held_out_prompt(task) for task in found]


def records(world: World, role: str = "eval") -> list[dict[str, Any]]:
    """What the metrics file has of ``role``."""
    lines = (world.folder / "metrics.jsonl").read_text().splitlines()
    return [record for line in lines if (record := json.loads(line))["role"] == role]
