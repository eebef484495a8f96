"""A bucket in memory, for tests of whole loops. It keeps the same contract as the real one."""

from __future__ import annotations

import hashlib
import secrets
import threading
import time
from typing import TYPE_CHECKING

from spotgrpo.shared.errors import IntegrityError, NotStored
from spotgrpo.shared.ports import ObjectInfo, Stored

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


class MemoryStore:
    """An ObjectStore that lives and dies with the process. Equal bytes have equal ETags, as in S3."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, float]] = {}
        self._lock = threading.Lock()

    def create(self, key: str, body: bytes) -> None:
        """Store an immutable object; see ObjectStore."""
        with self._lock:
            found = self._objects.get(key)
            if found is None:
                self._put(key, body)
            elif found[0] != body:
                raise IntegrityError(f"creating {key}: it is stored already, with other bytes")

    def get(self, key: str) -> Stored:
        """The object, or NotStored."""
        with self._lock:
            if key not in self._objects:
                raise NotStored(f"reading {key}: the bucket has no such object")
            body, _ = self._objects[key]
        return Stored(body, _etag(body))

    def get_if_changed(self, key: str, etag: str | None) -> Stored | None:
        """The object, or None while its ETag is still ``etag``."""
        stored = self.get(key)
        return None if stored.etag == etag else stored

    def compare_and_swap(self, key: str, body: bytes, expected: str | None) -> str | None:
        """Replace the object whose ETag is ``expected``; None where the condition was refused."""
        with self._lock:
            found = self._objects.get(key)
            if (None if found is None else _etag(found[0])) != expected:
                return None
            self._put(key, body)
        return _etag(body)

    def download(self, key: str, path: Path, size: int, sha256: str) -> None:
        """Write the object to ``path``, checked; see ObjectStore."""
        body = self.get(key).body
        if len(body) != size or hashlib.sha256(body).hexdigest() != sha256:
            raise IntegrityError(
                f"downloading {key}: its bytes are not those of the given size and sha256"
            )
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        part.write_bytes(body)
        part.replace(path)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose keys start with ``prefix``, in key order."""
        with self._lock:
            found = [
                ObjectInfo(key, len(body), modified)
                for key, (body, modified) in self._objects.items()
                if key.startswith(prefix)
            ]
        return iter(sorted(found, key=lambda info: info.key.encode()))

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing ones are fine."""
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)

    def _put(self, key: str, body: bytes) -> None:
        self._objects[key] = (bytes(body), time.time())


def _etag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'
