"""Room in the engine: how many sequences it may have at a time."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator


class Seats:
    """A group's part of the room: it gets its places one by one, and gives each back as soon as it can."""

    def __init__(self, room: Room, wanted: int) -> None:
        self._room = room
        self._places = asyncio.Semaphore(0)
        self._has_any = asyncio.Event()
        self.wanted, self.held = wanted, 0

    async def any(self) -> None:
        """Wait until there is a place, and leave it."""
        await self._has_any.wait()

    async def take(self) -> None:
        """Wait for a place and take it."""
        await self._places.acquire()

    def give_back(self) -> None:
        """Let go of a place that was taken."""
        self.held -= 1
        self._room.free(1)

    def hand(self) -> None:
        """Called by the room: one place more."""
        self.wanted -= 1
        self.held += 1
        self._has_any.set()
        self._places.release()


class Room:
    """Places for sequences. Groups get theirs in the order in which they asked, each as it comes free.

    So the engine is kept full whatever the lengths in a group are: the next one begins in the places of those that
    have ended, beside the ones that go on. A group of more sequences than there are places uses them in turn.
    """

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = self._free = limit
        self._clock, self._at, self._busy_s = clock, clock(), 0.0
        self._asking: deque[Seats] = deque()
        self._nobody_asks = asyncio.Event()
        self._nobody_asks.set()

    @property
    def used(self) -> int:
        """Places that are given out."""
        return self._limit - self._free

    @property
    def limit(self) -> int:
        """Places that there are."""
        return self._limit

    @property
    def busy_s(self) -> float:
        """Seconds in which places were taken, of all places together, up to now."""
        now = self._clock()
        self._busy_s += self.used * (now - self._at)
        self._at = now
        return self._busy_s

    def _change(self, free: int) -> None:
        """So many places more are free; what was counted until now stays."""
        _ = self.busy_s
        self._free += free

    @contextlib.contextmanager
    def seats(self, count: int) -> Iterator[Seats]:
        """Ask for ``count`` places; what is still held at the end of the block comes free."""
        seats = Seats(self, count)
        self._asking.append(seats)
        self._hand_out()
        try:
            yield seats
        finally:
            if seats in self._asking:
                self._asking.remove(seats)
            self.free(seats.held)
            seats.held = 0

    def free(self, places: int) -> None:
        """Give places back."""
        self._change(places)
        self._hand_out()

    def _hand_out(self) -> None:
        while self._free and self._asking:
            first = self._asking[0]
            first.hand()
            self._change(-1)
            if not first.wanted:
                self._asking.popleft()
        if self._asking:
            self._nobody_asks.clear()
        else:
            self._nobody_asks.set()

    async def nobody_waits(self) -> None:
        """Wait until everyone who asked for room has it."""
        await self._nobody_asks.wait()
