"""Whom a standby waits for, said soon and then now and then."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from spotgrpo.shared.errors import NotStored, SpotGRPOError
from spotgrpo.shared.ids import Keys, Queues
from spotgrpo.shared.manifest import Latest
from spotgrpo.shared.ports import ObjectStore, QueueDepth

log = logging.getLogger(__name__)

FIRST_S: Final = 5.0
"""A connection may take so long to get the leader queue that nobody else holds."""
SAY_EVERY: Final = 4
"""In stall_warn_s: a standby may wait for days, and nothing is wrong then."""


@dataclass
class Standby:
    """A standby's voice.

    Args:
        clock: monotonic seconds.
        wall: Unix seconds, to compare with the bucket's.
    """

    store: ObjectStore
    keys: Keys
    queues: Queues
    depth: Callable[[str], QueueDepth | None]
    stall_warn_s: float
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    _due: float | None = None

    def still_waiting(self) -> None:
        """Say who leads, as ``latest.json`` has it."""
        if self._due is None:
            self._due = self.clock() + FIRST_S
        if self.clock() < self._due:
            return
        self._due = self.clock() + SAY_EVERY * self.stall_warn_s
        if self.depth(self.queues.tasks) is None:
            log.warning(
                "run %s: waiting for the leader queue: the broker does not answer", self.keys.run
            )
        else:
            log.info("another learner leads run %s: standing by; %s", self.keys.run, self._leader())

    def _leader(self) -> str:
        try:
            latest = Latest.from_bytes(self.store.get(self.keys.latest).body)
            moved = max(info.modified for info in self.store.list(self.keys.latest))
        except NotStored:
            return "it has not begun the run yet"
        except SpotGRPOError as exc:
            return f"who, the bucket does not say now: {exc}"
        return (
            f"{latest.writer} as epoch {latest.epoch}, at version {latest.serving.version}; latest.json last moved "
            f"{max(0.0, self.wall() - moved):.0f} s ago"
        )
