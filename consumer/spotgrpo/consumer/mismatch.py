"""Which workers sample what they say they sample: the learner's own look at it, beside the workers' probes.

Known is what lag 0 tells: of a group whose every token was sampled under the weights that the gradient is taken at, the
step computes the same logprobs again, so the comparison costs nothing. Older groups differ by what was learned since,
which has no bound, and are not compared. A worker without a group of lag 0 is unknown: nothing is said of it and
nothing refused.

With quarantine, groups of a worker that does not fit are settled without being trained, and so that none is trained
before something is known, one group is computed ahead of the step where it came at lag 0 and its worker

- is unknown, or nothing was known of it for ``KNOWN_FOR`` versions: at lags of 1 and more, steps alone would not tell;
- is in quarantine, once a version: a worker whose groups fit again is let in again.

Why a worker differs is looked into once (``diagnosis``), and again where it does so anew, for some forward passes of
one of its groups, and before a step: after it, the weights are another version's.

It is kept in memory: a learner that takes over looks anew.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from spotgrpo.consumer.diagnosis import Recompute, explain
from spotgrpo.consumer.fit import Fit, group_fit
from spotgrpo.shared.gaps import Repeats
from spotgrpo.shared.wire import Group, Json

log = logging.getLogger(__name__)

BOUND: Final = {"float32": 0.01, "bfloat16": 0.1, "float16": 0.03}
"""Mean |behaviour − recomputed| logprob (nats) that precision explains, with room. Measured with vLLM on SmolLM2:
float32 2e-5, bfloat16 0.03 to 0.05; sampled at temperature 0.9 in place of 1: 0.08 to 0.17, at 0.7: 0.15 to 0.32."""
ENOUGH: Final = 64
"""Tokens that say something about a mean; fewer count as if the rest of these fitted."""
KNOWN_FOR: Final = 10
LATER: Final = "what makes it differ is looked into with its next group of lag 0"
MOST_EXPLAINED: Final = 8
"""Times that forward passes are spent on what makes a worker differ: many that are wrong are wrong alike."""
MOST_WORKERS: Final = 1024
MOST_SHOWN: Final = 32


@dataclass
class _Standing:
    """What is known of a worker.

    Attributes:
        recent: fit of its newest tokens, ENOUGH of them where there are as many.
        known_at: version at which something of it was compared last.
        is_over: it does not fit.
        cause: why, most likely; None before it was looked for, and where it fits.
        alarm: when it is spoken of.
    """

    recent: Fit = field(default_factory=Fit)
    known_at: int | None = None
    is_over: bool = False
    cause: str | None = None
    alarm: Repeats = field(default_factory=Repeats)


class MismatchWatch:
    """Used by the learner's main thread alone.

    Args:
        bound: mean |behaviour − recomputed| logprob in nats; None: by dtype.
        dtype: of the learner's base model.
        quarantines: whether groups of workers over the bound are refused.
        recompute: of the trainer as it is.
    """

    def __init__(
        self,
        bound: float | None,
        dtype: str,
        *,
        quarantines: bool,
        recompute: Recompute,
    ) -> None:
        self._bound = BOUND[dtype] if bound is None else bound
        self._dtype, self._quarantines, self._recompute = dtype, quarantines, recompute
        self._standings: dict[str, _Standing] = {}
        self._fresh: dict[str, Fit] = {}
        self._explained = 0

    def trained(self, fits: Iterable[tuple[str, Fit]], version: int) -> None:
        """A step at ``version`` computed these, each of a worker's group of lag 0."""
        by_worker: dict[str, Fit] = {}
        for worker, fit in fits:
            by_worker[worker] = by_worker.get(worker, Fit()) + fit
        for worker, fit in by_worker.items():
            self._note(worker, fit, version)

    def arrived(self, group: Group, version: int) -> None:
        """A group of lag 0 came, and the weights are still those that it was sampled with.

        With quarantine, one that is due is compared now, for a forward pass. What made its worker differ is looked for,
        once, for some more.
        """
        worker = group.worker
        if self._quarantines and self._is_due(self._standings.get(worker), version):
            fit = group_fit(group, self._recompute(group))
            self._note(worker, fit, version, lambda: self._cause(group, fit))
        standing = self._standings.get(worker)
        if standing is not None and standing.is_over and standing.cause is None:
            standing.cause = self._cause(group, standing.recent)
            log.warning("what makes worker %s differ: %s", worker, standing.cause)

    def refuses(self, worker: str) -> bool:
        """Whether groups of ``worker`` must not be trained."""
        standing = self._standings.get(worker)
        return self._quarantines and standing is not None and standing.is_over

    @property
    def mismatched(self) -> list[str]:
        """Workers that do not sample what they say, as far as is known."""
        return sorted(worker for worker, standing in self._standings.items() if standing.is_over)

    @property
    def quarantined(self) -> list[str]:
        """Workers whose groups are refused."""
        return sorted(worker for worker in self._standings if self.refuses(worker))

    def figures(self) -> dict[str, Json]:
        """For the record of a step: what was compared since the last one, the worst workers first."""
        whole = sum(self._fresh.values(), Fit())
        worst = sorted(self._fresh.items(), key=lambda pair: -pair[1].mean_gap)[:MOST_SHOWN]
        self._fresh = {}
        return {
            "sampling/sampling_logp_difference/mean": whole.mean_gap if whole.tokens else None,
            "lag0_tokens": whole.tokens,
            "mismatch_by_worker": {worker: fit.mean_gap for worker, fit in worst},
            "mismatch_kl_by_worker": {worker: fit.mean_kl for worker, fit in worst},
            "mismatched": [*self.mismatched[:MOST_SHOWN]],
            "quarantined": [*self.quarantined[:MOST_SHOWN]],
        }

    def _is_due(self, standing: _Standing | None, version: int) -> bool:
        if standing is None or standing.known_at is None:
            return True
        return version - standing.known_at >= (1 if standing.is_over else KNOWN_FOR)

    def _note(
        self, worker: str, fit: Fit, version: int, cause: Callable[[], str] | None = None
    ) -> None:
        if not fit.tokens:
            return
        standing = self._standings.pop(worker, None) or _Standing()
        self._standings[worker] = standing  # the newest is last
        if len(self._standings) > MOST_WORKERS:
            del self._standings[next(iter(self._standings))]
        self._fresh[worker] = self._fresh.get(worker, Fit()) + fit
        standing.recent = fit if standing.recent.tokens >= ENOUGH else standing.recent + fit
        standing.known_at = version
        recent, was_over = standing.recent, standing.is_over
        if not recent.gap <= self._bound * max(recent.tokens, ENOUGH):
            standing.is_over = True
        elif recent.tokens >= ENOUGH:
            standing.is_over = False
            standing.cause = None  # should it differ again, it may be of something else
        if standing.alarm.is_due(standing.is_over):
            if standing.cause is None and cause is not None:
                standing.cause = cause()
            self._alarm(worker, recent, standing.cause or LATER)
        elif standing.is_over != was_over and self._quarantines:
            what = "does not fit again, and is refused" if standing.is_over else "fits again"
            log.info("what worker %s samples %s (%.2g nats)", worker, what, recent.mean_gap)

    def _cause(self, group: Group, fit: Fit) -> str:
        if self._explained >= MOST_EXPLAINED:
            return "most likely as with those before it"
        self._explained += 1
        found = explain(group, self._recompute)
        if found is not None:
            return found
        if fit.mean_gap <= BOUND["bfloat16"] and self._dtype != "bfloat16":
            return (
                f"most likely its engine computes in less than {self._dtype} (its dtype, quantised weights), or its "
                "adapter is an older version's"
            )
        return (
            "neither the base model nor another temperature explains it: most likely another base model, or the "
            "adapter is another version's"
        )

    def _alarm(self, worker: str, fit: Fit, cause: str) -> None:
        then = (
            "its groups are not trained until they fit again"
            if self._quarantines
            else "its groups are trained all the same: train.quarantine refuses them"
        )
        log.warning(
            "worker %s does not sample what it says: its logprobs of %d tokens at lag 0 differ from the learner's by "
            "%.2g nats on average, over the bound of %.2g (train.mismatch_alarm); %s; %s",
            worker,
            fit.tokens,
            fit.mean_gap,
            self._bound,
            cause,
            then,
        )
