"""Why no step comes: what a learner that waits for groups sees, as sentences for a person. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from spotgrpo.consumer.roster import Sighting
from spotgrpo.shared.ids import Queues
from spotgrpo.shared.ports import QueueDepth

SHOWN: Final = 4
"""Workers whose last reports are shown."""

Doing = Literal[
    "waiting",
    "blocked",
    "scoring",
    "storing",
    "publishing",
    "leaving",
    "beginning",
    "generating",
    "idle",
    "too slow",
    "other",
]
STATES: Final[dict[str, Doing]] = {
    "waiting for a version": "waiting",
    "publishing blocked": "blocked",
    "scoring": "scoring",
    "storing": "storing",
    "publishing": "publishing",
    "draining": "leaving",
    "looking for partials": "beginning",
    "waiting for room": "beginning",
    "generating": "generating",
    "idle": "idle",
    "leaving tasks to faster workers": "too slow",
}
CLAUSES: Final[dict[Doing, str]] = {
    "waiting": "wait for a version: they cannot get it from the bucket, or refuse it; their logs say which",
    "blocked": "cannot publish: the broker holds publishers back (memory or disk alarm), or the rollouts queue is full",
    "scoring": "have generated and wait for rewards: a reward function is slow or hangs (worker.reward_timeout_s)",
    "storing": "wait for the bucket to take a group that is too big for a message",
    "publishing": "wait for the broker to confirm their groups",
    "leaving": "were told to stop and are leaving",
    "beginning": "begin tasks",
    "generating": "generate",
    "idle": "are idle",
    "too slow": "leave tasks to faster workers, for as long as versions came faster than they could finish one",
    "other": "do something else",
}
START_ONE: Final = "start one with `spotgrpo worker …`"
AGAIN: Final = "and no task waits for them: those that give no sign are published again after train.reissue_after_s"
NOT_TAKEN: Final = "though tasks wait: they may have lost their connection to the tasks queue"


@dataclass(frozen=True)
class Scene:
    """What can be seen while no group comes.

    Attributes:
        tasks, rollouts: the queues; None where the broker does not answer.
        outstanding: tasks that nothing settled yet.
        seen: workers that reported in the last minute.
        last: the newest report of all, also an older one.
        hears: reports can come at all.
        leads: this learner holds the leader queue, so that groups come to it.
        now: seconds, on the clock of the reports.
        quarantined: workers whose groups are not trained.
    """

    tasks: QueueDepth | None
    rollouts: QueueDepth | None
    outstanding: int
    seen: Sequence[Sighting]
    last: Sighting | None
    hears: bool
    leads: bool
    now: float
    quarantined: Sequence[str] = ()

    def describe(self, queues: Queues) -> str:
        """All of it: which queue, how many tasks and workers, why, and the last reports."""
        if self.tasks is None or self.rollouts is None:
            return (
                f"the broker does not answer, so nothing comes from {queues.rollouts}; trying again"
            )
        if not self.leads:
            return (
                f"this learner is not connected to {queues.leader}: it gets it back, or another learner takes the "
                "run over"
            )
        return (
            f"waiting for groups in {queues.rollouts} ({self.rollouts.ready} there); {self.outstanding} tasks "
            f"outstanding, {self.tasks.ready} of them not taken yet; {len(self.seen)} workers seen in the last "
            f"minute, {self.tasks.consumers} connected: {self._why(self.tasks)}{self._refused()}{self._reports()}"
        )

    def _why(self, tasks: QueueDepth) -> str:
        if self.seen:
            return "; ".join(self._clauses(tasks))
        if tasks.consumers and not self.hears:
            return "their reports cannot be heard, since the broker's user may not make a queue for them"
        if tasks.consumers:
            return "they are connected, but silent: starting, hanging, or their reports do not get here"
        if self.last is not None:
            gone, end = self.now - self.last.at, "left" if self.last.has_left else "was heard"
            return f"no worker is left, the last {end} {gone:.0f} s ago: {START_ONE}"
        return f"no worker has been seen: {START_ONE}"

    def _clauses(self, tasks: QueueDepth) -> list[str]:
        doing = [STATES.get(one.state, "other") for one in self.seen]
        found = []
        for what, clause in CLAUSES.items():
            count = doing.count(what)
            if count:
                found.append(f"{count} of {len(doing)} {clause}")
                if what == "idle":
                    found[-1] += f" {NOT_TAKEN if tasks.ready else AGAIN}"
        return found

    def _refused(self) -> str:
        if not self.quarantined:
            return ""
        names, more = ", ".join(self.quarantined[:SHOWN]), len(self.quarantined) - SHOWN
        others = f" and {more} more" if more > 0 else ""
        return f"; groups of {names}{others} are not trained, since what they sample does not fit (train.quarantine)"

    def _reports(self) -> str:
        if not self.seen:
            return ""
        shown = "; ".join(self._report(one) for one in self.seen[:SHOWN])
        more = len(self.seen) - SHOWN
        return f". Last reports: {shown}" + (f"; and {more} more" if more > 0 else "")

    def _report(self, one: Sighting) -> str:
        version = one.version or "no version"
        refused = f" (refused: {one.refused_why})" if one.refused_why else ""
        return f"{one.worker} {one.state}, {version}{refused}, {one.inflight} in flight, {self.now - one.at:.0f} s ago"
