"""A batch taken apart: rewards and advantages by source of the prompt, rewards by function. Pure.

The source of a prompt is what its row says in the column ``data_source`` or ``source``; of a reasoning-gym task, the
data set that made it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from spotgrpo.shared import gym
from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.wire import Group, Json, Rollout, Row

COLUMNS: Final = ("data_source", "source")
MOST_SHOWN: Final = 32
"""Sources of a batch that are shown, those with the most groups; reward functions likewise."""
LONGEST: Final = 60


@dataclass(frozen=True)
class Moments:
    """Count, sum and sum of squares of some numbers."""

    count: int = 0
    total: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Moments:
        given = [*values]
        return cls(len(given), math.fsum(given), math.fsum(value * value for value in given))

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            self.count + other.count, self.total + other.total, self.squares + other.squares
        )

    @property
    def mean(self) -> float | None:
        """None of nothing."""
        return self.total / self.count if self.count else None

    @property
    def std(self) -> float | None:
        """Population deviation; None of nothing."""
        if self.mean is None:
            return None
        return math.sqrt(max(self.squares / self.count - self.mean**2, 0.0))


def source_of(row: Row) -> str | None:
    """Where a prompt comes from; None where its row does not say."""
    entry = row.get(gym.ENTRY)
    metadata = entry.get("metadata") if isinstance(entry, dict) else None
    made_by = metadata.get("source_dataset") if isinstance(metadata, dict) else None
    for value in (*(row.get(column) for column in COLUMNS), made_by):
        if isinstance(value, str) and value.strip():
            return "".join(one if one.isprintable() else "?" for one in value.strip()[:LONGEST])
    return None


def by_source(groups: Sequence[Group], advantages: Mapping[TaskId, Moments]) -> dict[str, Json]:
    """Groups, rewards of scored rollouts and advantages of trained ones, by source.

    Args:
        advantages: of each trained group's trained rollouts.
    """
    members: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        source = source_of(group.row)
        if source is not None:
            members[source].append(group)
    most = sorted(members, key=lambda source: (-len(members[source]), source))[:MOST_SHOWN]
    rewards = {source: _spread(_rewards(members[source])) for source in most}
    trained = {
        source: sum(
            (advantages[one.task_id] for one in members[source] if one.task_id in advantages),
            Moments(),
        )
        for source in most
    }
    return {
        "groups_by_source": {source: len(members[source]) for source in most},
        "reward_by_source": {source: rewards[source][0] for source in most},
        "reward_std_by_source": {source: rewards[source][1] for source in most},
        "advantage_by_source": {source: trained[source].mean for source in most},
        "advantage_std_by_source": {source: trained[source].std for source in most},
    }


def by_function(rollouts: Sequence[Rollout]) -> dict[str, Json]:
    """Of each reward function, under TRL's names, mean and deviation of its numbers; ``none`` is how many it lacks."""
    names = dict.fromkeys(name for rollout in rollouts for name in rollout.reward_parts)
    found: dict[str, Json] = {}
    for name in [*names][:MOST_SHOWN]:
        given = [rollout.reward_parts.get(name) for rollout in rollouts]
        numbers = [value for value in given if value is not None]
        mean, std = _spread(numbers)
        found |= {f"rewards/{name}/mean": mean, f"rewards/{name}/std": std}
        found[f"rewards/{name}/none"] = len(given) - len(numbers)
    return found


def _rewards(groups: Sequence[Group]) -> list[float]:
    return [
        rollout.reward
        for group in groups
        for rollout in group.rollouts
        if rollout.reward is not None
    ]


def _spread(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and population deviation; None of nothing."""
    return (float(np.mean(values)), float(np.std(values))) if values else (None, None)
