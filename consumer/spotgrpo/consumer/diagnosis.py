"""Why a worker's logprobs are not the learner's: another temperature, no adapter, a truncated distribution. Pure numpy.

Each of these explains the difference where the learner, made wrong in the same way, computes what the worker says.
Measured on a tiny Llama and on SmolLM2-135M, sampled wrongly in each of these ways: in float32, what explains leaves
under 0.15 of the difference, mostly nothing, and what does not 0.3 and more. Of a truncated distribution nothing of the
difference is below the learner's logprobs (in bfloat16 0.1 of it), else 0.28 and more, but for temperature 0.7 (0.09),
which is tried before. In bfloat16, rounding hides a base that differs from its version by no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

import numpy as np

from spotgrpo.consumer.fit import group_fit
from spotgrpo.consumer.packing import Float32Array
from spotgrpo.shared.wire import Group

FACTORS: Final = (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.4, 1.5, 1.75, 2.0)
"""Of the run's temperature: those that are tried."""
EXPLAINS: Final = 0.25
"""Of the difference: what may be left of it."""
BELOW: Final = 0.2
"""Of all that a truncated distribution's logprobs differ by: what may be below the learner's."""
MOST_TOKENS: Final = 256
"""Of a group, that are computed so often."""


class Recompute(Protocol):
    """The learner's logprobs of each rollout's tokens of a group."""

    def __call__(
        self, group: Group, *, temperature: float | None = None, adapter: bool = True
    ) -> Sequence[Float32Array]:
        """At another than the sampling temperature, or of the base alone."""


@dataclass(frozen=True)
class Tried:
    """Mean |difference| in nats that is left with a temperature."""

    gap: float
    temperature: float


def explain(group: Group, recompute: Recompute) -> str | None:
    """What makes the behaviour logprobs of ``group``, sampled at lag 0, differ, in words; None where nothing is found.

    Costs some forward passes of MOST_TOKENS tokens.
    """
    part = _part(group)
    mine = recompute(part)
    gap = group_fit(part, mine).mean_gap
    if not gap > 0.0:
        return None
    base = group_fit(part, recompute(part, adapter=False)).mean_gap
    if base <= EXPLAINS * gap:
        return f"they are those of the base model (within {base:.2g}): its engine does not apply the adapter"
    best = _best_temperature(part, recompute)
    if best.gap <= EXPLAINS * gap:
        return (
            f"they are those of temperature {best.temperature:.2g} (within {best.gap:.2g}), not of "
            f"{group.sampling.temperature:g}: its engine samples at another temperature, or gives logprobs of before "
            "the temperature"
        )
    if _share_below(part, mine) <= BELOW:
        return (
            "hardly one is below the learner's: it samples from a truncated distribution, most likely by a top_p, "
            "top_k or min_p in the model's generation_config.json or in a server's defaults"
        )
    return None


def _best_temperature(part: Group, recompute: Recompute) -> Tried:
    """The nearest of the FACTORS, and then of those halfway to its neighbours."""
    own = part.sampling.temperature

    def tried(factor: float) -> Tried:
        found = recompute(part, temperature=factor * own)
        return Tried(group_fit(part, found).mean_gap, factor * own)

    coarse = {factor: tried(factor) for factor in FACTORS}
    best = min(coarse, key=lambda factor: coarse[factor].gap)
    place = FACTORS.index(best)
    around = FACTORS[max(place - 1, 0) : place + 2]
    finer = [tried((best + other) / 2.0) for other in around if other != best]
    return min([coarse[best], *finer], key=lambda one: one.gap)


def _share_below(part: Group, recomputed: Sequence[Float32Array]) -> float:
    """How much of what the behaviour logprobs differ by is below the recomputed ones."""
    apart = np.concatenate(
        [
            (rollout.logprobs.astype(np.float64) - mine)[rollout.loss_mask]
            for rollout, mine in zip(part.rollouts, recomputed, strict=True)
        ]
    )
    total = float(np.abs(apart).sum())
    return float(-apart[apart < 0].sum()) / total if total > 0 else 1.0


def _part(group: Group) -> Group:
    """``group`` with MOST_TOKENS tokens of its rollouts, of each from its start."""
    each = max(MOST_TOKENS // len(group.rollouts), 1)
    cut = tuple(
        replace(
            rollout,
            token_ids=rollout.token_ids[:each],
            logprobs=rollout.logprobs[:each],
            loss_mask=rollout.loss_mask[:each],
        )
        for rollout in group.rollouts
    )
    return replace(group, rollouts=cut)
