"""The losses again, in float64 numpy, completion by completion as the papers write them. Slow on purpose.

Nothing here is shared with ``spotgrpo.consumer.losses``. ``p`` are the logprobs that vary, ``fixed`` those inside a
stop-gradient: equal in value, so that a finite difference in ``p`` alone is the gradient that a method means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from spotgrpo.shared.ids import PolicyVersion, TaskId
from spotgrpo.shared.wire import Group, Rollout, Sampling, VersionRun

VERSION = 7
"""Of the learner in these tests."""
LONGEST = 12
"""``max_new_tokens`` of the runs in these tests."""


@dataclass
class Completion:
    """One completion of a group: parallel lists over its tokens, as plain floats."""

    p: list[float]
    fixed: list[float]
    mu: list[float]
    base: list[float]
    entropy: list[float]
    trained: list[bool]
    lag: list[int]
    reward: float | None

    @property
    def places(self) -> list[int]:
        return [t for t, is_trained in enumerate(self.trained) if is_trained]

    def ratio(self, t: int) -> float:
        return float(np.exp(self.p[t] - self.mu[t]))

    def fixed_ratio(self, t: int) -> float:
        return float(np.exp(self.fixed[t] - self.mu[t]))


Step = list[list[Completion]]


def drawn_groups(seed: int) -> list[Group]:
    """Ragged groups with masks, missing rewards and mixed versions.

    The last completion of the first is masked as a whole, the fourth group is flat, the fifth has one reward.
    """
    random = np.random.default_rng(seed)
    rewards: list[list[float | None]] = [
        [1.0, 0.0, 0.0, 1.0],
        [0.25, None, 1.0, 0.5],
        [None, 2.0, -1.0, 0.0],
        [1.0, 1.0, 1.0, 1.0],
        [None, 1.0, None, None],
    ]
    return [
        Group(
            run="r",
            task_id=TaskId(index),
            worker="w",
            engine="test",
            engine_version="1",
            manifest_sha256="0" * 64,
            prompt_ids=random.integers(5, 90, 3 + index, dtype=np.int32),
            row={},
            sampling=Sampling(LONGEST),
            rollouts=tuple(
                _drawn_rollout(random, reward, blank=(index, place) == (0, 3))
                for place, reward in enumerate(given)
            ),
        )
        for index, given in enumerate(rewards)
    ]


def _drawn_rollout(random: np.random.Generator, reward: float | None, *, blank: bool) -> Rollout:
    length = int(random.integers(1, LONGEST + 1))
    cut = int(random.integers(0, length))
    runs = [VersionRun(PolicyVersion(1, int(random.integers(0, 5))), length - cut)]
    if cut:
        runs.append(VersionRun(PolicyVersion(1, int(random.integers(5, VERSION + 1))), cut))
    mask = random.random(length) < 0.8
    mask[0] = True
    mask &= not blank
    return Rollout(
        token_ids=random.integers(5, 90, length, dtype=np.int32),
        logprobs=random.uniform(-3.0, -0.2, length).astype(np.float32),
        loss_mask=mask,
        versions=tuple(runs),
        reward=reward,
        reward_parts={},
        finish="length" if length == LONGEST else "stop",
    )


def advantages(
    rewards: Sequence[float | None], scale: str = "group_std", everyone: Sequence[float] = ()
) -> list[float | None]:
    """One a completion, None where it has no reward."""
    scored = [reward for reward in rewards if reward is not None]
    middle = sum(scored) / len(scored)
    deviation = {
        "group_std": lambda: float(np.std(scored, ddof=1)) + 1e-4,
        "batch_std": lambda: float(np.std(everyone, ddof=1)) + 1e-4,
        "none": lambda: 1.0,
    }[scale]()
    return [None if reward is None else (reward - middle) / deviation for reward in rewards]


def with_signal(step: Step) -> Step:
    """Groups whose rewards differ, without the completions that have none."""
    varied = []
    for group in step:
        scored = {one.reward for one in group if one.reward is not None}
        if len(scored) > 1:
            varied.append(group)
    return varied


def _weighed(step: Step, scale: str) -> list[tuple[Completion, float, list[Completion]]]:
    """(completion, advantage, its whole group) of all that is trained."""
    found = []
    for group in with_signal(step):
        for one, value in zip(group, advantages([c.reward for c in group], scale), strict=True):
            if value is not None and one.places:
                found.append((one, value, group))
    return found


def _scored(step: Step) -> int:
    return sum(one.reward is not None for group in with_signal(step) for one in group)


def _pessimist(ratio: float, advantage: float, low: float, high: float) -> float:
    return min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)


def grpo(step: Step, low: float = 0.2, high: float = 0.2) -> float:
    """DeepSeekMath eq. 3: mean over completions of the mean over each one's tokens."""
    total = 0.0
    for one, a, _ in _weighed(step, "group_std"):
        terms = [_pessimist(one.ratio(t), a, low, high) for t in one.places]
        total += sum(terms) / len(terms)
    return -total / _scored(step)


def dr_grpo(step: Step, completions: int, longest: int) -> float:
    """Dr. GRPO: plain sum over tokens, advantages only centred, a constant below."""
    total = 0.0
    for one, a, _ in _weighed(step, "none"):
        total += sum(_pessimist(one.ratio(t), a, 0.2, 0.2) for t in one.places)
    return -total / (completions * longest)


def dapo(step: Step, high: float = 0.28) -> float:
    """DAPO eq. 8: mean over all tokens of the batch."""
    total, count = 0.0, 0
    for one, a, _ in _weighed(step, "group_std"):
        total += sum(_pessimist(one.ratio(t), a, 0.2, high) for t in one.places)
        count += len(one.places)
    return -total / count


def gspo(step: Step) -> float:
    """GSPO eq. 5 with the length-normalised s_i of eq. 7."""
    total = 0.0
    for one, a, _ in _weighed(step, "group_std"):
        product = np.prod([one.ratio(t) for t in one.places])
        total += _pessimist(float(product ** (1 / len(one.places))), a, 3e-4, 4e-4)
    return -total / _scored(step)


def cispo(step: Step) -> float:
    """CISPO eq. 4: a bounded weight, fixed, on the log-likelihood of every token."""
    total, count = 0.0, 0
    for one, a, _ in _weighed(step, "group_std"):
        for t in one.places:
            total += min(one.fixed_ratio(t), 5.0) * a * one.p[t]
            count += 1
    return -total / count


def gepo(step: Step) -> float:
    """GEPO eq. 2 and 3 on length-normalised likelihoods."""
    total = 0.0
    for one, a, group in _weighed(step, "none"):
        q = [np.exp(np.mean([c.mu[t] for t in c.places])) for c in group if c.places]
        expected = sum(value * value for value in q) / sum(q)
        likelihood = np.exp(np.mean([one.p[t] for t in one.places]))
        total += likelihood / expected * a
    return -total / _scored(step)


def m2po(step: Step, limit: float = 0.04) -> float:
    """M2PO Algorithm 1: of the tokens that leave, drop the farthest until the second moment holds."""
    weighed = _weighed(step, "group_std")
    leaving = []
    for i, (one, a, _) in enumerate(weighed):
        for t in one.places:
            r = one.fixed_ratio(t)
            if (a > 0 and r > 1) or (a < 0 and r < 1):
                leaving.append((np.log(r) ** 2, i, t))
    leaving.sort()
    dropped = set()
    while leaving and np.mean([square for square, _, _ in leaving]) > limit:
        _, i, t = leaving.pop()
        dropped.add((i, t))
    total, count = 0.0, 0
    for i, (one, a, _) in enumerate(weighed):
        for t in one.places:
            total += 0.0 if (i, t) in dropped else one.ratio(t) * a
            count += 1
    return -total / count


def decoupled_ppo(step: Step) -> float:
    """AReaL's decoupled objective with A-3PO's interpolated proximal policy."""
    total, count = 0.0, 0
    for one, a, _ in _weighed(step, "group_std"):
        for t in one.places:
            alpha = 1.0 / max(one.lag[t], 1)
            proximal = alpha * one.mu[t] + (1 - alpha) * one.fixed[t]
            behaviour_weight = np.exp(proximal - one.mu[t])
            total += behaviour_weight * _pessimist(np.exp(one.p[t] - proximal), a, 0.2, 0.2)
            count += 1
    return -total / count


PRESETS: dict[str, Callable[[Step], float]] = {
    "grpo": grpo,
    "dr_grpo": lambda step: dr_grpo(step, 20, LONGEST),
    "dapo": dapo,
    "gspo": gspo,
    "cispo": cispo,
    "gepo": gepo,
    "m2po": m2po,
    "decoupled_ppo": decoupled_ppo,
}


def token_terms(step: Step, term: Callable[[Completion, int, float], float]) -> float:
    """Token mean of ``term(completion, place, advantage)``, negated: what the parts are tested in."""
    total, count = 0.0, 0
    for one, a, _ in _weighed(step, "group_std"):
        for t in one.places:
            total += term(one, t, a)
            count += 1
    return -total / count


def geometric_mean(one: Completion) -> float:
    """Of the fixed ratios of a completion's trained tokens."""
    return float(np.exp(np.mean([one.fixed[t] - one.mu[t] for t in one.places])))


def shifted(step: Step, place: tuple[int, int, int], by: float) -> Step:
    """A copy with one logprob ``p`` moved."""
    g, i, t = place
    copy = [list(group) for group in step]
    one = copy[g][i]
    p = list(one.p)
    p[t] += by
    copy[g][i] = dataclasses.replace(one, p=p)
    return copy
