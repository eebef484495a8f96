"""Evaluations of a run's versions on held-out prompts, beside training: one at a time, by the same workers.

consumes:     held-out groups and dead letters that the intake finds, versions as they come to be served
waits for:    nothing: whoever trains looks in now and then
produces:     held-out tasks, at most ``eval.share`` of what training has outstanding at a time; a result for every
              version that is due, and with it the best version so far, which the next commit carries

Held-out tasks are outside the books: an answer is acked as it comes, and is in memory until its evaluation is over. A
learner that takes over asks all of an unfinished evaluation again, under the same ids, so that answers to the one
before count for it; what it has found is in ``latest.json`` once, or not at all.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spotgrpo.consumer.evaluation import Answer, EvalResult, Evaluation, Plan, judged
from spotgrpo.shared.errors import WireError
from spotgrpo.shared.ids import PolicyVersion, TaskId, held_out_prompt, held_out_task

if TYPE_CHECKING:
    from spotgrpo.consumer.held_out import HeldOut, HeldOutIssuer
    from spotgrpo.shared.manifest import Evaluated, Serving
    from spotgrpo.shared.metrics import MetricsWriter
    from spotgrpo.shared.ports import QueueDepth
    from spotgrpo.shared.wire import Group, Json

log = logging.getLogger(__name__)

SILENT: Final = 4
"""An evaluation ends with what it has so many ``train.reissue_after_s`` after the last sign of it.

By the look before the present one: what came since, during a step that may take longer than all that, is not heard yet.
"""
ROLE: Final = "eval"
"""Of its records in ``metrics.jsonl``."""


@dataclass(frozen=True)
class Places:
    """How many held-out tasks may be with workers at a time: beside training, and once it is over."""

    beside: int
    alone: int

    @classmethod
    def of(cls, completions: int, share: float, group_size: int) -> Places:
        """As shares of ``completions``, which training has outstanding; one task at least."""
        return cls(
            max(1, int(share * completions) // group_size), max(1, completions // group_size)
        )


class Unevaluated:
    """What evaluations are to a run that has none: never due, and what was found before stays as it is."""

    def __init__(self, evaluated: Evaluated | None) -> None:
        self.evaluated = evaluated
        """For ``latest.json``."""

    @property
    def comparable(self) -> Evaluated | None:
        """What was found by asking the same as now."""
        return None

    @property
    def is_busy(self) -> bool:
        """Whether a version is being evaluated, or will be."""
        return False

    def made(self, number: int) -> None:
        """A version of that number is on its way to the bucket."""

    def served(self, serving: Serving) -> None:
        """A version can be had by workers. On the committer's thread."""

    def needed(self) -> frozenset[PolicyVersion]:
        """Versions that must stay in the bucket, beside those that ``latest.json`` names. On the committer's thread."""
        return frozenset()

    def look(self, depth: Callable[[str], QueueDepth | None], *, is_trained: bool) -> None:
        """Begin, ask, ask again what is lost, and end: whatever can be done now. Waits for nobody."""

    def wants(self, task: TaskId) -> bool:  # noqa: ARG002
        """Whether a group of ``task`` would count: others are late, or copies."""
        return False

    def answered(self, task: TaskId, group: Group) -> None:
        """Take the answer to a task that is wanted. WireError: it is not what was asked for."""

    def refused(self, task: TaskId) -> None:
        """No answer came of a task; it is asked again, a few times."""

    def describe(self) -> str:
        """What an evaluation waits for, as a clause; empty where none runs."""
        return ""

    def figures(self) -> Mapping[str, Json]:
        """Of the last evaluation that ended here, for the records of steps."""
        return {}

    def summary(self) -> Mapping[str, object]:
        """What evaluations found in this run so far."""
        return {}


class Evaluations(Unevaluated):
    """See the module. Used by the main thread, but for ``served`` and ``needed``, which the committer's calls.

    Args:
        held_out: what is asked.
        issuer: publishes it.
        plan: which versions are due.
        evaluated: what was found before, from ``latest.json``.
        pending: a version that the learner before left, to be evaluated first.
        resumed: an earlier learner may have asked the same.
        reissue_after_s: as ``train.reissue_after_s``.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        held_out: HeldOut,
        issuer: HeldOutIssuer,
        plan: Plan,
        places: Places,
        metrics: MetricsWriter,
        evaluated: Evaluated | None,
        pending: Serving | None,
        *,
        resumed: bool,
        reissue_after_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(evaluated)
        self._held_out, self._issuer, self._plan = held_out, issuer, plan
        self._places, self._metrics = places, metrics
        self._resumed, self._reissue_after_s, self._clock = resumed, reissue_after_s, clock
        self._lock = threading.Lock()
        self._pending, self._awaited = pending, -1
        self._current: Evaluation | None = None
        self._began = self._sign = self._looked = 0.0
        self._figures: dict[str, Json] = {}
        self._skipped = 0

    @property
    def comparable(self) -> Evaluated | None:
        """See the base."""
        found = self.evaluated
        is_same = found is not None and found.asked_sha256 == self._held_out.asked_sha256
        return found if is_same else None

    # ---- which version -------------------------------------------------------------------------------------------

    def made(self, number: int) -> None:
        """See the base."""
        if self._plan.is_due(number):
            with self._lock:
                self._awaited = number

    def served(self, serving: Serving) -> None:
        """See the base."""
        with self._lock:
            if not self._plan.is_due(serving.version):
                return
            skipped, self._pending, self._awaited = self._pending, serving, -1
        if skipped is not None:
            self._skipped += 1
            log.log(
                logging.INFO if self._skipped > 1 else logging.WARNING,
                "version %s is not evaluated: the evaluation before it still ran when %s was due "
                "(eval.every, eval.prompts, eval.share)",
                skipped.policy,
                serving.policy,
            )

    @property
    def is_busy(self) -> bool:
        """See the base."""
        with self._lock:
            return self._current is not None or self._pending is not None or self._awaited >= 0

    def needed(self) -> frozenset[PolicyVersion]:
        """See the base. What is found, and not committed yet, is among them."""
        with self._lock:
            found = {one.policy for one in (self._pending,) if one is not None}
            if self._current is not None:
                found.add(self._current.serving.policy)
            if self.evaluated is not None:
                named = (self.evaluated.last, self.evaluated.best)
                found |= {one.policy for one in named if one is not None}
            return frozenset(found)

    # ---- asking --------------------------------------------------------------------------------------------------

    def look(self, depth: Callable[[str], QueueDepth | None], *, is_trained: bool) -> None:
        """See the base."""
        self._issuer.check()
        current = self._current or self._begin()
        if current is None:
            return
        places = self._places.alone if is_trained else self._places.beside
        number = current.serving.version
        asked = [(self._task(current, prompt), number) for prompt in current.ask(places)]
        self._issuer.publish(asked, again=self._resumed)
        missing = [(self._task(current, prompt), number) for prompt in current.asked]
        self._issuer.reissue(missing, depth)
        is_silent = self._looked - self._sign >= SILENT * self._reissue_after_s
        self._looked = self._clock()
        if current.is_over or is_silent:
            self._end(current)

    def _begin(self) -> Evaluation | None:
        with self._lock:
            serving, self._pending = self._pending, None
            if serving is None:
                return None
            self._current = current = Evaluation(serving, len(self._held_out))
        self._issuer.epoch = serving.epoch
        self._began = self._sign = self._clock()
        log.info("evaluating version %s on %d prompts", serving.policy, len(self._held_out))
        return current

    @staticmethod
    def _task(current: Evaluation, prompt: int) -> TaskId:
        return held_out_task(current.serving.policy, prompt)

    # ---- what comes back -----------------------------------------------------------------------------------------

    def wants(self, task: TaskId) -> bool:
        """See the base."""
        return self._wanting(task) is not None

    def _wanting(self, task: TaskId) -> Evaluation | None:
        """The evaluation that waits for an answer to ``task``, if it does."""
        current, prompt = self._current, held_out_prompt(task)
        is_its_own = current is not None and task == self._task(current, prompt)
        return current if current is not None and is_its_own and current.wants(prompt) else None

    def answered(self, task: TaskId, group: Group) -> None:
        """See the base."""
        current = self._wanting(task)
        if current is None:
            return
        sampled_by = {run.version for rollout in group.rollouts for run in rollout.versions}
        if group.kind != "eval" or sampled_by != {current.serving.policy}:
            names = ", ".join(sorted(map(str, sampled_by)))
            raise WireError(
                f"a group of kind {group.kind}, sampled by {names}, for an evaluation of {current.serving.policy}"
            )
        current.answered(held_out_prompt(task), Answer.of(group))
        self._note_sign(task)

    def refused(self, task: TaskId) -> None:
        """See the base."""
        current = self._wanting(task)
        if current is not None:
            current.refused(held_out_prompt(task))
            self._note_sign(task)

    def _note_sign(self, task: TaskId) -> None:
        self._issuer.forget([task])
        self._sign = self._clock()

    # ---- the end -------------------------------------------------------------------------------------------------

    def _end(self, current: Evaluation) -> None:
        self._issuer.forget([self._task(current, prompt) for prompt in current.asked])
        result = current.result()
        after = judged(self.evaluated, self._held_out.asked_sha256, current.serving, result)
        with self._lock:
            self.evaluated, self._current = after, None
        self._say(current.serving.policy, result, after)

    def _say(self, version: PolicyVersion, result: EvalResult, after: Evaluated) -> None:
        """The record, with TRL's names where TRL has them, and a line for people."""
        self._figures = _figures(version, result, after)
        record = {
            **self._figures,
            **_details(version, result),
            "eval_runtime": self._clock() - self._began,
        }
        self._metrics.write(record, role=ROLE)
        if not result.decides:
            log.warning(
                "the evaluation of version %s decides nothing: %d of %d prompts got a reward, %d an answer",
                version,
                result.scored,
                result.prompts,
                result.answered,
            )
            return
        is_best = after.best is not None and after.best.policy == version
        log.info(
            "version %s: held-out reward %.3f%s on %d prompts, %s",
            version,
            result.reward,
            "" if result.stderr is None else f" ± {result.stderr:.3f}",
            result.scored,
            "the best so far" if is_best else f"best {_best(after)}",
        )

    def figures(self) -> Mapping[str, Json]:
        """See the base."""
        return self._figures

    def summary(self) -> Mapping[str, object]:
        """See the base."""
        found = self.comparable
        best = found.best if found is not None else None
        if found is None or best is None:
            return {}
        return {
            "best_version": str(best.policy),
            "best_reward": best.reward,
            "eval_reward": found.reward,
        }

    def describe(self) -> str:
        """See the base."""
        current = self._current
        if current is None:
            return ""
        return f"the evaluation of {current.serving.policy} waits for {len(current.asked)} prompts"


def _best(after: Evaluated) -> str:
    return f"{after.best.reward:.3f} of {after.best.policy}" if after.best else "none"


def _figures(version: PolicyVersion, result: EvalResult, after: Evaluated) -> dict[str, Json]:
    best = after.best
    return {
        "eval_version": version.number,
        "eval_reward": result.reward,
        "eval_reward_stderr": result.stderr,
        "best_version": best.version if best else None,
        "best_reward": best.reward if best else None,
    }


def _details(version: PolicyVersion, result: EvalResult) -> dict[str, Json]:
    return {
        "eval_epoch": version.epoch,
        "eval_prompts": result.prompts,
        "eval_answered": result.answered,
        "eval_scored": result.scored,
        "eval_unscored": result.unscored,
        "eval_decides": result.decides,
        "eval_completions/mean_length": result.mean_length,
        "eval_completions/clipped_ratio": result.clipped_ratio,
        **{f"eval_rewards/{name}/mean": mean for name, mean in result.parts.items()},
    }
