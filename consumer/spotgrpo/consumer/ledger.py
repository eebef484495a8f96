"""The ledger: which tasks were issued, how each was settled, and which are outstanding. Pure values.

At every ledger ``issued = trained + flat + stale + dead + outstanding``. A ledger lists what was issued and settled
since its parent; the chain of all of them is the run's books, which ``audit`` adds up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal, get_args

from spotgrpo.shared.errors import WireError
from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.wire import Fields, pack_body, unpack_body

Cause = Literal["trained", "flat", "stale", "dead"]
CAUSES: Final[tuple[Cause, ...]] = get_args(Cause)
Settled = Mapping[Cause, tuple[TaskId, ...]]

MAX_IDS: Final = 1 << 20


@dataclass(frozen=True)
class Counts:
    """Totals since the run began. ``duplicate`` stands beside the books: copies of groups, not tasks."""

    issued: int = 0
    trained: int = 0
    flat: int = 0
    stale: int = 0
    dead: int = 0
    duplicate: int = 0

    @property
    def settled(self) -> int:
        return self.trained + self.flat + self.stale + self.dead


@dataclass(frozen=True)
class Ledger:
    """The state of a run's books at one durable commit.

    Attributes:
        sequence: +1 every ledger along the chain.
        epoch: of the learner that wrote it.
        version: number of the policy version that it goes with.
        parent: bucket key of the ledger before, None for the first.
        cursor: next prompt index to be issued.
        outstanding: task -> version number when it was issued.
        settled: what ended since the parent, by cause, each in the order in which it was settled: of trained tasks,
            that of the step's batch, so that a run can be replayed from its ledgers.
        issued: what was issued since the parent: retries, then what a person asked for again, then new prompts.
        takeovers: epoch -> version number that its learner resumed from.
        unpublished: outstanding tasks that earlier ledgers issued, and that the broker had not confirmed when this one
            was written. Whoever takes the run over publishes them as it does ``issued``.
    """

    sequence: int
    epoch: int
    version: int
    parent: str | None
    counts: Counts
    cursor: int
    outstanding: Mapping[TaskId, int]
    settled: Settled
    issued: tuple[TaskId, ...]
    takeovers: Mapping[int, int]
    unpublished: tuple[TaskId, ...] = ()

    @classmethod
    def first(cls, epoch: int, issue: int) -> Ledger:
        """The ledger of version 0, which issues the first ``issue`` prompts."""
        empty = cls(-1, epoch, 0, None, Counts(), 0, {}, {}, (), {epoch: 0})
        return empty.next(
            settled={}, version=0, issue=issue, max_attempts=1, duplicates=0, parent=None
        )

    @property
    def balanced(self) -> bool:
        return self.counts.issued == self.counts.settled + len(self.outstanding)

    def taken_over(self, epoch: int) -> Ledger:
        """The same books in the hands of a new learner; not stored until its first commit."""
        return replace(self, epoch=epoch, takeovers={**self.takeovers, epoch: self.version})

    def next(
        self,
        *,
        settled: Settled,
        version: int,
        issue: int,
        max_attempts: int,
        duplicates: int,
        parent: str | None,
        requeued: tuple[TaskId, ...] = (),
        unconfirmed: Collection[TaskId] = (),
    ) -> Ledger:
        """The ledger after ``settled`` ended, stale and dead prompts were tried again, and ``issue`` new were issued.

        ``requeued`` are next attempts of dead tasks that a person asked for; that they were never issued is for the
        caller to know, since it takes the whole chain. ``unconfirmed`` are tasks that the broker may not have yet.

        Raises:
            ValueError: a task is settled that is not outstanding, or twice, or one is requeued that is outstanding
                or never was issued at all; the caller broke the protocol.
        """
        ended = [task for tasks in settled.values() for task in tasks]
        if len(set(ended)) != len(ended) or any(task not in self.outstanding for task in ended):
            raise ValueError(
                f"settles tasks that are not outstanding, or twice: {sorted(map(str, ended))}"
            )
        retries = retries_of(settled, max_attempts)
        _check_requeued(requeued, self.cursor, {*self.outstanding, *retries})
        issued = retries + requeued + tuple(TaskId(self.cursor + i) for i in range(issue))
        gone = set(ended)
        outstanding = {task: at for task, at in self.outstanding.items() if task not in gone}
        unpublished = tuple(task for task in outstanding if task in unconfirmed)
        outstanding.update(dict.fromkeys(issued, version))
        return replace(
            self,
            sequence=self.sequence + 1,
            version=version,
            parent=parent,
            counts=_add(self.counts, settled, len(issued), duplicates),
            cursor=self.cursor + issue,
            outstanding=outstanding,
            settled={cause: tuple(tasks) for cause, tasks in settled.items() if tasks},
            issued=issued,
            unpublished=unpublished,
        )


def retries_of(settled: Settled, max_attempts: int) -> tuple[TaskId, ...]:
    """The next attempts of prompts whose tasks went stale or died."""
    failed = (*settled.get("stale", ()), *settled.get("dead", ()))
    return tuple(task.next_attempt() for task in failed if task.attempt < max_attempts)


def _check_requeued(requeued: tuple[TaskId, ...], cursor: int, taken: set[TaskId]) -> None:
    wrong = [task for task in requeued if task in taken or task.attempt < 2 or task.index >= cursor]
    if wrong or len(set(requeued)) != len(requeued):
        raise ValueError(
            f"requeues tasks that are outstanding, first attempts, or twice: {sorted(map(str, requeued))}"
        )


def _add(counts: Counts, settled: Settled, issued: int, duplicates: int) -> Counts:
    return Counts(
        issued=counts.issued + issued,
        trained=counts.trained + len(settled.get("trained", ())),
        flat=counts.flat + len(settled.get("flat", ())),
        stale=counts.stale + len(settled.get("stale", ())),
        dead=counts.dead + len(settled.get("dead", ())),
        duplicate=counts.duplicate + duplicates,
    )


# ---- bytes ----------------------------------------------------------------------------------------------------


def encode_ledger(ledger: Ledger) -> bytes:
    """``ledger`` as a bucket object."""
    counts = ledger.counts
    return pack_body(
        "ledger",
        {
            "sequence": ledger.sequence,
            "epoch": ledger.epoch,
            "version": ledger.version,
            "parent": ledger.parent,
            "counts": {name: getattr(counts, name) for name in ("issued", *CAUSES, "duplicate")},
            "cursor": ledger.cursor,
            "outstanding": [
                {"task": str(task), "version": at} for task, at in ledger.outstanding.items()
            ],
            "settled": {
                cause: [str(task) for task in tasks] for cause, tasks in ledger.settled.items()
            },
            "issued": [str(task) for task in ledger.issued],
            "takeovers": [
                {"epoch": epoch, "version": at} for epoch, at in ledger.takeovers.items()
            ],
            "unpublished": [str(task) for task in ledger.unpublished],
        },
    )


def decode_ledger(body: bytes) -> Ledger:
    """The ledger in a bucket object, or WireError; books that do not balance are one too."""
    fields = unpack_body(body, "ledger")
    counts, settled = fields.fields("counts"), fields.fields("settled")
    unknown = set(settled.names) - set(CAUSES)
    if unknown:
        raise WireError(f"ledger.settled has unknown causes {sorted(unknown)}")
    return Ledger(
        sequence=fields.integer("sequence"),
        epoch=fields.integer("epoch", low=1),
        version=fields.integer("version"),
        parent=fields.text("parent", 512) if fields.has("parent") else None,
        counts=Counts(**{name: counts.integer(name) for name in ("issued", *CAUSES, "duplicate")}),
        cursor=fields.integer("cursor"),
        outstanding={
            TaskId.parse(entry.text("task", 32)): entry.integer("version")
            for entry in fields.each("outstanding", MAX_IDS)
        },
        settled={cause: _tasks(settled, cause) for cause in CAUSES if settled.has(cause)},
        issued=_tasks(fields, "issued"),
        takeovers={
            entry.integer("epoch"): entry.integer("version")
            for entry in fields.each("takeovers", MAX_IDS)
        },
        unpublished=_tasks(fields, "unpublished") if fields.has("unpublished") else (),
    )


def _tasks(fields: Fields, name: str) -> tuple[TaskId, ...]:
    return tuple(TaskId.parse(text) for text in fields.list_of(name, str, MAX_IDS))


def all_settled(ledgers: Iterable[Ledger]) -> dict[TaskId, list[Cause]]:
    """Every settled task of a chain with its causes; more than one means it was settled twice."""
    causes: dict[TaskId, list[Cause]] = {}
    for ledger in ledgers:
        for cause, tasks in ledger.settled.items():
            for task in tasks:
                causes.setdefault(task, []).append(cause)
    return causes
