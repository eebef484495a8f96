"""How far a single step may go: the surrogate of each token, to be maximised. Pure.

Shape suffixes: N predicted tokens of a micro-batch.
"""

# ruff: noqa: N803, N806, N815  (shape suffixes: the legend is above)

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Surrogate:
    """What is maximised.

    Attributes:
        value_N: with gradient.
        low_N, high_N: bool, where the ratio was clipped on that side.
    """

    value_N: Tensor
    low_N: Tensor
    high_N: Tensor


def clipped_ratio(
    ratio_N: Tensor, advantage_N: Tensor, low: float, high: float, cap: float | None = None
) -> Surrogate:
    """min(ρ Â, clip(ρ, 1 − ε_low, 1 + ε_high) Â): a clipped token has no gradient.

    PPO (arXiv:1707.06347) eq. 7; with ε_high > ε_low DAPO's clip-higher (arXiv:2503.14476) eq. 8. Where Â < 0 the
    minimum has no bound, so ``cap`` c > 1 + ε_high adds one: max(·, c Â), the dual-clip objective of arXiv:1912.09729
    and the two-sided clip of INTELLECT-2 (arXiv:2505.07291); TRL's ``delta``.
    """
    free_N = ratio_N * advantage_N
    held_N = ratio_N.clamp(1.0 - low, 1.0 + high) * advantage_N
    value_N = torch.minimum(free_N, held_N)
    is_held_N = held_N < free_N
    is_capped_N = torch.zeros_like(is_held_N)
    if cap is not None:
        is_capped_N = (advantage_N < 0) & (ratio_N > cap)
        value_N = torch.where(is_capped_N, cap * advantage_N, value_N)
    up_N = ratio_N > 1.0
    return Surrogate(value_N, is_held_N & ~up_N, (is_held_N & up_N) | is_capped_N)


def clipped_weight(
    ratio_N: Tensor, advantage_N: Tensor, logprobs_N: Tensor, low: float, high: float
) -> Surrogate:
    """sg(clip(ρ, 1 − ε_low, 1 + ε_high)) Â log π: every token keeps its gradient, with a bounded weight.

    CISPO (arXiv:2506.13585) eq. 4 and 5; TRL's ``epsilon_high`` is 1 + ε_high here, without a bound below (ε_low 1).
    """
    free_N = ratio_N.detach()
    weight_N = free_N.clamp(1.0 - low, 1.0 + high)
    return Surrogate(weight_N * advantage_N * logprobs_N, free_N < weight_N, free_N > weight_N)


def unclipped(ratio_N: Tensor, advantage_N: Tensor) -> Surrogate:
    """ρ Â: the plain importance-weighted advantage, as GEPO and M2PO take it."""
    never = torch.zeros_like(ratio_N, dtype=torch.bool)
    return Surrogate(ratio_N * advantage_N, never, never)
