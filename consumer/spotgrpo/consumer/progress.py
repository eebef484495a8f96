"""What a learner says of itself: one record a step for ``metrics.jsonl`` and telemetry, waits, and the summary."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from spotgrpo.consumer.accounts import flat_share
from spotgrpo.consumer.balance import Balance, Fleet
from spotgrpo.consumer.breakdown import Moments, by_function, by_source
from spotgrpo.consumer.fit import Fit
from spotgrpo.consumer.intake import Seen
from spotgrpo.consumer.lately import Lately
from spotgrpo.consumer.ledger import CAUSES, Counts, Ledger
from spotgrpo.consumer.roster import Roster
from spotgrpo.consumer.stability import StabilityWatch
from spotgrpo.consumer.staleness import Lag
from spotgrpo.consumer.stall import Scene
from spotgrpo.shared.gaps import gaps
from spotgrpo.shared.ids import Queues, TaskId
from spotgrpo.shared.metrics import MetricsWriter
from spotgrpo.shared.ports import QueueDepth
from spotgrpo.shared.wire import Group, Json, Rollout

log = logging.getLogger(__name__)

FLAT_BATCHES = 5
"""Say why after as many batches in a row that are flat as a whole, then after twice as many, and so on."""


class StepStats(Protocol):
    """What the progress report takes from the trainer's own statistics of a step."""

    @property
    def loss(self) -> float: ...
    @property
    def grad_norm(self) -> float: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def ratio_mean(self) -> float: ...
    @property
    def ratio_max(self) -> float: ...
    @property
    def effective_sample_size(self) -> float: ...
    @property
    def clipped_fraction(self) -> float: ...
    @property
    def clipped_low_fraction(self) -> float: ...
    @property
    def clipped_high_fraction(self) -> float: ...
    @property
    def masked_fraction(self) -> float: ...
    @property
    def mismatch_kl(self) -> float: ...
    @property
    def base_kl(self) -> float | None: ...
    @property
    def entropy(self) -> float: ...
    @property
    def advantages(self) -> Mapping[TaskId, Moments]: ...
    @property
    def tokens(self) -> int: ...
    @property
    def over_budget(self) -> int: ...
    @property
    def skipped(self) -> bool: ...
    @property
    def fits(self) -> Mapping[TaskId, Fit]: ...


@dataclass
class Waits:
    """Seconds since the last step, by what was waited for."""

    rollouts: float = 0.0
    commit: float = 0.0


@dataclass
class Progress:
    """Collects a run's figures. Used by the learner's main thread alone.

    Args:
        queues: of the run, for what is said while nothing comes.
        metrics: where records go.
        max_steps: for the log.
        stall_warn_s: say what is waited for after so many seconds.
        clock: monotonic seconds.
    """

    queues: Queues
    metrics: MetricsWriter
    max_steps: int
    stall_warn_s: float
    clock: Callable[[], float] = time.monotonic
    lately: Lately = field(default_factory=Lately)
    stability: StabilityWatch = field(default_factory=StabilityWatch)
    _waits: Waits = field(default_factory=Waits)
    _balance: Balance = field(default_factory=Balance)
    _step: dict[str, Json] = field(default_factory=dict)
    _groups: Sequence[Group] = ()
    _started: float = 0.0
    _last_sign: float = 0.0
    _said: float = 0.0
    _gap_s: float = 0.0
    _gaps: Iterator[float] = field(default_factory=lambda: iter(()))
    _waiting_since: float = 0.0
    _first_version: int = 0
    _version: int = 0
    _tokens_trained: int = 0
    _flat_batches: int = 0
    _skipped: int = 0
    _say_flat_at: int = FLAT_BATCHES
    _final: dict[str, object] = field(default_factory=dict)
    _last_record: dict[str, Json] = field(default_factory=dict)
    _whole: dict[str, Json] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._wait()

    def began(self, version: int, *, resumed: bool) -> None:
        """The run is taken over; the first task goes out now."""
        self._started = self._last_sign = self._said = self._balance.began = self.clock()
        self._first_version = self._version = version
        if version >= self.max_steps:
            log.info("already at version %d, train.max_steps = %d", version, self.max_steps)
            return
        log.info(
            "%s at version %d of %d", "resuming" if resumed else "starting", version, self.max_steps
        )

    @contextlib.contextmanager
    def waiting_for_rollouts(self) -> Iterator[None]:
        """Count the seconds of the block as ``perf/rollout_wait_s``."""
        started = self._wait()
        try:
            yield
        finally:
            self._waits.rollouts += self.clock() - started
            self._balance.waited.rollouts += self.clock() - started

    @contextlib.contextmanager
    def waiting_for_commit(self) -> Iterator[None]:
        """Count the seconds of the block as waiting for the bucket."""
        started = self._waiting_since = self._wait()
        try:
            yield
        finally:
            self._waits.commit += self.clock() - started
            self._balance.waited.commit += self.clock() - started

    def _wait(self) -> float:
        """A wait begins now."""
        self._said, self._gaps = self.clock(), gaps(self.stall_warn_s)
        self._gap_s = next(self._gaps)
        return self._said

    def _is_due(self) -> bool:
        """Whether to name the wait now: after ``stall_warn_s``, and then in growing gaps."""
        if self.clock() - self._said < self._gap_s:
            return False
        self._said, self._gap_s = self.clock(), next(self._gaps)
        return True

    def still_waiting(
        self,
        outstanding: int,
        depth: Callable[[str], QueueDepth | None],
        roster: Roster,
        *,
        leads: bool,
        quarantined: Sequence[str] = (),
        evaluation: str = "",
    ) -> None:
        """Say, now and then, what is being waited for, and what can be seen of those who should send it."""
        if not self._is_due():
            return
        scene = Scene(
            tasks=depth(self.queues.tasks),
            rollouts=depth(self.queues.rollouts),
            outstanding=outstanding,
            seen=roster.seen(),
            last=roster.last,
            hears=roster.hears,
            leads=leads,
            now=self.clock(),
            quarantined=quarantined,
        )
        waited = self.clock() - self._last_sign
        more = f". And {evaluation}" if evaluation else ""
        log.warning("no step for %.0f s: %s%s", waited, scene.describe(self.queues), more)

    def still_committing(self) -> None:
        """Say, now and then, that the commit before has not landed."""
        if self._is_due():
            log.warning(
                "waiting for %.0f s for the commit up to version %d to reach the bucket; deliveries stay unacked "
                "until it does",
                self.clock() - self._waiting_since,
                self._version,
            )

    def stepped(
        self,
        version: int,
        stats: StepStats | None,
        groups: Sequence[Group],
        lags: Sequence[Lag],
        seconds: float,
    ) -> None:
        """A batch made ``version``, or left it: flat as a whole (``stats`` is None), or a step that was skipped."""
        now = self.clock()
        whole = now - self._last_sign
        self.lately.stepped(whole, seconds, groups)
        self._last_sign, self._version = now, version
        if stats is not None and stats.over_budget:
            log.warning(
                "%d sequences are longer than train.token_budget: each ran alone", stats.over_budget
            )
        is_skipped = stats is not None and stats.skipped
        self._skipped += is_skipped
        self._flat_batches = 0 if stats is not None else self._flat_batches + 1
        if self._flat_batches == self._say_flat_at:
            self._say_flat(groups)
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        self._step = {
            "version": version,
            "groups": len(groups),
            "skipped": is_skipped,
            "steps_skipped": self._skipped,
            **_of_rollouts(rollouts),
            **by_function(rollouts),
            "frac_reward_zero_std": flat_share(groups),
            **_of_lags(lags),
            **_of_step(stats),
            **by_source(groups, stats.advantages if stats else {}),
            "perf/step_s": whole,
            "perf/train_s": seconds,
            "perf/rollout_wait_s": self._waits.rollouts,
            "perf/commit_wait_s": self._waits.commit,
        }
        self._tokens_trained += 0 if is_skipped else sum(group.tokens for group in groups)
        self._waits, self._groups = Waits(), groups

    def _say_flat(self, groups: Sequence[Group]) -> None:
        """Why no version comes of so many batches; the next time after twice as many."""
        self._say_flat_at *= 2
        rewards = [rollout.reward for group in groups for rollout in group.rollouts]
        if not any(reward is not None for reward in rewards):
            why = (
                "no rollout got a reward: the log of a worker names the function that fails and how"
            )
        else:
            why = (
                "no group has two different rewards: look at them, or take easier or harder prompts"
            )
        log.warning("%d batches in a row without a step: %s", self._flat_batches, why)

    @property
    def reward(self) -> float | None:
        """Mean reward of the last batch; None where nobody scored it."""
        found = self._step.get("reward")
        return found if isinstance(found, float) else None

    def record(
        self,
        ledger: Ledger,
        seen: Seen,
        workers: int,
        figures: Mapping[str, Json],
        fleet: Fleet,
    ) -> dict[str, Json]:
        """The record of the last step: written to the metrics file, and returned for telemetry.

        ``workers`` are those that reported in the last minute, ``fleet`` is what all of them did since the learner
        began to listen; ``figures`` are those of others.
        """
        counts = ledger.counts
        record: dict[str, Json] = {
            **self._step,
            "max_steps": self.max_steps,
            "elapsed_s": self.clock() - self._started,
            **{f"groups_{name}": getattr(counts, name) for name in (*CAUSES, "duplicate")},
            "outstanding": len(ledger.outstanding),
            "workers": workers,
            "tokens_received": seen.tokens,
            "groups_received": seen.groups,
            "groups_malformed": seen.malformed,
            "stale_by_worker": {**seen.dropped.largest()},
            **seen.accounts.figures(),
            **self._balance.record(self.clock(), fleet),
            "groups_quarantined": seen.quarantined.total,
            "quarantined_by_worker": {**seen.quarantined.largest()},
            **figures,
        }
        self.metrics.write(record)
        for text in self.stability.look(record, self._groups):
            log.warning("step to version %d: %s", self._version, text)
        self._last_record = record
        log.info(
            "version %d/%d  reward %s  entropy %s  mismatch_kl %s  ratio_max %s  grad_norm %s  staleness %.1f  "
            "tokens %d  step %.1f s (waited %.1f s)%s",
            self._version,
            self.max_steps,
            _shown(record["reward"]),
            _shown(record["entropy"]),
            _shown(record["mismatch_kl"]),
            _shown(record["ratio_max"]),
            _shown(record["grad_norm"]),
            record["sample/staleness_mean"],
            record["tokens"],
            record["perf/step_s"],
            record["perf/rollout_wait_s"],
            _held_out(record),
        )
        if text := self._balance.say(self.clock(), fleet):
            log.info("%s", text)
        self._whole = self._balance.whole(self.clock(), fleet)
        return record

    def ended(self, counts: Counts, outstanding: int) -> None:
        """The last commit has landed."""
        self._final = {
            **{f"groups_{name}": getattr(counts, name) for name in (*CAUSES, "duplicate")},
            "groups_issued": counts.issued,
            "groups_outstanding": outstanding,
            "train_wall_s": self.clock() - self._started,
        }

    def summary(self, ended: str) -> dict[str, object]:
        """What the run came to."""
        last = self._last_record
        return {
            "ended": ended,
            "versions": self._version,
            "versions_this_time": self._version - self._first_version,
            "reward": last.get("reward"),
            "tokens_generated": last.get("tokens_received", 0),
            "tokens_trained": self._tokens_trained,
            "steps_skipped": self._skipped,
            "groups_quarantined": last.get("groups_quarantined", 0),
            **self._whole,
            **self._final,
        }


def _shown(value: Json) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "none"


def _held_out(record: Mapping[str, Json]) -> str:
    """What the last evaluation found, as the end of the line."""
    reward, best = record.get("eval_reward"), record.get("best_reward")
    if not isinstance(reward, float) or not isinstance(best, float):
        return ""
    where, at = record["eval_version"], record["best_version"]
    return f"  held-out {reward:.3f} (version {where}), best {best:.3f} (version {at})"


# Names that TRL has are TRL's.


def _of_rollouts(rollouts: Sequence[Rollout]) -> dict[str, Json]:
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    return {
        "reward": float(np.mean(rewards)) if rewards else None,
        "reward_std": float(np.std(rewards)) if rewards else None,
        "unscored": len(rollouts) - len(rewards),
        "tokens": sum(lengths),
        "completions/mean_length": float(np.mean(lengths)),
        "completions/max_length": max(lengths),
        "completions/clipped_ratio": float(np.mean([rollout.truncated for rollout in rollouts])),
    }


def _of_lags(lags: Sequence[Lag]) -> dict[str, Json]:
    totals = [lag.total for lag in lags]
    return {
        "sample/staleness_mean": float(np.mean(totals)),
        "sample/staleness_max": max(totals),
        "sample/staleness_in_flight_mean": float(np.mean([lag.in_flight for lag in lags])),
        "sample/staleness_in_queue_mean": float(np.mean([lag.in_queue for lag in lags])),
    }


def _of_step(stats: StepStats | None) -> dict[str, Json]:
    names = {
        "loss": "loss",
        "grad_norm": "grad_norm",
        "learning_rate": "learning_rate",
        "ratio_mean": "ratio_mean",
        "ratio_max": "ratio_max",
        "effective_sample_size": "effective_sample_size",
        "clipped_fraction": "clipped_fraction",
        "clip_ratio/low_mean": "clipped_low_fraction",
        "clip_ratio/high_mean": "clipped_high_fraction",
        "masked_fraction": "masked_fraction",
        "mismatch_kl": "mismatch_kl",
        "kl": "base_kl",
        "entropy": "entropy",
    }
    found: dict[str, Json] = {key: getattr(stats, name, None) for key, name in names.items()}
    advantages = sum(stats.advantages.values(), Moments()) if stats else Moments()
    return {**found, "advantage_mean": advantages.mean, "advantage_std": advantages.std}
