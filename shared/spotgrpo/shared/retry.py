"""How transient errors are retried: jittered exponential backoff, up to a deadline or until told to stop.

One line is logged when the trouble starts, one a minute while it lasts, and one when it is over; never one a try.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception_type,
    stop_after_delay,
    stop_never,
    wait_random_exponential,
)
from tenacity.stop import stop_base, stop_when_event_set

from spotgrpo.shared.errors import TransientError

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_WAIT_S = 0.2
LONGEST_WAIT_S = 10.0
SAY_AGAIN_S = 60.0
"""Nobody waits in silence for longer."""


def retrying(
    what: str,
    *,
    deadline_s: float | None = None,
    stopping: threading.Event | None = None,
    longest_wait_s: float = LONGEST_WAIT_S,
    level: int = logging.WARNING,
) -> Retrying:
    """A tenacity controller that retries TransientError and raises the last one when it gives up.

    Args:
        what: what is being tried, for the log: "publishing to spotgrpo.r.tasks".
        deadline_s: give up after so many seconds; None never.
        stopping: give up once set; waiting ends at once.
        longest_wait_s: upper bound of one pause, in seconds.
        level: of the line that says that trouble started; lower where a caller retries above this again.
    """
    stop: stop_base = stop_after_delay(deadline_s) if deadline_s is not None else stop_never
    if stopping is not None:
        stop = stop | stop_when_event_set(stopping)

    said_s = 0.0

    def say(state: RetryCallState) -> None:
        nonlocal said_s
        waited_s = state.seconds_since_start or 0.0
        error = state.outcome.exception() if state.outcome else None
        if state.attempt_number == 1:
            said_s = waited_s
            log.log(level, "%s: %s; trying again", what, error)
        elif waited_s - said_s >= SAY_AGAIN_S:
            said_s = waited_s
            log.log(level, "%s: %s; still trying after %.0f s", what, error, waited_s)

    def sleep(seconds: float) -> None:
        (stopping or threading.Event()).wait(seconds)

    return Retrying(
        retry=retry_if_exception_type(TransientError),
        wait=wait_random_exponential(multiplier=FIRST_WAIT_S, max=longest_wait_s),
        stop=stop,
        before_sleep=say,
        sleep=sleep,
        reraise=True,
    )


def retry(
    what: str,
    call: Callable[[], T],
    *,
    deadline_s: float | None = None,
    stopping: threading.Event | None = None,
    longest_wait_s: float = LONGEST_WAIT_S,
    level: int = logging.WARNING,
) -> T:
    """``call()`` until it raises no TransientError; see :func:`retrying`."""
    controller = retrying(
        what, deadline_s=deadline_s, stopping=stopping, longest_wait_s=longest_wait_s, level=level
    )
    result: T = controller(call)
    if controller.statistics.get("attempt_number", 1) > 1:
        log.log(min(level, logging.INFO), "%s: works again", what)
    return result
