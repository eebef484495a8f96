"""How much better each rollout of a group was than its siblings. Values in, values out; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Float64Array: TypeAlias = npt.NDArray[np.float64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
AdvantageScale = Literal["group_std", "none"]

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


def group_advantages(rewards: Sequence[float | None], scale: AdvantageScale) -> Advantages:
    """Advantages relative to the group, one for each reward.

    ``group_std``: Â_i = (r_i − mean(r)) / (std(r) + 1e-4), DeepSeekMath (arXiv:2402.03300) §4.1.2, with the
    sample deviation (n − 1), as TRL has it. ``none``: Â_i = r_i − mean(r), Dr. GRPO (arXiv:2503.20783) §3.2:
    without the division, questions that are nearly always or never solved weigh no more than others.

    Args:
        rewards: one a rollout; None (unscored) takes no part.
        scale: whether to divide by the group's standard deviation.

    Raises:
        ValueError: a reward is not finite.
    """
    used = np.array([reward is not None for reward in rewards], dtype=np.bool_)
    values = np.zeros(len(rewards), dtype=np.float64)
    scored = np.array([reward for reward in rewards if reward is not None], dtype=np.float64)
    if not np.isfinite(scored).all():
        raise ValueError(f"rewards are not finite: {list(rewards)}")
    if len(scored) < 2 or np.ptp(scored) <= FLAT * max(1.0, float(np.abs(scored).max())):
        return Advantages(values, used, has_signal=False)
    centred = scored - scored.mean()
    if scale == "group_std":
        centred /= scored.std(ddof=1) + STD_EPSILON
    values[used] = centred
    return Advantages(values, used, has_signal=True)
