"""What several connections to one broker say when it goes away: one line when it starts and one when it is over."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from spotgrpo.shared.errors import ConfigError, SpotGRPOError

log = logging.getLogger(__name__)


class Outage:
    """Shared by the connections of a role. Thread-safe.

    Args:
        shown: the broker's address without its password.
        clock: monotonic seconds.
    """

    def __init__(self, shown: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._shown, self._clock = shown, clock
        self._lock = threading.Lock()
        self._without: set[object] = set()
        self._since = 0.0
        self._was_refused = False

    def begin(self, who: object, name: str, error: SpotGRPOError) -> None:
        """``who`` has no connection. The first one says so; another only where a person must act."""
        is_refused = isinstance(error, ConfigError)
        with self._lock:
            is_first = not self._without
            if is_first:
                self._since, self._was_refused = self._clock(), False
            is_news = is_first or (is_refused and not self._was_refused)
            self._was_refused = self._was_refused or is_refused
            self._without.add(who)
        level = logging.WARNING if is_news else logging.DEBUG
        log.log(level, "%s: no connection: %s; trying again", name, error)

    def end(self, who: object, name: str) -> None:
        """``who`` is connected again. The last one says so."""
        with self._lock:
            if who not in self._without:
                return
            self._without.discard(who)
            is_over = not self._without
            lasted_s = self._clock() - self._since
        level = logging.INFO if is_over else logging.DEBUG
        log.log(level, "%s: connected to %s again after %.0f s", name, self._shown, lasted_s)

    def forget(self, who: object) -> None:
        """``who`` is closed, and needs no connection any more."""
        with self._lock:
            self._without.discard(who)
