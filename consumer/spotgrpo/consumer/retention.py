"""What the bucket keeps: the newest versions of the lineage, every n-th for good, all ledgers, the newest state.

And the best version that evaluations found, with those that they still need; the batches of the newest skipped steps,
with version and state that they were taken at; and, of what workers store there (groups too big for a message,
partials), that of tasks that are outstanding.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from spotgrpo.consumer.ledger import Ledger
from spotgrpo.shared.errors import Fenced, SpotGRPOError, WireError
from spotgrpo.shared.ids import Keys, PolicyVersion, SkippedId
from spotgrpo.shared.manifest import Latest
from spotgrpo.shared.ports import ObjectInfo, ObjectStore

log = logging.getLogger(__name__)

UNKNOWN_S: Final = 86_400.0
"""How long an object stays that workers stored for no task of this ledger."""
SKIPPED_STEPS: Final = 3
"""How many skipped steps can be replayed: as many as in a row end a run. Each may keep a trainer state."""


class Retention:
    """Deletes what nothing needs after a durable commit. Failing to delete costs space, never the run.

    Args:
        keep: versions to keep, counted back from the newest.
        every: keep every n-th version for good; None none.
        check_mine: raises Fenced once another learner has the run.
        evaluates: versions that evaluations need, beside those that ``latest.json`` names.
        clock: Unix seconds.
    """

    def __init__(
        self,
        store: ObjectStore,
        keys: Keys,
        *,
        keep: int,
        every: int | None,
        check_mine: Callable[[], None],
        evaluates: Callable[[], Collection[PolicyVersion]] = frozenset,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._keys, self._keep, self._every = store, keys, keep, every
        self._check_mine, self._evaluates, self._clock = check_mine, evaluates, clock
        self._complained = False

    def apply(self, latest: Latest, superfluous: Sequence[str], ledger: Ledger) -> None:
        """Called once ``latest`` and ``ledger`` are committed, with keys of bodies that they made superfluous.

        Raises:
            Fenced: another learner has taken the run over meanwhile.
        """
        try:
            if superfluous:
                self._store.delete(superfluous)
            replayed = self._drop_batches(latest)
            self._drop_states(latest, replayed)
            self._drop_versions(latest, replayed)
            self._drop_leftovers(ledger)
            if self._complained:
                log.info("what is not needed any more can be deleted again")
            self._complained = False
        except Fenced:
            raise
        except SpotGRPOError as exc:
            if not self._complained:
                log.warning("cannot delete what is not needed any more, it takes space: %s", exc)
            self._complained = True

    def _drop_batches(self, latest: Latest) -> set[int]:
        """Of all but the newest skipped steps; returns the numbers of the versions that those left were taken at."""
        steps: dict[SkippedId, list[str]] = {}
        for info in self._store.list(self._keys.replays):
            with contextlib.suppress(WireError):  # one that is not ours
                steps.setdefault(self._keys.skipped_of(info.key), []).append(info.key)
        mine = sorted(step for step in steps if step.epoch <= latest.epoch)
        for step in mine[:-SKIPPED_STEPS]:
            # step.json first: a record without it does not exist.
            keys = sorted(steps.pop(step), key=lambda key: not key.endswith(".json"))
            self._store.delete(keys[:1])
            self._store.delete(keys[1:])
        return {step.version for step in steps}

    def _drop_states(self, latest: Latest, replayed: set[int]) -> None:
        """All but the durable one and those of ``replayed`` version numbers.

        A newer epoch's belong to a learner that takes over just now.
        """
        old = []
        for info in self._store.list(self._keys.states):
            version = _version_of(
                info.key.removeprefix(self._keys.states).removesuffix(".safetensors")
            )
            is_ours = version is not None and version.epoch <= latest.epoch
            is_needed = version is not None and version.number in replayed
            if info.key != latest.durable.state and is_ours and not is_needed:
                old.append(info.key)
        if old:
            self._store.delete(old)

    def _drop_versions(self, latest: Latest, replayed: set[int]) -> None:
        versions = self._list()
        newest = latest.serving.version
        named = {latest.serving.policy, latest.durable.policy, *self._evaluates()}
        if latest.evaluated is not None:
            found = (latest.evaluated.last, latest.evaluated.best)
            named |= {one.policy for one in found if one is not None}
        for version in sorted(versions):
            old = version.number <= newest - self._keep
            kept = version.number in replayed or (self._every and version.number % self._every == 0)
            if old and not kept and version not in named:
                # The manifest first: a version without one does not exist, so none is ever half there.
                files = sorted(
                    versions[version], key=lambda key: not key.endswith("/manifest.json")
                )
                self._store.delete(files[:1])
                self._store.delete(files[1:])

    def _drop_leftovers(self, ledger: Ledger) -> None:
        """What workers stored for tasks that are settled: late copies of big groups, and partials."""
        oldest_attempts: dict[int, int] = {}
        for task in sorted(ledger.outstanding, reverse=True):
            oldest_attempts[task.index] = task.attempt
        for prefix in (self._keys.groups, self._keys.partials):
            over = [
                info.key
                for info in self._store.list(prefix)
                if self._is_over(info, ledger.cursor, oldest_attempts)
            ]
            if over:
                # After the listing: one who took the run over may have issued a dead task again, because somebody
                # asked, and a worker stored this for it.
                self._check_mine()
                self._store.delete(over)

    def _is_over(self, info: ObjectInfo, cursor: int, oldest_attempts: Mapping[int, int]) -> bool:
        """Whether no learner can need an object any more, be it one that has just taken over from this one.

        Such a learner's ledger is not known here. It may have issued prompts from ``cursor`` on, and later attempts of
        what is outstanding; for the rest, a task that is not outstanding is settled.
        """
        try:
            task = self._keys.task_of(info.key)
        except WireError:
            task = None
        if task is None or task.index >= cursor:
            return info.modified < self._clock() - UNKNOWN_S
        return task.attempt < oldest_attempts.get(task.index, task.attempt + 1)

    def _list(self) -> dict[PolicyVersion, list[str]]:
        found: dict[PolicyVersion, list[str]] = {}
        for info in self._store.list(self._keys.versions):
            version = _version_of(info.key.removeprefix(self._keys.versions).split("/")[0])
            if version is not None:
                found.setdefault(version, []).append(info.key)
        return found


def _version_of(name: str) -> PolicyVersion | None:
    """The version that an object is named after; None for one that is not ours."""
    try:
        return PolicyVersion.parse(name)
    except WireError:
        return None
