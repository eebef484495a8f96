"""Room in the engine: how many sequences it may have at a time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Room:
    """Sequences that the engine may have at a time. A group over the limit runs alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.used = 0
        self._waiting = 0
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def taken(self, sequences: int) -> AsyncIterator[None]:
        """Wait for room and hold it while the block runs."""
        async with self._changed:
            self._waiting += 1
            try:
                await self._changed.wait_for(
                    lambda: not self.used or self.used + sequences <= self._limit
                )
                self.used += sequences
            finally:
                self._waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            async with self._changed:
                self.used -= sequences
                self._changed.notify_all()

    async def nobody_waits(self) -> None:
        """Wait until everyone who asked for room has it."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._waiting)
