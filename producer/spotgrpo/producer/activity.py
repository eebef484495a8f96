"""What a worker is doing, and what it waits for, from what it holds: a state and sentences for a person. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from spotgrpo.shared.ids import Queues

IDLE: Final = "idle"
BLOCKED: Final = "publishing blocked"
DRAINING: Final = "draining"
LEAVES_TASKS: Final = "leaving tasks to faster workers"
LEFT: Final = "left"


class Stage(StrEnum):
    """How far a task has come in this worker; as a word of the worker's own, its state."""

    RECALLING = "looking for partials"
    ADOPTING = "waiting for a version"
    QUEUING = "waiting for room"
    SAMPLING = "generating"
    SCORING = "scoring"
    STORING = "storing"
    PUBLISHING = "publishing"


SHOWN_FIRST: Final = (
    Stage.SAMPLING,
    Stage.SCORING,
    Stage.STORING,
    Stage.PUBLISHING,
    Stage.RECALLING,
    Stage.ADOPTING,
    Stage.QUEUING,
)
"""Work before waiting: a worker that generates one task while another waits for a version generates."""


@dataclass(frozen=True)
class Held:
    """A task in the worker's hands.

    Attributes:
        since: when it came to its stage, seconds on the clock of ``Activity.now``.
        min_version: that it asks for.
    """

    stage: Stage
    since: float
    min_version: int = 0


@dataclass(frozen=True)
class Limits:
    """What ends a wait, and what holds one up: settings that a sentence names."""

    max_inflight: int
    engine_stall_s: float
    reward_timeout_s: float


@dataclass(frozen=True)
class Activity:
    """All that a worker knows of itself at one moment.

    Attributes:
        tasks: that it holds.
        serves: its version; None before the first.
        refused_why: why the newest version is not served; empty where it is.
        trouble: why the bucket gives no versions; empty while it does.
        inflight: sequences in the engine.
        is_blocked: the broker takes no groups now.
        is_connected: tasks can come.
        is_draining: it was told to go.
        has_left: all is over.
        leaves_tasks: it could finish none in time.
    """

    now: float
    tasks: Sequence[Held] = ()
    serves: str | None = None
    refused_why: str = ""
    trouble: str = ""
    inflight: int = 0
    is_blocked: bool = False
    is_connected: bool = True
    is_draining: bool = False
    has_left: bool = False
    leaves_tasks: bool = False

    @property
    def state(self) -> str:
        """One word or two, for reports."""
        if self.has_left:
            return LEFT
        if self.is_draining:
            return DRAINING
        stages = {task.stage for task in self.tasks}
        if self.is_blocked and Stage.PUBLISHING in stages:
            return BLOCKED
        for stage in SHOWN_FIRST:
            if stage in stages:
                return stage
        if self.serves is None:
            return Stage.ADOPTING
        return LEAVES_TASKS if self.leaves_tasks else IDLE

    @property
    def is_idle(self) -> bool:
        """Nothing is wrong here, and nothing is left to do."""
        return self.state in (IDLE, LEAVES_TASKS) and self.is_connected

    def waits_for(self, queues: Queues, limits: Limits) -> str:
        """What would have to come for the work to go on, stage by stage; a clause each."""
        clauses = [
            self._clause(stage, queues, limits)
            for stage in SHOWN_FIRST
            if any(task.stage is stage for task in self.tasks)
        ]
        if not self.tasks and self.serves is None:
            clauses.append(f"there is no version to serve yet{self._why_no_version()}")
        elif not self.tasks and not self.is_connected:
            clauses.append(f"there is no connection to {queues.tasks}, so no task comes")
        elif not self.tasks and self.leaves_tasks:
            clauses.append(
                f"versions to come slower, since this worker would finish no task of {queues.tasks} before "
                "max_staleness: faster ones take them"
            )
        elif not self.tasks:
            clauses.append(
                f"no task in {queues.tasks}; the learner hands out none, or is not there"
            )
        return "; ".join(clauses)

    def _clause(self, stage: Stage, queues: Queues, limits: Limits) -> str:
        tasks = [task for task in self.tasks if task.stage is stage]
        waited_s = self.now - min(task.since for task in tasks)
        count = f"{len(tasks)} task" if len(tasks) == 1 else f"{len(tasks)} tasks"
        return f"{count} {self._what(stage, tasks, queues, limits)}, for {waited_s:.0f} s"

    def _what(self, stage: Stage, tasks: Sequence[Held], queues: Queues, limits: Limits) -> str:
        match stage:
            case Stage.RECALLING:
                return "waiting for the bucket to say whether another worker left partials"
            case Stage.ADOPTING:
                oldest = min(task.min_version for task in tasks)
                return f"waiting for version {oldest} or newer, {self._serving()}"
            case Stage.QUEUING:
                return (
                    f"waiting for room in the engine (worker.max_inflight = {limits.max_inflight})"
                )
            case Stage.SAMPLING:
                return (
                    f"in the engine with {self.inflight} sequences (without a token for worker.engine_stall_s = "
                    f"{limits.engine_stall_s:g} s this worker ends)"
                )
            case Stage.SCORING:
                return (
                    f"waiting for rewards (worker.reward_timeout_s = {limits.reward_timeout_s:g})"
                )
            case Stage.STORING:
                return "waiting for the bucket to take a group that is too big for a message"
            case Stage.PUBLISHING:
                return f"waiting for {queues.rollouts} to confirm the group{self._why_blocked()}"

    def _serving(self) -> str:
        return f"{self.serves or 'none'} is served{self._why_no_version()}"

    def _why_no_version(self) -> str:
        reasons = [
            f"the newest is refused: {self.refused_why}" if self.refused_why else "",
            self.trouble,
        ]
        found = "; ".join(reason for reason in reasons if reason)
        return f" ({found})" if found else ""

    def _why_blocked(self) -> str:
        if not self.is_blocked:
            return ""
        return ", which takes none now: an alarm, a full queue, or no connection"
