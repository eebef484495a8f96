"""Importance ratios of tokens, sequences and groups, as logs. Pure.

Shape suffixes: N predicted tokens of a micro-batch.
"""

# ruff: noqa: N803, N806, N815  (shape suffixes: the legend is above)

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spotgrpo.shared.loss_config import Anchor, Level

LONGEST_LOG_RATIO = 20.0
"""exp(20) is 5e8: far outside any clip range, and finite in float32."""


@dataclass(frozen=True, eq=False)
class Tokens:
    """The predicted tokens of a micro-batch, flat; sequences are whole. float32 unless said otherwise.

    Attributes:
        logprobs_N: log π with gradient, of the current policy at the sampling temperature.
        behaviour_N: log μ of the policy that sampled, at the same temperature.
        advantage_N: of the token's completion.
        mask_N: bool, True where a token is trained.
        weight_N: share in the step's aggregate.
        sequence_N: int64, number of the token's sequence in the micro-batch, below ``sequences``.
        entropy_N: of the distribution that the token was drawn from (nats); with gradient where there is a bonus.
        lag_N: int32, versions since it was sampled.
        group_log_q_N: log of what GEPO divides the probabilities of the token's group by.
        base_N: logprobs of the base model, where there is a KL term.
    """

    logprobs_N: Tensor
    behaviour_N: Tensor
    advantage_N: Tensor
    mask_N: Tensor
    weight_N: Tensor
    sequence_N: Tensor
    sequences: int
    entropy_N: Tensor
    lag_N: Tensor
    group_log_q_N: Tensor
    base_N: Tensor | None = None


def clamped(log_ratio: Tensor) -> Tensor:
    """Within ±20, so that its exp is finite."""
    return log_ratio.clamp(-LONGEST_LOG_RATIO, LONGEST_LOG_RATIO)


def masked(values_N: Tensor, mask_N: Tensor) -> Tensor:
    """0 where a token is not trained: it may have any logprob, and 0 × inf is not a number."""
    return torch.where(mask_N, values_N, torch.zeros_like(values_N))


def token_log_ratio(tokens: Tokens) -> Tensor:
    """log(π/μ) of each token, PPO (arXiv:1707.06347) §3 with π_old := μ; 0 where masked."""
    return masked(clamped(tokens.logprobs_N - tokens.behaviour_N), tokens.mask_N)


def anchor_share(tokens: Tokens, anchor: Anchor) -> Tensor | float:
    """α of log π_a = α log μ + (1 − α) log sg(π): how much of the anchor is the behaviour policy.

    ``behaviour`` 1, ``current`` 0, ``proximal`` 1 / max(lag, 1): A-3PO (arXiv:2512.06547) §3, for the proximal
    policy of decoupled PPO (arXiv:2110.00641; arXiv:2505.24298 §5.2).
    """
    if anchor == "behaviour":
        return 1.0
    if anchor == "current":
        return 0.0
    return 1.0 / tokens.lag_N.clamp(min=1).to(tokens.behaviour_N.dtype)


def sequence_mean(values_N: Tensor, tokens: Tokens) -> Tensor:
    """Mean over the trained tokens of each token's sequence, [N]; ``values_N`` is 0 where masked."""
    zeros = values_N.new_zeros(tokens.sequences)
    sums = zeros.index_add(0, tokens.sequence_N, values_N)
    sizes = zeros.index_add(0, tokens.sequence_N, tokens.mask_N.to(values_N.dtype))
    return (sums / sizes.clamp(min=1.0))[tokens.sequence_N]


def level_log_ratio(anchored_N: Tensor, tokens: Tokens, level: Level) -> Tensor:
    """The log ratio that a token is clipped and weighted with; 0 where masked.

    ``token``: its own. ``sequence``: the mean over its sequence, the log of the length-normalised likelihood
    ratio s_i of GSPO (arXiv:2507.18071) eq. 7. ``group``: length-normalised log π(y|x) less the group's
    log Ê_q[q(y|x)], GEPO (arXiv:2508.17850) eq. 3.

    Args:
        anchored_N: log(π/π_a) of each token, with gradient.
    """
    if level == "token":
        return anchored_N
    if level == "sequence":
        return masked(sequence_mean(anchored_N, tokens), tokens.mask_N)
    mean_N = sequence_mean(masked(tokens.logprobs_N, tokens.mask_N), tokens)
    return masked(clamped(mean_N - tokens.group_log_q_N), tokens.mask_N)
