"""The loss of a micro-batch, put together from its parts. Pure: tensors in, (loss, sums) out.

Shape suffixes: N predicted tokens of a micro-batch.
"""

# ruff: noqa: N803, N806, N815  (shape suffixes: the legend is above)

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from spotgrpo.consumer.losses.clipping import (
    Surrogate,
    clipped_ratio,
    clipped_weight,
    unclipped,
)
from spotgrpo.consumer.losses.corrections import correction
from spotgrpo.consumer.losses.penalties import kl_estimate
from spotgrpo.consumer.losses.ratios import (
    Tokens,
    anchor_share,
    level_log_ratio,
    masked,
    token_log_ratio,
)
from spotgrpo.shared.loss_config import LossConfig


@dataclass(frozen=True, eq=False)
class LossSums:
    """Sums over trained tokens, detached scalars that micro-batches add up; means are made by whoever reports them.

    Attributes:
        tokens: trained tokens.
        ratio: of importance ratios π/μ of tokens, before any clip, truncation or mask, whatever the level of the
            loss; ``ratio_square`` of their squares, ``ratio_max`` the greatest. Effective sample size as a share:
            ratio² / (tokens · ratio_square) (Kish 1965).
        clipped_low, clipped_high: tokens whose ratio, at the level of the loss, the clip held from below or above: they
            have no gradient, or a bounded weight with CISPO.
        dropped: tokens that a correction left out.
        kl: of r − 1 − log r, the k3 estimator of KL(μ‖π) for tokens sampled from μ (Schulman 2020,
            joschu.net/blog/kl-approx.html): how far the policy is from the one that sampled.
        base_kl: of the estimator of KL to the base; 0 where there is no such term.
        entropy: nats.
    """

    tokens: Tensor
    ratio: Tensor
    ratio_square: Tensor
    ratio_max: Tensor
    clipped_low: Tensor
    clipped_high: Tensor
    dropped: Tensor
    kl: Tensor
    base_kl: Tensor
    entropy: Tensor

    def __add__(self, other: LossSums) -> LossSums:
        names = [field.name for field in dataclasses.fields(self)]
        mine = {name: getattr(self, name) + getattr(other, name) for name in names}
        mine["ratio_max"] = torch.maximum(self.ratio_max, other.ratio_max)
        return LossSums(**mine)

    def floats(self) -> dict[str, float]:
        """By name; one copy from the device."""
        names = [field.name for field in dataclasses.fields(self)]
        values = torch.stack([getattr(self, name).double() for name in names]).tolist()
        return dict(zip(names, values, strict=True))


@dataclass(frozen=True, eq=False)
class Terms:
    """What the loss adds up, by token.

    Attributes:
        loss_N: share in the step's loss, with gradient; 0 where masked.
        log_ratio_N: log(π/μ) as :func:`token_log_ratio` has it, with gradient.
        surrogate: what is maximised, before corrections and weights.
        factor_N: product of the corrections.
        base_kl_N: estimates of KL to the base, detached; None where there is no such term.
    """

    loss_N: Tensor
    log_ratio_N: Tensor
    surrogate: Surrogate
    factor_N: Tensor
    base_kl_N: Tensor | None


def loss_of(
    tokens: Tokens, parts: LossConfig, *, m2_bound: float = math.inf
) -> tuple[Tensor, LossSums]:
    """Loss of a micro-batch, as its share of the step's: the sum of :func:`token_terms`, and what they say."""
    terms = token_terms(tokens, parts, m2_bound=m2_bound)
    return terms.loss_N.sum(), _sums(terms, tokens)


def token_terms(tokens: Tokens, parts: LossConfig, *, m2_bound: float = math.inf) -> Terms:
    """What each token adds to the loss of the step.

    L = −Σ_t a_t f_t w_t S(ρ_t, Â_t) + β Σ_t a_t KL_t − η Σ_t a_t H_t, with a_t the aggregation's weight, ρ the ratio
    to the anchor at the level of the loss, S the clip, w what is between anchor and behaviour, f the corrections.
    The package's docstring says how published methods map onto this.

    Args:
        parts: what each of them is.
        m2_bound: where M2PO masks; see ``corrections.second_moment_limit``.
    """
    log_ratio_N = token_log_ratio(tokens)
    share = anchor_share(tokens, parts.anchor)
    if parts.anchor == "behaviour":
        anchored_N, log_weight_N, log_gap_N = log_ratio_N, None, log_ratio_N.detach()
    else:
        log_weight_N = (1.0 - share) * log_ratio_N.detach()
        anchored_N, log_gap_N = log_ratio_N - log_weight_N, log_weight_N
    level_N = level_log_ratio(anchored_N, tokens, parts.ratio)
    surrogate = _surrogate(level_N.exp(), tokens, parts)
    factor_N = correction(log_ratio_N.detach(), log_gap_N, tokens, parts, m2_bound)
    counts_N = factor_N if log_weight_N is None else factor_N * log_weight_N.exp()
    value_N = surrogate.value_N * counts_N
    penalty_N, base_kl_N = _penalties(log_ratio_N, tokens, parts)
    loss_N = tokens.weight_N * masked(penalty_N - value_N, tokens.mask_N)
    return Terms(loss_N, log_ratio_N, surrogate, factor_N, base_kl_N)


def _surrogate(ratio_N: Tensor, tokens: Tokens, parts: LossConfig) -> Surrogate:
    if parts.clip == "none":
        return unclipped(ratio_N, tokens.advantage_N)
    low, high = parts.clip_low, parts.clip_high
    if parts.clip == "ratio":
        return clipped_ratio(ratio_N, tokens.advantage_N, low, high, parts.clip_cap)
    logprobs_N = masked(tokens.logprobs_N, tokens.mask_N)
    return clipped_weight(ratio_N, tokens.advantage_N, logprobs_N, low, high)


def _penalties(
    log_ratio_N: Tensor, tokens: Tokens, parts: LossConfig
) -> tuple[Tensor, Tensor | None]:
    """What is added to the loss of each token, and the estimates of KL to the base, detached."""
    penalty_N = torch.zeros_like(log_ratio_N)
    base_kl_N = None
    if parts.kl > 0:
        if tokens.base_N is None:
            raise ValueError("loss.kl needs the logprobs of the base")
        apart_N = masked(tokens.logprobs_N - tokens.base_N, tokens.mask_N)
        kl_N = kl_estimate(apart_N, parts.kl_estimator)
        base_kl_N = kl_N.detach()
        penalty_N = penalty_N + parts.kl * (kl_N * log_ratio_N.exp() if parts.kl_weighted else kl_N)
    if parts.entropy > 0:
        penalty_N = penalty_N - parts.entropy * tokens.entropy_N
    return penalty_N, base_kl_N


@torch.no_grad()
def _sums(terms: Terms, tokens: Tokens) -> LossSums:
    mask_N, log_ratio_N, surrogate = tokens.mask_N, terms.log_ratio_N, terms.surrogate
    ratio_N = masked(log_ratio_N.exp(), mask_N)
    none = ratio_N.new_zeros(())
    return LossSums(
        tokens=mask_N.sum(),
        ratio=ratio_N.sum(),
        ratio_square=ratio_N.square().sum(),
        ratio_max=ratio_N.max() if len(ratio_N) else none,
        clipped_low=(surrogate.low_N & mask_N).sum(),
        clipped_high=(surrogate.high_N & mask_N).sum(),
        dropped=((terms.factor_N == 0) & mask_N).sum(),
        kl=masked(log_ratio_N.exp() - 1.0 - log_ratio_N, mask_N).sum(),
        base_kl=none if terms.base_kl_N is None else terms.base_kl_N.sum(),
        entropy=masked(tokens.entropy_N.detach(), mask_N).sum(),
    )
