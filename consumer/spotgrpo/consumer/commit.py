"""From an optimizer step to what workers serve and a learner resumes from.

Order is the guarantee. A version's files are stored, then its manifest, then ``latest.json`` moves (*serving*);
trainer state and ledger are stored, then ``latest.json`` moves again (*durable*); only then deliveries are acked
and new tasks published. A learner killed between any two of these leaves nothing that counts twice or is missing.
"""

from __future__ import annotations

import functools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from dataclasses import dataclass
from statistics import median_low
from typing import Final, Protocol

from spotgrpo.consumer.deltas import DeltaMaker
from spotgrpo.consumer.lately import STEPS
from spotgrpo.consumer.ledger import Ledger, encode_ledger
from spotgrpo.shared.errors import SpotGRPOError
from spotgrpo.shared.ids import Keys, PolicyVersion
from spotgrpo.shared.latest import LatestPointer, fresh_nonce
from spotgrpo.shared.manifest import (
    Durable,
    Evaluated,
    FileEntry,
    Latest,
    Manifest,
    Probe,
    Serving,
    sha256_hex,
)
from spotgrpo.shared.ports import ObjectStore
from spotgrpo.shared.retry import retry
from spotgrpo.shared.steps import Step, reached
from spotgrpo.shared.threads import start

log = logging.getLogger(__name__)

SAID: Final = ("step_s", "group_tokens", "lead_s", "wall_s", "evaluated")
"""What ``latest.json`` says of the run at every move, beside versions."""
CLOSE_S = 5.0
"""How long ``close`` waits for a transfer that is on its way; the thread is a daemon."""


@dataclass(frozen=True)
class NewVersion:
    """A policy version that is not in the bucket yet.

    ``probe`` is asked for once the files are stored, and may wait for a probe that is being made meanwhile.
    """

    version: PolicyVersion
    parent: PolicyVersion | None
    files: Mapping[str, bytes]
    modules: int
    base_sha256: str
    probe: Callable[[], Probe | None]


@dataclass(frozen=True)
class Commit:
    """What to make true in the bucket: a version to serve, a ledger (with trainer state) to resume from, or both.

    ``new`` None leaves the version; ``ledger`` None leaves ``durable``; ``state`` None keeps the stored state. It is
    asked for once the version is served, and may wait as ``NewVersion.probe`` may. ``ended`` names the limit that the
    run has reached, and is empty while it goes on; the rest is as in ``Latest``.
    """

    new: NewVersion | None
    ledger: Ledger | None
    state: Callable[[], bytes] | None
    step_s: float = 0.0
    group_tokens: float = 0.0
    lead_s: float = 0.0
    wall_s: float = 0.0
    evaluated: Evaluated | None = None
    ended: str = ""


@dataclass(frozen=True)
class Stored:
    """Where a version's manifest lies and what it hashes to."""

    version: PolicyVersion
    manifest: str
    sha256: str

    def serving(self) -> Serving:
        return Serving(
            version=self.version.number,
            epoch=self.version.epoch,
            manifest=self.manifest,
            sha256=self.sha256,
        )


class BucketWriter:
    """Stores immutable objects of one run, trying for as long as the bucket is unreachable.

    Args:
        abandon: once set, an unreachable bucket is given up (StoreUnavailable).
        deltas: whether versions offer a delta to the one stored before (``sync.encoding``).
    """

    def __init__(
        self, store: ObjectStore, keys: Keys, abandon: threading.Event, *, deltas: bool = False
    ) -> None:
        self._store, self._keys, self.abandon = store, keys, abandon
        self._deltas = DeltaMaker(wanted=deltas)

    def _create(self, key: str, body: bytes) -> None:
        retry(f"storing {key}", lambda: self._store.create(key, body), stopping=self.abandon)

    def store_version(self, new: NewVersion) -> Stored:
        """Files first, the manifest last: a version without one does not exist."""

        def store(name: str, body: bytes) -> None:
            self._create(self._keys.version(new.version, name), body)

        making = self._deltas.begin(new.parent, new.files, store)
        storing = [
            start(functools.partial(store, name, body), "upload")
            for name, body in new.files.items()
        ]
        files = [
            FileEntry(name=name, size=len(body), sha256=sha256_hex(body))
            for name, body in new.files.items()
        ]
        wait(storing)  # all of them: an object that appears after a failure would belong to nobody
        for one in storing:
            one.result()
        delta = making.result()
        reached(Step.LEARNER_UPLOADED)
        manifest = Manifest(
            run=self._keys.run,
            version=new.version.number,
            epoch=new.version.epoch,
            parent=str(new.parent) if new.parent else None,
            files=files,
            modules=new.modules,
            base_sha256=new.base_sha256,
            probe=new.probe(),
            created_at=time.time(),
            delta=delta,
        ).to_bytes()
        key = self._keys.manifest(new.version)
        self._create(key, manifest)
        self._deltas.stored(new.version, new.files)
        return Stored(new.version, key, sha256_hex(manifest))

    def store_state(self, version: PolicyVersion, state: bytes) -> tuple[str, str]:
        """Returns the key and sha256 of the trainer state."""
        key = self._keys.state(version)
        self._create(key, state)
        return key, sha256_hex(state)

    def store_ledger(self, ledger: Ledger) -> tuple[str, str]:
        """Returns the key and sha256 of the ledger."""
        key, body = self._keys.ledger(ledger.sequence, ledger.epoch), encode_ledger(ledger)
        self._create(key, body)
        return key, sha256_hex(body)


class AfterDurable(Protocol):
    """What may happen only once a ledger is committed: ack, publish, delete."""

    def __call__(self, latest: Latest) -> None: ...


class Committer:
    """Performs commits in order on a thread of its own, one in flight at most, beside the next step.

    ``submit`` waits while one is in flight, so a learner that cannot commit stops one version ahead. An error
    (``Fenced``, an integrity fault) ends the thread and comes out of the next ``submit`` or ``check``.
    """

    def __init__(
        self,
        writer: BucketWriter,
        pointer: LatestPointer,
        latest: Latest,
        *,
        on_serving: Callable[[Serving], None],
        on_durable: AfterDurable,
    ) -> None:
        self._writer, self._pointer, self._latest = writer, pointer, latest
        self._on_serving, self._on_durable = on_serving, on_durable
        self._jobs: queue.SimpleQueue[Commit | None] = queue.SimpleQueue()
        self._idle = threading.Event()
        self._idle.set()
        self._error: BaseException | None = None
        self._servings_s: deque[float] = deque(maxlen=STEPS)
        self._thread = threading.Thread(target=self._run, name="committer", daemon=True)
        self._thread.start()

    @property
    def idle(self) -> bool:
        """True while no commit is in flight."""
        return self._idle.is_set()

    @property
    def serving_s(self) -> float:
        """Seconds that a new version took until it was served, the median of late: one may have met an outage."""
        return median_low(self._servings_s or [0.0])

    @property
    def latest(self) -> Latest:
        """``latest.json`` as this learner last moved it."""
        return self._latest

    def check(self) -> None:
        """Raise what ended the committer, if anything did."""
        if self._error is not None:
            raise self._error

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        """Wait until no commit is in flight; False after ``timeout_s``. Raises what ended the committer."""
        done = self._idle.wait(timeout_s)
        self.check()
        return done

    def submit(self, commit: Commit) -> None:
        """Hand over a commit; the caller made sure that the committer is idle."""
        self.check()
        if not self._idle.is_set():
            raise ValueError("a commit is in flight already")
        self._idle.clear()
        self._jobs.put(commit)

    def close(self) -> None:
        """End the thread. A commit that cannot land now is given up: what it settles was not acked, and is redone."""
        self._writer.abandon.set()
        self._jobs.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (commit := self._jobs.get()) is not None:
            try:
                self._perform(commit)
            except BaseException as exc:  # the thread's edge: the main thread raises it
                self._error = exc
                if not isinstance(exc, SpotGRPOError):
                    log.exception("the committer failed")
                return
            finally:
                self._idle.set()

    def _perform(self, commit: Commit) -> None:
        said, began = {name: getattr(commit, name) for name in SAID}, time.monotonic()
        stored = self._writer.store_version(commit.new) if commit.new else None
        if stored:
            reached(Step.LEARNER_MANIFEST_STORED)
            self._move(serving=stored.serving(), **said)
            reached(Step.LEARNER_SERVING)
            self._servings_s.append(time.monotonic() - began)
            self._on_serving(stored.serving())
        if commit.ledger is None:
            return
        durable = self._store_durable(commit, commit.ledger)
        reached(Step.LEARNER_STATE_STORED)
        self._move(durable=durable, finished=bool(commit.ended), ended=commit.ended, **said)
        reached(Step.LEARNER_DURABLE)
        self._on_durable(self._latest)

    def _store_durable(self, commit: Commit, ledger: Ledger) -> Durable:
        serving, before = self._latest.serving, self._latest.durable
        key, digest = self._writer.store_ledger(ledger)
        if commit.state is None:
            return before.model_copy(update={"ledger": key, "ledger_sha256": digest})
        state, state_digest = self._writer.store_state(serving.policy, commit.state())
        return Durable(
            version=serving.version,
            epoch=serving.epoch,
            manifest=serving.manifest,
            manifest_sha256=serving.sha256,
            state=state,
            state_sha256=state_digest,
            ledger=key,
            ledger_sha256=digest,
        )

    def _move(self, **changes: object) -> None:
        new = self._latest.model_copy(update={**changes, "nonce": fresh_nonce()})
        self._pointer.move(new, stopping=self._writer.abandon)
        self._latest = new
