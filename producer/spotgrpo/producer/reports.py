"""What a worker says of itself on the telemetry exchange: at once, every ``report_s``, and on leaving."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from spotgrpo.shared.ids import Queues
from spotgrpo.shared.ports import Message, Publisher
from spotgrpo.shared.wire import Json, Report, encode_report


@dataclass
class Reporter:
    """A worker's voice. Nothing depends on it being heard.

    Args:
        values: what is to be said now; ``tokens`` among them gives the speed.
        every_s: seconds between two reports.
        clock: monotonic seconds.
    """

    worker_id: str
    queues: Queues
    publisher: Publisher
    values: Callable[[], dict[str, Json]]
    every_s: float
    clock: Callable[[], float] = time.monotonic
    _tokens: int = 0
    _at: float = field(init=False)

    def __post_init__(self) -> None:
        self._at = self.clock()

    async def run(self) -> None:
        """Report for ever, the first time at once: until then nobody knows that this worker is there."""
        while True:
            self.say()
            await asyncio.sleep(self.every_s)

    def say(self) -> None:
        """Report now."""
        values = self.values()
        values["tokens_per_s"] = self._speed(values["tokens"])
        report = Report(self.worker_id, "worker", time.time(), values)
        self.publisher.broadcast(self.queues.telemetry, Message(encode_report(report)))

    def _speed(self, tokens: Json) -> float:
        """Tokens a second since the last report."""
        now, before = self.clock(), self._at
        total = tokens if isinstance(tokens, int) else self._tokens
        gained, self._tokens, self._at = total - self._tokens, total, now
        return gained / (now - before) if now > before else 0.0
