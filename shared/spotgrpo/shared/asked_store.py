"""Buckets that take trouble in another way than the one below them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from spotgrpo.shared.errors import ConfigError, IntegrityError, NotStored, StoreUnavailable
from spotgrpo.shared.ports import ObjectInfo, ObjectStore, Stored
from spotgrpo.shared.threads import until_stopped

T = TypeVar("T")


class AskedStore:
    """Implements ports.ObjectStore over another one; how that is asked is for subclasses."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    def _ask(self, call: Callable[[], T]) -> T:
        return call()

    def create(self, key: str, body: bytes) -> None:
        """See ports.ObjectStore."""
        self._ask(lambda: self._store.create(key, body))

    def get(self, key: str) -> Stored:
        """See ports.ObjectStore."""
        return self._ask(lambda: self._store.get(key))

    def get_if_changed(self, key: str, etag: str | None) -> Stored | None:
        """See ports.ObjectStore."""
        return self._ask(lambda: self._store.get_if_changed(key, etag))

    def compare_and_swap(self, key: str, body: bytes, expected: str | None) -> str | None:
        """See ports.ObjectStore."""
        return self._ask(lambda: self._store.compare_and_swap(key, body, expected))

    def download(self, key: str, path: Path, size: int, sha256: str) -> None:
        """See ports.ObjectStore."""
        self._ask(lambda: self._store.download(key, path, size, sha256))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See ports.ObjectStore."""
        return iter(self._ask(lambda: tuple(self._store.list(prefix))))

    def delete(self, keys: Sequence[str]) -> None:
        """See ports.ObjectStore."""
        self._ask(lambda: self._store.delete(keys))


class PatientStore(AskedStore):
    """A bucket that let us in before: what it refuses now may pass. For roles that run for days.

    A refusal (ConfigError) of the first calls is a person's to mend, and passes on. Once a call was answered, it is
    StoreUnavailable: a token has run out and is renewed, a clock is set again, a policy is corrected.
    """

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self._was_let_in = False

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            answer = call()
        except ConfigError as exc:
            if not self._was_let_in:
                raise
            raise StoreUnavailable(str(exc)) from exc
        except (NotStored, IntegrityError):
            self._was_let_in = True
            raise
        self._was_let_in = True
        return answer


class StoppableStore(AskedStore):
    """A bucket whose calls are given up (StoreUnavailable) soon after ``stopping`` is set, whatever it does."""

    def __init__(self, store: ObjectStore, stopping: threading.Event) -> None:
        super().__init__(store)
        self._stopping = stopping

    def _ask(self, call: Callable[[], T]) -> T:
        return until_stopped(call, self._stopping)
