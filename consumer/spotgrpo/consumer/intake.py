"""From deliveries to a step's batch: decode, check, dedupe, drop what is stale, in the order of age.

consumes:     the rollouts queue and the dead-letter queue
waits for:    ``groups_per_step`` usable groups
unblocked by: a delivery, or a commit that settles what fills the window
produces:     a batch of held groups; everything else it settles as flat, stale (quarantined ones too) or dead
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from spotgrpo.consumer.accounts import Accounts
from spotgrpo.consumer.advantages import Advantages, group_advantages
from spotgrpo.consumer.ahead import Ahead, Taken
from spotgrpo.consumer.losses.objective import Objective
from spotgrpo.consumer.losses.overlong import shaped_rewards
from spotgrpo.consumer.losses.plan import has_gradient
from spotgrpo.consumer.mismatch import MismatchWatch
from spotgrpo.consumer.pacing import Pacing
from spotgrpo.consumer.settlement import Settlement
from spotgrpo.consumer.staleness import Lag, is_sampled_by, lag_of, oldest_version
from spotgrpo.shared.config import TrainConfig
from spotgrpo.shared.errors import (
    IntegrityError,
    NotStored,
    SpotGRPOError,
    StoreUnavailable,
    WireError,
)
from spotgrpo.shared.ids import Keys, TaskId, lineage_version
from spotgrpo.shared.manifest import sha256_hex
from spotgrpo.shared.ports import Consumer, Delivery, Handle, ObjectStore
from spotgrpo.shared.retry import retry
from spotgrpo.shared.steps import Step, reached
from spotgrpo.shared.wire import Group, GroupRef, Sampling, decode_group, decode_group_ref

log = logging.getLogger(__name__)

LARGEST_REWARD = 1e9
"""Beyond it float32 loses what rewards differ by, and sums overflow."""
MOST_COUNTED = 1024
MOST_SHOWN = 32
OTHERS = "others"
"""Workers whose stale groups are counted each by itself, and of these the ones that a record names."""
POLL_S = 0.2
"""Longest wait for a delivery before the learner looks at everything else."""


@dataclass(frozen=True)
class Receipt:
    """What acks a delivery: the consumer it came from, and its handle there; and the group's object, if it has one."""

    consumer: Consumer
    handle: Handle
    object_key: str | None = None


@dataclass(frozen=True)
class Decoded:
    """What a delivery holds. No group where it is settled already or not asked for: its object may be gone."""

    task: TaskId
    group: Group | None
    object_key: str | None


@dataclass(frozen=True)
class HeldGroup:
    """A group that can be trained: its oldest version, and where the learner was when it came."""

    task: TaskId
    group: Group
    oldest: int
    arrived_at: int
    has_signal: bool

    def lag(self, version: int) -> Lag:
        return lag_of(self.oldest, self.arrived_at, version)


@dataclass(frozen=True)
class Expected:
    """What a group must look like to belong to this run."""

    run: str
    group_size: int
    sampling: Sampling
    vocabulary: int
    max_context: int

    def check(self, group: Group) -> None:
        """Raise WireError for a group that would be trained wrongly or crash the trainer."""
        if any(abs(rollout.reward or 0.0) > LARGEST_REWARD for rollout in group.rollouts):
            raise WireError(f"a reward beyond {LARGEST_REWARD:g}")
        if group.run != self.run:
            raise WireError(f"group of run {group.run!r} in a queue of run {self.run!r}")
        if len(group.rollouts) != self.group_size:
            raise WireError(f"group of {len(group.rollouts)} rollouts, not {self.group_size}")
        if group.sampling.temperature != self.sampling.temperature:
            raise WireError(
                f"sampled at temperature {group.sampling.temperature}, not {self.sampling.temperature}"
            )
        if not len(group.prompt_ids):
            raise WireError("group without a prompt")
        for ids in (group.prompt_ids, *(rollout.token_ids for rollout in group.rollouts)):
            if int(ids.max()) >= self.vocabulary:
                raise WireError(
                    f"token id {int(ids.max())} is outside the vocabulary of {self.vocabulary}"
                )
        longest = max(len(rollout.token_ids) for rollout in group.rollouts)
        if len(group.prompt_ids) + longest > self.max_context:
            raise WireError(
                f"{len(group.prompt_ids)} + {longest} tokens are over the context of {self.max_context}"
            )


class HeldOutPort(Protocol):
    """Who takes what comes of held-out tasks; ``consumer.evaluations`` is the real one."""

    def wants(self, task: TaskId) -> bool: ...
    def answered(self, task: TaskId, group: Group) -> None: ...
    def refused(self, task: TaskId) -> None: ...


@dataclass
class Tally:
    """Counts by worker, of which a run may see any number: the small ones are counted together once there are many."""

    _counts: Counter[str] = field(default_factory=Counter)
    _others: int = 0

    def add(self, worker: str) -> None:
        """One more of ``worker``."""
        self._counts[worker] += 1
        if len(self._counts) > MOST_COUNTED:
            self._counts, before = Counter(), self._counts
            self._counts.update(dict(before.most_common(MOST_COUNTED // 2)))
            self._others += before.total() - self._counts.total()

    def largest(self, most: int = MOST_SHOWN) -> dict[str, int]:
        """The ``most`` largest counts, and all others as one."""
        shown = dict(self._counts.most_common(most))
        others = self._counts.total() + self._others - sum(shown.values())
        return {**shown, OTHERS: others} if others else shown

    @property
    def total(self) -> int:
        """Of all workers."""
        return self._counts.total() + self._others


@dataclass
class Seen:
    """What came in since the run was taken over; for metrics."""

    tokens: int = 0
    groups: int = 0
    malformed: int = 0
    dropped: Tally = field(default_factory=Tally)
    """Stale groups by worker."""
    quarantined: Tally = field(default_factory=Tally)
    """Groups that were not trained since their worker was in quarantine, by worker; the books have them as stale."""
    accounts: Accounts = field(default_factory=Accounts)


class Intake:
    """The learner's side of the rollouts queue. Used by the main thread alone; during a step its ``Ahead`` decodes."""

    def __init__(
        self,
        rollouts: Consumer,
        dead: Consumer,
        store: ObjectStore,
        keys: Keys,
        settlement: Settlement[Receipt],
        expected: Expected,
        train: TrainConfig,
        pacing: Pacing,
        objective: Objective,
        watch: MismatchWatch,
        epoch: int,
        stopping: threading.Event,
        evaluations: HeldOutPort | None = None,
        held_out: Expected | None = None,
    ) -> None:
        self._evaluations, self._held_out = evaluations, held_out
        self._rollouts, self._dead = rollouts, dead
        self._ahead: Ahead[Decoded] = Ahead(rollouts, self._decode, pacing.window)
        self._store, self._keys = store, keys
        self._settlement, self._expected = settlement, expected
        self._train, self._pacing, self._objective = train, pacing, objective
        self._watch = watch
        self._epoch, self._stopping = epoch, stopping
        self._held: dict[TaskId, HeldGroup] = {}
        self.seen = Seen()

    def next_batch(
        self,
        version: int,
        on_wait: Callable[[bool], None],
        is_over: Callable[[], bool] = lambda: False,
    ) -> list[HeldGroup]:
        """The next step's groups, oldest first; fewer only where no more can come; empty once told to stop or over.

        Args:
            version: number of the version whose weights the gradient will be taken at.
            on_wait: called again and again while there is no batch, with True where settled tasks or free issue
                budget wait for a commit of their own (rule 5).
            is_over: whether the run ends here, whatever comes.
        """
        while not (self._stopping.is_set() or is_over()):
            if not self._receive(version):
                break
            self._drop_stale(version)
            self._drop_quarantined()
            usable = sorted(self._held.values(), key=lambda held: (held.oldest, held.task))
            if len(usable) >= self._pacing.groups_per_step or (
                usable and self._nothing_more_comes(len(usable), version)
            ):
                batch = usable[: self._pacing.groups_per_step]
                for held in batch:
                    self.seen.accounts.batched(held.group, held.lag(version))
                    del self._held[held.task]
                return batch
            on_wait(self._settlement.has_settleable or self._can_issue(version))
        return []

    def preparing(self) -> contextlib.AbstractContextManager[None]:
        """While a step runs on the main thread: what comes is taken and decoded, and waits for the next batch."""
        return self._ahead.busy(len(self._held))

    def listen(self, version: int) -> bool:
        """Take in what is there, for a learner that trains no more; False once told to stop."""
        return not self._stopping.is_set() and self._receive(version)

    def _nothing_more_comes(self, usable: int, version: int) -> bool:
        if self._settlement.in_flight:
            return False  # what it acks makes room, what it issues may come
        if self._settlement.receipts >= self._pacing.window:
            return True  # a full prefetch window must never stand still
        if self._settlement.has_settleable or self._can_issue(version):
            return False
        return self._settlement.unsettled == usable

    def _can_issue(self, version: int) -> bool:
        return self._pacing.budget(version, self._settlement.unsettled) > 0

    def _receive(self, version: int) -> bool:
        """Take in what is there; wait a moment if nothing is. False if told to stop while the bucket was away."""
        self._settlement.drop_void(_is_void)
        try:
            if (
                self._rollouts.generation
            ):  # else another learner may lead, and these may be its dead letters
                self._receive_dead()
            taken = self._ahead.take(POLL_S)
            while taken is not None:
                self._accept(taken, version)
                taken = self._ahead.take(0) if len(self._held) < self._pacing.window else None
        except StoreUnavailable:
            if not self._stopping.is_set():
                raise
            return False
        return True

    def _accept(self, taken: Taken[Decoded], version: int) -> None:
        delivery = taken.delivery
        try:
            decoded = taken.result()
            if (
                decoded is None or decoded.group is None
            ):  # whether it is wanted is a question of now
                decoded = self._decode(delivery)
            task, group, object_key = decoded.task, decoded.group, decoded.object_key
            if group is not None:
                self._check_versions(group, version)
            if task.is_held_out:
                self._hand_on(task, group)
        except WireError as exc:
            log.error(
                "a group from worker %s is dead-lettered: %s",
                delivery.message.headers.get("worker"),
                exc,
            )
            self.seen.malformed += 1
            self._rollouts.reject(delivery.handle, requeue=False)
            return
        if task.is_held_out:
            self._rollouts.ack([delivery.handle])
            reached(Step.LEARNER_HEARD)
            self._drop_body(object_key)
            return
        receipt = Receipt(self._rollouts, delivery.handle, object_key)
        verdict = self._settlement.receive(task, receipt)
        if verdict == "duplicate":
            self._rollouts.ack([delivery.handle])
            self._drop_body(object_key)
        elif verdict == "held" and group is not None:
            self._hold(task, group, version)

    def _hand_on(self, task: TaskId, group: Group | None) -> None:
        """A held-out group is outside the books: it counts for the evaluation that wants it, or for nothing."""
        if self._evaluations is None or group is None:
            return
        if self._watch.refuses(group.worker):
            self._evaluations.refused(task)
        else:
            self._evaluations.answered(task, group)

    def _is_wanted(self, task: TaskId) -> bool:
        if task.is_held_out:
            return self._evaluations is not None and self._evaluations.wants(task)
        return task in self._settlement.committed.outstanding

    def _decode(self, delivery: Delivery) -> Decoded:
        """Checked but for what the learner's version says; during a step on a thread of its own."""
        task = TaskId.parse(str(delivery.message.headers.get("task", "")))
        body, key = delivery.message.body, None
        expected = self._held_out if task.is_held_out else self._expected
        if delivery.message.headers.get("kind") == "group_ref":
            ref = decode_group_ref(body)
            key = self._keys.group(task, ref.sha256)
            if ref.key != key:
                raise WireError(f"reference to {ref.key!r}, which is no group of task {task}")
            if not self._is_wanted(task):
                return Decoded(task, None, key)
            body = self._fetch(ref)
        if expected is None or (task.is_held_out and not self._is_wanted(task)):
            return Decoded(task, None, key)
        group = decode_group(body)
        if group.task_id != task:
            raise WireError(f"header says task {task}, body says {group.task_id}")
        expected.check(group)
        return Decoded(task, group, key)

    def _fetch(self, ref: GroupRef) -> bytes:
        try:
            found = retry(
                f"reading {ref.key}", lambda: self._store.get(ref.key), stopping=self._stopping
            ).body
        except NotStored as exc:
            raise WireError(f"{ref.key} is not in the bucket") from exc
        if len(found) != ref.size or sha256_hex(found) != ref.sha256:
            raise WireError(f"{ref.key} does not have the size and sha256 of its reference")
        return found

    def _check_versions(self, group: Group, version: int) -> None:
        """A version that this line never had would never be stale."""
        for run in {run for rollout in group.rollouts for run in rollout.versions}:
            counts_as = lineage_version(run.version, self._settlement.committed.takeovers)
            if run.version.epoch > self._epoch or counts_as > version:
                raise WireError(f"sampled by {run.version}, which was never served")

    def _drop_body(self, object_key: str | None) -> None:
        """The object of a group that was settled before it came; failing to delete costs space."""
        if object_key is not None:
            with contextlib.suppress(SpotGRPOError):
                self._store.delete([object_key])

    def _hold(self, task: TaskId, group: Group, version: int) -> None:
        self.seen.groups += 1
        self.seen.tokens += group.tokens
        takeovers = self._settlement.committed.takeovers
        oldest = oldest_version(group, takeovers)
        if is_sampled_by(group, version, takeovers):
            self._watch.arrived(group, version)
        advantages = self._advantages(group)
        is_trained = has_gradient(group, advantages, self._objective)
        held = HeldGroup(task, group, oldest, version, is_trained)
        if self._train.refill_flat and not (is_trained and advantages.has_signal):
            self._settlement.settle("flat", [task])
        else:
            self._held[task] = held

    def _advantages(self, group: Group) -> Advantages:
        """As the trainer will have them but for the scale, which may be that of a whole step."""
        return group_advantages(shaped_rewards(group, self._objective), "none")

    def _drop_stale(self, version: int) -> None:
        for held in list(self._held.values()):
            lag = held.lag(version)
            if lag.total > self._pacing.max_staleness:
                log.info(
                    "task %s is stale: lag %d in flight, %d in queue",
                    held.task,
                    lag.in_flight,
                    lag.in_queue,
                )
                self._settlement.settle("stale", [held.task])
                self.seen.dropped.add(held.group.worker)
                self.seen.accounts.drop(held.group, lag, self._pacing.max_staleness)
                del self._held[held.task]

    def _drop_quarantined(self) -> None:
        """In the books they are stale: nothing was trained of them, and their prompts are tried again."""
        for held in list(self._held.values()):
            worker = held.group.worker
            if self._watch.refuses(worker):
                log.info("task %s is not trained: worker %s is in quarantine", held.task, worker)
                self._settlement.settle("stale", [held.task])
                self.seen.quarantined.add(worker)
                self.seen.accounts.quarantine(held.group)
                del self._held[held.task]

    def _receive_dead(self) -> None:
        """Dead letters pass the same test as groups; their bodies are kept for people."""
        while (delivery := self._dead.take(0)) is not None:
            headers = delivery.message.headers
            try:
                task = TaskId.parse(str(headers.get("task", "")))
            except WireError:
                log.error(
                    "a dead letter without a task id is dropped: %d bytes",
                    len(delivery.message.body),
                )
                self._keep_dead(
                    self._keys.dead(f"unknown.{_short(delivery.message.body)}"), delivery
                )
                self._dead.ack([delivery.handle])
                continue
            if task.is_held_out:
                log.warning("held-out task %s was refused by a worker, or its answer was", task)
                self._dead.ack([delivery.handle])
                if self._evaluations is not None:
                    self._evaluations.refused(task)
                continue
            verdict = self._settlement.receive(task, Receipt(self._dead, delivery.handle))
            if verdict == "duplicate":
                self._dead.ack([delivery.handle])
            elif verdict == "held":
                log.error("task %s is dead after too many deliveries or an unreadable answer", task)
                self._keep_dead(self._keys.dead(task), delivery)
                self._settlement.settle("dead", [task])

    def _keep_dead(self, key: str, delivery: Delivery) -> None:
        try:
            retry(
                f"storing {key}",
                lambda: self._store.create(key, delivery.message.body),
                stopping=self._stopping,
            )
        except IntegrityError:
            log.info("%s holds another body already; the first is kept", key)


def _is_void(receipt: Receipt) -> bool:
    return receipt.handle.generation != receipt.consumer.generation


def _short(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]
