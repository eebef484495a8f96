"""From a micro-batch and the plan of its step to the flat arrays that the loss is computed on.

Shape suffixes: N predicted tokens of a micro-batch, A all trained tokens of a step.
"""

# ruff: noqa: N803, N806  (shape suffixes: the legend is above)

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spotgrpo.consumer.logprobs import TokenScores
from spotgrpo.consumer.losses.corrections import second_moment_limit
from spotgrpo.consumer.losses.plan import StepPlan
from spotgrpo.consumer.losses.ratios import Tokens, clamped
from spotgrpo.consumer.packing import Float32Array, MicroBatch


def gather(
    batch: MicroBatch, plan: StepPlan, scores: TokenScores, base_N: Tensor | None = None
) -> Tokens:
    """The tokens of ``batch``, in its order, on the device of ``scores``."""

    def moved(array: npt.NDArray[np.generic]) -> Tensor:
        return torch.from_numpy(array).to(scores.logprobs_N.device)

    owners, sequence_N = np.unique(batch.owner_N, return_inverse=True)
    return Tokens(
        logprobs_N=scores.logprobs_N,
        behaviour_N=moved(batch.behaviour_N),
        advantage_N=moved(batch.advantage_N),
        mask_N=moved(batch.mask_N),
        weight_N=moved(plan.weight_S[batch.owner_N].astype(np.float32)),
        sequence_N=moved(sequence_N.astype(np.int64)),
        sequences=len(owners),
        entropy_N=scores.entropy_N,
        lag_N=moved(plan.lags_of(batch)),
        group_log_q_N=moved(plan.group_log_q_S[batch.owner_N].astype(np.float32)),
        base_N=base_N,
    )


def step_second_moment_limit(
    plan: StepPlan, logprobs: Mapping[int, Float32Array], limit: float
) -> float:
    """``corrections.second_moment_limit`` over all trained tokens of the step.

    Args:
        logprobs: log π of the tokens of each sample, by ``Sample.index``.
    """
    masks = [sample.mask for sample in plan.samples]
    apart = [
        (logprobs[sample.index] - sample.behaviour)[mask]
        for sample, mask in zip(plan.samples, masks, strict=True)
    ]
    advantages = np.repeat(
        [sample.advantage for sample in plan.samples], [int(mask.sum()) for mask in masks]
    )
    log_ratio_A = clamped(torch.from_numpy(np.concatenate(apart)))
    return second_moment_limit(log_ratio_A, torch.from_numpy(advantages), limit)
