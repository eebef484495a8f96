"""What a bucket can do, found by doing it. For ``spotgrpo doctor`` and for the learner's start."""

from __future__ import annotations

import hashlib
import logging
import secrets
import tempfile
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from spotgrpo.shared.errors import ConfigError, SpotGRPOError, StoreUnavailable
from spotgrpo.shared.retry import retry
from spotgrpo.shared.s3.store import S3Store
from spotgrpo.shared.s3.transfer import LONGEST_PAUSE_S, PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotgrpo.shared.config import BucketConfig
    from spotgrpo.shared.ports import ObjectStore

SCRATCH: Final = ".doctor/"
"""Where scratch objects go, under the bucket's prefix; they are deleted again."""
LARGEST_SKEW_S: Final = 60.0
"""S3 refuses requests that are signed 15 minutes off; a clock this wrong is on its way there."""
OTHER_SERVER: Final = (
    "use a server that honours If-None-Match and If-Match on PUT (AWS S3, MinIO, SeaweedFS, Ceph)"
)


@dataclass(frozen=True)
class Problem:
    """What is wrong, and what to do about it, a sentence each."""

    what: str
    remedy: str


@dataclass(frozen=True)
class StoreReport:
    """What was found. A bool is True only where it was seen to work; ``clock_skew_s`` > 0: our clock is ahead."""

    reachable: bool = False
    can_list: bool = False
    can_write: bool = False
    can_read: bool = False
    can_delete: bool = False
    conditional_create_honoured: bool = False
    compare_and_swap_honoured: bool = False
    etag_polling: bool = False
    clock_skew_s: float | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def ok(self) -> bool:
        """True where nothing is wrong."""
        return not self.problems


@dataclass(frozen=True)
class Conditions:
    """Which conditional writes a server honours; ``problems`` says how it does not."""

    create: bool
    swap: bool
    problems: tuple[Problem, ...]


def require_compare_and_swap(store: ObjectStore) -> None:
    """Try conditional writes on a scratch object.

    Raises:
        ConfigError: the server ignores a condition, so two learners could overwrite each other.
        StoreUnavailable: it did not answer.
    """
    found = try_conditions(store)
    if found.problems:
        problem = found.problems[0]
        raise ConfigError(
            "bucket.endpoint_url", _endpoint(store), f"{problem.what}: {problem.remedy}"
        )


def try_conditions(store: ObjectStore) -> Conditions:
    """Conditional writes that must succeed and conditional writes that must be refused, on scratch objects.

    Raises:
        StoreUnavailable: the server did not answer, for some seconds.
        ConfigError: it refuses to write or to read.
    """
    # Each try has an object of its own: what became of a try without an answer is not known.
    return retry(
        "trying conditional writes",
        lambda: _try_conditions(store),
        deadline_s=PATIENCE_S,
        longest_wait_s=LONGEST_PAUSE_S,
        level=logging.DEBUG,
    )


def _try_conditions(store: ObjectStore) -> Conditions:
    key = _scratch_key()
    try:
        problems = [
            _problem(what) for what in (*_create_faults(store, key), *_swap_faults(store, key))
        ]
    finally:
        with suppress(SpotGRPOError):  # without the right to delete: inspect() tells
            store.delete([key, f"{key}.absent"])
    create = not any("If-None-Match" in problem.what for problem in problems)
    swap = not any("If-Match" in problem.what for problem in problems)
    return Conditions(create, swap, tuple(problems))


def _create_faults(store: ObjectStore, key: str) -> list[str]:
    if store.compare_and_swap(key, b"first", None) is None:
        return ["the server refuses If-None-Match for an object that does not exist"]
    if store.compare_and_swap(key, b"second", None) is not None:
        return ["the server ignores If-None-Match and replaced an existing object"]
    return []


def _swap_faults(store: ObjectStore, key: str) -> list[str]:
    before = store.get(key).etag
    after = store.compare_and_swap(key, b"third", before)
    if after is None:
        return ["the server refuses If-Match with the right ETag"]
    faults = []
    if store.compare_and_swap(key, b"fourth", before) is not None:
        faults.append("the server ignores If-Match and let a stale ETag replace an object")
    if store.compare_and_swap(f"{key}.absent", b"fifth", after) is not None:
        faults.append("the server ignores If-Match and created an object in place of a missing one")
    return faults


def _problem(what: str) -> Problem:
    return Problem(what, OTHER_SERVER)


def _scratch_key() -> str:
    return f"{SCRATCH}{secrets.token_hex(8)}"


def _endpoint(store: ObjectStore) -> str | None:
    return store.config.endpoint_url if isinstance(store, S3Store) else None


# ---- the whole report -------------------------------------------------------------------------------------------


def inspect(config: BucketConfig) -> StoreReport:
    """Try everything that a run needs of the bucket. Raises nothing of this package: what fails is a problem."""
    try:
        store = S3Store(config)
    except ConfigError as exc:
        return StoreReport(problems=(_from_error(exc),))
    with closing(store):
        try:
            report = StoreReport(reachable=True, can_list=True, clock_skew_s=_skew(store))
        except SpotGRPOError as exc:
            # A refusal is an answer too, but nothing more can be tried after it.
            return StoreReport(reachable=isinstance(exc, ConfigError), problems=(_from_error(exc),))
        inspection = _Inspection(store, report)
        inspection.run()
        return inspection.report


@dataclass
class _Inspection:
    """One pass over a bucket that answers; each check that fails adds a problem and the others go on."""

    store: S3Store
    report: StoreReport
    key: str = field(default_factory=_scratch_key)

    def run(self) -> None:
        self._check_clock()
        self._check("can_write", lambda: self.store.create(self.key, b"scratch"))
        if self.report.can_write:
            self._check("can_read", self._read)
            self._check("etag_polling", self._poll)
            self._check_conditions()
            self._check("can_delete", self._delete)

    def _check(self, name: str, attempt: Callable[[], None]) -> None:
        try:
            attempt()
        except SpotGRPOError as exc:
            self._add(_from_error(exc))
        else:
            seen: dict[str, Any] = {name: True}
            self.report = replace(self.report, **seen)

    def _add(self, *problems: Problem) -> None:
        self.report = replace(self.report, problems=self.report.problems + problems)

    def _read(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.store.download(
                self.key, Path(folder) / "scratch", 7, hashlib.sha256(b"scratch").hexdigest()
            )

    def _poll(self) -> None:
        if not self.store.polls_cheaply(self.key, self.store.get(self.key).etag):
            remedy = "it sends whole objects in place of 304: use a longer worker.poll_s, or another server"
            raise ConfigError("bucket.endpoint_url", self.store.config.endpoint_url, remedy)

    def _delete(self) -> None:
        self.store.delete([self.key])
        if any(info.key == self.key for info in self.store.list(self.key)):
            raise StoreUnavailable("a deleted object is still listed")

    def _check_conditions(self) -> None:
        try:
            found = try_conditions(self.store)
        except SpotGRPOError as exc:
            self._add(_from_error(exc))
            return
        self.report = replace(
            self.report,
            conditional_create_honoured=found.create,
            compare_and_swap_honoured=found.swap,
        )
        self._add(*found.problems)

    def _check_clock(self) -> None:
        skew = self.report.clock_skew_s
        if skew is not None and abs(skew) > LARGEST_SKEW_S:
            what = f"this clock is {abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} the bucket's"
            self._add(Problem(what, "set this machine's clock (NTP): signed requests expire"))


def _skew(store: S3Store) -> float | None:
    before = time.time()
    server = store.probe()
    # The Date header has whole seconds: half of one is added on average.
    return None if server is None else (before + time.time()) / 2 - (server + 0.5)


def _from_error(exc: SpotGRPOError) -> Problem:
    if isinstance(exc, ConfigError):
        return Problem(str(exc), exc.remedy)
    if isinstance(exc, StoreUnavailable):
        return Problem(str(exc), "check bucket.endpoint_url, the network, and that the server runs")
    return Problem(str(exc), "look at the server's own log: it does not give back what was stored")
