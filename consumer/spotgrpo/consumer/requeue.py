"""A dead task tried again because a person asked: from a request in the bucket to the next attempt in a ledger.

``spotgrpo dead requeue`` writes ``requeue/<task>`` and nothing else; the learner alone issues. A request is answered
by a ledger that issues the task's next attempt, and deleted once that ledger is committed. One that is seen again
after a death is told from a new one by the chain of ledgers: an id that was ever issued is not issued again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from typing import Final, Literal

from spotgrpo.consumer.audit import read_parent
from spotgrpo.consumer.ledger import Ledger
from spotgrpo.shared.errors import Fenced, SpotGRPOError, WireError
from spotgrpo.shared.ids import LAST_ATTEMPT, Keys, TaskId
from spotgrpo.shared.ports import ObjectStore
from spotgrpo.shared.wire import pack_body

log = logging.getLogger(__name__)

Fate = Literal["dead", "retried", "requeued", "not dead"]
"""``dead``: no later attempt was issued, so it can be requeued. ``retried``: the ledger that has it as dead issued the
next attempt (``train.max_attempts``). ``requeued``: a later ledger did, since somebody asked."""

LOOK_S: Final = 3.0
LOOK_AGAIN_S: Final = 30.0
"""After a look that failed: while the bucket is away, one takes the loop some seconds."""
LEDGERS_A_LOOK: Final = 64
"""Ledgers read at one look: a request for a task that died long ago must not hold a step up."""
REFUSED: Final = "it is not dead, or was tried again already"


def encode_request(task: TaskId) -> bytes:
    """The object that asks for the next attempt of ``task``; the same bytes whoever asks, and however often."""
    return pack_body("requeue", {"task": str(task)})


class Past:
    """What the chain of ledgers says of dead tasks, read back only as far as asked for.

    Every ledger newer than the oldest one read is known, so a death that was found shows whether the next attempt
    was issued: it can only have been at the same time or later.
    """

    def __init__(self, store: ObjectStore, newest: Ledger) -> None:
        self._store, self._oldest = store, newest
        self._dead: dict[TaskId, int] = {}
        self._retries: dict[TaskId, int] = {}
        self.note(newest)

    def note(self, newer: Ledger) -> None:
        """The chain grew."""
        self._newest = newer
        self._add(newer)

    def _add(self, ledger: Ledger) -> None:
        self._dead.update(dict.fromkeys(ledger.settled.get("dead", ()), ledger.sequence))
        retries = [task for task in ledger.issued if task.attempt > 1]
        self._retries.update(dict.fromkeys(retries, ledger.sequence))

    def read(self, tasks: Collection[TaskId], most: int | None = None) -> None:
        """Read back until the fate of all ``tasks`` is known, at most ``most`` ledgers.

        Raises StoreUnavailable, IntegrityError or WireError; what was read stays known.
        """
        left = most
        while left != 0 and any(self.fate(task) is None for task in tasks):
            before = read_parent(self._store, self._oldest)
            if before is None:
                return
            self._add(before)
            self._oldest = before
            left = None if left is None else left - 1

    def fate(self, task: TaskId) -> Fate | None:
        """What became of ``task``; None where more of the chain has to be read."""
        died = self._dead.get(task)
        if died is not None:
            again = self._retries.get(task.next_attempt())
            return "dead" if again is None else "retried" if again == died else "requeued"
        never = task.index >= self._newest.cursor or task in self._newest.outstanding
        return "not dead" if never or self._oldest.parent is None else None


class Requeues:
    """The learner's side of requests. ``landed`` runs on the committer's thread, the rest on the main one.

    Args:
        past: of the chain from which this learner goes on.
        check_mine: raises Fenced once another learner has the run. A request that makes no sense here may make sense
            to that one: it was made after the takeover, so a look at ``latest.json`` after the listing tells.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: ObjectStore,
        keys: Keys,
        past: Past,
        check_mine: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store, self._keys, self._past = store, keys, past
        self._check_mine, self._clock = check_mine, clock
        self._open: list[TaskId] = []
        self._flight: frozenset[TaskId] = frozenset()
        self._due = self._clock()
        self._complained = False

    @property
    def wanted(self) -> list[TaskId]:
        """Next attempts that are asked for and in no ledger yet."""
        return [task.next_attempt() for task in self._open]

    def look(self) -> None:
        """List the requests, every LOOK_S; drop those that cannot be answered. Raises Fenced."""
        if self._clock() < self._due:
            return
        wait = LOOK_S
        try:
            self._read_requests()
            if self._complained:
                log.info("tasks to try again can be looked for again")
            self._complained = False
        except Fenced:
            raise
        except SpotGRPOError as exc:
            wait = LOOK_AGAIN_S
            if not self._complained:
                log.warning("cannot look for tasks to try again: %s", exc)
            self._complained = True
        self._due = self._clock() + wait

    def written(self, ledger: Ledger) -> None:
        """``ledger`` is on its way, with as many of ``wanted`` as it had room for."""
        self._past.note(ledger)
        issued = set(ledger.issued)
        self._flight = frozenset(task for task in self._open if task.next_attempt() in issued)
        self._open = [task for task in self._open if task not in self._flight]

    def landed(self) -> None:
        """It is committed: what it answers is deleted."""
        answered = sorted(self._flight)
        for task in answered:
            log.info("task %s is tried again as %s: somebody asked", task, task.next_attempt())
        try:
            self._forget(answered)
        except SpotGRPOError as exc:
            log.info("requests that are answered stay a while: %s", exc)
        self._flight = frozenset()

    def _read_requests(self) -> None:
        tasks, refused = self._listed()
        self._past.read(tasks, LEDGERS_A_LOOK)
        fates = {task: self._past.fate(task) for task in tasks}
        self._open = [task for task in tasks if fates[task] == "dead"]
        answered = [task for task in tasks if fates[task] == "requeued"]
        refused += [str(task) for task in tasks if fates[task] in ("retried", "not dead")]
        if not answered and not refused:
            return
        self._check_mine()
        for name in refused:
            log.warning("a request to try task %.60s again is dropped: %s", name, REFUSED)
        self._store.delete([self._keys.requeue(name) for name in refused])
        self._forget(answered)

    def _listed(self) -> tuple[list[TaskId], list[str]]:
        """Tasks of requests that no ledger on its way answers, and names of requests that no ledger could."""
        tasks, refused = [], []
        for name in requested(self._store, self._keys):
            try:
                task = TaskId.parse(name)
            except WireError:
                refused.append(name)
                continue
            if task.attempt >= LAST_ATTEMPT:
                refused.append(name)
            elif task not in self._flight:
                tasks.append(task)
        return tasks, refused

    def _forget(self, answered: list[TaskId]) -> None:
        """Bodies first: a request that is left is found again, a body is not."""
        if answered:
            self._store.delete([self._keys.dead(task) for task in answered])
            self._store.delete([self._keys.requeue(task) for task in answered])


def requested(store: ObjectStore, keys: Keys) -> Iterator[str]:
    """Names of the tasks that somebody asked to be tried again."""
    return (info.key.removeprefix(keys.requeues) for info in store.list(keys.requeues))
