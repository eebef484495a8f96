"""The books of a run, added up from the bucket alone.

Follows the chain of ledgers from the one that ``latest.json`` names back to the first, and checks that every task
was issued once, settled at most once, and is settled or outstanding at the end.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field

from spotgrpo.consumer.ledger import CAUSES, Ledger, all_settled, decode_ledger
from spotgrpo.shared.errors import ConfigError, IntegrityError, NotStored
from spotgrpo.shared.ids import Keys, TaskId
from spotgrpo.shared.manifest import Latest, sha256_hex
from spotgrpo.shared.ports import ObjectStore


@dataclass(frozen=True)
class AuditReport:
    """What the ledgers say.

    Attributes:
        lost: tasks that were issued and are neither settled nor outstanding.
        settled_twice: tasks with more than one settlement.
        issued_twice: tasks that two ledgers issued.
        unknown: tasks settled or outstanding that no ledger issued.
        counts_differ: names of totals in the last ledger that the chain does not add up to.
    """

    run: str
    epoch: int
    version: int
    ledgers: int
    issued: int
    trained: int
    flat: int
    stale: int
    dead: int
    outstanding: int
    duplicate: int
    lost: list[str] = field(default_factory=list)
    settled_twice: list[str] = field(default_factory=list)
    issued_twice: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    counts_differ: list[str] = field(default_factory=list)

    @property
    def balanced(self) -> bool:
        return not (
            self.lost
            or self.settled_twice
            or self.issued_twice
            or self.unknown
            or self.counts_differ
        )

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "balanced": self.balanced}


def audit_run(store: ObjectStore, keys: Keys) -> AuditReport:
    """Audit a run.

    Raises:
        ConfigError: the bucket holds no such run.
        IntegrityError: a ledger of the chain is missing or altered.
    """
    return audit_chain(keys.run, read_chain(store, read_latest(store, keys)))


def read_latest(store: ObjectStore, keys: Keys) -> Latest:
    """``latest.json`` of a run. Raises ConfigError where the bucket holds no such run."""
    try:
        return Latest.from_bytes(store.get(keys.latest).body)
    except NotStored as exc:
        raise ConfigError(
            "run.id", keys.run, "the bucket has no run of this id; name one that was started"
        ) from exc


def read_chain(store: ObjectStore, latest: Latest) -> list[Ledger]:
    """All ledgers from the first to the one that ``latest`` names."""
    chain = [read_newest(store, latest)]
    while (before := read_parent(store, chain[-1])) is not None:
        chain.append(before)
    return chain[::-1]


def read_newest(store: ObjectStore, latest: Latest) -> Ledger:
    """The ledger that ``latest`` names. Raises IntegrityError."""
    key, body = latest.durable.ledger, _read(store, latest.durable.ledger)
    if sha256_hex(body) != latest.durable.ledger_sha256:
        raise IntegrityError(f"ledger {key} does not have the sha256 that latest.json names")
    return decode_ledger(body)


def read_parent(store: ObjectStore, ledger: Ledger) -> Ledger | None:
    """The ledger before ``ledger``, None where that is the first. Raises IntegrityError."""
    if ledger.parent is None:
        return None
    before = decode_ledger(_read(store, ledger.parent))
    if before.sequence != ledger.sequence - 1:
        raise IntegrityError(f"ledger {ledger.parent} is not the one before {ledger.sequence}")
    return before


def _read(store: ObjectStore, key: str) -> bytes:
    try:
        return store.get(key).body
    except NotStored as exc:
        raise IntegrityError(f"ledger {key} is missing from the bucket") from exc


def audit_chain(run: str, chain: list[Ledger]) -> AuditReport:
    """The report on a chain, first ledger first. Pure."""
    last = chain[-1]
    issued = Counter(task for ledger in chain for task in ledger.issued)
    causes = all_settled(chain)
    settled = set(causes)
    outstanding = set(last.outstanding)
    added: dict[str, int] = {
        cause: sum(cause in found for found in causes.values()) for cause in CAUSES
    }
    return AuditReport(
        run=run,
        epoch=last.epoch,
        version=last.version,
        ledgers=len(chain),
        issued=issued.total(),
        **added,
        outstanding=len(outstanding),
        duplicate=last.counts.duplicate,
        lost=_names(set(issued) - settled - outstanding),
        settled_twice=_names(
            {task for task, found in causes.items() if len(found) > 1} | (settled & outstanding)
        ),
        issued_twice=_names({task for task, times in issued.items() if times > 1}),
        unknown=_names((settled | outstanding) - set(issued)),
        counts_differ=_differing(last, issued.total(), added),
    )


def _differing(last: Ledger, issued: int, added: dict[str, int]) -> list[str]:
    found = {"issued": issued, **added}
    return [name for name, total in found.items() if getattr(last.counts, name) != total]


def _names(tasks: set[TaskId]) -> list[str]:
    return [str(task) for task in sorted(tasks)]
