"""A learner from the leader queue to the summary: stand by, take over, loop, finish."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from spotgrpo.consumer.commit import BucketWriter, Committer
from spotgrpo.consumer.evaluation import Plan
from spotgrpo.consumer.evaluations import Evaluations, Places, Unevaluated
from spotgrpo.consumer.held_out import HeldOutIssuer
from spotgrpo.consumer.intake import Expected, Intake, Receipt
from spotgrpo.consumer.issuer import Issuer
from spotgrpo.consumer.limits import Limits
from spotgrpo.consumer.loop import AfterCommit, Ownership, Pacing, TrainerPort, TrainingLoop
from spotgrpo.consumer.losses.objective import Objective
from spotgrpo.consumer.mismatch import MismatchWatch
from spotgrpo.consumer.requeue import Past, Requeues
from spotgrpo.consumer.retention import Retention
from spotgrpo.consumer.roster import Roster
from spotgrpo.consumer.settlement import Settlement
from spotgrpo.consumer.skips import Skips
from spotgrpo.consumer.standby import Standby
from spotgrpo.consumer.takeover import Start, TakenOver, take_over, write_run_document
from spotgrpo.shared.asked_store import StoppableStore
from spotgrpo.shared.errors import ConfigError, NotStored
from spotgrpo.shared.ids import Keys, Queues
from spotgrpo.shared.latest import LatestPointer
from spotgrpo.shared.manifest import Serving, sha256_hex
from spotgrpo.shared.retry import retry
from spotgrpo.shared.steps import Step, reached
from spotgrpo.shared.threads import until_stopped

if TYPE_CHECKING:
    from spotgrpo.consumer.held_out import HeldOut
    from spotgrpo.consumer.progress import Progress
    from spotgrpo.consumer.prompts import PromptSource
    from spotgrpo.shared.config import Config
    from spotgrpo.shared.manifest import RunDocument
    from spotgrpo.shared.ports import Broker, Consumer, LeaderConsumer, ObjectStore, Publisher
    from spotgrpo.shared.wire import Sampling

log = logging.getLogger(__name__)

STANDBY_WAIT_S = 1.0
DEAD_PREFETCH = 16
PUBLISHED = 4
"""Unconfirmed messages in windows: more than tasks there are, so that publishing never blocks the loop."""


@dataclass(frozen=True)
class Wiring:
    """What a learner is connected to."""

    config: Config
    store: ObjectStore
    broker: Broker
    trainer: TrainerPort
    prompts: PromptSource
    document: RunDocument
    stopping: threading.Event
    held_out: HeldOut | None = None


class Learner:
    """One learner process of one run: the active one, or a hot standby until it can take over."""

    def __init__(self, wiring: Wiring, progress: Progress) -> None:
        self._w, self._progress = wiring, progress
        self._keys, self._queues = Keys(wiring.config.run.id), Queues(wiring.config.run.id)
        self._id = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._pointer = LatestPointer(wiring.store, self._keys, self._id)
        self._pacing = Pacing.of(wiring.config.train)
        self._stoppable = StoppableStore(wiring.store, wiring.stopping)
        """For the main thread, which must hear that it should stop; the committer may go on for a while."""

    def run(self) -> dict[str, object]:
        """Train until a limit is reached or told to stop; returns the summary.

        The order is rule 7: hold the leader queue, read ``latest.json``, compare-and-swap epoch + 1, restore,
        publish, consume.
        """
        self._w.broker.declare()
        self._write_run_document()
        with contextlib.ExitStack() as stack:
            rollouts = self._w.broker.leader_consumer(self._pacing.window)
            stack.callback(rollouts.close)
            if not self._lead(rollouts):
                return self._progress.summary("stopped on standby")
            taken = self._take_over()
            loop = self._assemble(stack, taken, rollouts)
            self._progress.began(taken.ledger.version, resumed=taken.resumed)
            loop.publish_outstanding(taken.ledger, again=taken.resumed)
            rollouts.start(authorize=self._pointer.check_mine)
            loop.run()
        summary = self._progress.summary("done" if loop.is_done else "stopped")
        return {**summary, "ended_by": loop.ended or None, **loop.evaluations.summary()}

    def _write_run_document(self) -> None:
        w = self._w
        there = write_run_document(self._stoppable, self._keys, w.document, w.stopping)
        if w.held_out is not None and not there.evaluates:
            remedy = (
                f"run {there.run} was begun without evaluations, and its workers keep no room for a version that is "
                "evaluated: leave [eval] out, or start a run under another run.id"
            )
            raise ConfigError("eval.every", w.config.eval.every, remedy)

    def _lead(self, rollouts: LeaderConsumer) -> bool:
        w = self._w
        standby = Standby(
            self._stoppable, self._keys, self._queues, w.broker.depth, w.config.log.stall_warn_s
        )
        while not w.stopping.is_set():
            if rollouts.lead(STANDBY_WAIT_S):
                return True
            standby.still_waiting()
        return False

    def _take_over(self) -> TakenOver:
        taken = take_over(
            self._stoppable,
            self._keys,
            self._pointer,
            writer_id=self._id,
            base_sha256=self._w.document.model.base_sha256,
            start=self._start,
            stopping=self._w.stopping,
        )
        if taken.resumed:
            self._w.trainer.restore(taken.state)
            reached(Step.LEARNER_RESTORED)
        return taken

    def _start(self) -> Start:
        trainer = self._w.trainer
        issue = self._pacing.budget(version=0, outstanding=0)
        return Start(
            trainer.adapter_files(), trainer.modules, trainer.probe(), trainer.state(), issue
        )

    def _assemble(
        self, stack: contextlib.ExitStack, taken: TakenOver, rollouts: LeaderConsumer
    ) -> TrainingLoop:
        """Everything that exists only while this learner is the active one."""
        w = self._w
        places = self._places()
        window = PUBLISHED * (self._pacing.window + (places.alone if places else 0))
        publisher = w.broker.publisher(window)
        stack.callback(publisher.close)
        evaluations = self._evaluations(taken, publisher, places)
        settlement: Settlement[Receipt] = Settlement(taken.ledger)
        issuer = Issuer(w.prompts, publisher, w.config)
        requeues = Requeues(
            self._stoppable, self._keys, Past(self._stoppable, taken.ledger), self._check_mine
        )
        after = AfterCommit(
            settlement,
            issuer,
            self._retention(evaluations),
            publisher,
            self._queues,
            requeues,
            evaluations,
        )
        committer = self._committer(stack, taken, after)
        dead = w.broker.consumer(self._queues.dead, prefetch=DEAD_PREFETCH)
        stack.callback(dead.close)
        watch = self._watch()
        return TrainingLoop(
            trainer=w.trainer,
            settlement=settlement,
            intake=self._intake(
                taken, rollouts, dead, settlement, issuer.sampling, watch, evaluations
            ),
            watch=watch,
            issuer=issuer,
            requeues=requeues,
            committer=committer,
            evaluations=evaluations,
            limits=Limits(w.config, taken.latest),
            progress=self._progress,
            skips=Skips(
                self._stoppable, self._keys, w.config, taken.latest.epoch, stopping=w.stopping
            ),
            roster=self._roster(stack),
            pacing=self._pacing,
            publisher=publisher,
            ownership=Ownership(rollouts, self._check_mine),
            depth=w.broker.depth,
            stopping=w.stopping,
            base_sha256=w.document.model.base_sha256,
            queues=self._queues,
            source=self._id,
            epoch=taken.latest.epoch,
            version=taken.ledger.version,
        )

    def _committer(
        self, stack: contextlib.ExitStack, taken: TakenOver, after: AfterCommit
    ) -> Committer:
        w = self._w
        deltas = w.config.sync.encoding == "delta"
        committer = Committer(
            BucketWriter(w.store, self._keys, threading.Event(), deltas=deltas),
            self._pointer,
            taken.latest,
            on_serving=after.serving,
            on_durable=after.durable,
        )
        stack.callback(committer.close)
        return committer

    def _check_mine(self) -> None:
        """As the main thread asks it."""
        until_stopped(self._pointer.check_mine, self._w.stopping)

    def _roster(self, stack: contextlib.ExitStack) -> Roster:
        news = self._w.broker.subscribe(self._queues.telemetry)
        if news is not None:
            stack.callback(news.close)
        return Roster(news)

    def _places(self) -> Places | None:
        """Of held-out tasks; None where nothing is evaluated."""
        w = self._w
        if w.held_out is None:
            return None
        tasks = (self._pacing.max_staleness + 1) * self._pacing.groups_per_step
        completions = tasks * w.config.sampling.group_size
        return Places.of(completions, w.config.eval.share, w.held_out.group_size)

    def _evaluations(
        self, taken: TakenOver, publisher: Publisher, places: Places | None
    ) -> Unevaluated:
        w, every = self._w, self._w.config.eval.every
        if w.held_out is None or every is None or places is None:
            return Unevaluated(taken.latest.evaluated)
        plan = Plan(every, self._pacing.max_steps)
        issuer = HeldOutIssuer(w.prompts, publisher, w.config)
        issuer.held_out = w.held_out
        return Evaluations(
            w.held_out,
            issuer,
            plan,
            places,
            self._progress.metrics,
            taken.latest.evaluated,
            self._left_over(taken, plan, w.held_out),
            resumed=taken.resumed,
            reissue_after_s=w.config.train.reissue_after_s,
        )

    def _left_over(self, taken: TakenOver, plan: Plan, held_out: HeldOut) -> Serving | None:
        """The version that the learner before did not evaluate to the end; None where the bucket has it no more."""
        ledger, evaluated = taken.ledger, taken.latest.evaluated
        version = plan.left_over(ledger.version, ledger.takeovers, evaluated, held_out.asked_sha256)
        if version is None:
            return None
        key = self._keys.manifest(version)
        try:
            stored = retry(
                f"reading {key}", lambda: self._stoppable.get(key), stopping=self._w.stopping
            )
        except NotStored:
            log.info("version %s is not evaluated: it is not kept any more", version)
            return None
        return Serving(
            version=version.number,
            epoch=version.epoch,
            manifest=key,
            sha256=sha256_hex(stored.body),
        )

    def _retention(self, evaluations: Unevaluated) -> Retention:
        train = self._w.config.train
        keep = train.max_staleness + 2
        return Retention(
            self._w.store,
            self._keys,
            keep=keep,
            every=train.keep_every,
            check_mine=self._pointer.check_mine,
            evaluates=evaluations.needed,
        )

    def _watch(self) -> MismatchWatch:
        config = self._w.config
        return MismatchWatch(
            config.train.mismatch_alarm,
            "bfloat16" if config.train.autocast or config.train.quantize else config.model.dtype,
            quarantines=config.train.quarantine,
            recompute=self._w.trainer.logprobs,
        )

    def _intake(
        self,
        taken: TakenOver,
        rollouts: LeaderConsumer,
        dead: Consumer,
        settlement: Settlement[Receipt],
        sampling: Sampling,
        watch: MismatchWatch,
        evaluations: Unevaluated,
    ) -> Intake:
        w, held_out = self._w, self._w.held_out
        expected = Expected(
            run=self._keys.run,
            group_size=w.config.sampling.group_size,
            sampling=sampling,
            vocabulary=w.trainer.vocabulary,
            max_context=w.document.max_context,
        )
        return Intake(
            rollouts,
            dead,
            self._stoppable,
            self._keys,
            settlement,
            expected,
            w.config.train,
            self._pacing,
            Objective.of(w.config),
            watch,
            epoch=taken.latest.epoch,
            stopping=w.stopping,
            evaluations=evaluations,
            held_out=None
            if held_out is None
            else replace(expected, group_size=held_out.group_size, sampling=held_out.sampling),
        )
