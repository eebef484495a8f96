"""The settlement protocol: which delivery counts, and when it may be acked. No I/O, no clock.

A task is *held* from its first delivery until the commit that settles it has landed. Copies are kept beside it.
Nothing is acked before that commit, but for groups whose task is outstanding in no committed ledger: those are
duplicates, however late they come. DESIGN numbers these rules; the tests of this module name them.

The main thread receives and settles, the committer's thread calls ``landed``: one lock guards the state.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from spotgrpo.consumer.ledger import Cause, Ledger, retries_of
from spotgrpo.shared.ids import TaskId

ReceiptT = TypeVar("ReceiptT")
Verdict = Literal["held", "copy", "duplicate"]


@dataclass
class _Entry(Generic[ReceiptT]):
    """A task in the learner's hands: the receipts of all its copies, and where it stands."""

    receipts: list[ReceiptT]
    cause: Cause | None = None
    in_flight: bool = False


@dataclass(frozen=True)
class Landed(Generic[ReceiptT]):
    """What a landed commit allows: acking these receipts, publishing these tasks, deleting what belongs to these."""

    acks: tuple[ReceiptT, ...]
    issued: tuple[TaskId, ...]
    settled: tuple[TaskId, ...]


@dataclass
class Settlement(Generic[ReceiptT]):
    """Deliveries between the broker and the ledger. ``ReceiptT`` is whatever acks a delivery."""

    committed: Ledger
    _entries: dict[TaskId, _Entry[ReceiptT]] = field(default_factory=dict)
    _flight: Ledger | None = None
    _duplicates: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def receive(self, task: TaskId, receipt: ReceiptT) -> Verdict:
        """Take a delivery in. Only a ``duplicate`` may be acked, and at once (rule 2)."""
        with self._lock:
            if task not in self.committed.outstanding:
                self._duplicates += 1
                return "duplicate"
            entry = self._entries.get(task)
            if entry is None:
                self._entries[task] = _Entry([receipt])
                return "held"
            entry.receipts.append(receipt)
            self._duplicates += 1
            return "copy"

    def settle(self, cause: Cause, tasks: Iterable[TaskId]) -> None:
        """Mark held tasks as ended; they are acked once a commit that has them in its ledger has landed.

        Ledgers list them in the order of these calls: that of a step's batch, for the trained ones.
        """
        with self._lock:
            for task in tasks:
                entry = self._entries[task]
                if entry.cause is not None:
                    raise ValueError(f"task {task} is settled already, as {entry.cause}")
                entry.cause = cause
                self._entries[task] = self._entries.pop(task)

    def write(
        self,
        version: int,
        issue: Callable[[int], int],
        max_attempts: int,
        parent: str,
        requeue: Sequence[TaskId] = (),
        unconfirmed: Collection[TaskId] = (),
    ) -> Ledger:
        """The ledger of the next commit: all that is settled and not in a ledger yet.

        Args:
            version: number of the policy version it goes with.
            issue: how many new tasks to issue when so many are outstanding.
            parent: bucket key of the committed ledger.
            requeue: next attempts of dead tasks that a person asked for; as many as ``issue`` allows go before new
                prompts, so that no more are outstanding than can be trained in time.
            unconfirmed: tasks that were published, and that the broker has not confirmed.
        """
        with self._lock:
            if self._flight is not None:
                raise ValueError("a commit is in flight already")
            settled: dict[Cause, tuple[TaskId, ...]] = {}
            for task, entry in self._entries.items():
                if entry.cause is not None:
                    entry.in_flight = True
                    settled[entry.cause] = (*settled.get(entry.cause, ()), task)
            left = len(self.committed.outstanding) - sum(map(len, settled.values()))
            room = issue(left + len(retries_of(settled, max_attempts)))
            requeued = tuple(requeue[:room])
            self._flight = self.committed.next(
                settled=settled,
                version=version,
                issue=room - len(requeued),
                requeued=requeued,
                max_attempts=max_attempts,
                duplicates=self._duplicates,
                parent=parent,
                unconfirmed=unconfirmed,
            )
            self._duplicates = 0
            return self._flight

    def landed(self) -> Landed[ReceiptT]:
        """The commit in flight is in the bucket: its ledger is the committed one (rules 1 and 3)."""
        with self._lock:
            if self._flight is None:
                raise ValueError("no commit is in flight")
            self.committed, self._flight = self._flight, None
            done = [task for task, entry in self._entries.items() if entry.in_flight]
            acks = tuple(receipt for task in done for receipt in self._entries.pop(task).receipts)
            return Landed(acks, self.committed.issued, tuple(done))

    def drop_void(self, is_void: Callable[[ReceiptT], bool]) -> None:
        """Forget receipts of dead channels (rule 3). Their tasks stay held: the broker delivers them again."""
        with self._lock:
            for entry in self._entries.values():
                entry.receipts = [receipt for receipt in entry.receipts if not is_void(receipt)]

    @property
    def in_flight(self) -> bool:
        """True while a ledger was written that has not landed."""
        return self._flight is not None

    @property
    def has_settleable(self) -> bool:
        """True while something settled waits for a commit (rule 5)."""
        with self._lock:
            return any(
                entry.cause is not None and not entry.in_flight for entry in self._entries.values()
            )

    @property
    def receipts(self) -> int:
        """Deliveries in hand that were not acked: what fills the prefetch window."""
        with self._lock:
            return sum(len(entry.receipts) for entry in self._entries.values())

    @property
    def unsettled(self) -> int:
        """Tasks outstanding that nothing settled yet: in the queues, in workers, or held here."""
        with self._lock:
            settled = sum(entry.cause is not None for entry in self._entries.values())
            return len(self.committed.outstanding) - settled

    def missing(self) -> list[tuple[TaskId, int]]:
        """Outstanding tasks of which no delivery is in hand, with the version at which each was issued."""
        with self._lock:
            return [
                (task, at)
                for task, at in self.committed.outstanding.items()
                if task not in self._entries
            ]
