"""What a learner has written, as far as a policy watcher looks at it: versions and ``latest.json``, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spotgrpo.shared.ids import Keys, PolicyVersion
from spotgrpo.shared.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    Durable,
    FileEntry,
    Latest,
    Manifest,
    Probe,
    Serving,
    sha256_hex,
)
from spotgrpo.shared.memory.store import MemoryStore
from tests.tools.loop_world import RUN

BASE = "0" * 64
"""The base model's digest in run.json."""


class FaultyStore(MemoryStore):
    """Flips a byte of one object on its way down."""

    flipped = ""

    def get(self, key: str) -> Any:
        stored = super().get(key)
        if key != self.flipped:
            return stored
        middle = len(stored.body) // 2
        body = stored.body[:middle] + bytes([stored.body[middle] ^ 1]) + stored.body[middle + 1 :]
        return type(stored)(body, stored.etag)


def files_of(folder: Path) -> dict[str, bytes]:
    """A PEFT folder as a version's files."""
    return {name: (folder / name).read_bytes() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)}


@dataclass
class VersionBucket:
    """Commits versions one after the other."""

    store: FaultyStore = field(default_factory=FaultyStore)
    keys: Keys = field(default_factory=lambda: Keys(RUN))
    etag: str | None = None

    def commit(
        self,
        version: PolicyVersion,
        files: Mapping[str, bytes],
        probe: Probe | None = None,
        *,
        modules: int = 4,
        base_sha256: str = BASE,
    ) -> None:
        """Store a version and let ``latest.json`` serve it."""
        for name, body in files.items():
            self.store.create(self.keys.version(version, name), body)
        manifest = Manifest(
            run=RUN,
            version=version.number,
            epoch=version.epoch,
            files=[
                FileEntry(name=name, size=len(body), sha256=sha256_hex(body))
                for name, body in files.items()
            ],
            modules=modules,
            base_sha256=base_sha256,
            probe=probe,
        ).to_bytes()
        key = self.keys.manifest(version)
        self.store.create(key, manifest)
        named = {"version": version.number, "epoch": version.epoch}
        serving = Serving(manifest=key, sha256=sha256_hex(manifest), **named)
        durable = Durable(
            manifest=key, manifest_sha256=serving.sha256, state="s", state_sha256=BASE, ledger="l",
            ledger_sha256=BASE, **named,
        )  # fmt: skip
        latest = Latest(
            epoch=version.epoch, writer="w", nonce=str(version), serving=serving, durable=durable
        )
        self.etag = self.store.compare_and_swap(self.keys.latest, latest.to_bytes(), self.etag)

    def forget(self, version: PolicyVersion) -> None:
        """As retention does."""
        self.store.delete([info.key for info in self.store.list(self.keys.version(version, ""))])
