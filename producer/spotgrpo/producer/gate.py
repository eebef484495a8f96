"""The worker's side of admission: it is sent tasks, or asks for them one by one, or gives one back.

Looks again and again at how fast versions and tokens come, and has ``Admission`` decide.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from spotgrpo.producer.activity import Activity, Stage
from spotgrpo.producer.admission import Admission, Running
from spotgrpo.producer.drain import Job
from spotgrpo.producer.forecast import Pace, Timing, Wait
from spotgrpo.producer.outages import Outages
from spotgrpo.producer.policy import PolicyWatcher
from spotgrpo.producer.room import Room
from spotgrpo.producer.sampler import Sampled
from spotgrpo.producer.usage import Usage, why_empty
from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.manifest import RunDocument
from spotgrpo.shared.ports import Consumer

log = logging.getLogger(__name__)

LOOK_S: Final = 0.25
NOT_BEGUN: Final = (Stage.RECALLING, Stage.ADOPTING, Stage.QUEUING)


class Gate:
    """Keeps tasks out that could not be finished in time. Lives in the worker's event loop.

    Args:
        jobs: what the worker holds.
        forget: called with a job that went back to the queue.
        activity: what the worker does now.
        is_on: whether tasks are left to others at all; else places are only accounted for.
    """

    def __init__(
        self,
        document: RunDocument,
        room: Room,
        policy: PolicyWatcher,
        consumer: Consumer,
        jobs: dict[TaskId, Job],
        forget: Callable[[Job], None],
        activity: Callable[[], Activity],
        *,
        is_on: bool,
    ) -> None:
        self._room, self._policy, self._consumer, self._jobs = room, policy, consumer, jobs
        self._forget, self._activity = forget, activity
        group_size = document.sampling.group_size
        self._admission = Admission(
            document.max_staleness, group_size, max(1, room.limit // group_size)
        )
        self.usage = Usage(room.limit, time.monotonic())
        self.given_back = 0
        self._outages = Outages(time.monotonic())
        self._has_said = False
        self._is_on = is_on

    @property
    def asks(self) -> bool:
        """Whether tasks are only taken by asking for each."""
        return self._admission.asks

    @property
    def leaves_tasks(self) -> bool:
        """Whether this worker has places, and could finish nothing in time."""
        return self.asks and len(self._jobs) >= self._admission.width

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            now, activity = time.monotonic(), self._activity()
            self._outages.look(now, is_away=activity.is_blocked or bool(activity.trouble))
            self.usage.note(now, self._room.busy_s, why_empty(activity))
            if self._is_on:
                await self._look()

    async def _look(self) -> None:
        admission, pace = self._admission, self._policy.pace
        admission.speed.tokens_before = self._policy.group_tokens
        was_paused = admission.asks
        for job in list(self._jobs.values()):
            running = self._running(job)
            if running is not None and admission.is_hopeless(running, pace):
                self._consumer.pause()  # or it would come back at once
                was_paused = True
                admission.gave_back(running)
                await self._give_back(job, f"{running.tokens} tokens were sampled")
        served = self._policy.current
        admission.look(pace, served.version.number if served else 0, len(self._jobs))
        if admission.asks:
            self._consumer.pause()
            await self._give_back_beyond(admission.width)
        elif was_paused:
            self._consumer.resume()
        self._say(pace)

    def _say(self, pace: Pace) -> None:
        """When it begins to ask for tasks, and when that is over."""
        if self._admission.asks == self._has_said:
            return
        self._has_said = self._admission.asks
        if self._has_said:
            log.warning("tasks are taken one by one now: %s", self._admission.why(pace))
        else:
            log.info("as many tasks are taken as there are places for again")

    def _running(self, job: Job) -> Running | None:
        """What a group has come to; None where it is too early to tell, or where it cannot come too late."""
        runs = [run for draft in job.drafts for run in draft.versions]
        is_free = job.task.kind == "train" and job.task.pinned is None
        if job.stage is not Stage.SAMPLING or not runs or not is_free:
            return None
        now = time.monotonic()
        longest = max(job.drafts, key=lambda draft: len(draft.token_ids))
        if not longest.token_s(now) or self._outages.stood_still(job.began, now):
            return None
        return Running(
            oldest=min(run.version.number for run in runs),
            tokens=len(longest.token_ids),
            token_s=longest.token_s(now),
            load=self._load_since(job, now),
            is_again=job.is_again,
        )

    async def _give_back_beyond(self, width: int) -> None:
        """Tasks that were not begun, where more are in hand than can be worked on in time."""
        waiting = [job for job in self._jobs.values() if job.stage in NOT_BEGUN]
        for job in waiting[: max(0, len(self._jobs) - width)]:
            await self._give_back(job, "it was not begun")

    async def _give_back(self, job: Job, how_far: str) -> None:
        """For another worker, at the head of the queue."""
        job.stop()
        if job.work is not None:
            await asyncio.wait({job.work})
        if self._jobs.get(job.task.task_id) is not job:  # it was done just now
            return
        for handle in job.handles:
            self._consumer.reject(handle, requeue=True)
        self._forget(job)
        self.given_back += 1
        log.info(
            "task %s goes back to the queue, since it would be too late here: %s",
            job.task.task_id,
            how_far,
        )

    # ---- what the speed is told from ------------------------------------------------------------------------------

    def began(self, job: Job) -> None:
        """The sampling of a group begins."""
        job.began, job.busy_s = time.monotonic(), self._room.busy_s
        if self._policy.current is not None and job.task.kind == "train":
            self._admission.began(self._policy.pace, self._policy.current.version.number)

    def sampled(self, job: Job) -> None:
        """All of its completions are there."""
        tokens = max(len(draft.token_ids) - draft.brought for draft in job.drafts)
        job.sampled = now = time.monotonic()
        if tokens > 0 and now > job.began and not self._outages.stood_still(job.began, now):
            token_s = (now - job.began) / tokens
            self._admission.speed.note(Timing(self._load_since(job, now), token_s))

    def published(self, job: Job, sampled: Sampled) -> None:
        """The broker has the group."""
        now = time.monotonic()
        longest = max(len(rollout.token_ids) for rollout in sampled.rollouts)
        was_held_up = self._outages.any(job.sampled, now)
        self._admission.speed.ended(longest, None if was_held_up else Wait(job.sampled, now))
        is_judged = job.task.kind == "train" and job.task.pinned is None
        if is_judged and not self._outages.any(job.began, now):
            oldest = min(run.version.number for one in sampled.rollouts for run in one.versions)
            self._admission.ended(self._policy.pace.newest - oldest)

    def _load_since(self, job: Job, now: float) -> float:
        """Sequences in the engine, on average, since a group began."""
        passed_s = now - job.began
        return max(1.0, (self._room.busy_s - job.busy_s) / passed_s) if passed_s else 1.0
