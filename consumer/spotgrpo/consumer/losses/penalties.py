"""Terms that do not look at rewards: KL to the base. (The entropy bonus is the entropy itself.) Pure.

Shape suffixes: N predicted tokens of a micro-batch.
"""

# ruff: noqa: N803, N806  (shape suffixes: the legend is above)

from __future__ import annotations

from torch import Tensor

from spotgrpo.consumer.losses.ratios import clamped
from spotgrpo.shared.loss_config import KlEstimator


def kl_estimate(log_ratio_N: Tensor, estimator: KlEstimator) -> Tensor:
    """Estimates of KL(p‖q) from log(p/q) at tokens that were sampled from p, with gradient.

    With l = log(p/q): k1 = l, k2 = l²/2, k3 = exp(−l) − 1 + l (Schulman 2020, joschu.net/blog/kl-approx.html); k3 is
    GRPO's (arXiv:2402.03300) eq. 4. As a loss they differ: of k1 as it is the expected gradient is 0, of k2 it is
    that of KL(p‖q), of k3 that of KL(q‖p). Multiplied by p/μ with its gradient (``kl_weighted``: the unbiased estimate
    of DeepSeek-V3.2, arXiv:2512.02556 §3.1) k1 and k3 have that of KL(p‖q), for tokens that any μ sampled.
    """
    log_ratio_N = clamped(log_ratio_N)
    if estimator == "k1":
        return log_ratio_N
    if estimator == "k2":
        return log_ratio_N.square() / 2.0
    return (-log_ratio_N).exp() - 1.0 + log_ratio_N
