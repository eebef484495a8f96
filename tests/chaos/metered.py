"""Workers that count what they generate, for measuring what a kill costs.

``install`` is for the ``prepare`` of an order (see ``nursery``). It puts three things around a worker: tokens that
come by the clock, a count of them that survives SIGKILL, and the time at which each group was confirmed.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

import numpy as np

from spotgrpo.producer.engines.base import Chunk, GenerationRequest
from tests.chaos import roles
from tests.chaos.engine import PacedEngine


class Meter:
    """What a worker has generated, in a mapped file: what was written is there even after SIGKILL."""

    def __init__(self, values: np.memmap[Any, np.dtype[np.float64]]) -> None:
        self._values = values

    @classmethod
    def create(cls, path: Path) -> Self:
        path.parent.mkdir(exist_ok=True)
        return cls(np.memmap(path, np.float64, "w+", shape=(2,)))

    @classmethod
    def read(cls, path: Path) -> Self:
        return cls(np.memmap(path, np.float64, "r", shape=(2,)))

    @property
    def tokens(self) -> int:
        return int(self._values[0])

    @property
    def began_at(self) -> float:
        """When its first request came, in Unix seconds; 0 before that."""
        return float(self._values[1])

    def begin(self) -> None:
        if not self._values[1]:
            self._values[1] = time.time()

    def add(self, tokens: int) -> None:
        self._values[0] += tokens


class MeteredEngine(PacedEngine):
    """A paced engine whose tokens come by the clock: a loop that was held up makes up for it at once.

    So the rate of a worker does not depend on how busy the machine is, and a killed one makes the others no faster.

    Args:
        meter: counts every token.
        ready_at: Unix seconds before which it does not start: the load time of a real engine.
        shared_by: its tokens take so long while so many sequences share it, and less beside fewer; None: always.
        shortest: share of its tokens that the shortest completion has; the seed draws the length of each.
    """

    def __init__(
        self,
        *args: Any,
        meter: Meter,
        ready_at: float,
        shared_by: int | None = None,
        shortest: float = 1.0,
    ) -> None:
        super().__init__(*args)
        self._meter, self._ready_at = meter, ready_at
        self._shared_by, self._shortest, self._running = shared_by, shortest, 0
        self._due: WeakKeyDictionary[asyncio.Task[Any], float] = WeakKeyDictionary()

    async def start(self) -> None:
        await super().start()
        await asyncio.sleep(max(0.0, self._ready_at - time.time()))

    async def submit(self, request: GenerationRequest) -> AsyncIterator[Chunk]:
        self._meter.begin()
        draw = random.Random(request.seed).uniform(self._shortest, 1.0)
        left = max(1, round(draw * request.sampling.max_new_tokens)) - len(request.prefix_ids)
        self._running += 1
        try:
            async for chunk in super().submit(request):
                left -= len(chunk.token_ids)
                self._meter.add(len(chunk.token_ids))
                yield chunk if left or chunk.finish else replace(chunk, finish="stop")
                if not left:
                    return
        finally:
            self._running -= 1

    async def pause(self) -> None:
        """Until the next token of the request is due; each request has a task of its own."""
        request = asyncio.current_task()
        assert request is not None
        share = self._running / self._shared_by if self._shared_by else 1.0
        due = self._due.get(request, time.monotonic()) + share * self.token_s
        self._due[request] = due
        await asyncio.sleep(max(0.0, due - time.monotonic()))


def install(order: dict[str, Any]) -> None:
    """Meter the worker that ``order`` is for; it holds ``ready_at``, and may hold what else the engine takes."""
    meter = Meter.create(Path(order["folder"]) / "meters" / str(os.getpid()))
    roles.PacedEngine = functools.partial(  # type: ignore[assignment,misc]
        MeteredEngine,
        meter=meter,
        ready_at=order["ready_at"],
        shared_by=order.get("shared_by"),
        shortest=order.get("shortest", 1.0),
    )
    plain = roles._append

    def append(path: Path, line: bytes, done: Future[None]) -> None:
        plain(path, line.rstrip() + f" {time.time():.6f}\n".encode(), done)

    roles._append = append
