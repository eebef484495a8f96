"""Which side to scale: what the learner waited for, and what its workers' places were empty for, in shares and words.

Workers count their own seconds and report the sums; the roster adds up what they grew by. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from spotgrpo.shared.wire import Json

FIRST_S: Final = 60.0
EVERY_S: Final = 300.0
"""Seconds until the first sentence, and between two."""
NOTABLE: Final = 0.2
"""Share of the time from which a wait is worth a word."""
CAUSES: Final = ("tasks", "version", "too_slow", "blocked")
"""What workers' places are empty for, as their reports call it."""


@dataclass
class Fleet:
    """Seconds of workers, in whole engines: sums over all of them since the learner began to listen."""

    busy_s: float = 0.0
    idle_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0))

    @property
    def total_s(self) -> float:
        return self.busy_s + sum(self.idle_s.values())

    def grow(self, before: Mapping[str, float], now: Mapping[str, float]) -> None:
        """A worker's own sums, as :func:`seconds_of` gives them, went from ``before`` to ``now``."""
        gained = {name: max(0.0, now[name] - before.get(name, 0.0)) for name in now}
        self.busy_s += gained.get("busy", 0.0)
        for cause in CAUSES:
            self.idle_s[cause] += gained.get(cause, 0.0)

    def since(self, before: Fleet) -> Fleet:
        """What was added since."""
        idle_s = {cause: self.idle_s[cause] - before.idle_s[cause] for cause in CAUSES}
        return Fleet(self.busy_s - before.busy_s, idle_s)

    def share(self, cause: str) -> float:
        """Of all places and seconds, what was empty for want of ``cause``."""
        return self.idle_s[cause] / self.total_s if self.total_s > 0 else 0.0

    def copy(self) -> Fleet:
        return Fleet(self.busy_s, dict(self.idle_s))


def seconds_of(values: Mapping[str, Json]) -> dict[str, float]:
    """The seconds of a worker's report; what is not a number is passed over."""
    idle = values.get("idle_s")
    named = {"busy": values.get("busy_s"), **(idle if isinstance(idle, dict) else {})}
    wanted = ("busy", *CAUSES)
    return {
        name: float(value)
        for name, value in named.items()
        if name in wanted and isinstance(value, int | float)
    }


@dataclass
class LearnerSeconds:
    """What the learner's time went by, in seconds: ``whole`` has everything in it."""

    whole: float = 0.0
    rollouts: float = 0.0
    commit: float = 0.0

    def since(self, before: LearnerSeconds) -> LearnerSeconds:
        """What was added since."""
        return LearnerSeconds(
            self.whole - before.whole, self.rollouts - before.rollouts, self.commit - before.commit
        )

    def share(self, seconds: float) -> float:
        return seconds / self.whole if self.whole > 0 else 0.0


def figures(learner: LearnerSeconds, fleet: Fleet) -> dict[str, Json]:
    """Of one stretch of time, for a record. Seconds of workers are those of whole engines, all together."""
    return {
        "perf/rollout_wait_share": learner.share(learner.rollouts),
        "rollout/busy_s": fleet.busy_s,
        "rollout/backpressure_s": fleet.idle_s["tasks"] + fleet.idle_s["blocked"],
        "rollout/no_task_s": fleet.idle_s["tasks"],
        "rollout/blocked_s": fleet.idle_s["blocked"],
        "rollout/no_version_s": fleet.idle_s["version"],
        "rollout/too_slow_s": fleet.idle_s["too_slow"],
        "rollout/backpressure_share": fleet.share("tasks") + fleet.share("blocked"),
    }


def sentence(learner: LearnerSeconds, fleet: Fleet) -> str:
    """Who waited for whom in a stretch of time, and what to do about it."""
    last = _last(learner.whole)
    waited, stored = learner.share(learner.rollouts), learner.share(learner.commit)
    found = []
    if stored >= NOTABLE:
        found.append(
            f"the learner waited {stored:.0%} of {last} for the bucket: a faster link to it, or train.durable_every"
        )
    if fleet.share("blocked") >= NOTABLE:
        found.append(
            f"workers had {fleet.share('blocked'):.0%} of their places empty over {last} since the broker took no "
            "groups: the rollouts queue is full, or an alarm of the broker is on"
        )
    found += _who_waits(waited, fleet, last)
    if fleet.share("version") >= NOTABLE:
        found.append(
            f"workers had {fleet.share('version'):.0%} of their places empty for want of a version: see what they "
            "refuse, and their link to the bucket"
        )
    if fleet.share("too_slow") >= NOTABLE:
        found.append(
            f"workers left {fleet.share('too_slow'):.0%} of their places empty, since they could finish nothing within "
            "train.max_staleness: raise it, or replace the slow ones"
        )
    return "; ".join(found) or f"learner and workers kept each other busy over {last}"


def _who_waits(waited: float, fleet: Fleet, last: str) -> list[str]:
    """The learner for groups, workers for tasks, or both for what ``max_staleness`` allows."""
    idle = fleet.share("tasks")
    if max(waited, idle) < NOTABLE:
        return []
    if not fleet.total_s:
        return [
            f"the learner waited {waited:.0%} of {last} for rollouts: add workers (none is heard of)"
        ]
    if idle < NOTABLE:
        return [f"the learner waited {waited:.0%} of {last} for rollouts: add workers"]
    if waited < NOTABLE:
        return [f"workers idled {idle:.0%} of {last} for want of tasks: the learner is the limit"]
    return [
        (
            f"the learner waited {waited:.0%} of {last} for rollouts while workers idled {idle:.0%} for want of tasks: "
            "more can be outstanding with a larger train.max_staleness or train.groups_per_step"
        )
    ]


def _last(seconds: float) -> str:
    return f"the last {seconds / 60:.0f} min" if seconds >= 2 * 60 else f"the last {seconds:.0f} s"


@dataclass
class Balance:
    """Takes stock now and then: of every record, and of every sentence.

    Attributes:
        began: seconds on the clock of ``now`` below.
        waited: by the learner, since then.
    """

    began: float = 0.0
    waited: LearnerSeconds = field(default_factory=LearnerSeconds)
    _recorded: tuple[LearnerSeconds, Fleet] = field(
        default_factory=lambda: (LearnerSeconds(), Fleet())
    )
    _said: tuple[LearnerSeconds, Fleet] = field(default_factory=lambda: (LearnerSeconds(), Fleet()))
    _say_after_s: float = field(default_factory=lambda: FIRST_S)

    def record(self, now: float, fleet: Fleet) -> dict[str, Json]:
        """Figures of the time since the last record."""
        learner = self._learner(now)
        found = figures(learner.since(self._recorded[0]), fleet.since(self._recorded[1]))
        self._recorded = learner, fleet.copy()
        return found

    def say(self, now: float, fleet: Fleet) -> str:
        """A sentence where one is due, about the time since the last; else nothing."""
        learner = self._learner(now)
        since = learner.since(self._said[0])
        if since.whole < self._say_after_s:
            return ""
        text = sentence(since, fleet.since(self._said[1]))
        self._said, self._say_after_s = (learner, fleet.copy()), EVERY_S
        return text

    def whole(self, now: float, fleet: Fleet) -> dict[str, Json]:
        """Of the whole run."""
        learner = self._learner(now)
        shares = {
            "rollout_wait_share": learner.share(learner.rollouts),
            "commit_wait_share": learner.share(learner.commit),
            "backpressure_share": fleet.share("tasks") + fleet.share("blocked"),
        }
        return {**shares, "balance": sentence(learner, fleet)}

    def _learner(self, now: float) -> LearnerSeconds:
        return LearnerSeconds(now - self.began, self.waited.rollouts, self.waited.commit)
