"""The policy watcher: which version the worker serves, and how it comes to serve the next.

consumes:     ``latest.json`` by ETag, every ``poll_s`` with jitter, or at once when woken
produces:     an adopted version: fetched, verified, loaded, probed
promises:     new requests go to the newest adopted version, running ones finish on theirs; a version that fails a
              check is never adopted and the one before stays; what requests run on stays loaded, and so does the
              version that is evaluated
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

from spotgrpo.producer.deltas import Deltas
from spotgrpo.producer.engines.base import Engine, SeveralServers
from spotgrpo.producer.forecast import Pace
from spotgrpo.producer.probe import ProbeVerdict, judge
from spotgrpo.shared.errors import (
    IntegrityError,
    NotStored,
    StoreUnavailable,
    TransientError,
    WireError,
)
from spotgrpo.shared.ids import Keys, PolicyVersion
from spotgrpo.shared.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    FileEntry,
    Latest,
    Manifest,
    Probe,
    RunDocument,
    Serving,
    sha256_hex,
)
from spotgrpo.shared.ports import ObjectStore
from spotgrpo.shared.steps import Step, reached
from spotgrpo.shared.threads import in_thread

log = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")

LONGEST_PAUSE_S = 30.0
LONGEST_WHY = 120
"""Characters of a reason that a report carries."""
MOST_REFUSED = 32
"""Versions remembered as refused: only the newest are ever named again."""
FINISHED_GRACE_S = 60.0
"""A run that was finished when the worker came may be about to be resumed; after this it is believed."""


@dataclass(eq=False)
class Adopted:
    """A version that the engine has loaded, what its ``probe`` said then, and how many requests it is answering."""

    version: PolicyVersion
    manifest_sha256: str
    folder: Path
    verdict: str
    probe: Probe | None = None
    in_flight: int = 0


class _Damaged(IntegrityError):
    """What came is not what was named. Damaged in store it stays so; damaged on the way it comes right."""


@dataclass(frozen=True)
class _Refusal:
    """Why a version is not served. It is tried again at ``again_at`` (monotonic), ``pause_s`` after it was refused."""

    why: str
    pause_s: float = math.inf
    again_at: float = math.inf

    @property
    def is_for_good(self) -> bool:
        return math.isinf(self.again_at)

    @property
    def stands(self) -> bool:
        return time.monotonic() < self.again_at


@dataclass
class Adoptions:
    """Counts for the worker's report.

    ``deltas`` versions came as a delta; ``fell_back`` offered one too, and came whole.
    """

    adopted: int = 0
    refused: int = 0
    deltas: int = 0
    fell_back: int = 0
    probes: dict[str, int] = field(default_factory=dict)


class PolicyWatcher:
    """Keeps the engine at the newest version. Lives in the worker's event loop; the bucket is read in threads.

    Args:
        cache_dir: where versions are kept while the engine holds them.
        poll_s: between two looks at ``latest.json``.
        keep: versions that the engine holds at most, in a run that evaluates with the one that is evaluated.
        finished_grace_s: how long a run that was never seen unfinished is watched before ``finished`` is set.
        dtype: that the engine computes in; None: the run's.

    Attributes:
        refused_why: why the newest version is not served; empty where it is.
        trouble: why nothing can be learned of versions now; empty where it can.
        takeovers: epoch -> version number that its learner resumed from.
        group_tokens: of a group's longest completion lately, as the learner says; 0 before it knows.
    """

    def __init__(
        self,
        store: ObjectStore,
        keys: Keys,
        engine: Engine,
        document: RunDocument,
        *,
        cache_dir: Path,
        poll_s: float,
        keep: int,
        finished_grace_s: float = FINISHED_GRACE_S,
        dtype: str | None = None,
    ) -> None:
        self._store, self._keys, self._engine, self._document = store, keys, engine, document
        self._cache_dir, self._poll_s, self._keep = cache_dir, poll_s, keep
        self._dtype = dtype or document.dtype
        self._deltas = Deltas(store, keys)
        self._loaded: dict[PolicyVersion, Adopted] = {}
        self._refused: dict[str, _Refusal] = {}
        self._etag: str | None = None
        self._woken = asyncio.Event()
        self._released = asyncio.Event()
        self._is_crowded = False
        self._pinned: PolicyVersion | None = None
        self._turn = asyncio.Lock()
        """Of what loads and unloads."""
        self._bringing: dict[PolicyVersion, asyncio.Task[bool]] = {}
        self._changed = asyncio.Condition()
        self._folders = 0
        self._finished_grace_s = finished_grace_s
        self._says_finished = self._was_unfinished = False
        self._started = self._newest_at = time.monotonic()
        self._newest, self._step_s, self._lead_s, self.group_tokens = 0, 0.0, 0.0, 0.0
        self.current: Adopted | None = None
        self.finished = asyncio.Event()
        self.counts = Adoptions()
        self.refused_why = ""
        self.trouble = ""
        self.takeovers: Mapping[int, int] = {}

    def wake(self) -> None:
        """Look at ``latest.json`` now. To be called on the event loop."""
        self._woken.set()

    async def run(self) -> None:
        """Watch for ever. Only an engine that dies ends it, with its error."""
        try:
            await self._watch()
        finally:
            for bringing in self._bringing.values():
                bringing.cancel()

    async def _watch(self) -> None:
        pause = self._poll_s
        while True:
            try:
                await self._look()
                self._judge_finished()
                self._note_answer()
                pause = self._poll_s
            except TransientError as exc:
                self._note_trouble(exc)
                pause = min(2 * pause, LONGEST_PAUSE_S)
            except NotStored as exc:
                log.debug("superseded while it was read: %s", exc)
                self._etag = None
                self._note_answer()
            await self._pause(pause * random.uniform(0.8, 1.2))

    def _note_trouble(self, error: TransientError) -> None:
        """Said once; the version that is served stays, for as long as it takes."""
        if not self.trouble:
            served = self.current.version if self.current else "no version yet"
            log.warning("%s; going on with %s", error, served)
        self.trouble = str(error)

    def _note_answer(self) -> None:
        if self.trouble:
            log.info("new versions can be had again")
        self.trouble = ""

    async def _pause(self, seconds: float) -> None:
        # Not wait_for: until Python 3.12 it may take a cancellation for the wake-up, and the worker would not end.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        self._woken.clear()

    async def _look(self) -> None:
        try:
            stored = await self._ask(self._store.get_if_changed, self._keys.latest, self._etag)
        except NotStored:
            self._was_unfinished = True  # not even begun
            raise
        if stored is None:
            return
        try:
            latest = Latest.from_bytes(stored.body)
        except WireError as exc:
            log.error("latest.json is not readable: %s", exc)
            self._etag = stored.etag
            return
        self.takeovers = latest.takeovers
        self._note_newest(latest)
        async with self._turn:
            await self._follow(latest.serving)
        refusal = self._refused.get(latest.serving.sha256)
        # One that is tried again is read again, though nothing has changed.
        self._etag = stored.etag if refusal is None or refusal.is_for_good else None
        self._says_finished = latest.finished
        self._was_unfinished = self._was_unfinished or not latest.finished

    def _note_newest(self, latest: Latest) -> None:
        """For forecasts: which version is the newest, since when, and how long a step takes."""
        if latest.serving.version != self._newest:
            self._newest, self._newest_at = latest.serving.version, time.monotonic()
        self._step_s, self._lead_s = latest.step_s, latest.lead_s
        self.group_tokens = latest.group_tokens

    @property
    def pace(self) -> Pace:
        """How fast versions come, as far as this worker knows now."""
        age_s = time.monotonic() - self._newest_at
        return Pace(newest=self._newest, age_s=age_s, step_s=self._step_s, lead_s=self._lead_s)

    def _judge_finished(self) -> None:
        """Let a worker that came before the learner of a resumed run see that run go on, not leave at once."""
        waited_s = time.monotonic() - self._started
        if self._says_finished and (self._was_unfinished or waited_s >= self._finished_grace_s):
            self.finished.set()
        else:
            self.finished.clear()

    async def _ask(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """A call of the bucket, which may never answer."""
        return await in_thread(functools.partial(call, *args, **kwargs))

    async def _follow(self, serving: Serving) -> None:
        """Adopt ``serving`` unless it is served already or was refused before; what was damaged is tried again."""
        refusal = self._refused.get(serving.sha256)
        self.refused_why = refusal.why if refusal else ""
        if self.current is not None and self.current.version == serving.policy:
            return
        if refusal is not None and refusal.stands:
            return
        loaded = self._loaded.get(serving.policy)
        if loaded is None:
            try:
                loaded = await self._load(serving)
            except (IntegrityError, WireError) as exc:
                served = self.current.version if self.current else "nothing"
                self.refused_why = self._refuse(serving, exc, f"{served} stays")
                return
            self._loaded[loaded.version] = loaded
            self.refused_why = ""
        await self._adopt(loaded)

    def _refuse(self, serving: Serving, error: Exception, then: str) -> str:
        """Count it and say so, once, and remember why; what is damaged is tried again, ever more rarely."""
        why = _short(f"{serving.policy}: {error}")
        before = self._refused.pop(serving.sha256, None)
        self.counts.refused += before is None
        if before is None or not isinstance(error, _Damaged):
            log.error("version %s is refused, %s: %s", serving.policy, then, error)
        refusal = _Refusal(why)
        if isinstance(error, _Damaged):
            pause_s = min(2 * before.pause_s if before else self._poll_s, LONGEST_PAUSE_S)
            refusal = _Refusal(why, pause_s, time.monotonic() + pause_s)
        self._refused[serving.sha256] = refusal
        if len(self._refused) > MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        return why

    async def _adopt(self, loaded: Adopted) -> None:
        async with self._changed:
            self.current = loaded
            self._changed.notify_all()
        self.counts.adopted += 1
        log.info("serving version %s (probe: %s)", loaded.version, loaded.verdict)
        await self._unload_old(room=1)  # now, so that the next load does not wait for it

    async def _load(self, serving: Serving, room: int = 1) -> Adopted:
        body = (await self._ask(self._store.get, serving.manifest)).body
        if sha256_hex(body) != serving.sha256:
            raise _Damaged(f"{serving.manifest} does not have the sha256 that latest.json names")
        manifest = Manifest.from_bytes(body)
        self._check(manifest, serving)
        self._folders += 1
        folder = self._cache_dir / f"{serving.policy}.{self._folders}"
        try:
            await self._fetch(manifest, folder)
            reached(Step.WORKER_DOWNLOADED)
            await self._make_room(room)
            modules = await self._engine.load(manifest.policy, folder)
            if modules != manifest.modules:
                raise IntegrityError(
                    f"the adapter went on {modules} modules, not on {manifest.modules}"
                )
            verdict = await self.prove(manifest.policy, manifest.probe)
        except Exception:
            # Not where it is cancelled: a worker that leaves waits for no engine that is stuck.
            await self._forget(manifest.policy, folder)
            raise
        if self._refused.pop(serving.sha256, None):
            log.info("version %s is not damaged any more", manifest.policy)
        return Adopted(manifest.policy, serving.sha256, folder, verdict, manifest.probe)

    def _check(self, manifest: Manifest, serving: Serving) -> None:
        if manifest.policy != serving.policy or manifest.run != self._keys.run:
            raise IntegrityError(
                f"{serving.manifest} is of {manifest.policy} of run {manifest.run}"
            )
        if manifest.base_sha256 != self._document.model.base_sha256:
            raise IntegrityError(f"{serving.manifest} is for another base model")
        if not {ADAPTER_CONFIG, ADAPTER_WEIGHTS} <= {entry.name for entry in manifest.files}:
            raise IntegrityError(
                f"{serving.manifest} does not name {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}"
            )

    async def _fetch(self, manifest: Manifest, folder: Path) -> None:
        """Download the version's files. A full disk may have room later: what is loaded serves meanwhile."""
        try:
            await asyncio.to_thread(folder.mkdir, parents=True)
            fetching = (
                self._fetch_file(manifest, entry, folder / entry.name) for entry in manifest.files
            )
            # All have ended before one fails: nothing writes to a folder that is being removed.
            for failure in await asyncio.gather(*fetching, return_exceptions=True):
                if failure is not None:
                    raise failure
        except OSError as exc:
            where = f"worker.cache_dir = {str(self._cache_dir)!r}"
            raise StoreUnavailable(
                f"cannot write {manifest.policy} to {where}: {exc.strerror or exc}"
            ) from exc

    async def _fetch_file(self, manifest: Manifest, entry: FileEntry, path: Path) -> None:
        is_weights = entry.name == ADAPTER_WEIGHTS
        if not (is_weights and manifest.delta and await self._rebuild(manifest, entry, path)):
            key = self._keys.version(manifest.policy, entry.name)
            try:
                await self._ask(self._store.download, key, path, entry.size, entry.sha256)
            except IntegrityError as exc:
                raise _Damaged(str(exc)) from exc
        if is_weights:
            self._deltas.keep(entry, path)

    async def _rebuild(self, manifest: Manifest, weights: FileEntry, path: Path) -> bool:
        """Whether the weights could be had by the version's delta."""
        came = await self._ask(self._deltas.rebuild, manifest, weights, path)
        if came:
            self.counts.deltas += 1
        else:
            self.counts.fell_back += 1
        return came

    async def prove(self, version: PolicyVersion, probe: Probe | None) -> str:
        """Hold what the engine gives for a loaded version against its probe, and count the verdict.

        One that fails is measured once more, and counts only where it fails again: what an engine computes depends on
        what else it computes at the time, and where the base is quantised that may be more than rounding explains.

        Returns ``pass``, ``inconclusive`` or, without a probe, ``none``; a failing one is an IntegrityError.
        """
        if probe is None:
            return "none"
        verdict = await self._verdict(version, probe)
        if verdict == "fail":
            log.warning("version %s fails its probe: it is tried once more", version)
            verdict = await self._verdict(version, probe)
        self.counts.probes[verdict] = self.counts.probes.get(verdict, 0) + 1
        if verdict == "fail":
            raise IntegrityError(
                "the engine's logprobs are not this version's: it serves the base, or another model"
            )
        return verdict

    async def _verdict(self, version: PolicyVersion, probe: Probe) -> ProbeVerdict:
        engine = self._engine
        if isinstance(engine, SeveralServers):
            measured = await engine.score_probe(version, probe)
        else:
            measured = await engine.score(version, probe.token_ids)
        return judge(probe, measured, self._dtype)

    async def _forget(self, version: PolicyVersion, folder: Path) -> None:
        with contextlib.suppress(Exception):  # the error that led here is the one to tell
            await self._engine.unload(version)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _make_room(self, room: int = 1) -> None:
        """Wait until ``room`` more versions fit: running requests keep theirs loaded."""
        await self._unload_old(room)
        try:
            while self._surplus(room) > 0:
                self._is_crowded = True
                self._released.clear()
                await self._released.wait()
                await self._unload_old(room)
        finally:
            self._is_crowded = False

    def _surplus(self, room: int) -> int:
        """Versions too many if ``room`` more come; the one that is pinned has a place of its own."""
        others = sum(version != self._pinned for version in self._loaded)
        return others + room - (self._keep - self._document.evaluates)

    async def _unload_old(self, room: int = 0) -> None:
        """Unload the oldest idle versions until ``room`` more fit."""
        idle = sorted(
            (
                loaded
                for loaded in self._loaded.values()
                if loaded is not self.current
                and not loaded.in_flight
                and loaded.version != self._pinned
            ),
            key=lambda loaded: loaded.version,
        )
        for loaded in idle[: max(0, self._surplus(room))]:
            if loaded.in_flight:  # since the one before it was unloaded
                continue
            del self._loaded[loaded.version]
            await self._engine.unload(loaded.version)
            await asyncio.to_thread(shutil.rmtree, loaded.folder, ignore_errors=True)

    def loaded(self, version: PolicyVersion) -> Adopted | None:
        """A version that the engine still holds."""
        return self._loaded.get(version)

    # ---- a version that tasks are pinned to ----------------------------------------------------------------------

    def pinned(self, version: PolicyVersion) -> Adopted | None:
        """A version that the engine holds, for a task that is pinned to it; None where it does not.

        In a run that evaluates there is room for one beside those in use: the newest that was asked for so stays.
        """
        loaded = self._loaded.get(version)
        if loaded is not None and self._document.evaluates:
            self._pin(max(self._pinned or version, version))
        return loaded

    def _pin(self, version: PolicyVersion | None) -> None:
        """What is pinned takes no ordinary place: who waits for one looks again."""
        if version != self._pinned:
            self._pinned = version
            self._released.set()

    async def bring(self, version: PolicyVersion) -> bool:
        """Have the engine hold ``version`` for tasks that are pinned to it, from the bucket where it has gone.

        Waits for a bucket that is away. False where there is no room for it (the run does not evaluate, or something
        newer is pinned), where the bucket has it no more, or where it fails a check here.
        """
        while self.pinned(version) is None:
            try:
                # The task that asks may go back to the queue meanwhile: an engine that was half-way with a load or an
                # unload would go on, and hold a version that nobody here knows of.
                if not await asyncio.shield(self._begin_to_bring(version)):
                    return False
            except TransientError as exc:
                log.info("%s, which is evaluated, cannot be had now: %s", version, exc)
                await asyncio.sleep(self._poll_s)
        return True

    def _begin_to_bring(self, version: PolicyVersion) -> asyncio.Task[bool]:
        """What brings it, the same for all who ask; it goes on without them."""

        async def bring() -> bool:
            async with self._turn:
                return self.pinned(version) is not None or await self._load_pinned(version)

        def over(task: asyncio.Task[bool]) -> None:
            del self._bringing[version]
            if not task.cancelled():
                task.exception()  # whoever waits hears of it, if anybody does

        if version not in self._bringing:
            self._bringing[version] = asyncio.create_task(bring())
            self._bringing[version].add_done_callback(over)
        return self._bringing[version]

    async def _load_pinned(self, version: PolicyVersion) -> bool:
        """Whether an older version could be loaded once more."""
        if not self._document.evaluates or version < (self._pinned or version):
            return False
        key = self._keys.manifest(version)
        try:
            body = (await self._ask(self._store.get, key)).body
        except NotStored:
            log.info("%s, which is evaluated, is not in the bucket any more", version)
            return False
        serving = Serving(
            version=version.number, epoch=version.epoch, manifest=key, sha256=sha256_hex(body)
        )
        refusal = self._refused.get(serving.sha256)
        if refusal is not None and refusal.stands:
            return False
        before = self._pinned
        self._pin(version)
        try:
            self._loaded[version] = await self._load(serving, room=0)
        except (IntegrityError, WireError, NotStored) as exc:
            self._refuse(serving, exc, "no evaluation of it here")
            return False
        finally:
            if version not in self._loaded and self._pinned == version:
                self._pin(before)  # in vain: an older one may still be had
        log.info("version %s is loaded once more, to be evaluated", version)
        return True

    def answering(self) -> list[Adopted]:
        """What is served now, and older versions that requests still run on."""
        loaded = self._loaded.values()
        return [one for one in loaded if one is self.current or one.in_flight]

    def serves(self, number: int) -> Adopted | None:
        """The served version, where it is ``number`` or newer."""
        current = self.current
        return current if current is not None and current.version.number >= number else None

    async def at_least(self, number: int) -> Adopted:
        """The served version, waiting until it is ``number`` or newer."""
        async with self._changed:
            while (adopted := self.serves(number)) is None:
                await self._changed.wait()
            return adopted

    @contextlib.contextmanager
    def using(self, adopted: Adopted) -> Iterator[PolicyVersion]:
        """Keep ``adopted`` loaded while the block runs."""
        self.hold(adopted)
        try:
            yield adopted.version
        finally:
            self.release(adopted)

    def hold(self, adopted: Adopted) -> None:
        """Keep ``adopted`` loaded until it is released once more."""
        adopted.in_flight += 1

    def release(self, adopted: Adopted) -> None:
        """Undo a ``hold``."""
        adopted.in_flight -= 1
        self._released.set()

    def must_go(self, adopted: Adopted) -> bool:
        """Whether a new version waits for ``adopted`` to be left: all are in use, and it is the oldest."""
        others = [
            loaded
            for loaded in self._loaded.values()
            if loaded is not self.current and loaded.version != self._pinned
        ]
        oldest = min(others, key=lambda loaded: loaded.version, default=None)
        return self._is_crowded and adopted is oldest


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_WHY else text[: LONGEST_WHY - 1] + "…"
