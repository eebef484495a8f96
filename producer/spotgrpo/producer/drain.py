"""The end of a worker that was told to go: what it holds is finished, or stored and handed back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from spotgrpo.producer.activity import Stage
from spotgrpo.producer.partials import Partials, marked_again
from spotgrpo.producer.patience import Patience
from spotgrpo.producer.sampler import Draft, Sampler
from spotgrpo.shared.errors import SpotGRPOError
from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.ports import Consumer, Handle, Message
from spotgrpo.shared.steps import Step, reached
from spotgrpo.shared.wire import Task

log = logging.getLogger(__name__)

LOOK_S: Final = 0.5
"""How often it is looked whether the machine has less time than it seemed."""
ABORT_SHARE: Final = 0.4
STORE_SHARE: Final = 0.8
"""Of the time for handing back: when the engine must have stopped, and the partials be stored, at the latest."""


@dataclass
class Job:
    """A task in this worker's hands.

    Attributes:
        handles: of all its deliveries. A copy on a living channel is unsettled like the first; those of a channel
            that is gone name nothing, and the consumer drops them.
        is_again: another worker may have begun it.
        drafts: its rollouts, from when sampling began.
        work: what brings it from version to ack.
        stage, since: how far it has come, and when (monotonic seconds) it came there.
        began: when (monotonic seconds) its sampling began.
        sampled: when (monotonic seconds) all of its completions were there.
        busy_s: seconds in which the engine's places had been taken by then, all together.
    """

    task: Task
    message: Message
    handles: list[Handle]
    is_again: bool
    drafts: list[Draft] = field(default_factory=list)
    work: asyncio.Task[None] | None = None
    stage: Stage = Stage.RECALLING
    since: float = field(default_factory=time.monotonic)
    began: float = 0.0
    sampled: float = 0.0
    busy_s: float = 0.0

    def enter(self, stage: Stage) -> None:
        """It has come to ``stage`` now."""
        self.stage, self.since = stage, time.monotonic()

    @property
    def is_sampled(self) -> bool:
        """True from its first request until it is done or has failed."""
        return bool(self.drafts) and self.work is not None and not self.work.done()

    def stop(self) -> None:
        """End what works on it; its drafts stay."""
        if self.work is not None:
            self.work.cancel()


@dataclass
class Drain:
    """Takes nothing more, finishes what fits into its time, stores the rest as partials and hands it back.

    Args:
        jobs: what the worker holds; who is done or handed back is taken out.
        consumer: of the tasks queue.
        publish: to the tasks queue, until confirmed.
    """

    jobs: dict[TaskId, Job]
    sampler: Sampler
    partials: Partials
    consumer: Consumer
    publish: Callable[[Message], Awaitable[None]]
    handed_back: int = 0
    saved: int = 0

    async def run(self, patience: Patience) -> bool:
        """Drain. What was not begun goes back at once, while the rest is finished.

        False where the broker did not answer in time: it requeues by itself whatever is unacked when the connection
        closes.
        """
        self.consumer.cancel()
        untouched = [job for job in self.jobs.values() if not job.drafts]
        for job in untouched:  # now, or room that comes free would let one begin
            job.stop()
        early = asyncio.gather(*(self._return(job, store_s=0.0) for job in untouched))
        try:
            await self._let_finish(patience)
            hand_back_s = patience.hand_back_s
            async with asyncio.timeout(hand_back_s):
                await self._return_begun(hand_back_s)
                await early
        except (TimeoutError, SpotGRPOError) as exc:
            log.warning(
                "could not hand %d unfinished tasks back (%s): the broker requeues them",
                len(self.jobs),
                str(exc) or "no answer in time",
            )
            return False
        finally:
            early.cancel()
            await asyncio.gather(early, return_exceptions=True)
            if self.handed_back:
                log.info(
                    "handed %d unfinished tasks back, %d partials", self.handed_back, self.saved
                )
        return True

    async def _let_finish(self, patience: Patience) -> None:
        """Wait until what was begun is done or patience ends, which may be sooner than it seemed."""
        while running := [job.work for job in self.jobs.values() if job.work and job.is_sampled]:
            finish_s = patience.finish_s
            if not finish_s:
                return
            await asyncio.wait(running, timeout=min(finish_s, LOOK_S))

    async def _return_begun(self, within_s: float) -> None:
        """Stop the engine so that no token is lost, then store and hand back what is left, all at a time."""
        began = time.monotonic()
        await self.sampler.interrupt(ABORT_SHARE * within_s)
        store_s = STORE_SHARE * within_s - (time.monotonic() - began)
        begun = [job for job in self.jobs.values() if job.drafts]
        await asyncio.gather(*(self._return(job, store_s) for job in begun))

    async def _return(self, job: Job, store_s: float) -> None:
        """Store what there is of a task (rule 9), publish it again, and only then ack it.

        A copy at worst, never a loss, and no delivery that the broker would count against the task.
        """
        job.stop()
        if job.work is not None:
            await asyncio.wait({job.work})
        if job.task.task_id not in self.jobs:  # it was done just now
            return
        if await self.partials.save(job.task, job.drafts, store_s):
            self.saved += 1
            reached(Step.WORKER_PARTIAL_STORED)
        await self._hand_back(job.message, job.handles)
        del self.jobs[job.task.task_id]

    async def _hand_back(self, message: Message, handles: list[Handle]) -> None:
        await self.publish(marked_again(message))
        reached(Step.WORKER_HANDED_BACK)
        self.consumer.ack(handles)
        self.handed_back += 1
