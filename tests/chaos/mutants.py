"""Rules of the protocol broken on purpose, one at a time: each must be caught by the checks of ``books``.

A mutant is installed in every role process of a run. It changes what the code does, never what the checks look at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from spotgrpo.consumer.commit import Commit, Committer
from spotgrpo.consumer.intake import Intake
from spotgrpo.consumer.issuer import Issuer
from spotgrpo.consumer.settlement import Settlement
from spotgrpo.shared.errors import StoreUnavailable
from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.latest import LatestPointer
from spotgrpo.shared.ports import Delivery
from spotgrpo.shared.s3 import S3Store


@dataclass(frozen=True)
class Mutant:
    """A rule that is broken: how, the cells in which that must come out, and the failure that it shows by (regular
    expression).

    One that breaks nothing is the control: its cells must pass.
    """

    what: str
    install: Callable[[], None] | None
    cells: tuple[str, ...]
    symptom: str


def _ack_before_commit() -> None:
    """Every delivery is acked as soon as it is taken in."""
    plain = Intake._accept

    def accept(self: Intake, delivery: Delivery, version: int) -> None:
        plain(self, delivery, version)
        self._rollouts.ack([delivery.handle])

    Intake._accept = accept  # type: ignore[method-assign]


def _no_dedupe() -> None:
    """A group whose task is not outstanding is taken for one that counts."""
    plain = Settlement.receive

    def receive(self: Settlement[Any], task: Any, receipt: Any) -> Any:
        if task not in self.committed.outstanding and task not in self._entries:
            self.committed.outstanding[task] = self.committed.version  # type: ignore[index]
        return plain(self, task, receipt)

    Settlement.receive = receive  # type: ignore[method-assign]


def _copies_acked_early() -> None:
    """A copy of a group that is held is a duplicate, acked at once."""
    plain = Settlement.receive

    def receive(self: Settlement[Any], task: Any, receipt: Any) -> Any:
        verdict = plain(self, task, receipt)
        if verdict == "copy":
            self._entries[task].receipts.remove(receipt)
            return "duplicate"
        return verdict

    Settlement.receive = receive  # type: ignore[method-assign]


def _no_compare_and_swap() -> None:
    """``latest.json`` is written whatever it is. Other keys are not: a learner tries the store out at its start."""
    plain = S3Store.compare_and_swap

    def compare_and_swap(self: S3Store, key: str, body: bytes, expected: str | None) -> str | None:
        if not key.endswith("latest.json"):
            return plain(self, key, body, expected)
        answer = self._client.put_object(Bucket=self._bucket, Key=self._prefix + key, Body=body)
        return answer["ETag"]

    S3Store.compare_and_swap = compare_and_swap  # type: ignore[method-assign]


def _no_fencing() -> None:
    """A learner that finds another's state moves on from that instead of leaving."""

    def read_back(self: LatestPointer, body: bytes) -> None:
        found = self._fetch()
        if found is not None and found.body == body:
            self._land(found)
            return
        self._known = found
        raise StoreUnavailable("it did not land so far")

    LatestPointer._read_back = read_back  # type: ignore[method-assign]
    LatestPointer.check_mine = lambda _self: None  # type: ignore[method-assign]


def _no_read_back() -> None:
    """A move without an answer is taken for a lost one."""

    def read_back(self: LatestPointer, body: bytes) -> None:
        del body
        raise self._fenced(self._fetch())

    LatestPointer._read_back = read_back  # type: ignore[method-assign]


def _no_digest() -> None:
    """A download is taken as it comes."""

    def download(self: S3Store, key: str, path: Path, size: int, sha256: str) -> None:
        del size, sha256
        path.write_bytes(self.get_unchecked(key))  # type: ignore[attr-defined]

    def get_unchecked(self: S3Store, key: str) -> bytes:
        client = self._download_client
        return client.get_object(Bucket=self._bucket, Key=self._prefix + key)["Body"].read()

    S3Store.get_unchecked = get_unchecked  # type: ignore[attr-defined]
    S3Store.download = download  # type: ignore[method-assign]


def _published_before_issued() -> None:
    """Tasks are published while the ledger that issues them is still on its way, and not once it has landed."""
    issuers: list[Issuer] = []
    early: set[TaskId] = set()
    plain_init, plain_submit, plain_publish = Issuer.__init__, Committer.submit, Issuer.publish

    def init(self: Issuer, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        issuers.append(self)

    def submit(self: Committer, commit: Commit) -> None:
        if commit.ledger is not None:
            outstanding = commit.ledger.outstanding
            new = [(task, outstanding[task]) for task in commit.ledger.issued]
            plain_publish(issuers[-1], new)
            early.update(commit.ledger.issued)
        plain_submit(self, commit)

    def publish(self: Issuer, tasks: Iterable[tuple[TaskId, int]], **options: Any) -> None:
        plain_publish(self, [(task, at) for task, at in tasks if task not in early], **options)

    Issuer.__init__ = init  # type: ignore[method-assign]
    Issuer.publish = publish  # type: ignore[method-assign]
    Committer.submit = submit  # type: ignore[method-assign]


HANGS = "did not happen within"
"""A group that is lost is waited for in vain, after the fault or at the end: nothing is published a second time."""
GOES_ON = "the end of learner|not in the chain any more"
"""A learner that lost the run does not leave, or what another one committed is overwritten."""

BROKEN: Mapping[str, Mutant] = MappingProxyType(
    {
        "ack-order": Mutant(
            "deliveries are acked before the commit",
            _ack_before_commit,
            ("SIGKILL learner / after the step",),
            HANGS,
        ),
        "dedupe": Mutant(
            "a group of a task that is not outstanding counts",
            _no_dedupe,
            ("SIGSTOP worker / after confirm, before ack",),
            "settled_twice",
        ),
        "copies": Mutant(
            "copies of held groups are acked early",
            _copies_acked_early,
            ("line reset, then SIGKILL / learner",),
            HANGS,
        ),
        "cas": Mutant(
            "`latest.json` is written without a condition",
            _no_compare_and_swap,
            ("SIGSTOP learner / after manifest, before `latest`",),
            GOES_ON,
        ),
        "fencing": Mutant(
            "a learner that lost the run goes on",
            _no_fencing,
            ("SIGSTOP learner / after manifest, before `latest`",),
            GOES_ON,
        ),
        "read-back": Mutant(
            "a move without an answer counts as lost",
            _no_read_back,
            ("answer lost / `latest` moved",),
            "ended with 4",
        ),
        "digest": Mutant(
            "downloads are not checked",
            _no_digest,
            ("download flipped / adapter",),
            "served from other bytes",
        ),
        "write-ahead": Mutant(
            "tasks are published before a ledger holds them",
            _published_before_issued,
            ("SIGKILL learner / state and ledger stored, before `latest`",),
            "no ledger issued",
        ),
    }
)

CONTROL = Mutant(
    "nothing (the control)",
    None,
    tuple(sorted({cell for mutant in BROKEN.values() for cell in mutant.cells})),
    "NOT CAUGHT",
)
MUTANTS: Mapping[str, Mutant] = MappingProxyType({"control": CONTROL, **BROKEN})
