"""Where groups' lags come from, and whom the filter drops: counts since the run was taken over. Pure.

A filter that drops what is slow biases the policy against long completions, so that both what came into steps and
what was dropped is counted by length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from spotgrpo.consumer.lately import longest_of
from spotgrpo.consumer.staleness import Lag
from spotgrpo.shared.wire import Group, Json

MOST_LAG: Final = 16
"""Lags from here on are counted as one."""

DropCause = Literal["in_flight", "in_queue", "quarantine"]
"""Too old when it came; too old after it came, since it waited; from a worker whose logprobs do not fit."""


@dataclass
class Accounts:
    """Counts of groups, by lag and by length (of the longest completion, up to a power of two)."""

    in_flight: Counter[int] = field(default_factory=Counter)
    in_queue: Counter[int] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    batched_by_length: Counter[int] = field(default_factory=Counter)
    dropped_by_length: Counter[int] = field(default_factory=Counter)

    def batched(self, group: Group, lag: Lag) -> None:
        """It goes into a step, or fills a place of one."""
        self._count(lag)
        self.batched_by_length[_up_to(longest_of(group))] += 1

    def drop(self, group: Group, lag: Lag, max_staleness: int) -> None:
        """It is too old to be trained."""
        self._count(lag)
        self.dropped["in_flight" if lag.in_flight > max_staleness else "in_queue"] += 1
        self.dropped_by_length[_up_to(longest_of(group))] += 1

    def quarantine(self, group: Group) -> None:
        """It is not trained for its worker's sake, however old it is."""
        self.dropped["quarantine"] += 1
        self.dropped_by_length[_up_to(longest_of(group))] += 1

    def _count(self, lag: Lag) -> None:
        self.in_flight[min(lag.in_flight, MOST_LAG)] += 1
        self.in_queue[min(lag.in_queue, MOST_LAG)] += 1

    def figures(self) -> dict[str, Json]:
        """For a record: histograms are lists, whose place is the lag; lengths are by their upper bounds."""
        return {
            "staleness_in_flight_histogram": _histogram(self.in_flight),
            "staleness_in_queue_histogram": _histogram(self.in_queue),
            "dropped_in_flight": self.dropped["in_flight"],
            "dropped_in_queue": self.dropped["in_queue"],
            "dropped_quarantine": self.dropped["quarantine"],
            "batched_by_length": _by_length(self.batched_by_length),
            "dropped_by_length": _by_length(self.dropped_by_length),
        }


def flat_share(groups: Sequence[Group]) -> float:
    """Share of a batch whose rewards do not differ: a place each, with a gradient only by other terms of the loss."""
    rewards = [{one.reward for one in group.rollouts if one.reward is not None} for group in groups]
    return sum(len(different) < 2 for different in rewards) / len(groups)


def _up_to(tokens: int) -> int:
    """The power of two that is ``tokens`` or the next above it."""
    return 1 << max(0, tokens - 1).bit_length()


def _histogram(counts: Counter[int]) -> Json:
    return [counts[lag] for lag in range(max(counts, default=-1) + 1)]


def _by_length(counts: Counter[int]) -> Json:
    return {str(length): counts[length] for length in sorted(counts)}
