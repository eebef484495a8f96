"""The generator worker: takes tasks, samples and scores groups, publishes them until confirmed, then acks.

consumes:     the tasks queue, at most what fits into the engine
waits for:    a version that is new enough, then room in the engine
unblocked by: a finished group, an adoption
produces:     one group a task on the rollouts queue; a task is acked only after its group was confirmed
on stop:      takes nothing more, finishes what it can in ``drain_s``, stores the rest as partials and hands it back
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import secrets
import socket
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from spotgrpo.producer.acks import Acks
from spotgrpo.producer.activity import Activity, Held, Limits, Stage
from spotgrpo.producer.drain import Drain, Job
from spotgrpo.producer.engines.base import Engine, RequestRefused
from spotgrpo.producer.gate import Gate
from spotgrpo.producer.partials import Partials, comes_again
from spotgrpo.producer.patience import Patience
from spotgrpo.producer.policy import Adopted, PolicyWatcher
from spotgrpo.producer.proving import Prover
from spotgrpo.producer.publishing import Outlet
from spotgrpo.producer.reports import Reporter
from spotgrpo.producer.rewards import Rewards
from spotgrpo.producer.room import Room, Seats
from spotgrpo.producer.sampler import Aborted, Sampled, Sampler
from spotgrpo.producer.saving import Saver
from spotgrpo.producer.segments import GroupVersions, SegmentCounts, too_old
from spotgrpo.producer.waiting import Watchdog
from spotgrpo.shared.config import WorkerConfig
from spotgrpo.shared.errors import IntegrityError, SpotGRPOError, WireError
from spotgrpo.shared.ids import Keys, Queues, TaskId
from spotgrpo.shared.manifest import RunDocument
from spotgrpo.shared.ports import Broker, Consumer, Delivery, ObjectStore
from spotgrpo.shared.steps import Step, reached
from spotgrpo.shared.stopping import Stopping
from spotgrpo.shared.wire import Group, Json, Task, decode_task

log = logging.getLogger(__name__)

TAKE_S = 0.5
LOOK_S = 1.0
CLOSE_S = 5.0
UNANSWERED_CLOSE_S = 0.5
"""For the last confirms and acks, and where the broker did not even answer the drain."""
MOST_HELD = 3
"""Prefetch windows of tasks held at most: those asked for beyond one window while the engine has room, and those of a
lost channel, which are worked on all the same, beside the new one's."""


class Decoder(Protocol):
    """The part of a tokenizer that a worker needs."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


def new_worker_id() -> str:
    """Host, process and a random part, so that a restarted worker is another one."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"


@dataclass(frozen=True)
class Wiring:
    """What a worker is connected to."""

    config: WorkerConfig
    document: RunDocument
    store: ObjectStore
    broker: Broker
    engine: Engine
    policy: PolicyWatcher
    rewards: Rewards
    tokenizer: Decoder
    stopping: Stopping
    stall_warn_s: float = 30.0
    worker_id: str = field(default_factory=new_worker_id)


class Worker:
    """One worker process. Everything here runs on one event loop; queues and bucket have threads of their own."""

    def __init__(self, wiring: Wiring) -> None:
        self._w = wiring
        self._keys, self._queues = Keys(wiring.document.run), Queues(wiring.document.run)
        self._room = Room(wiring.config.max_inflight)
        self._jobs: dict[TaskId, Job] = {}
        self._freed = asyncio.Event()
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sampler = Sampler(wiring.engine, self._count, wiring.config.segment_tokens)
        self._segments = SegmentCounts()
        self._partials = Partials(
            wiring.store, self._keys, wiring.worker_id, wiring.document.max_staleness
        )
        self._tokens = self._groups = self._begun = 0
        self._last_token = time.monotonic()
        self._is_draining = self._has_left = False
        self._saving: asyncio.Task[None] | None = None
        self._publisher = wiring.broker.publisher()
        self._consumer = wiring.broker.consumer(self._queues.tasks, self._prefetch)
        self._acks = Acks(self._consumer, MOST_HELD * self._prefetch)
        self._outlet = Outlet(wiring.store, self._keys, self._publisher)
        self._gate = Gate(
            wiring.document,
            self._room,
            wiring.policy,
            self._consumer,
            self._jobs,
            self._forget,
            self._activity,
            is_on=wiring.config.admission,
        )
        self._reporter = Reporter(
            wiring.worker_id, self._queues, self._publisher, self._values, wiring.config.report_s
        )

    async def run(self) -> None:
        """Work until told to stop or the run is finished; an engine that dies or fails a probe raises."""
        background = [
            self._spawn(self._w.policy.run()),
            self._spawn(self._reporter.run()),
            self._spawn(self._watch_engine()),
            self._spawn(self._watch_progress()),
        ]
        every_s = self._w.config.partial_every_s
        if every_s is not None:
            self._saving = self._spawn(Saver(self._jobs, self._partials, every_s).run())
            background.append(self._saving)
        prover = Prover(self._w.policy, self._w.config.probe_every_s, self._distrust)
        proving = self._spawn(prover.run())
        wakeups = self._subscribe()
        if wakeups is not None:
            background.append(self._spawn(self._wake_for_ever(wakeups)))
        stopped = asyncio.create_task(self._w.stopping.wait_async())
        finished = asyncio.create_task(self._w.policy.finished.wait())
        intake, gate = self._spawn(self._take_for_ever()), self._spawn(self._gate.run())
        close_s = CLOSE_S
        try:
            ends: set[asyncio.Future[Any]] = {stopped, finished, self._failure}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            for taking in (intake, gate, proving):
                taking.cancel()
            if self._failure.done():
                self._failure.result()
            log.info("the run is finished: leaving" if finished.done() else "stopping")
            drain_s = 0.0 if finished.done() else self._w.config.drain_s
            if not await self._drain(Patience(drain_s, self._w.stopping)):
                close_s = UNANSWERED_CLOSE_S
            if self._failure.done():  # meanwhile
                self._failure.result()
        finally:
            left = (*background, proving, intake, gate, stopped, finished, *self._works())
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            await self._close(close_s, wakeups)

    @property
    def _prefetch(self) -> int:
        """Tasks to hold: what the engine has room for, and one more so that it never waits for the next."""
        return max(1, self._w.config.max_inflight // self._w.document.sampling.group_size) + 1

    # ---- tasks ---------------------------------------------------------------------------------------------------

    async def _take_for_ever(self) -> None:
        while True:
            await self._room.nobody_waits()  # one task at most is begun without room for it
            if self._could_begin_more():
                self._consumer.ask_beyond()
            taking = asyncio.create_task(asyncio.to_thread(self._consumer.take, TAKE_S))
            try:
                delivery = await asyncio.shield(taking)
            except asyncio.CancelledError:  # the thread goes on, and may have taken one
                taking.add_done_callback(self._give_back)
                raise
            if delivery is not None:
                await self._begin(delivery)
                await asyncio.sleep(0)  # so that it has asked for room

    def _could_begin_more(self) -> bool:
        """Whether the window holds up what the engine has room for: last rollouts and rewards use it up too."""
        if self._gate.asks:
            return not self._gate.leaves_tasks
        is_all_begun = all(job.drafts for job in self._jobs.values())
        return is_all_begun and not self._publisher.blocked

    def _give_back(self, taking: asyncio.Task[Delivery | None]) -> None:
        """What came in the moment in which a drain began: nobody would know of it until the worker is gone."""
        if not taking.cancelled() and taking.exception() is None:
            delivery = taking.result()
            if delivery is not None:
                self._consumer.reject(delivery.handle, requeue=True)

    async def _begin(self, delivery: Delivery) -> None:
        try:
            task = decode_task(delivery.message.body)
            self._check(task)
        except WireError as exc:
            log.error("a task is dead-lettered: %s", exc)
            self._consumer.reject(delivery.handle, requeue=False)
            return
        job = self._jobs.get(task.task_id)
        if job is not None:  # a copy, or the channel was lost meanwhile
            job.handles.append(delivery.handle)
            return
        if self._acks.gave(task.task_id, delivery):
            return
        try:
            await self._few_are_held()
        except asyncio.CancelledError:
            self._consumer.reject(delivery.handle, requeue=True)
            raise
        job = Job(task, delivery.message, [delivery.handle], comes_again(delivery))
        self._jobs[task.task_id] = job
        self._begun += 1
        job.work = self._spawn(self._work(job))

    async def _few_are_held(self) -> None:
        """Wait while more is held than one channel may hand out twice: each one that is lost lets a window in anew."""
        while len(self._jobs) >= MOST_HELD * self._prefetch:
            self._freed.clear()
            await self._freed.wait()

    def _forget(self, job: Job) -> None:
        """It is no longer this worker's."""
        self._jobs.pop(job.task.task_id, None)
        self._freed.set()

    def _works(self) -> list[asyncio.Task[None]]:
        return [job.work for job in self._jobs.values() if job.work is not None]

    def _check(self, task: Task) -> None:
        """Raise WireError for a task that no worker could do; it must not wander from one to the next."""
        document = self._w.document
        if task.run != document.run:
            raise WireError(f"task of run {task.run!r} in a queue of run {document.run!r}")
        if not task.prompt_ids or len(task.prompt_ids) >= document.max_context:
            raise WireError(
                f"{len(task.prompt_ids)} prompt tokens do not fit a context of {document.max_context}"
            )

    async def _work(self, job: Job) -> None:
        """One task from version to ack. A drain that ends it finds the job in ``_jobs``, to be handed back."""
        task = job.task
        try:
            adopted, sampled = await self._sample(job)
        except Aborted:
            if not self._sampler.interrupted:
                raise
            return
        except RequestRefused as exc:
            log.error("task %s is dead-lettered: %s", task.task_id, exc)
            for handle in job.handles:
                self._consumer.reject(handle, requeue=False)
            self._forget(job)
            return
        job.enter(Stage.SCORING)
        self._gate.sampled(job)
        group = await self._score(task, adopted, sampled)
        reached(Step.WORKER_GENERATED)
        await self._publish(job, group)
        reached(Step.WORKER_CONFIRMED)
        self._gate.published(job, sampled)
        self._acks.give(task.task_id, job.handles)
        self._forget(job)
        self._groups += 1

    async def _sample(self, job: Job) -> tuple[Adopted, Sampled]:
        """The version first: a task that waits for one must not hold room. What is served may change meanwhile."""
        task = job.task
        found = await self._partials.find(task) if job.is_again else []
        while True:
            if self._version_for(task) is None:
                job.enter(Stage.ADOPTING)
                await self._come_to(task)
            job.enter(Stage.QUEUING)
            with self._room.seats(task.group_size) as seats:
                await seats.any()
                adopted = self._version_for(task)
                if adopted is None:
                    continue
                job.enter(Stage.SAMPLING)
                self._gate.began(job)
                job.drafts = self._partials.begin(
                    task, found, adopted.version, self._w.policy.takeovers
                )
                try:
                    return await self._generate(job, adopted, seats)
                except RequestRefused as exc:
                    if not any(draft.brought for draft in job.drafts):
                        raise
                    log.error("a partial of task %s is not used: %s", task.task_id, exc)
                    found = []

    async def _generate(self, job: Job, adopted: Adopted, seats: Seats) -> tuple[Adopted, Sampled]:
        """The group, and the version that it was on at its end."""
        switches = self._w.config.inflight == "switch"
        versions = GroupVersions(
            self._w.policy, job.task, adopted, self._segments, switches=switches
        )
        with versions:
            sampled = await self._sampler.sample(job.task, versions, job.drafts, seats)
        self._note_stale(job.task, sampled)
        return versions.adopted, sampled

    def _note_stale(self, task: Task, sampled: Sampled) -> None:
        """Say, once, and count what took so long that no learner can train it. It decides, and gets them all."""
        current, limit = self._w.policy.current, self._w.document.max_staleness
        if current is None or task.pinned is not None or task.kind != "train":
            return
        stale = too_old([one.versions for one in sampled.rollouts], current.version, limit)
        if stale and not self._segments.stale:
            log.warning(
                "%d rollouts of task %s have tokens more than max_staleness = %d versions older than %s: they "
                "take too long to be trained (train.max_staleness, sampling.max_new_tokens)",
                stale,
                task.task_id,
                limit,
                current.version,
            )
        self._segments.stale += stale

    def _version_for(self, task: Task) -> Adopted | None:
        """The version that a task would be sampled on now; None where it has to wait."""
        if task.pinned is not None:
            return self._w.policy.pinned(task.pinned)
        return self._w.policy.serves(task.min_version)

    async def _come_to(self, task: Task) -> None:
        """Wait until its version is there. RequestRefused where the one that it is pinned to cannot be had here."""
        await self._w.policy.at_least(task.min_version)
        if task.pinned is not None and not await self._w.policy.bring(task.pinned):
            raise RequestRefused(f"version {task.pinned} cannot be had here")

    @property
    def _submitted(self) -> int:
        """Sequences that the engine owes tokens for."""
        return self._room.used

    async def _score(self, task: Task, adopted: Adopted, sampled: Sampled) -> Group:
        ids = [rollout.token_ids.tolist() for rollout in sampled.rollouts]
        texts = [self._w.tokenizer.decode(one, skip_special_tokens=True) for one in ids]
        scored = await self._w.rewards.score(
            task.prompt, texts, ids, task.row, self._w.config.reward_timeout_s
        )
        rollouts = tuple(
            replace(rollout, reward=score.reward, reward_parts=score.parts)
            for rollout, score in zip(sampled.rollouts, scored, strict=True)
        )
        return Group(
            run=task.run,
            task_id=task.task_id,
            kind=task.kind,
            worker=self._w.worker_id,
            engine=self._w.engine.name,
            engine_version=self._w.engine.engine_version,
            manifest_sha256=adopted.manifest_sha256,
            prompt_ids=np.asarray(task.prompt_ids, dtype=np.int32),
            row=task.row,
            sampling=task.sampling,
            rollouts=rollouts,
            started_at=sampled.started_at,
            generated_at=sampled.generated_at,
            scored_at=time.time(),
        )

    async def _publish(self, job: Job, group: Group) -> None:
        """Until confirmed."""
        job.enter(Stage.STORING)
        message = await self._outlet.message(group)
        job.enter(Stage.PUBLISHING)
        await self._outlet.confirmed(self._queues.rollouts, message)

    # ---- the end -------------------------------------------------------------------------------------------------

    async def _drain(self, patience: Patience) -> bool:
        self._is_draining = True
        publish = functools.partial(self._outlet.confirmed, self._queues.tasks)
        drain = Drain(self._jobs, self._sampler, self._partials, self._consumer, publish)
        return await drain.run(patience)

    async def _close(self, timeout_s: float, wakeups: Consumer | None) -> None:
        for consumer in (wakeups, self._consumer):
            if consumer is not None:
                await asyncio.to_thread(consumer.close, timeout_s)
        self._has_left = True
        self._reporter.say()
        await asyncio.to_thread(self._publisher.close, timeout_s)
        self._outlet.close()
        await self._w.engine.close()

    # ---- background ----------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose failure ends the worker."""
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._failure.done():
            self._failure.set_exception(_innermost(error))

    def _distrust(self, error: IntegrityError) -> None:
        """What the engine gave must not leave: whatever would publish or store it takes no further step."""
        if not self._failure.done():
            self._failure.set_exception(error)
        for task in (*self._works(), *filter(None, [self._saving])):
            task.cancel()

    def _subscribe(self) -> Consumer | None:
        """Let "version N is out" wake the policy watcher; without permission polling alone is enough."""
        wakeups = self._w.broker.subscribe(self._queues.versions)
        if wakeups is None:
            log.info(
                "not allowed to hear of new versions: polling every %.1f s", self._w.config.poll_s
            )
            return None
        return wakeups

    async def _wake_for_ever(self, wakeups: Consumer) -> None:
        while not self._w.stopping.is_set():
            asked = time.monotonic()
            if await asyncio.to_thread(wakeups.take, TAKE_S) is not None:
                self._w.policy.wake()
            elif time.monotonic() - asked < TAKE_S / 2:  # it has ended: it would answer so for ever
                log.info("no more news of versions: polling every %.1f s", self._w.config.poll_s)
                return

    def _count(self, tokens: int) -> None:
        self._tokens += tokens
        self._last_token = time.monotonic()
        reached(Step.WORKER_GENERATING)

    async def _watch_engine(self) -> None:
        """An engine that gives no token while it has work would hold its tasks for ever behind a living heartbeat."""
        while True:
            await asyncio.sleep(1.0)
            if not self._submitted:
                self._last_token = time.monotonic()
            silent = time.monotonic() - self._last_token
            if silent > self._w.config.engine_stall_s:
                raise SpotGRPOError(
                    f"the engine gave no token for {silent:.0f} s with {self._submitted} sequences in flight"
                )

    async def _watch_progress(self) -> None:
        """Nobody waits in silence: where neither tokens nor groups nor tasks nor versions come, say for what."""
        config = self._w.config
        limits = Limits(config.max_inflight, config.engine_stall_s, config.reward_timeout_s)
        watchdog = Watchdog(self._w.stall_warn_s)
        while self._jobs or not self._is_draining:
            await asyncio.sleep(min(LOOK_S, self._w.stall_warn_s / 4))
            activity = self._activity()
            mark = (self._tokens, self._groups, self._begun, self._w.policy.counts.adopted)
            what = functools.partial(activity.waits_for, self._queues, limits)
            watchdog.look(mark, what, is_fine=activity.is_idle)

    def _activity(self) -> Activity:
        policy = self._w.policy
        return Activity(
            now=time.monotonic(),
            tasks=[Held(job.stage, job.since, job.task.min_version) for job in self._jobs.values()],
            serves=str(policy.current.version) if policy.current else None,
            refused_why=policy.refused_why,
            trouble=policy.trouble,
            inflight=self._submitted,
            is_blocked=self._publisher.blocked,
            is_connected=self._consumer.generation > 0,
            is_draining=self._is_draining,
            has_left=self._has_left,
            leaves_tasks=self._gate.leaves_tasks,
        )

    def _values(self) -> dict[str, Json]:
        activity = self._activity()
        return {
            "version": activity.serves,
            "state": activity.state,
            "engine": self._w.engine.name,
            "inflight": self._submitted,
            "tasks": len(self._jobs),
            "groups": self._groups,
            "tokens": self._tokens,
            "busy_s": self._gate.usage.busy_s,
            "idle_s": {str(why): seconds for why, seconds in self._gate.usage.idle_s.items()},
            "tasks_given_back": self._gate.given_back,
            "partials_saved": self._partials.counts.saved,
            "partials_resumed": self._partials.counts.resumed,
            "partials_stale": self._partials.counts.stale,
            "tokens_resumed": self._partials.counts.tokens_resumed,
            "rollouts_switched": self._segments.switched,
            "rollouts_made_room": self._segments.made_room,
            "rollouts_stale": self._segments.stale,
            "adopted": self._w.policy.counts.adopted,
            "refused": self._w.policy.counts.refused,
            "refused_why": activity.refused_why,
            "deltas": self._w.policy.counts.deltas,
            "deltas_fell_back": self._w.policy.counts.fell_back,
            "probes": dict(self._w.policy.counts.probes),
            "reward_failures": {
                str(name): int(count) for name, count in self._w.rewards.failures.items()
            },
        }


def _innermost(error: BaseException) -> BaseException:
    """The first error in a group, so that the exit code is its own."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
