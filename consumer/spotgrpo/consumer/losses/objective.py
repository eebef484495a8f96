"""The choice of loss parts, with what they need to know of the run. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spotgrpo.shared.loss_config import LossConfig

if TYPE_CHECKING:
    from spotgrpo.shared.config import Config


@dataclass(frozen=True)
class Objective:
    """What is minimised.

    Attributes:
        parts: the loss, part by part.
        max_new_tokens: longest completion that is sampled.
        completions: how many a step asks for: groups of a step × rollouts of a group.
    """

    parts: LossConfig = field(default_factory=LossConfig)
    max_new_tokens: int = 512
    completions: int = 64

    @classmethod
    def of(cls, config: Config) -> Objective:
        """That of a run."""
        sampling = config.sampling
        return cls(
            config.loss,
            sampling.max_new_tokens,
            config.train.groups_per_step * sampling.group_size,
        )
