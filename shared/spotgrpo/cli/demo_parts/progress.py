"""What is known of a running demo, put together from the reports of learner and workers. No clock, no I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final

from spotgrpo.shared.errors import WireError
from spotgrpo.shared.ids import PolicyVersion
from spotgrpo.shared.wire import Json, Report

SPEED_WEIGHT: Final = 0.15
"""Of the newest report: tokens come in bursts, and a number that jumps tells nothing."""
PACE_STEPS: Final = 8
"""Steps whose times the rest is estimated from."""


@dataclass(frozen=True)
class Step:
    """One optimizer step. ``reward`` is the mean over its groups, lags are in versions, ``at`` is Unix seconds.

    ``learner_waited`` is the share of its time that the learner waited for groups, ``workers_idled`` that of the
    workers' places that were empty for want of tasks, or of a broker that takes groups.
    """

    version: int
    reward: float | None
    lag_mean: float | None
    lag_max: float | None
    at: float
    learner_waited: float | None = None
    workers_idled: float | None = None


@dataclass
class WorkerState:
    """The newest that a worker said of itself. ``tokens`` and ``groups`` count from its start."""

    name: str
    state: str = "starting"
    version: str = ""
    inflight: int = 0
    groups: int = 0
    tokens: int = 0
    tokens_per_s: float = 0.0
    at: float = 0.0
    engine: str = ""
    is_gone: bool = False

    def apply(self, report: Report) -> None:
        """Take over what ``report`` says; reports that were overtaken on their way change nothing."""
        if report.at < self.at:
            return
        values = report.values
        self.at = report.at
        self.state = str(values.get("state") or self.state)
        self.version = _short_version(values.get("version")) or self.version
        self.engine = str(values.get("engine") or self.engine)
        self.inflight = int(_number(values, "inflight") or 0)
        self.groups = int(_number(values, "groups") or self.groups)
        self.tokens = int(_number(values, "tokens") or self.tokens)
        speed = _number(values, "tokens_per_s") or 0.0
        self.tokens_per_s += SPEED_WEIGHT * (speed - self.tokens_per_s)

    def lost(self) -> None:
        """The process is gone; what it counted stays."""
        self.state, self.is_gone, self.inflight, self.tokens_per_s = "killed", True, 0, 0.0


@dataclass
class Progress:
    """A demo as seen from outside; ``max_steps`` are asked for."""

    max_steps: int
    steps: dict[int, Step] = field(default_factory=dict)
    workers: dict[str, WorkerState] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)

    def add_worker(self, name: str) -> WorkerState:
        """A worker process was started."""
        self.workers[name] = WorkerState(name)
        return self.workers[name]

    def apply_worker(self, name: str, report: Report) -> None:
        """A worker of ours said something."""
        worker = self.workers.get(name) or self.add_worker(name)
        if not worker.is_gone:
            worker.apply(report)

    def apply_learner(self, values: Mapping[str, Json], at: float) -> None:
        """The learner said something: a report, or a line of ``metrics.jsonl``, which say the same."""
        for name, value in values.items():
            if isinstance(value, int) and not isinstance(value, bool):
                self.counts[name] = value
        version = _version_number(values.get("version"))
        if version is not None and version > 0 and "reward" in values and version not in self.steps:
            lags = (
                _number(values, "sample/staleness_mean"),
                _number(values, "sample/staleness_max"),
            )
            waits = (
                _number(values, "perf/rollout_wait_share"),
                _number(values, "rollout/backpressure_share"),
            )
            self.steps[version] = Step(version, _number(values, "reward"), *lags, at, *waits)

    @property
    def version(self) -> int:
        return max(self.steps, default=0)

    @property
    def newest(self) -> Step | None:
        return self.steps.get(self.version)

    @property
    def rewards(self) -> list[float]:
        """Mean reward of each step so far, in order."""
        steps = sorted(self.steps.values(), key=lambda step: step.version)
        return [step.reward for step in steps if step.reward is not None]

    @property
    def tokens_per_s(self) -> float:
        return sum(worker.tokens_per_s for worker in self.workers.values())

    @property
    def tokens(self) -> int:
        return sum(worker.tokens for worker in self.workers.values())

    @property
    def engine(self) -> str:
        """What the workers generate with; empty before one said so."""
        return next((worker.engine for worker in self.workers.values() if worker.engine), "")

    def seconds_left(self) -> float | None:
        """Steps left at the pace of the last ones; None before there is one."""
        times = [self.steps[version].at for version in sorted(self.steps)][-PACE_STEPS - 1 :]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        return median(gaps) * (self.max_steps - self.version) if gaps else None


def _number(values: Mapping[str, Json], name: str) -> float | None:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) else None


def _version_number(value: Json) -> int | None:
    if isinstance(value, int):
        return value
    if not isinstance(value, str):
        return None
    try:
        return PolicyVersion.parse(value).number
    except WireError:
        return None


def _short_version(value: Json) -> str:
    number = _version_number(value)
    return "" if number is None else f"v{number}"
