"""The one mutable object of a run, ``latest.json``, and the protocol that moves it.

Settlement rule 6: a move is a compare-and-swap from the state that was read. After any answer but success it is
read back: these bytes → done; still the parent → the identical bytes again; anything else → Fenced. A lost answer
may belong to a write that lands later, so nothing new is planned while the answer is open: the identical bytes are
safe to send again however often, and the nonce in them tells this learner's write from any other's.
"""

from __future__ import annotations

import secrets
import threading
from typing import TYPE_CHECKING

from spotgrpo.shared.errors import Fenced, NotStored, StoreUnavailable, WireError
from spotgrpo.shared.manifest import Latest
from spotgrpo.shared.ports import Stored
from spotgrpo.shared.retry import LONGEST_WAIT_S, retry

if TYPE_CHECKING:
    from spotgrpo.shared.ids import Keys
    from spotgrpo.shared.ports import ObjectStore


def fresh_nonce() -> str:
    """What makes the bytes of one move unlike those of any other: 128 random bits in hex."""
    return secrets.token_hex(16)


class LatestPointer:
    """One learner's hold on ``latest.json``. ``move`` and ``check_mine`` may run on different threads.

    Args:
        store: the bucket.
        keys: of the run.
        writer: this learner's random id, for the messages of whom it fences.
        longest_wait_s: upper bound of a pause between tries of a move, in seconds.
    """

    def __init__(
        self, store: ObjectStore, keys: Keys, writer: str, *, longest_wait_s: float = LONGEST_WAIT_S
    ) -> None:
        self._store = store
        self._key = keys.latest
        self._writer = writer
        self._longest_wait_s = longest_wait_s
        self._moving = threading.Lock()
        self._known: Stored | None = None
        """The state that the next move starts from; None: there is no latest.json."""
        self._open: bytes | None = None
        """What was sent and is not known to have landed."""

    def read(self) -> Latest | None:
        """The pointer as it is now, or None where there is none; the next ``move`` starts from it.

        Raises:
            WireError: it is not a ``latest.json``.
            StoreUnavailable: the bucket does not answer.
        """
        with self._moving:
            found = self._fetch()
            latest = Latest.from_bytes(found.body) if found else None
            self._known, self._open = found, None
        return latest

    def move(self, new: Latest, *, stopping: threading.Event | None = None) -> None:
        """Replace the state that was read or moved to last by ``new``, which carries a fresh nonce.

        Waits for an unreachable bucket for ever. The same ``new`` may be given again after StoreUnavailable.

        Raises:
            Fenced: another learner moved it; nothing of ``new`` is in the bucket.
            StoreUnavailable: ``stopping`` was set with the outcome unknown.
            ValueError: another ``new`` than the one whose outcome is still unknown; read again first.
        """
        body = new.to_bytes()
        with self._moving:
            if self._open is not None and self._open != body:
                raise ValueError(
                    "the move before may still land: give the same value again, or read()"
                )
            self._open = body
            retry(
                f"moving {self._key}",
                lambda: self._try(body),
                stopping=stopping,
                longest_wait_s=self._longest_wait_s,
            )

    def check_mine(self) -> None:
        """Return if the pointer is where this learner read it or moved it to, a move in flight included.

        Raises:
            Fenced: another learner moved it.
            StoreUnavailable: the bucket does not answer.
        """
        while True:
            before = self._mine()
            found = self._fetch()
            if (found.body if found else None) in before:
                return
            # A move that ended meanwhile changes what is ours; judge again by what is ours now.
            if self._mine() == before:
                raise self._fenced(found)

    def _mine(self) -> tuple[bytes | None, ...]:
        known, sent = self._known, self._open
        parent = known.body if known else None
        return (parent,) if sent is None else (parent, sent)

    def _try(self, body: bytes) -> None:
        """One compare-and-swap, settled by reading back; StoreUnavailable while its outcome is open."""
        expected = self._known.etag if self._known else None
        try:
            etag = self._store.compare_and_swap(self._key, body, expected)
        except StoreUnavailable:
            etag = None
        if etag is None:
            self._read_back(body)
        else:
            self._land(Stored(body, etag))

    def _read_back(self, body: bytes) -> None:
        found = self._fetch()
        if found is not None and found.body == body:
            self._land(found)
        elif (found.body if found else None) == (self._known.body if self._known else None):
            # By bytes, not by ETag: the nonce makes them unique, and some servers name one state in two ways.
            self._known = found
            raise StoreUnavailable(f"moving {self._key}: it did not land so far")
        else:
            self._open = None
            raise self._fenced(found)

    def _land(self, stored: Stored) -> None:
        self._known, self._open = stored, None

    def _fetch(self) -> Stored | None:
        try:
            return self._store.get(self._key)
        except NotStored:
            return None

    def _fenced(self, found: Stored | None) -> Fenced:
        if found is None:
            return Fenced(f"{self._key} is gone: the run was deleted under learner {self._writer}")
        try:
            other = Latest.from_bytes(found.body)
        except WireError as exc:
            return Fenced(f"{self._key} was overwritten with something else ({exc})")
        return Fenced(
            f"{self._key} was moved by learner {other.writer} at epoch {other.epoch} "
            f"(version {other.serving.version}); learner {self._writer} has lost the run"
        )
