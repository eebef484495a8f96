"""Off-policy corrections: how much of a token's surrogate counts, given how far its policies are apart. Pure.

Each gives a factor without gradient, [N] in [0, 1]; several are multiplied. ``log_gap_N`` is log(π_a/μ) where the
anchor is not the behaviour policy, else log(π/μ); detached, 0 where masked.

Shape suffixes: N predicted tokens of a micro-batch, A all trained tokens of a step.
"""

# ruff: noqa: N803, N806  (shape suffixes: the legend is above)

from __future__ import annotations

import math

import torch
from torch import Tensor

from spotgrpo.consumer.losses.ratios import Tokens, sequence_mean
from spotgrpo.shared.loss_config import LossConfig


def truncate(log_gap_N: Tensor, above: float) -> Tensor:
    """min(w, C) / w: truncated importance sampling (Ionides 2008; for engine and trainer: Yao et al. 2025).

    The weight itself is multiplied in elsewhere, so that it becomes min(w, C). Source:
    fengyao.notion.site/off-policy-rl; TRL's ``token_truncate``.
    """
    return (math.log(above) - log_gap_N).clamp(max=0.0).exp()


def mask_outliers(log_gap_N: Tensor, below: float, above: float) -> Tensor:
    """1 where below ≤ w ≤ above, else 0: IcePop (arXiv:2510.18855 §2.3.2); TRL's ``token_mask``."""
    gap_N = log_gap_N.exp()
    return ((gap_N >= below) & (gap_N <= above)).to(log_gap_N.dtype)


def reject_sequences(log_gap_N: Tensor, tokens: Tokens, below: float, above: float) -> Tensor:
    """The same for whole sequences, by the geometric mean of w over their trained tokens.

    Geometric sequence rejection of verl's rollout correction ("seq_mean_k1") and of Liu et al. 2025
    (richardli.xyz/rl-collapse), which does not depend on the length as the product of all w does.
    """
    return mask_outliers(sequence_mean(log_gap_N, tokens), below, above)


def pulls_away(log_ratio_N: Tensor, advantage_N: Tensor) -> Tensor:
    """Bool: the gradient would move π further from μ: (Â > 0 and π > μ) or (Â < 0 and π < μ)."""
    return log_ratio_N * advantage_N > 0


def within_total_variation(log_ratio_N: Tensor, tokens: Tokens, limit: float) -> Tensor:
    """0 where |π − μ| > δ and the gradient would move the token further, else 1.

    DPPO (arXiv:2602.04879) eq. 12 with the binary total variation: of the sampled token against all others.
    """
    with torch.no_grad():
        moved_N = (tokens.logprobs_N.exp() - tokens.behaviour_N.exp()).abs()
        away_N = pulls_away(log_ratio_N, tokens.advantage_N)
        return (~(away_N & (moved_N > limit))).to(log_ratio_N.dtype)


def second_moment_limit(log_ratio_A: Tensor, advantage_A: Tensor, limit: float) -> float:
    """|log(π/μ)| beyond which M2PO masks: a fact of the whole step.

    Of the tokens that :func:`pulls_away`, the greatest (log r)² are left out, one by one, until the mean over the
    rest is at most τ: M2PO (arXiv:2510.01161) eq. 4 and Algorithm 1. The bound is halfway between the last that
    stays and the first that goes, so that rounding moves neither across. inf where all stay.
    """
    squares_A = (log_ratio_A.double() ** 2)[pulls_away(log_ratio_A, advantage_A)].sort().values
    sizes_A = torch.arange(1, len(squares_A) + 1, dtype=torch.float64, device=squares_A.device)
    kept = int((squares_A.cumsum(0) / sizes_A <= limit).sum())  # the means only grow
    if kept == len(squares_A):
        return math.inf
    last = float(squares_A[kept - 1]) if kept else 0.0
    return (math.sqrt(last) + math.sqrt(float(squares_A[kept]))) / 2.0


def within_second_moment(log_ratio_N: Tensor, advantage_N: Tensor, bound: float) -> Tensor:
    """0 where :func:`pulls_away` and |log(π/μ)| is beyond ``bound``, else 1: the mask in M2PO's objective."""
    away_N = pulls_away(log_ratio_N, advantage_N)
    return (~(away_N & (log_ratio_N.abs() > bound))).to(log_ratio_N.dtype)


def correction(
    log_ratio_N: Tensor, log_gap_N: Tensor, tokens: Tokens, parts: LossConfig, m2_bound: float
) -> Tensor:
    """Product of those that ``parts`` names; 1 where it names none.

    Args:
        log_ratio_N: log(π/μ), detached.
        log_gap_N: see above.
        m2_bound: :func:`second_moment_limit` of the step; inf where it is not asked for.
    """
    factor_N = torch.ones_like(log_gap_N)
    for name in parts.corrections:
        if name == "truncate":
            factor_N = factor_N * truncate(log_gap_N, parts.truncate_above)
        elif name == "mask":
            factor_N = factor_N * mask_outliers(log_gap_N, parts.mask_below, parts.mask_above)
        elif name == "reject":
            below, above = parts.reject_below, parts.reject_above
            factor_N = factor_N * reject_sequences(log_gap_N, tokens, below, above)
        elif name == "tv":
            factor_N = factor_N * within_total_variation(log_ratio_N, tokens, parts.tv_limit)
        else:
            factor_N = factor_N * within_second_moment(log_ratio_N, tokens.advantage_N, m2_bound)
    return factor_N
