"""What the last steps were like, for workers to forecast by. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from spotgrpo.shared.wire import Group

STEPS: Final = 3
"""A median: the first step of a run may have waited for workers to come, and one may wait for anything."""
GROUPS: Final = 64


@dataclass
class Lately:
    """Medians over the last steps; 0 before the first."""

    _steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    _trains_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS))
    _tokens: deque[int] = field(default_factory=lambda: deque(maxlen=GROUPS))

    def stepped(self, whole_s: float, train_s: float, groups: Sequence[Group]) -> None:
        """A step on ``groups`` ended, ``whole_s`` after the one before, and ``train_s`` after they were chosen."""
        self._steps_s.append(whole_s)
        self._trains_s.append(train_s)
        self._tokens.extend(longest_of(group) for group in groups)

    @property
    def step_s(self) -> float:
        """Seconds from one step to the next."""
        return median(self._steps_s) if self._steps_s else 0.0

    @property
    def train_s(self) -> float:
        """Seconds of a step without its waits."""
        return median(self._trains_s) if self._trains_s else 0.0

    @property
    def group_tokens(self) -> float:
        """Tokens of a group's longest completion: what it takes as long as."""
        return float(median(self._tokens)) if self._tokens else 0.0


def longest_of(group: Group) -> int:
    """Tokens of its longest completion."""
    return max(len(rollout.token_ids) for rollout in group.rollouts)
