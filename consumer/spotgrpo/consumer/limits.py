"""When a run ends before ``train.max_steps``: its time, its target, or evaluations that get no better."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from spotgrpo.shared.config import Config
    from spotgrpo.shared.manifest import Evaluated, Latest

TARGET_BATCHES: Final = 10
"""Without evaluations, ``train.target_reward`` is held against the mean reward of so many batches."""


class Limits:
    """The limits of one configuration, in the hands of the learner that took over at ``latest``.

    A limit is named by its key and value, so that a finished run whose limit was raised goes on, and a standby that
    takes over one whose limit was not finishes it at once. Time and evaluations are in ``latest.json``; batches are
    not, but that they ended the run is.

    Args:
        clock: monotonic seconds.
    """

    def __init__(
        self, config: Config, latest: Latest, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_wall_s, self._target = config.train.max_wall_s, config.train.target_reward
        self._patience, self._evaluates = config.eval.patience, config.eval.every is not None
        self._clock, self._began, self._before_s = clock, clock(), latest.wall_s
        self._rewards: deque[float] = deque(maxlen=TARGET_BATCHES)
        self._has_met_target = not self._evaluates and latest.ended == self._target_name

    @property
    def wall_s(self) -> float:
        """Seconds that learners have led the run, this one included. Those after a dead one's last commit are lost."""
        return self._before_s + self._clock() - self._began

    @property
    def needs_wall_s(self) -> bool:
        """Whether the time is worth a commit of its own."""
        return self._max_wall_s is not None

    def trained(self, reward: float | None) -> None:
        """Take a batch's mean reward in; one that nobody scored says nothing."""
        if reward is not None:
            self._rewards.append(reward)

    def reached(self, evaluated: Evaluated | None) -> str:
        """The limit that ends the run now, as key and value, or nothing. One that was reached stays so."""
        if self._target is not None and self._meets(self._target, evaluated):
            return self._target_name
        if self._patience is not None and evaluated and evaluated.since_best >= self._patience:
            return f"eval.patience = {self._patience}"
        if self._max_wall_s is not None and self.wall_s >= self._max_wall_s:
            return f"train.max_wall_s = {self._max_wall_s:g}"
        return ""

    def _meets(self, target: float, evaluated: Evaluated | None) -> bool:
        if self._evaluates:
            best = evaluated.best if evaluated is not None else None
            return best is not None and best.reward >= target
        is_full = len(self._rewards) == TARGET_BATCHES
        mean = sum(self._rewards) / TARGET_BATCHES
        self._has_met_target = self._has_met_target or (is_full and mean >= target)
        return self._has_met_target

    @property
    def _target_name(self) -> str:
        return f"train.target_reward = {self._target}"
