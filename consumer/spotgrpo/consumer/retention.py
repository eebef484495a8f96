"""What the bucket keeps: the newest versions of the lineage, every n-th for good, all ledgers, the newest state."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from spotgrpo.shared.errors import StoreUnavailable, WireError
from spotgrpo.shared.ids import Keys, PolicyVersion
from spotgrpo.shared.manifest import Latest
from spotgrpo.shared.ports import ObjectStore

log = logging.getLogger(__name__)


class Retention:
    """Deletes what nothing needs after a durable commit. Failing to delete costs space, never the run.

    Args:
        keep: versions to keep, counted back from the newest.
        every: keep every n-th version for good; None none.
    """

    def __init__(self, store: ObjectStore, keys: Keys, *, keep: int, every: int | None) -> None:
        self._store, self._keys, self._keep, self._every = store, keys, keep, every

    def apply(self, latest: Latest, superfluous: Sequence[str]) -> None:
        """Called once ``latest`` is in the bucket, with the keys that it made superfluous."""
        try:
            if superfluous:
                self._store.delete(superfluous)
            self._drop_versions(latest)
        except StoreUnavailable as exc:
            log.warning("could not delete what is not needed any more: %s", exc)

    def _drop_versions(self, latest: Latest) -> None:
        versions = self._list()
        newest = latest.serving.version
        named = {latest.serving.policy, latest.durable.policy}
        for version in sorted(versions):
            old = version.number <= newest - self._keep
            kept = self._every and version.number % self._every == 0
            if old and not kept and version not in named:
                # The manifest first: a version without one does not exist, so none is ever half there.
                files = sorted(
                    versions[version], key=lambda key: not key.endswith("/manifest.json")
                )
                self._store.delete(files[:1])
                self._store.delete(files[1:])

    def _list(self) -> dict[PolicyVersion, list[str]]:
        found: dict[PolicyVersion, list[str]] = {}
        for info in self._store.list(self._keys.versions):
            try:
                version = PolicyVersion.parse(
                    info.key.removeprefix(self._keys.versions).split("/")[0]
                )
            except WireError:
                continue  # not ours
            found.setdefault(version, []).append(info.key)
        return found
