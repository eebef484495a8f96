"""Whether a group begun now could still be trained at its end: how fast versions come, and how fast this worker is.

Lag is counted as the learner counts it: versions that come from the one a group is sampled on until it is trained.
Pure: times are given, in seconds of one clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import Final

MEMORY: Final = 8
"""Groups of this worker that its speed is told from."""
FADE: Final = 0.7
"""Weight of a group beside the one after it."""
SAME_LOAD: Final = 0.25
"""Loads that differ by less of their mean say nothing of what another load would cost."""
ANOTHER_MACHINE: Final = 3.0
"""A group that took so many times longer or shorter than forecast makes those before it worthless."""


@dataclass(frozen=True)
class Pace:
    """How fast versions come.

    Attributes:
        newest: number of the newest version that is known.
        age_s: seconds since it was first seen.
        step_s: seconds of a step, as the learner says; 0 before it knows.
        lead_s: seconds from when a step's groups are chosen until its version can be seen, as the learner says.
    """

    newest: int
    age_s: float
    step_s: float
    lead_s: float = 0.0

    @property
    def is_known(self) -> bool:
        return self.step_s > 0

    @property
    def version_s(self) -> float:
        """Seconds between two versions: as the learner said, or more once the next one is overdue."""
        return max(self.step_s, self.age_s)

    def lag_after(self, seconds: float, oldest: int) -> float:
        """Steps whose groups are chosen from when those of version ``oldest`` were until ``seconds`` from now.

        The group is for the next one, so that its lag is the whole number in it.
        """
        return self.newest - oldest + (self.lead_s + self.age_s + seconds) / self.version_s


@dataclass(frozen=True)
class Timing:
    """What a group took here.

    Attributes:
        load: sequences in the engine meanwhile, on average.
        token_s: seconds a token of its longest completion.
    """

    load: float
    token_s: float


@dataclass(frozen=True)
class Wait:
    """What a group took from its last token until the broker had it: rewards and publishing.

    Attributes:
        since, until: seconds of one clock.
    """

    since: float
    until: float


@dataclass
class Speed:
    """This worker's recent groups, and what the next one would take at another load.

    Seconds a token are taken to be ``a + b × load`` with a, b ≥ 0. Where all loads were alike they are taken to be
    proportional to the load, which is the best that fewer sequences can bring: trying it shows what they do.

    Groups that wait for the broker or for rewards side by side wait for the same thing, which may be an outage that
    nobody noticed: they say how long that takes once, not once each.

    Attributes:
        tokens_before: of a group's longest completion, as long as none has ended here; 0: not known.
    """

    tokens_before: float = 0.0
    _timings: deque[Timing] = field(default_factory=lambda: deque(maxlen=MEMORY))
    _tokens: deque[int] = field(default_factory=lambda: deque(maxlen=MEMORY))
    _waits: deque[Wait] = field(default_factory=lambda: deque(maxlen=MEMORY))

    def note(self, timing: Timing) -> None:
        """A group was sampled, or a part of it that is long enough to tell."""
        if self._timings:
            ratio = timing.token_s / self.token_s(timing.load)
            if not 1 / ANOTHER_MACHINE < ratio < ANOTHER_MACHINE:
                self._timings.clear()
        self._timings.append(timing)

    def ended(self, tokens: int, wait: Wait | None = None) -> None:
        """A group of this length is out, after ``wait``; None where an outage made it longer."""
        self._tokens.append(tokens)
        if wait is not None and not (self._waits and wait.since < self._waits[-1].until):
            self._waits.append(wait)

    @property
    def is_known(self) -> bool:
        return bool(self._timings) and self.tokens > 0

    @property
    def load(self) -> float:
        """Sequences in the engine beside the last group, it included; at least one timing must have been noted."""
        return self._timings[-1].load

    @property
    def tokens(self) -> float:
        """Of the longest completion of a group."""
        return median(self._tokens) if self._tokens else self.tokens_before

    @property
    def rest_s(self) -> float:
        """Of rewards and publishing."""
        return median_low([one.until - one.since for one in self._waits] or [0.0])

    def token_s(self, load: float) -> float:
        """Seconds a token of one sequence among ``load``; at least one timing must have been noted."""
        weights = [FADE**age for age in reversed(range(len(self._timings)))]
        total = sum(weights)
        pairs = list(zip(weights, self._timings, strict=True))
        mean_load = sum(w * one.load for w, one in pairs) / total
        mean_s = sum(w * one.token_s for w, one in pairs) / total
        loads = [one.load for one in self._timings]
        if max(loads) - min(loads) < SAME_LOAD * mean_load:
            return mean_s * load / mean_load
        spread = sum(w * (one.load - mean_load) ** 2 for w, one in pairs)
        slope = (
            sum(w * (one.load - mean_load) * (one.token_s - mean_s) for w, one in pairs) / spread
        )
        steepest = mean_s / mean_load  # a ≥ 0
        return mean_s + min(max(slope, 0.0), steepest) * (load - mean_load)

    def group_s(self, load: float) -> float:
        """Seconds from the first request of a group until it is out, while ``load`` sequences are in the engine."""
        return self.token_s(load) * self.tokens + self.rest_s
