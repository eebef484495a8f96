"""How well behaviour logprobs fit those that the trainer computes itself. Pure numpy.

At lag 0 both are of the same weights, tokens and temperature: what differs is rounding, or a fault.

Shape suffixes: N predicted tokens of a micro-batch.
"""

# ruff: noqa: N803  (shape suffixes: the legend is above)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from spotgrpo.consumer.packing import Float32Array, MicroBatch
from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.wire import Group

LONGEST_LOG_RATIO: Final = 20.0
"""As the loss has it: exp(20) is finite, and far outside anything that fits."""


@dataclass(frozen=True)
class Fit:
    """Sums over tokens, with log r = recomputed − behaviour logprob, in nats.

    Attributes:
        gap: of |log r|.
        kl: of r − 1 − log r, the k3 estimator of KL(μ‖π) for tokens sampled from μ (Schulman 2020,
            joschu.net/blog/kl-approx.html).
    """

    tokens: int = 0
    gap: float = 0.0
    kl: float = 0.0

    def __add__(self, other: Fit) -> Fit:
        return Fit(self.tokens + other.tokens, self.gap + other.gap, self.kl + other.kl)

    @property
    def mean_gap(self) -> float:
        """Mean |behaviour − recomputed| logprob."""
        return self.gap / max(self.tokens, 1)

    @property
    def mean_kl(self) -> float:
        """``mismatch_kl`` of these tokens."""
        return self.kl / max(self.tokens, 1)


@dataclass
class StepFits:
    """The fit of each group of a step, from logprobs that the step computes anyway.

    Args:
        tasks: of each sample, by ``Sample.index``.
    """

    tasks: Sequence[TaskId]
    by_task: dict[TaskId, Fit] = field(default_factory=dict)

    def add(self, batch: MicroBatch, logprobs_N: Float32Array) -> None:
        """Take in the trained tokens of ``batch``."""
        for owner in np.unique(batch.owner_N):
            mine = batch.mask_N & (batch.owner_N == owner)
            found = _fit(batch.behaviour_N[mine], logprobs_N[mine])
            task = self.tasks[owner]
            self.by_task[task] = self.by_task.get(task, Fit()) + found


def group_fit(group: Group, recomputed: Sequence[Float32Array]) -> Fit:
    """The fit of a group's unmasked tokens.

    Args:
        recomputed: the trainer's logprobs of each rollout's tokens, at the sampling temperature.
    """
    found = Fit()
    for rollout, logprobs in zip(group.rollouts, recomputed, strict=True):
        mask = rollout.loss_mask
        found += _fit(rollout.logprobs[mask], logprobs[mask])
    return found


def _fit(behaviour: Float32Array, recomputed: Float32Array) -> Fit:
    apart: npt.NDArray[np.float64] = recomputed.astype(np.float64) - behaviour
    log_ratio = np.clip(apart, -LONGEST_LOG_RATIO, LONGEST_LOG_RATIO)
    return Fit(
        tokens=len(log_ratio),
        gap=float(np.abs(log_ratio).sum()),
        kl=float((np.expm1(log_ratio) - log_ratio).sum()),
    )
