"""Names for the moments between two effects on the outside: where a death could lose or double something.

The roles call :func:`reached` as they pass one. In a run that does nothing. The chaos tests watch it, to end or
freeze a process exactly there. What lies between two bytes on a wire (a publish and its confirm, one ack and the
next) has no name here: a proxy sees it better than the process does.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

Observer = Callable[["Step"], None]


class Step(StrEnum):
    """The moments, in the order in which a task and a version pass them."""

    WORKER_GENERATING = "worker.generating"
    """Some tokens of a group are sampled, not all."""
    WORKER_GENERATED = "worker.generated"
    """A group is scored, and nobody knows of it yet."""
    WORKER_CONFIRMED = "worker.confirmed"
    """The broker has a group, and its task is not acked."""
    WORKER_PARTIAL_STORED = "worker.partial_stored"
    """A drain has stored unfinished work, and not handed its task back."""
    WORKER_HANDED_BACK = "worker.handed_back"
    """A drain has published a task again, and not acked its delivery."""
    WORKER_DOWNLOADED = "worker.downloaded"
    """A version is on the disk, and not in the engine."""

    LEARNER_BEGINNING = "learner.beginning"
    """Version 0 of a new run is stored, and there is no ``latest.json`` yet."""
    LEARNER_LEADING = "learner.leading"
    """A takeover holds the leader queue, and ``latest.json`` is the learner's before."""
    LEARNER_CLAIMED = "learner.claimed"
    """``latest.json`` has the new epoch, and nothing is restored."""
    LEARNER_RESTORED = "learner.restored"
    """A takeover has the state, and published and consumed nothing."""
    LEARNER_STEPPING = "learner.stepping"
    """The gradient of a step is computed, the weights are as before."""
    LEARNER_STEPPED = "learner.stepped"
    """The weights are the next version's, and nothing of it is in the bucket."""
    LEARNER_SKIP_RECORDED = "learner.skip_recorded"
    """The batch of a step that was skipped is in the bucket, and its tasks are not settled."""
    LEARNER_HEARD = "learner.heard"
    """The answer to a held-out task was given to be acked, and is in this process alone."""
    LEARNER_UPLOADED = "learner.uploaded"
    """A version's files are in the bucket, its manifest is not."""
    LEARNER_MANIFEST_STORED = "learner.manifest_stored"
    """A version is whole in the bucket, and ``latest.json`` does not name it."""
    LEARNER_SERVING = "learner.serving"
    """Workers may adopt the version, and it is not durable."""
    LEARNER_STATE_STORED = "learner.state_stored"
    """State and ledger are in the bucket, and ``latest.json`` does not name them."""
    LEARNER_DURABLE = "learner.durable"
    """The commit has landed, and nothing that it settles is acked."""
    LEARNER_ACKED = "learner.acked"
    """All that it settles was given to be acked, and none of the tasks that it issues to be published."""
    LEARNER_ISSUED = "learner.issued"
    """Its tasks were given to be published."""


_observer: Observer | None = None


def observe(observer: Observer | None) -> None:
    """Have ``observer`` called at every step of this process, on the thread that reaches it; None: no more."""
    global _observer  # noqa: PLW0603 - one a process, set before anything is started
    _observer = observer


def reached(step: Step) -> None:
    """The process is at ``step``."""
    if _observer is not None:
        _observer(step)
