"""Deliveries that are taken and decoded while the main thread is busy with a step.

consumes:     a consumer of the rollouts queue, for the time of a step
waits for:    nothing: it looks again and again while the step runs
unblocked by: the end of the step
produces:     the deliveries, in their order, with what became of decoding them

Only the taking is early: what a delivery does to the books is decided when the main thread asks for it, in the order in
which it would have come.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

from spotgrpo.shared.errors import SpotGRPOError
from spotgrpo.shared.ports import Consumer, Delivery
from spotgrpo.shared.threads import start

T = TypeVar("T")

LOOK_S = 0.02
"""Between two looks for a delivery while a step runs."""


@dataclass(frozen=True)
class Taken(Generic[T]):
    """A delivery; ``decoded`` None where nobody has begun with that."""

    delivery: Delivery
    decoded: Future[T] | None = None

    def result(self) -> T | None:
        """What it was decoded to, once that is done; None where it was not, or could not be: by now it might."""
        return None if self.decoded is None or self.decoded.exception() else self.decoded.result()


class Ahead(Generic[T]):
    """The only one that takes from ``consumer``: the main thread, or one of its own during a step.

    Args:
        decode: must be right on another thread.
        most: deliveries in hand, above which none is taken early.
    """

    def __init__(self, consumer: Consumer, decode: Callable[[Delivery], T], most: int) -> None:
        self._consumer, self._decode, self._most = consumer, decode, most
        self._lock = threading.Lock()
        self._taken: deque[Taken[T]] = deque()
        self._over = threading.Event()
        self._over.set()

    @contextlib.contextmanager
    def busy(self, in_hand: int) -> Iterator[None]:
        """While the main thread takes nothing; ``in_hand`` is what it holds of before.

        The end waits for nothing: what is being decoded then is waited for where it is asked for.
        """
        over = self._over = threading.Event()
        start(lambda: self._look(over, self._most - in_hand), "decoding")
        try:
            yield
        finally:
            with self._lock:
                over.set()

    def take(self, timeout_s: float) -> Taken[T] | None:
        """The next delivery, or None. Those of a channel that is dead by now are not handed out."""
        with self._lock:
            while self._taken:
                first = self._taken.popleft()
                if first.delivery.handle.generation == self._consumer.generation:
                    return first
        delivery = self._consumer.take(timeout_s)
        return None if delivery is None else Taken(delivery)

    def _look(self, over: threading.Event, room: int) -> None:
        while room > 0 and not over.is_set():
            taken = self._take_early(over)
            if taken is None:
                over.wait(LOOK_S)
                continue
            delivery, decoded = taken
            room -= 1
            try:
                decoded.set_result(self._decode(delivery))
            except BaseException as exc:  # noqa: BLE001 - kept where the main thread sees that it failed
                decoded.set_exception(exc)

    def _take_early(self, over: threading.Event) -> tuple[Delivery, Future[T]] | None:
        with self._lock:
            if over.is_set():
                return None
            try:
                delivery = self._consumer.take(0)
            except SpotGRPOError:
                return None  # the main thread will hear of it when it asks
            if delivery is None:
                return None
            decoded: Future[T] = Future()
            self._taken.append(Taken(delivery, decoded))
            return delivery, decoded
