"""Tasks from prompts: what a task id stands for, when it is published, and when again.

A task is a pure function of the run's prompt order, its id and the version at issue, so that a takeover or a
reissue publishes the same task. Nothing here decides whether a task may be published: ids come from a committed
ledger (rule 4).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np

from spotgrpo.consumer.prompts import PromptSource
from spotgrpo.shared.config import Config
from spotgrpo.shared.ids import Queues, TaskId
from spotgrpo.shared.ports import Message, Publisher, QueueDepth
from spotgrpo.shared.wire import AGAIN, SCHEMA, Sampling, Task, encode_task

log = logging.getLogger(__name__)

LOOK_AGAIN_S = 5.0
"""Between two looks at the queue, at most: tasks may wait there for as long as no worker comes."""
LONGEST_BACKOFF = 16
"""A task is published again after reissue_after_s, then twice as long, … up to this many times as long."""


def rollout_seeds(seed: int, task: TaskId, group_size: int) -> tuple[int, ...]:
    """One seed (31 bits) for each rollout: same run seed and task, same seeds; every attempt has its own."""
    sequence = np.random.SeedSequence(entropy=(seed, task.index, task.attempt))
    return tuple(int(word) >> 1 for word in sequence.generate_state(group_size, np.uint32))


_Due = tuple[TaskId, int, float]
"""A task, its version at issue, and the seconds that it gave no sign for."""


@dataclass
class _Timer:
    """When a task is published again: ``wait`` seconds after its last publish was confirmed.

    ``place`` is that of its last publish among all.
    """

    due: float
    wait: float
    place: int
    is_confirmed: bool = False


class Issuer:
    """Publishes tasks; safe to call from the committer's thread and the main one."""

    def __init__(
        self,
        prompts: PromptSource,
        publisher: Publisher,
        config: Config,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prompts, self._publisher, self._config, self._clock = (
            prompts,
            publisher,
            config,
            clock,
        )
        self._queue = Queues(config.run.id).tasks
        self._timers: dict[TaskId, _Timer] = {}
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._look_at = 0.0
        self._places = itertools.count(1)
        self._settled_place = 0

    def task(self, task_id: TaskId, issued_at: int) -> Task:
        """The task that ``task_id``, issued at version number ``issued_at``, stands for.

        It asks for that version or a newer one: as many tasks are outstanding as can be trained within
        ``max_staleness`` if each is sampled with the version at its issue, and none of them if with an older one.
        """
        sampling = self._config.sampling
        row = self._prompts[task_id.index]
        return Task(
            run=self._config.run.id,
            task_id=task_id,
            prompt_ids=row.prompt_ids,
            prompt=row.prompt,
            row=row.row,
            sampling=self.sampling,
            seeds=rollout_seeds(self._config.run.seed, task_id, sampling.group_size),
            min_version=issued_at,
        )

    @property
    def sampling(self) -> Sampling:
        """The run's sampling parameters as tasks carry them."""
        sampling = self._config.sampling
        return Sampling(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            stop=tuple(sampling.stop),
            stop_token_ids=tuple(sampling.stop_token_ids),
        )

    def publish(self, tasks: Iterable[tuple[TaskId, int]], *, again: bool = False) -> None:
        """Publish tasks (id, version at issue) that a committed ledger holds.

        ``again`` says that an earlier learner may have published them, so that a worker may have left a partial.
        """
        for task_id, issued_at in tasks:
            self._publish(task_id, issued_at, self._config.train.reissue_after_s, again=again)

    def _publish(self, task_id: TaskId, issued_at: int, wait: float, *, again: bool) -> None:
        with self._lock:
            body = encode_task(self.task(task_id, issued_at))
            timer = _Timer(self._clock() + wait, wait, next(self._places))
            self._timers[task_id] = timer
        done = self._publisher.publish(self._queue, self._message(task_id, body, again=again))
        done.add_done_callback(lambda future: self._confirmed(timer, future))

    def _confirmed(self, timer: _Timer, future: Future[None]) -> None:
        """On the publisher's thread. An error is for good: the loop raises it."""
        error = future.exception()
        with self._lock:
            if error is not None:
                self._error = self._error or error
            timer.is_confirmed = error is None
            timer.due = self._clock() + timer.wait

    @property
    def unconfirmed(self) -> set[TaskId]:
        """Tasks that the broker has not confirmed: they are lost with this learner, if it ends now."""
        with self._lock:
            return {task for task, timer in self._timers.items() if not timer.is_confirmed}

    def check(self) -> None:
        """Raise what keeps tasks from being published for good, if anything does."""
        if self._error is not None:
            raise self._error

    def _message(self, task_id: TaskId, body: bytes, *, again: bool) -> Message:
        headers: dict[str, str | int] = {
            "run": self._config.run.id,
            "task": str(task_id),
            "schema": SCHEMA,
            "kind": "task",
            **({AGAIN: 1} if again else {}),
        }
        return Message(body, message_id=str(task_id), headers=headers)

    def expect(self, tasks: Iterable[TaskId]) -> None:
        """Start the reissue timers of outstanding tasks that an earlier learner published."""
        with self._lock:
            wait = self._config.train.reissue_after_s
            for task_id in tasks:
                timer = _Timer(self._clock() + wait, wait, next(self._places), is_confirmed=True)
                self._timers.setdefault(task_id, timer)

    def forget(self, tasks: Iterable[TaskId]) -> None:
        """Drop the timers of settled tasks."""
        with self._lock:
            for task_id in tasks:
                timer = self._timers.pop(task_id, None)
                if timer is not None:
                    self._settled_place = max(self._settled_place, timer.place)

    def reissue(
        self,
        missing: Iterable[tuple[TaskId, int]],
        depth: Callable[[str], QueueDepth | None],
    ) -> list[TaskId]:
        """Publish again, under the same ids, the tasks of ``missing`` that gave no sign for too long.

        Not while a publish of the same task is unconfirmed: the publisher repeats that itself. Not while it may wait
        in its queue either, since a copy would be generated for nothing: it does not once the queue is empty, or once
        a task that was published after it has been answered. In a run that flows the queue may never be seen empty.
        """
        after_s = self._config.train.reissue_after_s
        due, overtaken = self._due(dict(missing))
        if len(overtaken) < len(due) and not self._is_queue_empty(depth, after_s):
            due = overtaken
        longest = LONGEST_BACKOFF * after_s
        for task_id, issued_at, waited in due:
            log.warning("task %s gave no sign for %.0f s: publishing it again", task_id, waited)
            self._publish(task_id, issued_at, min(2 * waited, longest), again=True)
        return [task_id for task_id, _, _ in due]

    def _is_queue_empty(self, depth: Callable[[str], QueueDepth | None], after_s: float) -> bool:
        """Whether no task waits; asked now and then only, False in between."""
        if self._clock() < self._look_at:
            return False
        tasks = depth(self._queue)
        if tasks is not None and not tasks.ready:
            return True
        self._look_at = self._clock() + min(LOOK_AGAIN_S, after_s)
        return False

    def _due(self, missing: Mapping[TaskId, int]) -> tuple[list[_Due], list[_Due]]:
        """Of ``missing``: what is due, and what of that a later task has overtaken."""
        now = self._clock()
        due: list[_Due] = []
        overtaken: list[_Due] = []
        with self._lock:
            answered = max(
                (timer.place for task, timer in self._timers.items() if task not in missing),
                default=0,
            )
            newest = max(answered, self._settled_place)
            for task_id, issued_at in missing.items():
                timer = self._timers.get(task_id)
                if timer is not None and timer.is_confirmed and now >= timer.due:
                    due.append((task_id, issued_at, timer.wait))
                    if timer.place < newest:
                        overtaken.append(due[-1])
        return due, overtaken
