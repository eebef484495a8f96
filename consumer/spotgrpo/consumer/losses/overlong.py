"""Completions that the token limit cut: left out of the loss, or marked down as they near the limit. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from spotgrpo.consumer.losses.objective import Objective
    from spotgrpo.consumer.packing import BoolArray
    from spotgrpo.shared.wire import Group, Rollout


def length_penalty(tokens: int, longest: int, soft: int) -> float:
    """What a completion of ``tokens`` loses, between 0 and 1.

    0 up to longest − soft, then (tokens − (longest − soft)) / soft, and 1 from ``longest`` on: DAPO's soft overlong
    punishment (arXiv:2503.14476) eq. 13, with the sign turned.
    """
    return min(max((tokens - (longest - soft)) / soft, 0.0), 1.0)


def shaped_rewards(group: Group, objective: Objective) -> list[float | None]:
    """The rewards that advantages are made from, one a rollout."""
    parts = objective.parts
    rewards = [rollout.reward for rollout in group.rollouts]
    if parts.overlong != "shape":
        return rewards
    longest = objective.max_new_tokens
    soft = min(parts.overlong_tokens or max(longest // 5, 1), longest)
    taken = [length_penalty(len(one.token_ids), longest, soft) for one in group.rollouts]
    return [
        None if reward is None else reward - parts.overlong_penalty * part
        for reward, part in zip(rewards, taken, strict=True)
    ]


def trained_mask(rollout: Rollout, objective: Objective) -> BoolArray:
    """Bool [T]: which tokens are trained. ``mask`` is DAPO's overlong filtering (arXiv:2503.14476 §3.4)."""
    if objective.parts.overlong == "mask" and rollout.truncated:
        return np.zeros_like(rollout.loss_mask)
    return rollout.loss_mask


def is_trainable(group: Group, used: Sequence[bool] | BoolArray, objective: Objective) -> bool:
    """Whether some token of a scored rollout is trained; ``used`` says which are scored."""
    return any(
        mine and bool(trained_mask(rollout, objective).any())
        for mine, rollout in zip(used, group.rollouts, strict=True)
    )
