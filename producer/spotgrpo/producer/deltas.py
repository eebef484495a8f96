"""Weights from a delta to a version that is on the disk already, in place of a whole download.

Whatever is wrong with a delta, the whole file is there too: nothing depends on the one before having arrived.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from spotgrpo.shared.delta import apply_delta
from spotgrpo.shared.errors import IntegrityError, SpotGRPOError
from spotgrpo.shared.manifest import sha256_hex

if TYPE_CHECKING:
    from pathlib import Path

    from spotgrpo.shared.ids import Keys
    from spotgrpo.shared.manifest import DeltaEntry, FileEntry, Manifest
    from spotgrpo.shared.ports import ObjectStore

log = logging.getLogger(__name__)


@dataclass
class Deltas:
    """Rebuilds weights from those of versions that are on the disk."""

    store: ObjectStore
    keys: Keys
    _held: dict[str, Path] = field(default_factory=dict)

    def keep(self, weights: FileEntry, path: Path) -> None:
        """The weights at ``path`` were checked: deltas to them can be applied for as long as the file is there."""
        self._held = {sha256: held for sha256, held in self._held.items() if held.exists()}
        self._held[weights.sha256] = path

    def rebuild(self, manifest: Manifest, weights: FileEntry, path: Path) -> bool:
        """Write the weights of ``manifest`` to ``path`` by way of its delta; False where they have to come whole.

        The file that is written has the digest of ``weights``. May take as long as a download.
        """
        delta = manifest.delta
        if delta is None:
            return False
        parent = self._held.get(delta.parent_sha256)
        if parent is None:
            log.info("%s comes whole: %s is not here", manifest.policy, delta.parent)
            return False
        try:
            self._rebuild(manifest, delta, parent, weights, path)
        except (SpotGRPOError, OSError) as exc:
            log.warning("%s comes whole, its delta is of no use: %s", manifest.policy, exc)
            return False
        return True

    def _rebuild(
        self, manifest: Manifest, delta: DeltaEntry, parent: Path, weights: FileEntry, path: Path
    ) -> None:
        if delta.size >= weights.size:
            raise IntegrityError(
                f"it is {delta.size} bytes long, the whole file only {weights.size}"
            )
        key = self.keys.version(manifest.policy, delta.name)
        local = path.with_suffix(".delta")
        try:
            self.store.download(key, local, delta.size, delta.sha256)
            rebuilt = apply_delta(parent.read_bytes(), local.read_bytes(), weights.size)
        finally:
            local.unlink(missing_ok=True)
        if sha256_hex(rebuilt) != weights.sha256:
            raise IntegrityError(f"with {parent.parent.name} it gives another file than its own")
        path.write_bytes(rebuilt)
