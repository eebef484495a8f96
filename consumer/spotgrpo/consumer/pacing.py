"""How many tasks are worth having outstanding, and when a trainer state is worth storing. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from spotgrpo.shared.config import TrainConfig

SLACK = 8
"""Deliveries beyond the outstanding tasks that the prefetch window leaves room for: copies of groups."""


@dataclass(frozen=True)
class Pacing:
    """The run's rhythm; see the fields of ``TrainConfig`` with the same names."""

    max_steps: int
    groups_per_step: int
    max_staleness: int
    max_attempts: int
    durable_every: int

    @classmethod
    def of(cls, config: TrainConfig) -> Self:
        return cls(
            max_steps=config.max_steps,
            groups_per_step=config.groups_per_step,
            max_staleness=config.max_staleness,
            max_attempts=config.max_attempts,
            durable_every=config.durable_every,
        )

    @property
    def window(self) -> int:
        """Deliveries that the learner may hold unacked."""
        return (self.max_staleness + 1) * self.groups_per_step + SLACK

    def budget(self, version: int, outstanding: int) -> int:
        """New tasks that can still be trained within ``max_staleness``, and that the run needs at all."""
        can_be_trained = (self.max_staleness + 1) * self.groups_per_step
        needed = max(0, self.max_steps - version) * self.groups_per_step
        return max(0, min(can_be_trained, needed) - outstanding)

    def is_durable_due(self, version: int, unsettled: int) -> bool:
        """Every ``durable_every`` versions, at the end, and before tasks run short: issuing waits for a ledger."""
        short = unsettled < 2 * self.groups_per_step
        return short or version % self.durable_every == 0 or version >= self.max_steps
