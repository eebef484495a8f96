"""The clipped surrogate of GRPO against behaviour logprobs. Pure: tensors in, (loss, sums) out.

N: predicted tokens of a micro-batch.
"""

# ruff: noqa: N803, N806  (shape suffixes: the legend is above)

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LONGEST_LOG_RATIO = 20.0
"""exp(20) is 5e8: far outside any clip range, and finite in float32."""


@dataclass(frozen=True)
class LossSums:
    """Sums over the trained tokens of a micro-batch, detached scalars; means are made by whoever reports them.

    Attributes:
        tokens: trained tokens.
        ratio: of importance ratios π/μ; ``ratio_max`` is their greatest.
        clipped: tokens whose gradient the clip removed.
        kl: of r − 1 − log r, the k3 estimator of KL(μ‖π) for tokens sampled from μ (Schulman 2020,
            joschu.net/blog/kl-approx.html): how far the policy is from the one that sampled.
    """

    tokens: Tensor
    ratio: Tensor
    ratio_max: Tensor
    clipped: Tensor
    kl: Tensor


def clipped_surrogate(
    logprobs_N: Tensor,
    behaviour_N: Tensor,
    advantage_N: Tensor,
    mask_N: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    denominator: float,
) -> tuple[Tensor, LossSums]:
    """Loss of a micro-batch, as its share of the step's token mean.

    L = −1/D Σ_t min(r_t Â_t, clip(r_t, 1 − ε_low, 1 + ε_high) Â_t) with r_t = π(o_t)/μ(o_t): PPO
    (arXiv:1707.06347) eq. 7 with the group-relative advantages of DeepSeekMath (arXiv:2402.03300) eq. 3, the
    asymmetric clip and the mean over all tokens of the step of DAPO (arXiv:2503.14476) eq. 8. μ is the policy
    that sampled each token, so a group of any lag has its own right ratio.

    Args:
        logprobs_N: float32, with gradient, of the current policy at the sampling temperature.
        behaviour_N: float32, of the policy that sampled, at the same temperature.
        advantage_N: float32.
        mask_N: bool, True where a token is trained.
        clip_low: ε_low.
        clip_high: ε_high.
        denominator: D, trained tokens of the whole step, so that micro-batches add up.
    """
    log_ratio_N = (logprobs_N - behaviour_N).clamp(-LONGEST_LOG_RATIO, LONGEST_LOG_RATIO)
    # Masked before exp: a token that is not trained may have any logprob, and 0 × inf is not a number.
    log_ratio_N = torch.where(mask_N, log_ratio_N, torch.zeros_like(log_ratio_N))
    ratio_N = log_ratio_N.exp()
    free_N = ratio_N * advantage_N
    held_N = ratio_N.clamp(1.0 - clip_low, 1.0 + clip_high) * advantage_N
    surrogate_N = torch.where(mask_N, torch.minimum(free_N, held_N), torch.zeros_like(free_N))
    loss = -surrogate_N.sum() / denominator
    with torch.no_grad():
        one = ratio_N.new_ones(1)
        sums = LossSums(
            tokens=mask_N.sum(),
            ratio=(ratio_N * mask_N).sum(),
            ratio_max=torch.cat([torch.where(mask_N, ratio_N, 0.0 * one), 0.0 * one]).max(),
            clipped=((held_N < free_N) & mask_N).sum(),
            kl=((ratio_N - 1.0 - log_ratio_N) * mask_N).sum(),
        )
    return loss, sums
