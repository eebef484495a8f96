"""How a process is asked to stop: once politely, a second time at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

log = logging.getLogger(__name__)

EXIT_INTERRUPTED = 130
AT_ONCE_S = 2.0
"""What a role gets after a second Ctrl-C."""


class Stopping(threading.Event):
    """An event that is set once the process should stop.

    Being a :class:`threading.Event` it goes wherever one is waited for (``retry``, threads). Callbacks let an
    event loop, or anything else that does not wait on it, hear of it too.

    Attributes:
        reason: what asked first ("SIGTERM", "finished"), for the log; empty before.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reason = ""
        self._gone_at: float | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._guard = threading.Lock()
        self._interrupts = 0
        self._leave_s: float | None = None

    def set(self) -> None:
        """Ask to stop and call the callbacks, each once, on this thread. Idempotent."""
        with self._guard:
            super().set()
            due, self._callbacks = self._callbacks, []
        for callback in due:
            callback()

    def ask(self, reason: str, within_s: float | None = None) -> None:
        """:meth:`set`, keeping the first ``reason`` and the earliest end.

        Args:
            within_s: seconds after which the machine is gone, where that is known.
        """
        self.reason = self.reason or reason
        if within_s is not None:
            gone_at = time.monotonic() + within_s
            self._gone_at = gone_at if self._gone_at is None else min(gone_at, self._gone_at)
        self.set()

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the machine is gone, 0 or more; None where nobody said."""
        return None if self._gone_at is None else max(0.0, self._gone_at - time.monotonic())

    def add_callback(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call ``callback`` once when asked to stop, at once if that was before; returns what removes it.

        It runs on the thread that asks and must neither block nor raise.
        """
        with self._guard:
            late = self.is_set()
            if not late:
                self._callbacks.append(callback)
        if late:
            callback()
        return lambda: self._remove(callback)

    def _remove(self, callback: Callable[[], None]) -> None:
        with self._guard, contextlib.suppress(ValueError):
            self._callbacks.remove(callback)

    async def wait_async(self) -> None:
        """Wait in an event loop until asked to stop."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop closed meanwhile
                loop.call_soon_threadsafe(woken.set)

        remove = self.add_callback(wake)
        try:
            await woken.wait()
        finally:
            remove()

    @contextlib.contextmanager
    def on_signals(self, leave_s: float | None = None) -> Iterator[Stopping]:
        """Let SIGINT and SIGTERM ask to stop while the block runs (main thread only).

        A second SIGINT raises KeyboardInterrupt; a third ends the process without more ado, for native code
        that never comes back to Python.

        Args:
            leave_s: seconds after the second one at which that happens anyhow; None where something has to be tidied
                up first, however long it takes.
        """
        self._leave_s = leave_s
        before = {
            number: signal.signal(number, self._heard) for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heard(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._interrupts += 1
        if self._interrupts > 2:
            os._exit(EXIT_INTERRUPTED)
        if self._interrupts > 1:
            if self._leave_s is not None:
                threading.Thread(target=self._leave, args=(self._leave_s,), daemon=True).start()
            raise KeyboardInterrupt
        # On a thread of its own: the one interrupted here may hold the event's lock.
        name = signal.Signals(number).name
        threading.Thread(target=self._ask_aloud, args=(name,), name="stopping", daemon=True).start()

    @staticmethod
    def _leave(after_s: float) -> None:
        """Whatever the rest of the process still waits for."""
        time.sleep(after_s)
        os.write(2, b"spotgrpo: stopped at once\n")
        os._exit(EXIT_INTERRUPTED)

    def _ask_aloud(self, name: str) -> None:
        if not self.is_set():
            again = "; Ctrl-C again to stop at once" if name == "SIGINT" else ""
            log.info("%s: stopping%s", name, again)
        self.ask(name)
