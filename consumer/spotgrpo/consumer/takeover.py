"""How a learner becomes the active one: read ``latest.json``, compare-and-swap epoch + 1, restore (rule 7).

A new run begins here too: version 0 is the untouched base with a zero adapter, and its ledger issues the first
tasks. Everything is stored before ``latest.json`` names it.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from spotgrpo.consumer.commit import BucketWriter, NewVersion
from spotgrpo.consumer.ledger import Ledger, decode_ledger
from spotgrpo.shared.errors import ConfigError, Fenced, IntegrityError, NotStored, WireError
from spotgrpo.shared.ids import Keys, PolicyVersion
from spotgrpo.shared.latest import LatestPointer, fresh_nonce
from spotgrpo.shared.manifest import Durable, Latest, Probe, RunDocument, sha256_hex
from spotgrpo.shared.ports import ObjectInfo, ObjectStore
from spotgrpo.shared.retry import retry
from spotgrpo.shared.steps import Step, reached
from spotgrpo.shared.threads import until_stopped

log = logging.getLogger(__name__)

IDENTITY = ("model", "lora", "data", "rewards", "max_staleness", "dtype")
"""Parts of run.json that a resumed run may not change; sampling and everything about the optimizer it may."""

TRIES = 5


@dataclass(frozen=True)
class Start:
    """What version 0 consists of."""

    files: Mapping[str, bytes]
    modules: int
    probe: Probe | None
    state: bytes
    issue: int


@dataclass(frozen=True)
class TakenOver:
    """The run in this learner's hands."""

    latest: Latest
    ledger: Ledger
    state: bytes
    resumed: bool


def write_run_document(
    store: ObjectStore, keys: Keys, document: RunDocument, stopping: threading.Event
) -> RunDocument:
    """Write ``run.json`` once; where it exists already, refuse a run of another identity with both values.

    Returns the one that stands, which workers go by.
    """
    key, body = keys.run_json, document.to_bytes()
    write = functools.partial(store.compare_and_swap, key, body, None)
    if retry(f"writing {key}", write, stopping=stopping) is not None:
        return document
    stored = retry(f"reading {key}", lambda: store.get(key), stopping=stopping)
    there = RunDocument.from_bytes(stored.body)
    for part in IDENTITY:
        _same(part, getattr(there, part), getattr(document, part))
    return there


def _same(name: str, there: object, here: object) -> None:
    if there == here:
        return
    fields = getattr(type(here), "model_fields", None)
    if fields and type(there) is type(here):
        for field in fields:
            _same(f"{name}.{field}", getattr(there, field), getattr(here, field))
        return
    raise ConfigError(
        name,
        _plain(here),
        f"run.json of this run id has {_plain(there)!r}; give that, or start a run under another run.id",
    )


def _plain(value: object) -> object:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    dump = getattr(value, "model_dump", None)
    return dump() if dump else value


def take_over(
    store: ObjectStore,
    keys: Keys,
    pointer: LatestPointer,
    *,
    writer_id: str,
    base_sha256: str,
    start: Callable[[], Start],
    stopping: threading.Event,
) -> TakenOver:
    """Make this learner the active one. The leader queue is held already; the compare-and-swap decides.

    A last move of the learner before may still land between the read and the compare-and-swap. Nothing is restored
    yet, so the state is read again then and the next epoch taken, a few times.

    Raises:
        Fenced: ``latest.json`` kept moving: another learner is at work.
        IntegrityError: what ``latest.json`` names is missing or altered.
    """
    for left in reversed(range(TRIES)):
        read = functools.partial(until_stopped, pointer.read, stopping)
        latest = retry("reading latest.json", read, stopping=stopping)
        try:
            if latest is None:
                return _begin(store, keys, pointer, writer_id, base_sha256, start(), stopping)
            return _restore(store, _claim(pointer, latest, writer_id, stopping), stopping)
        except Fenced as exc:
            if not left:
                raise
            log.warning("%s; reading it again", exc)
    raise AssertionError("unreachable")


def _restore(store: ObjectStore, mine: Latest, stopping: threading.Event) -> TakenOver:
    durable = mine.durable
    state = _verified(store, durable.state, durable.state_sha256, stopping)
    ledger = _verified(store, durable.ledger, durable.ledger_sha256, stopping)
    return TakenOver(mine, _balanced(ledger).taken_over(mine.epoch), state, resumed=True)


def _claim(
    pointer: LatestPointer, latest: Latest, writer_id: str, stopping: threading.Event
) -> Latest:
    """Move ``latest.json`` to the next epoch, ``serving`` back to ``durable``. Raises Fenced."""
    serving = latest.serving.model_copy(
        update={
            "version": latest.durable.version,
            "epoch": latest.durable.epoch,
            "manifest": latest.durable.manifest,
            "sha256": latest.durable.manifest_sha256,
        }
    )
    mine = latest.model_copy(
        update={
            "epoch": latest.epoch + 1,
            "writer": writer_id,
            "nonce": fresh_nonce(),
            "serving": serving,
            "finished": False,
            "takeovers": {**latest.takeovers, latest.epoch + 1: latest.durable.version},
        }
    )
    reached(Step.LEARNER_LEADING)
    _move(pointer, mine, stopping)
    reached(Step.LEARNER_CLAIMED)
    log.info("took the run over at version %s as epoch %d", mine.durable.policy, mine.epoch)
    return mine


def _move(pointer: LatestPointer, latest: Latest, stopping: threading.Event) -> None:
    until_stopped(functools.partial(pointer.move, latest, stopping=stopping), stopping)


def _begin(
    store: ObjectStore,
    keys: Keys,
    pointer: LatestPointer,
    writer_id: str,
    base_sha256: str,
    start: Start,
    stopping: threading.Event,
) -> TakenOver:
    version = PolicyVersion(epoch=_unused_epoch(store, keys, stopping), number=0)
    writer = BucketWriter(store, keys, stopping)
    stored = writer.store_version(
        NewVersion(version, None, start.files, start.modules, base_sha256, lambda: start.probe)
    )
    state, state_digest = writer.store_state(version, start.state)
    ledger = Ledger.first(version.epoch, start.issue)
    ledger_key, ledger_digest = writer.store_ledger(ledger)
    durable = Durable(
        version=0,
        epoch=version.epoch,
        manifest=stored.manifest,
        manifest_sha256=stored.sha256,
        state=state,
        state_sha256=state_digest,
        ledger=ledger_key,
        ledger_sha256=ledger_digest,
    )
    latest = Latest(
        epoch=version.epoch,
        writer=writer_id,
        nonce=fresh_nonce(),
        serving=stored.serving(),
        durable=durable,
    )
    reached(Step.LEARNER_BEGINNING)
    _move(pointer, latest, stopping)
    log.info("began run %s at version %s", keys.run, version)
    return TakenOver(latest, ledger, start.state, resumed=False)


def _unused_epoch(store: ObjectStore, keys: Keys, stopping: threading.Event) -> int:
    """1, or more where a learner died before it wrote the first ``latest.json``: its names are not used again."""
    used = [0]
    for prefix in (keys.versions, keys.ledgers, keys.states):
        found = retry(
            f"listing {prefix}", functools.partial(_listed, store, prefix), stopping=stopping
        )
        for info in found:
            name = info.key.removeprefix(prefix).split("/")[0]
            epoch = name.partition(".e")[2].split(".")[0]
            used.append(int(epoch) if epoch.isdigit() else 0)
    return max(used) + 1


def _listed(store: ObjectStore, prefix: str) -> list[ObjectInfo]:
    return list(store.list(prefix))


def _verified(store: ObjectStore, key: str, digest: str, stopping: threading.Event) -> bytes:
    try:
        body = retry(f"reading {key}", lambda: store.get(key), stopping=stopping).body
    except NotStored as exc:
        raise IntegrityError(f"{key}, which latest.json names, is not in the bucket") from exc
    if sha256_hex(body) != digest:
        raise IntegrityError(f"{key} does not have the sha256 that latest.json names")
    return body


def _balanced(body: bytes) -> Ledger:
    ledger = decode_ledger(body)
    if not ledger.balanced:
        raise WireError(f"the books of ledger {ledger.sequence} do not balance: {ledger.counts}")
    return ledger
