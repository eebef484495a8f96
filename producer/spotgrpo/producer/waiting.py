"""Waits that take long are named: once after ``log.stall_warn_s``, again in growing gaps, and once when they end."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from spotgrpo.shared.gaps import gaps

log = logging.getLogger(__name__)


@dataclass
class Watchdog:
    """Watches one thing that should go on, and speaks where it does not. Asked again and again by who does it.

    Args:
        warn_s: seconds without progress before the first line.
        clock: monotonic seconds.
    """

    warn_s: float
    clock: Callable[[], float] = time.monotonic
    _mark: object = None
    _since: float = 0.0
    _due: float = 0.0
    _lines: int = 0

    def __post_init__(self) -> None:
        self._begin()

    def look(self, mark: object, what: Callable[[], str], *, is_fine: bool = False) -> None:
        """Say ``what()`` is waited for, where that is due.

        Args:
            mark: another one than at the last look is progress.
            is_fine: nothing is wrong with this wait, so that one line about it is enough.
        """
        now = self.clock()
        waited_s = now - self._since
        if mark != self._mark:
            if self._lines:
                log.info("going on after %.0f s", waited_s)
            self._mark = mark
            self._begin()
        elif now >= self._due and not (is_fine and self._lines):
            self._lines += 1
            self._due = now + next(itertools.islice(gaps(self.warn_s), self._lines, None))
            level = logging.INFO if is_fine else logging.WARNING
            log.log(level, "nothing done for %.0f s: %s", waited_s, what())

    def _begin(self) -> None:
        self._since = self.clock()
        self._due, self._lines = self._since + self.warn_s, 0


@contextlib.contextmanager
def aloud(what: str | Callable[[], str], warn_s: float) -> Iterator[None]:
    """Say on a thread of its own that the block waits for ``what``: the block may compute, and hold its own up."""
    began, over = time.monotonic(), threading.Event()
    lines = 0

    def speak() -> None:
        nonlocal lines
        for gap_s in gaps(warn_s):
            if over.wait(gap_s):
                return
            lines += 1
            text = what if isinstance(what, str) else what()
            log.warning("waiting for %.0f s for %s", time.monotonic() - began, text)

    thread = threading.Thread(target=speak, name="aloud", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if lines:
        log.info("going on after %.0f s", time.monotonic() - began)
