"""The delta that a version offers beside its whole file: what changed since the version stored before it."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from spotgrpo.shared.delta import encode_delta
from spotgrpo.shared.manifest import ADAPTER_WEIGHTS, DeltaEntry, sha256_hex
from spotgrpo.shared.threads import start

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from spotgrpo.shared.ids import PolicyVersion

DELTA_FILE: Final = "adapter_model.delta"


@dataclass(frozen=True)
class _Weights:
    version: PolicyVersion
    body: bytes
    sha256: str


class DeltaMaker:
    """Makes deltas against the last version that this process stored; it keeps that one's weights.

    So the first version after a start or a takeover offers none, nor does one whose parent is another.

    Args:
        wanted: ``sync.encoding`` is ``delta``; else nothing is kept, and nothing made.
    """

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._last: _Weights | None = None

    def begin(
        self,
        parent: PolicyVersion | None,
        files: Mapping[str, bytes],
        store: Callable[[str, bytes], None],
    ) -> Future[DeltaEntry | None]:
        """Make and ``store`` the delta of a new version on a thread, beside its files.

        What comes is how the manifest names it, once it is stored; None where there is no delta.
        """
        last, body = self._last, files.get(ADAPTER_WEIGHTS)
        if last is None or last.version != parent or body is None:
            nothing: Future[DeltaEntry | None] = Future()
            nothing.set_result(None)
            return nothing
        return start(lambda: _store_delta(last, body, store), "delta")

    def stored(self, version: PolicyVersion, files: Mapping[str, bytes]) -> None:
        """The version is in the bucket: the next one's delta is against it."""
        body = files.get(ADAPTER_WEIGHTS)
        if self._wanted and body is not None:
            self._last = _Weights(version, body, sha256_hex(body))


def _store_delta(
    parent: _Weights, new: bytes, store: Callable[[str, bytes], None]
) -> DeltaEntry | None:
    body = encode_delta(parent.body, new)
    if body is None:
        return None
    store(DELTA_FILE, body)
    return DeltaEntry(
        name=DELTA_FILE,
        size=len(body),
        sha256=sha256_hex(body),
        parent=str(parent.version),
        parent_sha256=parent.sha256,
    )
