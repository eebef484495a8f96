"""Running groups are saved as they grow, so that a worker killed without notice costs little.

consumes:     what the worker holds
produces:     a partial of every group that has grown since its last one, every ``every_s``
promises:     generation does not wait for the bucket, one object is under way at a time, and nothing here fails
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from spotgrpo.producer.drain import Job
from spotgrpo.producer.partials import Partials
from spotgrpo.shared.errors import SpotGRPOError, TransientError
from spotgrpo.shared.ids import TaskId

log = logging.getLogger(__name__)

STORE_S: Final = 15.0
"""How long the bucket may take for one partial; then it counts as away."""
MARGIN: Final = 0.1
LEAST_PAUSE: Final = 0.1
"""Of ``every_s``: kept back for rounds that take longer than the one before, and let pass between two in any case."""


def pause_after(took_s: float, every_s: float) -> float:
    """Seconds from the end of a round that took ``took_s`` to the next one.

    A token waits for the next round to begin, then to end: the two together are to stay under ``every_s``.
    """
    return max(LEAST_PAUSE * every_s, (1 - MARGIN) * every_s - 2 * took_s)


@dataclass
class Saver:
    """Saves the groups among ``jobs`` for as long as the worker runs."""

    jobs: Mapping[TaskId, Job]
    partials: Partials
    every_s: float
    _is_troubled: bool = False

    async def run(self) -> None:
        """Save for ever. The bucket may fail as it likes: a round that it does not take is skipped."""
        pause_s = pause_after(0.0, self.every_s)
        while True:
            await asyncio.sleep(pause_s)
            began = time.monotonic()
            await self._save_all()
            pause_s = pause_after(time.monotonic() - began, self.every_s)

    async def _save_all(self) -> None:
        why, has_saved = "", False
        for job in list(self.jobs.values()):
            try:
                if job.task.task_id in self.jobs:  # it may have been done while others were saved
                    has_saved |= await self.partials.store(job.task, job.drafts, STORE_S)
            except (TimeoutError, TransientError) as exc:
                why = str(exc) or "the bucket does not answer"
                break
            except SpotGRPOError as exc:  # too big: others may do
                why = str(exc)
        if why or has_saved:
            self._note_trouble(why)

    def _note_trouble(self, why: str) -> None:
        """Said once when it begins and once when it is over."""
        if why and not self._is_troubled:
            log.warning("running groups cannot be saved: %s", why)
        elif self._is_troubled and not why:
            log.info("running groups are saved again")
        self._is_troubled = bool(why)
