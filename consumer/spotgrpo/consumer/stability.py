"""What a run's figures warn of, in words with the likely cause: said once, and again in growing gaps. Pure.

Whether a single worker samples what it says is found out elsewhere (``mismatch``); here it is a cause.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from spotgrpo.consumer.breakdown import MOST_SHOWN, source_of
from spotgrpo.shared.gaps import Repeats
from spotgrpo.shared.wire import Group, Json


@dataclass(frozen=True)
class _Figure:
    """One of the record that says how far the policy is from those that sampled, and from where it is worth a word."""

    name: str
    bound: float
    text: str
    is_low: bool = False

    def shown(self, record: Mapping[str, Json]) -> str | None:
        value = _number(record, self.name)
        if value is None or not (value < self.bound if self.is_low else value > self.bound):
            return None
        return f"{self.text.format(value)} ({self.name})"


APART: Final = (
    # Several times the divergence at which implementations of PPO stop an epoch (0.01 to 0.05).
    _Figure("mismatch_kl", 0.1, "the policy is {:.2g} nats from those that sampled"),
    # Where nothing clips it, such a token outweighs a hundred others.
    _Figure("ratio_max", 100.0, "a token is {:.3g} times as likely as when it was sampled"),
    # More than half of the tokens are as good as none.
    _Figure(
        "effective_sample_size",
        0.5,
        "all tokens are worth {:.0%} of as many on policy",
        is_low=True,
    ),
)
COLLAPSED: Final = 0.1
"""Of the entropy that the run began with."""
FIRST: Final = 5
"""Steps whose entropies are what it began with, and the last ones that are held against it."""
MOSTLY: Final = 0.5
"""Of a function's completions: None for more of them is too much."""
PATIENCE: Final = 3
"""Steps in a row, for what a single step may show by chance."""
NAMED: Final = 4
MOST_SOURCES: Final = 1024

CORRECT: Final = (
    "loss.corrections (truncate, mask) bound what such tokens count, if their ratios are right"
)


@dataclass
class _Scores:
    """How a reward function does: sources that it ever gave a number for, and when it is spoken of."""

    scored: set[str | None] = field(default_factory=set)
    alarm: Repeats = field(default_factory=lambda: Repeats(PATIENCE))


@dataclass
class StabilityWatch:
    """Looks at one step after the other. Kept in memory: a learner that takes over begins anew."""

    _alarms: dict[str, Repeats] = field(default_factory=lambda: defaultdict(Repeats))
    _collapse: Repeats = field(default_factory=lambda: Repeats(PATIENCE))
    _first: list[float] = field(default_factory=list)
    _last: list[float] = field(default_factory=list)
    _functions: dict[str, _Scores] = field(default_factory=dict)

    def look(self, record: Mapping[str, Json], groups: Sequence[Group]) -> list[str]:
        """What to warn of after a step.

        Args:
            record: of the step, as in ``metrics.jsonl``.
            groups: of its batch.
        """
        found = [self._apart(record), self._entropy(record), *self._rewards(groups)]
        return [text for text in found if text is not None]

    def _apart(self, record: Mapping[str, Json]) -> str | None:
        """The policy is far from those that sampled: by its divergence, a single token, or the weights' spread."""
        shown = [(one.name, one.shown(record)) for one in APART]
        due = [self._alarms[name].is_due(text is not None) for name, text in shown]
        if not any(due):
            return None
        what = ", ".join(text for _, text in shown if text is not None)
        return f"{what}: {_why_apart(record)}"

    def _entropy(self, record: Mapping[str, Json]) -> str | None:
        entropy = _number(record, "entropy")
        if entropy is None:
            return None
        if len(self._first) < FIRST:
            self._first.append(entropy)
            return None
        self._last = [*self._last, entropy][-FIRST:]
        before, now = median(self._first), median(self._last)
        if not self._collapse.is_due(now < COLLAPSED * before):
            return None
        return (
            f"entropy has fallen to {now:.2g} nats a token, from {before:.2g}: the policy hardly tries anything new, "
            "and more and more groups will be flat. Well and good where the reward is what it should be; else a "
            "smaller train.learning_rate, a larger loss.clip_high, or a weight on loss.entropy or loss.kl"
        )

    def _rewards(self, groups: Sequence[Group]) -> list[str | None]:
        names = dict.fromkeys(
            name for group in groups for one in group.rollouts for name in one.reward_parts
        )
        return [self._nones(name, groups) for name in [*names][:MOST_SHOWN]]

    def _nones(self, name: str, groups: Sequence[Group]) -> str | None:
        """Of a function that is meant for some sources alone, those for which it never gave a number do not count."""
        scores = self._functions.setdefault(name, _Scores())
        values: dict[str | None, list[float | None]] = defaultdict(list)
        for group in groups:
            given = [one.reward_parts.get(name) for one in group.rollouts]
            values[source_of(group.row)] += given
        if len(scores.scored) < MOST_SOURCES:
            scores.scored |= {
                source for source, given in values.items() if any(v is not None for v in given)
            }
        counted = [
            value
            for source, given in values.items()
            if source in scores.scored or not scores.scored
            for value in given
        ]
        nones = sum(value is None for value in counted)
        if not scores.alarm.is_due(nones > MOSTLY * len(counted)):
            return None
        return (
            f"reward {name} gave None for {nones} of {len(counted)} completions: most likely it raises, runs over "
            "worker.reward_timeout_s, or does not know such rows; the log of a worker says which. The advantage of "
            "those completions is made without it"
        )


def _why_apart(record: Mapping[str, Json]) -> str:
    """The likely cause: workers that sample something else, then lag, then how engine and learner compute."""
    wrong = record.get("mismatched")
    if isinstance(wrong, list) and wrong:
        names = ", ".join(map(str, wrong[:NAMED])) + (" and others" if len(wrong) > NAMED else "")
        return (
            f"most likely since {names} do not sample what they say; a warning of each has the cause, and "
            "train.quarantine keeps their groups out"
        )
    lag = _number(record, "sample/staleness_mean") or 0.0
    if lag > 0:
        fits = ", and what was sampled at lag 0 fits" if record.get("lag0_tokens") else ""
        return (
            f"most likely too much lag: groups were {lag:.1f} versions old on average{fits}. A smaller "
            f"train.learning_rate or train.max_staleness brings them together; {CORRECT}"
        )
    return (
        "though all of it was sampled by the same weights: engine and learner compute some tokens differently, most "
        f"likely by their dtype or quantised weights; {CORRECT}"
    )


def _number(record: Mapping[str, Json], name: str) -> float | None:
    value = record.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
