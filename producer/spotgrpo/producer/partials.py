"""Partials: what a worker leaves of groups that it could not finish, and the next carries on from.

They lie in the bucket, one object a drain and task (and one a round with ``partial_every_s``), and are looked for only
where a task comes a second time. The bucket may fail here as it likes: a partial that cannot be stored or read costs
its tokens, never the task.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np

from spotgrpo.producer.sampler import Draft
from spotgrpo.shared.errors import NotStored, SpotGRPOError, WireError
from spotgrpo.shared.ids import Keys, PolicyVersion, lineage_version
from spotgrpo.shared.ports import Delivery, Message, ObjectInfo, ObjectStore
from spotgrpo.shared.retry import retry
from spotgrpo.shared.threads import in_thread
from spotgrpo.shared.wire import (
    AGAIN,
    MAX_OBJECT_BYTES,
    Partial,
    Task,
    decode_partial,
    encode_partial,
)

log = logging.getLogger(__name__)
T = TypeVar("T")

FIND_S: Final = 15.0
"""How long a bucket that does not answer keeps a task from being begun afresh."""
MOST_READ: Final = 16
"""Partials of a task that are looked at: each worker's last, of those the newest."""
AT_ONCE: Final = 4
"""Objects that travel at a time."""


def comes_again(delivery: Delivery) -> bool:
    """Whether another worker may have begun this task."""
    return delivery.redelivered or bool(delivery.message.headers.get(AGAIN))


def marked_again(message: Message) -> Message:
    """``message`` as a drain publishes it anew, without what the broker noted on the way here."""
    headers: Mapping[str, str | int] = {
        name: value for name, value in message.headers.items() if not name.startswith("x-")
    }
    return Message(message.body, message.message_id, {**headers, AGAIN: 1})


# ---- choosing -------------------------------------------------------------------------------------------------


def belongs_to(partial: Partial, task: Task) -> bool:
    """Whether ``partial`` is unfinished work of exactly this task."""
    return (
        partial.run == task.run
        and partial.task_id == task.task_id
        and partial.sampling == task.sampling
        and np.array_equal(partial.prompt_ids, task.prompt_ids)
        and tuple(rollout.seed for rollout in partial.rollouts) == task.seeds
    )


def can_be_trained(
    partial: Partial,
    task: Task,
    version: PolicyVersion,
    max_staleness: int,
    takeovers: Mapping[int, int],
) -> bool:
    """Whether a group that is carried on from ``partial`` under ``version`` can still be trained.

    A token of a version that a takeover gave up counts as what that resumed from, as it does for the learner. One of a
    newer number or epoch than ``version`` counts as too old: that takeover may not be known here yet.

    Args:
        takeovers: epoch -> version number that its learner resumed from.
    """
    found = {run.version for rollout in partial.rollouts for run in rollout.versions}
    if not found:
        return False
    if task.pinned is not None and found | {version} != {task.pinned}:
        return False
    if any(one.number > version.number or one.epoch > version.epoch for one in found):
        return False
    oldest = min(lineage_version(one, takeovers) for one in found)
    return oldest >= max(task.min_version, version.number - max_staleness)


def choose(
    found: Iterable[Partial],
    task: Task,
    version: PolicyVersion,
    max_staleness: int,
    takeovers: Mapping[int, int],
) -> Partial | None:
    """The partial that spares the most tokens, or None where none can be carried on under ``version``."""
    usable = [one for one in found if can_be_trained(one, task, version, max_staleness, takeovers)]
    return max(usable, key=lambda one: one.tokens, default=None)


def last_of_each(listed: Iterable[ObjectInfo]) -> list[ObjectInfo]:
    """The last partial of every worker, which holds what its others do."""
    last: dict[str, tuple[int, ObjectInfo]] = {}
    for info in listed:
        worker, _, number = info.key.rpartition(".")
        rank = int(number) if number.isdecimal() else -1
        if worker not in last or rank > last[worker][0]:
            last[worker] = (rank, info)
    return [info for _, info in last.values()]


# ---- the bucket -----------------------------------------------------------------------------------------------


@dataclass
class PartialCounts:
    """For the worker's report. ``stale`` counts tasks that were begun afresh though there was a partial."""

    saved: int = 0
    resumed: int = 0
    stale: int = 0
    tokens_resumed: int = 0


class Partials:
    """A worker's dealings with ``partials/``. Lives in the worker's event loop."""

    def __init__(self, store: ObjectStore, keys: Keys, worker_id: str, max_staleness: int) -> None:
        self._store, self._keys, self._worker_id = store, keys, worker_id
        self._max_staleness = max_staleness
        self._numbers = itertools.count(1)
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._is_losing = self._is_troubled = False
        self.counts = PartialCounts()

    async def find(self, task: Task) -> Sequence[Partial]:
        """Partials of ``task``; what cannot be read, or is another task's, is passed over."""
        try:
            async with asyncio.timeout(2 * FIND_S), self._turn:
                found = await in_thread(lambda: self._read_all(task))
        except (TimeoutError, SpotGRPOError) as exc:
            self._note_trouble(str(exc) or "the bucket does not answer")
            return ()
        self._note_trouble("")
        return [partial for partial in found if partial.tokens]

    def _note_trouble(self, why: str) -> None:
        """Said once when it begins and once when it is over: in a long outage every task would have a line."""
        if why and not self._is_troubled:
            log.warning("cannot look for partials, tasks begin afresh: %s", why)
        elif self._is_troubled and not why:
            log.info("partials can be looked for again")
        self._is_troubled = bool(why)

    def begin(
        self,
        task: Task,
        found: Sequence[Partial],
        version: PolicyVersion,
        takeovers: Mapping[int, int],
    ) -> list[Draft]:
        """The drafts to sample from under ``version``: carried on where that can be trained, else empty ones."""
        best = choose(found, task, version, self._max_staleness, takeovers)
        if best is None:
            if found:
                self.counts.stale += 1
                log.info("task %s begins afresh: its partial is too stale", task.task_id)
            return [Draft(seed) for seed in task.seeds]
        self.counts.resumed += 1
        self.counts.tokens_resumed += best.tokens
        log.info("task %s goes on after %d tokens", task.task_id, best.tokens)
        return [Draft.of(rollout) for rollout in best.rollouts]

    async def save(self, task: Task, drafts: Sequence[Draft], within_s: float) -> bool:
        """Store ``drafts`` for the next worker; False where there is nothing new in them, or it cannot be done."""
        try:
            is_stored = await self.store(task, drafts, within_s)
        except (TimeoutError, SpotGRPOError) as exc:
            why = str(exc) or "the bucket did not take it in time"
            level = logging.DEBUG if self._is_losing else logging.WARNING  # the others of a drain
            log.log(level, "a partial of task %s is lost: %s", task.task_id, why)
            self._is_losing = True
            return False
        self._is_losing = self._is_losing and not is_stored
        return is_stored

    async def store(self, task: Task, drafts: Sequence[Draft], within_s: float) -> bool:
        """Store ``drafts`` as they stand now; False where there is nothing new in them.

        Raises:
            TimeoutError: the bucket did not take it in time.
            SpotGRPOError: it refuses, is away, or the partial is too big.
        """
        if not any(draft.has_grown for draft in drafts):
            return False
        key = self._keys.partial(task.task_id, self._worker_id, next(self._numbers))
        give_up_at = time.monotonic() + within_s
        partial = self._partial(task, drafts)
        async with asyncio.timeout(within_s), self._turn:
            await in_thread(lambda: self._create(key, encode_partial(partial), give_up_at))
        for draft, rollout in zip(drafts, partial.rollouts, strict=True):
            draft.saved = max(draft.saved, len(rollout.token_ids))
        self.counts.saved += 1
        return True

    def _partial(self, task: Task, drafts: Sequence[Draft]) -> Partial:
        return Partial(
            run=task.run,
            task_id=task.task_id,
            worker=self._worker_id,
            prompt_ids=np.asarray(task.prompt_ids, dtype=np.int32),
            sampling=task.sampling,
            rollouts=tuple(draft.partial() for draft in drafts),
            saved_at=time.time(),
        )

    # ---- in threads ----------------------------------------------------------------------------------------------

    def _create(self, key: str, body: bytes, give_up_at: float) -> None:
        """The same bytes each time, so that one whose answer was lost may be stored already."""
        left_s = max(0.0, give_up_at - time.monotonic())
        create = functools.partial(self._store.create, key, body)
        retry(f"storing {key}", create, deadline_s=left_s, level=logging.DEBUG)

    def _read_all(self, task: Task) -> list[Partial]:
        prefix = self._keys.partials_of(task.task_id)
        listed = self._asked(f"listing {prefix}", lambda: list(self._store.list(prefix)))
        last = last_of_each(listed)
        newest = sorted(last, key=lambda info: info.modified, reverse=True)[:MOST_READ]
        found = [self._read(info.key, task) for info in newest if info.size <= MAX_OBJECT_BYTES]
        return [partial for partial in found if partial is not None]

    @staticmethod
    def _asked(what: str, call: Callable[[], T]) -> T:
        """Who asked says that it failed, so that the tries need no lines."""
        return retry(what, call, deadline_s=FIND_S, level=logging.DEBUG)

    def _read(self, key: str, task: Task) -> Partial | None:
        try:
            stored = self._asked(f"reading {key}", lambda: self._store.get(key))
            partial = decode_partial(stored.body)
        except NotStored:  # the learner has settled the task meanwhile
            return None
        except WireError as exc:
            log.error("partial %s cannot be read: %s", key, exc)
            return None
        if not belongs_to(partial, task):
            log.error("partial %s does not belong to task %s as it is asked now", key, task.task_id)
            return None
        return partial
