"""How much better each rollout of a group was than its siblings. Values in, values out; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from spotgrpo.shared.loss_config import AdvantageScale, Baseline

Float64Array: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

STD_EPSILON = 1e-4
"""Added to the standard deviation, as TRL does, so that nearly equal rewards do not blow up."""
FLAT = 1e-9
"""Rewards that differ by less than this part of their size are equal: summed parts round."""


@dataclass(frozen=True, eq=False)
class Advantages:
    """Advantages of one group of G rollouts.

    Attributes:
        values: float64 [G]; 0 where a rollout is not used.
        used: bool [G]; False for rollouts without a reward: they take no part in mean, deviation or loss.
        has_signal: False where no gradient comes of the group: under two rewards, or all of them equal.
    """

    values: Float64Array
    used: BoolArray
    has_signal: bool


def group_advantages(
    rewards: Sequence[float | None],
    scale: AdvantageScale,
    baseline: Baseline = "mean",
    *,
    batch_std: float | None = None,
) -> Advantages:
    """Advantages relative to the group, one for each reward.

    Baselines: ``mean``: r_i − mean(r), DeepSeekMath (arXiv:2402.03300) §4.1.2. ``leave_one_out``: r_i − mean of the
    other rewards, the RLOO estimator (arXiv:2402.14740 §2), which is n/(n − 1) times the former.

    Scales: ``group_std`` divides by std(r) + 1e-4, DeepSeekMath §4.1.2, with the sample deviation (n − 1), as TRL has
    it. ``batch_std`` by that of all rewards of the step, so that a group whose rewards hardly differ is not blown up
    (arXiv:2508.08221; TRL's ``scale_rewards="batch"``). ``none``: Dr. GRPO (arXiv:2503.20783) §3.2: without the
    division, questions that are nearly always or never solved weigh no more than others.

    Args:
        rewards: one a rollout; None (unscored) takes no part.
        scale: what to divide by.
        baseline: what to compare with.
        batch_std: :func:`reward_deviation` of the step, where ``scale`` is batch_std.

    Raises:
        ValueError: a reward is not finite, or batch_std is missing.
    """
    used = np.array([reward is not None for reward in rewards], dtype=np.bool_)
    values = np.zeros(len(rewards), dtype=np.float64)
    scored = np.array([reward for reward in rewards if reward is not None], dtype=np.float64)
    if not np.isfinite(scored).all():
        raise ValueError(f"rewards are not finite: {list(rewards)}")
    if len(scored) < 2 or np.ptp(scored) <= FLAT * max(1.0, float(np.abs(scored).max())):
        return Advantages(values, used, has_signal=False)
    centred = scored - scored.mean()
    if baseline == "leave_one_out":
        centred *= len(scored) / (len(scored) - 1)
    if scale == "group_std":
        centred /= scored.std(ddof=1) + STD_EPSILON
    elif scale == "batch_std":
        if batch_std is None:
            raise ValueError("batch_std is missing")
        centred /= batch_std + STD_EPSILON
    values[used] = centred
    return Advantages(values, used, has_signal=True)


def reward_deviation(groups: Sequence[Sequence[float | None]]) -> float:
    """Sample deviation (n − 1) of all rewards of a step; 0 where there are fewer than two."""
    scored = [reward for rewards in groups for reward in rewards if reward is not None]
    return float(np.std(scored, ddof=1)) if len(scored) > 1 else 0.0
