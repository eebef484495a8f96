"""What the micro-batches of a step must know of each other, computed before any of them runs. numpy, no torch.

All of it is a fact of a sample: the gradient of a step does not depend on which micro-batch a sample is in.

Shape suffixes: S samples of the step, N predicted tokens of a micro-batch.
"""

# ruff: noqa: N815  (shape suffixes: the legend is above)

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from spotgrpo.consumer.advantages import (
    Advantages,
    Float64Array,
    group_advantages,
    reward_deviation,
)
from spotgrpo.consumer.losses.objective import Objective
from spotgrpo.consumer.losses.overlong import is_trainable, shaped_rewards, trained_mask
from spotgrpo.consumer.packing import BoolArray, Int32Array, MicroBatch, Sample
from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.wire import Group, Rollout


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The samples of a step and what else their loss needs, all by ``Sample.index``.

    Attributes:
        samples: scored rollouts with a token to train, of groups that have a gradient.
        groups: those groups; ``flat`` counts the others.
        weight_S: share of each token of the sample in the step's aggregate; see :func:`token_weights`.
        group_log_q_S: log of the expectation that GEPO divides by; see :func:`log_expected_probability`. 0 elsewhere.
        lags: one a sample: learner's version − version of each token, int32 [n].
        tasks: one a sample; ``rollouts``: which of the task's group it is.
    """

    samples: tuple[Sample, ...]
    groups: tuple[Group, ...]
    flat: int
    weight_S: Float64Array
    group_log_q_S: Float64Array
    lags: tuple[Int32Array, ...]
    tasks: tuple[TaskId, ...]
    rollouts: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Trained tokens."""
        return sum(int(sample.mask.sum()) for sample in self.samples)

    def lags_of(self, batch: MicroBatch) -> Int32Array:
        """Lag of each predicted token of ``batch``, int32 [N]."""
        firsts = np.sort(np.unique(batch.owner_N, return_index=True)[1])
        return np.concatenate([self.lags[owner] for owner in batch.owner_N[firsts]])


def plan_step(groups: Sequence[Group], objective: Objective, version: int) -> StepPlan:
    """Decide what of ``groups`` is trained, and how much each token counts.

    Args:
        version: of the weights that the gradient is taken at.
    """
    parts = objective.parts
    rewards = [shaped_rewards(group, objective) for group in groups]
    deviation = reward_deviation(rewards) if parts.advantage_scale == "batch_std" else None
    found = [
        group_advantages(given, parts.advantage_scale, parts.baseline, batch_std=deviation)
        for given in rewards
    ]
    trained = [
        (group, advantages)
        for group, advantages in zip(groups, found, strict=True)
        if has_gradient(group, advantages, objective)
    ]
    kept = [(group, *one) for group, held in trained for one in _kept(group, held, objective)]
    samples = tuple(
        Sample(index, group.prompt_ids, one.token_ids, one.logprobs, mask, advantage)
        for index, (group, one, _, mask, advantage) in enumerate(kept)
    )
    scored = sum(int(advantages.used.sum()) for _, advantages in trained)
    needed = parts.ratio == "group"
    log_q = {id(one): log_expected_probability(one) if needed else 0.0 for one, _ in trained}
    return StepPlan(
        samples=samples,
        groups=tuple(group for group, _ in trained),
        flat=len(groups) - len(trained),
        weight_S=token_weights([int(sample.mask.sum()) for sample in samples], scored, objective),
        group_log_q_S=np.array([log_q[id(group)] for group, *_ in kept], dtype=np.float64),
        lags=tuple(_lags(one, version) for _, one, *_ in kept),
        tasks=tuple(group.task_id for group, *_ in kept),
        rollouts=tuple(number for _, _, number, *_ in kept),
    )


def has_gradient(group: Group, advantages: Advantages, objective: Objective) -> bool:
    """Whether a gradient comes of ``group``: from its rewards, or from a KL or entropy term without them."""
    moves = advantages.has_signal or objective.parts.regularises
    return moves and is_trainable(group, advantages.used, objective)


def token_weights(lengths: Sequence[int], completions: int, objective: Objective) -> Float64Array:
    """What each token of a sample is multiplied with, so that the step's loss is the plain sum over tokens.

    With n_i trained tokens of sample i:
    ``token``: 1 / Σ n_i, DAPO (arXiv:2503.14476) eq. 8.
    ``sequence``: 1 / (S n_i), GRPO (arXiv:2402.03300) eq. 3, the mean over S completions of each one's mean.
    ``constant``: 1 / (B L), Dr. GRPO (arXiv:2503.20783) §3.1 and its listing: neither a completion's length nor how
    many were usable changes what a token counts. B completions are asked for in a step, L is the longest one.

    Args:
        lengths: n_i, each at least 1.
        completions: S: scored rollouts of the trained groups, those without a token to train included.
    """
    n = np.asarray(lengths, dtype=np.float64)
    parts = objective.parts
    if parts.aggregate == "token":
        return np.full(len(n), 1.0 / max(n.sum(), 1.0))
    if parts.aggregate == "sequence":
        return 1.0 / (completions * n)
    longest = parts.constant_tokens or objective.max_new_tokens
    return np.full(len(n), 1.0 / (objective.completions * longest))


def log_expected_probability(group: Group) -> float:
    """Logarithm of Ê_q[q(y|x)], Ê = Σ_i q_i² / Σ_i q_i, GEPO (arXiv:2508.17850) eq. 2.

    q_i is the probability of completion i under the policies that sampled it, length-normalised as in GSPO:
    exp of the mean logprob of its unmasked tokens. Over all rollouts of the group that have one.
    """
    log_q = np.array(
        [
            one.logprobs[one.loss_mask].astype(np.float64).mean()
            for one in group.rollouts
            if one.loss_mask.any()
        ]
    )
    with np.errstate(
        invalid="ignore"
    ):  # what is not finite makes a loss that is not, and that is looked at
        return float(np.logaddexp.reduce(2.0 * log_q) - np.logaddexp.reduce(log_q))


def _kept(
    group: Group, advantages: Advantages, objective: Objective
) -> Iterator[tuple[Rollout, int, BoolArray, float]]:
    """Scored rollouts with a token to train: with their number in the group, mask and advantage."""
    for number, one in enumerate(group.rollouts):
        mask = trained_mask(one, objective)
        if advantages.used[number] and mask.any():
            yield one, number, mask, float(advantages.values[number])


def _lags(rollout: Rollout, version: int) -> Int32Array:
    """Versions of a line that was given up in a takeover may be ahead of the learner's: no lag."""
    runs = rollout.versions
    each = [max(version - run.version.number, 0) for run in runs]
    return np.repeat(np.array(each, dtype=np.int32), [run.tokens for run in runs])
