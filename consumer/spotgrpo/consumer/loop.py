"""The loop that is the run, and what a landed commit sets going.

Each part owns its state: ``Settlement`` the books, ``Committer`` the bucket, ``Intake`` what came in, ``Issuer``
what goes out, the trainer the weights. The loop owns the order in which they are asked.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

from spotgrpo.consumer.commit import Commit, NewVersion
from spotgrpo.consumer.pacing import Pacing
from spotgrpo.consumer.staleness import is_sampled_by
from spotgrpo.shared.errors import StoreUnavailable
from spotgrpo.shared.ids import PolicyVersion
from spotgrpo.shared.ports import Message
from spotgrpo.shared.steps import Step, reached
from spotgrpo.shared.wire import Report, encode_report

if TYPE_CHECKING:
    import threading

    from spotgrpo.consumer.commit import Committer
    from spotgrpo.consumer.evaluations import Unevaluated
    from spotgrpo.consumer.intake import HeldGroup, Intake, Receipt
    from spotgrpo.consumer.issuer import Issuer
    from spotgrpo.consumer.ledger import Ledger
    from spotgrpo.consumer.limits import Limits
    from spotgrpo.consumer.mismatch import MismatchWatch
    from spotgrpo.consumer.packing import Float32Array
    from spotgrpo.consumer.progress import Progress, StepStats
    from spotgrpo.consumer.requeue import Requeues
    from spotgrpo.consumer.retention import Retention
    from spotgrpo.consumer.roster import Roster
    from spotgrpo.consumer.settlement import Settlement
    from spotgrpo.consumer.skips import Skips
    from spotgrpo.shared.ids import Queues
    from spotgrpo.shared.manifest import Latest, Probe, Serving
    from spotgrpo.shared.ports import LeaderConsumer, Publisher, QueueDepth
    from spotgrpo.shared.wire import Group

log = logging.getLogger(__name__)
T = TypeVar("T")

__all__ = ["AfterCommit", "Ownership", "Pacing", "TrainerPort", "TrainingLoop"]

OWNERSHIP_S = 2.0
LAST_COMMIT_S = 30.0
"""How long a learner that was told to stop waits for the commit in flight."""
COMMIT_POLL_S = 0.5


class TrainerPort(Protocol):
    """What the loop needs of a trainer; ``consumer.trainer.Trainer`` is the real one."""

    @property
    def modules(self) -> int:
        """Modules that carry the adapter."""

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""

    def step(self, groups: Sequence[Group]) -> StepStats:
        """One optimizer step on groups that have a signal; where it is skipped, nothing of ``state`` changes."""

    def adapter_files(self) -> dict[str, bytes]:
        """The PEFT folder of the weights as they are."""

    def probe(self) -> Probe:
        """Tokens that tell these weights from the base."""

    def state(self) -> bytes:
        """All that an exact continuation needs."""

    def restore(self, state: bytes) -> None:
        """Continue from ``state``."""

    def logprobs(
        self, group: Group, *, temperature: float | None = None, adapter: bool = True
    ) -> Sequence[Float32Array]:
        """Of each rollout's tokens: under the weights as they are and at the sampling temperature, unless told else."""


@dataclass(frozen=True)
class AfterCommit:
    """What may happen only once a commit has landed. Runs on the committer's thread."""

    settlement: Settlement[Receipt]
    issuer: Issuer
    retention: Retention
    publisher: Publisher
    queues: Queues
    requeues: Requeues
    evaluations: Unevaluated

    def serving(self, serving: Serving) -> None:
        """Wake pollers early; polling alone is enough. Where the version is to be evaluated, it can be."""
        self.evaluations.served(serving)
        self.publisher.broadcast(self.queues.versions, Message(str(serving.policy).encode()))

    def durable(self, latest: Latest) -> None:
        """Ack what the ledger settled and publish what it issued (rules 1, 3 and 4), then delete leftovers."""
        landed = self.settlement.landed()
        for consumer in {receipt.consumer for receipt in landed.acks}:
            consumer.ack(
                [receipt.handle for receipt in landed.acks if receipt.consumer is consumer]
            )
        reached(Step.LEARNER_ACKED)
        self.issuer.forget(landed.settled)
        outstanding = self.settlement.committed.outstanding
        self.issuer.publish([(task, outstanding[task]) for task in landed.issued])
        reached(Step.LEARNER_ISSUED)
        self.requeues.landed()
        bodies = [receipt.object_key for receipt in landed.acks if receipt.object_key]
        self.retention.apply(latest, bodies, self.settlement.committed)


@dataclass
class Ownership:
    """While the connection that leads is lost, another learner may take over: look at ``latest.json`` now and then.

    Args:
        rollouts: the consumer on that connection.
        check_mine: raises Fenced once ``latest.json`` is another's, StoreUnavailable where that cannot be known.
    """

    rollouts: LeaderConsumer
    check_mine: Callable[[], None]
    clock: Callable[[], float] = time.monotonic
    _looked: float = 0.0

    @property
    def is_sure(self) -> bool:
        """True while the leader queue is held."""
        return self.rollouts.generation != 0

    def check(self) -> None:
        """Raise Fenced if the run was taken over meanwhile."""
        if self.is_sure or self.clock() - self._looked < OWNERSHIP_S:
            return
        self._looked = self.clock()
        with contextlib.suppress(StoreUnavailable):
            self.check_mine()


@dataclass
class TrainingLoop:
    """Steps from ``version`` to ``pacing.max_steps``, or to another limit."""

    trainer: TrainerPort
    settlement: Settlement[Receipt]
    intake: Intake
    watch: MismatchWatch
    issuer: Issuer
    requeues: Requeues
    committer: Committer
    evaluations: Unevaluated
    limits: Limits
    progress: Progress
    skips: Skips
    roster: Roster
    pacing: Pacing
    publisher: Publisher
    ownership: Ownership
    depth: Callable[[str], QueueDepth | None]
    stopping: threading.Event
    base_sha256: str
    queues: Queues
    source: str
    epoch: int
    version: int
    give_up_at: float | None = None
    """Monotonic seconds at which a learner that was told to stop waits for the bucket no longer."""
    has_given_up: bool = False

    @property
    def is_trained(self) -> bool:
        """True once the last version is trained."""
        return self.version >= self.pacing.max_steps

    @property
    def ended(self) -> str:
        """The limit that the run has reached, as key and value; empty while it goes on.

        Where it is ``max_steps``, the evaluation that is left is waited for.
        """
        found = self.limits.reached(self.evaluations.comparable)
        if not found and self.is_trained and not self.evaluations.is_busy:
            found = f"train.max_steps = {self.pacing.max_steps}"
        return found

    @property
    def is_done(self) -> bool:
        """True once nothing is left to be done but to say so."""
        return bool(self.ended)

    def run(self) -> None:
        """Train until done or told to stop.

        Invariant: between two turns every outstanding task is in a queue, in a worker's hands, held by the intake,
        or settled in a ledger that is on its way to the bucket.
        """
        while not (self.is_trained or self.is_done or self.stopping.is_set()):
            self._look_after()
            batch = self._next_batch()
            if batch:
                self._train_on(batch)
        self._await_evaluation()
        self._finish()

    def publish_outstanding(self, ledger: Ledger, *, again: bool) -> None:
        """What may be in no queue at once, the rest if it gives no sign (rule 4).

        That is what the last ledger issued, and what the broker had not confirmed when that was written: in an outage a
        learner commits what it holds, and may be gone before the broker is back. After a takeover (``again``) it may
        have published all of it.
        """
        outstanding = ledger.outstanding
        unsure = [task for task in (*ledger.unpublished, *ledger.issued) if task in outstanding]
        self.issuer.publish([(task, outstanding[task]) for task in unsure], again=again)
        self.issuer.expect(set(outstanding) - set(unsure))

    # ---- one turn ----------------------------------------------------------------------------------------------

    def _next_batch(self) -> list[HeldGroup]:
        with self.progress.waiting_for_rollouts():
            return self.intake.next_batch(self.version, self._while_waiting, lambda: self.is_done)

    def _await_evaluation(self) -> None:
        """After the last step: what is left to be evaluated. Whatever else comes is not trained any more."""
        while not self.is_done and self.intake.listen(self.version):
            self._while_waiting(self.settlement.has_settleable)

    def _look_after(self) -> None:
        """Whether the run is ours, whether a task is lost (rule 4), and what people ask to be tried again.

        At every turn: a learner that always finds groups enough would never look while it waits.
        """
        self.issuer.check()
        self.ownership.check()
        if self.ownership.is_sure:
            self.issuer.reissue(self.settlement.missing(), self.depth)
            self.evaluations.look(self.depth, is_trained=self.is_trained)
        self.requeues.look()

    def _while_waiting(self, settleable: bool) -> None:
        """Between two looks for deliveries: commit without a step (rule 5), say what is missing."""
        self.committer.check()
        self._look_after()
        if settleable and self.committer.idle and self._is_worth_a_commit:
            self._commit(None, None)
        self.roster.listen()
        self.progress.still_waiting(
            self.settlement.unsettled,
            self.depth,
            self.roster,
            leads=self.ownership.is_sure,
            quarantined=self.watch.quarantined,
            evaluation=self.evaluations.describe(),
        )

    def _train_on(self, batch: list[HeldGroup]) -> None:
        """One optimizer step and its commit on the way. A batch that makes no version is settled without one."""
        started = time.monotonic()
        lags = [held.lag(self.version) for held in batch]
        trained = [held for held in batch if held.has_signal]
        stats = None
        if trained:
            with self.intake.preparing():
                stats = self.trainer.step([held.group for held in trained])
        is_skipped = stats is not None and stats.skipped
        if stats is not None and not self._note_step(trained, stats):
            return  # told to stop: this step is redone
        reached(Step.LEARNER_STEPPED)
        self.settlement.settle("dead" if is_skipped else "trained", [held.task for held in trained])
        self.settlement.settle("flat", [held.task for held in batch if not held.has_signal])
        seconds = time.monotonic() - started
        if not self._land():
            return  # told to stop while the bucket is away: this step is redone
        if trained and not is_skipped:
            self._hand_over_version()
        else:
            self._commit(None, None)
        self.progress.stepped(self.version, stats, [held.group for held in batch], lags, seconds)
        self.limits.trained(self.progress.reward)
        self._report()
        if self.skips.are_too_many and self._land():
            raise self.skips.give_up()

    def _note_step(self, trained: Sequence[HeldGroup], stats: StepStats) -> bool:
        """What a step says of the workers; of one that was skipped, its batch is stored, False if told to stop first.

        The weights that it was taken at are made durable before: a replay needs their trainer state.
        """
        if not stats.skipped:
            self.skips.stepped()
            self._note_fits(trained, stats)
            return True
        if not self._land():
            return False
        if self.committer.latest.serving.policy != self.committer.latest.durable.policy:
            self._commit(None, None)
            if not self._land():
                return False
        groups = [held.group for held in trained]
        return self.skips.record(groups, stats, self.version, self.committer.latest.durable)

    def _note_fits(self, trained: Sequence[HeldGroup], stats: StepStats) -> None:
        """What the step says of the workers whose groups are of the weights that it was taken at."""
        takeovers = self.settlement.committed.takeovers
        fits = [
            (held.group.worker, stats.fits[held.task])
            for held in trained
            if held.task in stats.fits and is_sampled_by(held.group, self.version, takeovers)
        ]
        self.watch.trained(fits, self.version)

    @property
    def _is_worth_a_commit(self) -> bool:
        """Settled tasks alone cost a ledger; with versions that are not durable yet they cost a trainer state too."""
        latest = self.committer.latest
        if latest.serving.policy == latest.durable.policy:
            return True
        is_full = self.settlement.receipts >= self.pacing.window
        return is_full or self.pacing.is_durable_due(self.version, self.settlement.unsettled)

    # ---- commits -----------------------------------------------------------------------------------------------

    def _hand_over_version(self) -> None:
        """The weights as they are now, to a committer that is idle.

        It stores them while the rest of the version is made here; the next step waits for both copies, not for it.
        """
        self.version += 1
        self.evaluations.made(self.version)
        probe: Future[Probe] = Future()
        state: Future[bytes] = Future()
        new = NewVersion(
            version=PolicyVersion(self.epoch, self.version),
            parent=self.committer.latest.serving.policy,
            files=self.trainer.adapter_files(),
            modules=self.trainer.modules,
            base_sha256=self.base_sha256,
            probe=probe.result,
        )
        is_durable = self.pacing.is_durable_due(self.version, self.settlement.unsettled)
        if is_durable:
            self._commit(new, state.result)
        else:
            self._submit(Commit(new, None, None))
        _keep(probe, self.trainer.probe)
        if is_durable:
            _keep(state, self.trainer.state)

    def _commit(self, new: NewVersion | None, state: Callable[[], bytes] | None) -> None:
        """Give the idle committer a ledger with all that is settled, with a version or alone."""
        latest = self.committer.latest
        if new is None and latest.serving.policy != latest.durable.policy:
            found: Future[bytes] = Future()  # versions are served that no state was stored for yet
            _keep(found, self.trainer.state)
            state = found.result
        ended = self.ended
        ledger = self.settlement.write(
            version=self.version,
            issue=lambda outstanding: self._budget(outstanding, ended),
            max_attempts=0 if self.is_trained or ended else self.pacing.max_attempts,
            parent=latest.durable.ledger,
            requeue=self.requeues.wanted,
            unconfirmed=self.issuer.unconfirmed,
        )
        self.requeues.written(ledger)
        self._submit(Commit(new, ledger, state, ended=ended))

    def _budget(self, outstanding: int, ended: str) -> int:
        return 0 if ended else self.pacing.budget(self.version, outstanding)

    def _submit(self, commit: Commit) -> None:
        """With what workers forecast by, and how the run stands."""
        lately = self.progress.lately
        self.committer.submit(
            replace(
                commit,
                step_s=lately.step_s,
                group_tokens=lately.group_tokens,
                lead_s=lately.train_s + self.committer.serving_s,
                wall_s=self.limits.wall_s,
                evaluated=self.evaluations.evaluated,
            )
        )

    def _land(self) -> bool:
        """Wait for the commit in flight as long as it takes; once told to stop, LAST_COMMIT_S in all, then False.

        False for good, though it may land after all: the step of which nothing was handed over is settled by then,
        and a commit would say so without the weights that it made.
        """
        with self.progress.waiting_for_commit():
            while not self.has_given_up and not self.committer.wait_idle(timeout_s=COMMIT_POLL_S):
                self.progress.still_committing()
                if self.stopping.is_set():
                    self.give_up_at = self.give_up_at or time.monotonic() + LAST_COMMIT_S
                    self.has_given_up = time.monotonic() >= self.give_up_at
        return not self.has_given_up

    def _finish(self) -> None:
        """Make durable what was trained, so that nothing of it is trained again, and what was found."""
        landed = self._land()
        if landed and self._has_something_to_say:
            self._commit(None, None)
            landed = self._land()
        if not landed:
            log.warning(
                "the last commit did not reach the bucket: the next learner redoes its step"
            )
        committed = self.settlement.committed
        self.progress.ended(committed.counts, len(committed.outstanding))

    @property
    def _has_something_to_say(self) -> bool:
        latest = self.committer.latest
        return (
            self.settlement.has_settleable
            or self.limits.needs_wall_s
            or self.ended != latest.ended
            or self.is_done != latest.finished
            or self.evaluations.evaluated != latest.evaluated
        )

    def _report(self) -> None:
        self.roster.listen()
        workers = len(self.roster.seen())
        record = self.progress.record(
            self.settlement.committed,
            self.intake.seen,
            workers,
            {**self.watch.figures(), **self.evaluations.figures()},
            self.roster.fleet,
        )
        report = Report(self.source, "learner", time.time(), record)
        self.publisher.broadcast(self.queues.telemetry, Message(encode_report(report)))


def _keep(promise: Future[T], make: Callable[[], T]) -> None:
    """Make what was promised to the committer; where that fails, it hears of it too."""
    try:
        promise.set_result(make())
    except BaseException as exc:
        promise.set_exception(exc)
        raise
