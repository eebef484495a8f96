"""Calls that may never come back, on threads that neither an event loop nor the end of the process waits for.

The threads of an executor (``asyncio.to_thread``) are joined at the end, so that a server that does not answer would
hold up whoever wants to leave.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final, TypeVar

from spotgrpo.shared.errors import StoreUnavailable

T = TypeVar("T")

POLL_S: Final = 0.1
GRACE_S: Final = 2.0
"""What a call of the bucket still gets once the process was told to stop."""


def start(call: Callable[[], T], name: str) -> Future[T]:
    """Begin ``call()`` on a daemon thread; the future cannot be cancelled."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as exc:  # noqa: BLE001 - handed to who waits; a thread has nobody above it
            future.set_exception(exc)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future


async def in_thread(call: Callable[[], T], name: str = "bucket") -> T:
    """``call()`` on a thread of its own; one whose caller is cancelled is left behind."""
    return await asyncio.wrap_future(start(call, name))


def until_stopped(call: Callable[[], T], stopping: threading.Event, grace_s: float = GRACE_S) -> T:
    """``call()``, which asks the bucket, given up ``grace_s`` after ``stopping`` is set.

    Raises:
        StoreUnavailable: it was given up; what it does may still be done.
    """
    running, give_up_at = start(call, "bucket"), None
    while not wait([running], POLL_S).done:
        if stopping.is_set():
            give_up_at = give_up_at or time.monotonic() + grace_s
            if time.monotonic() >= give_up_at:
                raise StoreUnavailable("told to stop, and the bucket does not answer")
    return running.result()
