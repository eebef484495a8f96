"""How old a group is, counted in versions of the lineage that is being trained. Pure.

Lag is the learner's version (whose weights the gradient is taken at) minus the oldest version among the group's
tokens. It is split at the moment the group reached the learner: *in flight* before, *in queue* after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from spotgrpo.shared.ids import lineage_version
from spotgrpo.shared.wire import Group


@dataclass(frozen=True)
class Lag:
    """Versions between sampling and training; ``total`` is the sum of the parts."""

    in_flight: int
    in_queue: int

    @property
    def total(self) -> int:
        return self.in_flight + self.in_queue


def oldest_version(group: Group, takeovers: Mapping[int, int]) -> int:
    """The oldest version among the group's tokens, as it counts today."""
    return min(
        lineage_version(run.version, takeovers)
        for rollout in group.rollouts
        for run in rollout.versions
    )


def is_sampled_by(group: Group, version: int, takeovers: Mapping[int, int]) -> bool:
    """Whether every token was sampled under the very weights of ``version``.

    A version that a takeover gave up counts as another one for its lag, and has weights of its own all the same.
    """
    return all(
        run.version.number == version == lineage_version(run.version, takeovers)
        for rollout in group.rollouts
        for run in rollout.versions
    )


def lag_of(oldest: int, arrived_at: int, version: int) -> Lag:
    """Lag of a group whose oldest token is of ``oldest``, that came when the learner was at ``arrived_at``."""
    arrived_at = max(oldest, min(arrived_at, version))
    return Lag(in_flight=arrived_at - oldest, in_queue=version - arrived_at)
