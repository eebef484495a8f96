"""The intake on queues in memory: settlement rules that need deliveries, each by its number."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from spotgrpo.consumer.intake import (
    MOST_COUNTED,
    MOST_SHOWN,
    OTHERS,
    Decoded,
    Expected,
    HeldGroup,
    Intake,
    Receipt,
    Tally,
)
from spotgrpo.consumer.ledger import Ledger
from spotgrpo.consumer.losses.objective import Objective
from spotgrpo.consumer.mismatch import MismatchWatch
from spotgrpo.consumer.pacing import Pacing
from spotgrpo.consumer.settlement import Settlement
from spotgrpo.shared.ids import Keys, PolicyVersion, Queues, TaskId
from spotgrpo.shared.loss_config import LossConfig
from spotgrpo.shared.memory.broker import MemoryBroker, MemoryBrokerServer
from spotgrpo.shared.memory.store import MemoryStore
from spotgrpo.shared.ports import Delivery, Message
from spotgrpo.shared.wire import Sampling, Task
from tests.tools.loop_world import RUN, VOCABULARY, answer, config_of, group_message

QUEUES = Queues(RUN)
A, B, C = (TaskId(i) for i in range(3))
SAMPLING = Sampling(4)
SERVED = PolicyVersion(1, 0)


class Desk:
    """An intake with both its queues; nothing commits."""

    def __init__(
        self,
        ledger: Ledger,
        groups_per_step: int,
        max_staleness: int,
        *,
        refill_flat: bool = False,
        kl: float = 0.0,
    ) -> None:
        self.server, self.stopping = MemoryBrokerServer(), threading.Event()
        broker = MemoryBroker(self.server, RUN)
        broker.declare()
        self.publisher = broker.publisher()
        config = config_of(
            groups_per_step=groups_per_step, max_staleness=max_staleness, refill_flat=refill_flat
        ).model_copy(update={"loss": LossConfig(kl=kl)})
        self.pacing = Pacing.of(config.train)
        self.settlement: Settlement[Receipt] = Settlement(ledger)
        rollouts = broker.leader_consumer(self.pacing.window)
        assert rollouts.lead(1.0)
        rollouts.start(lambda: None)
        self.intake = Intake(
            rollouts,
            broker.consumer(QUEUES.dead, 16),
            MemoryStore(),
            Keys(RUN),
            self.settlement,
            Expected(RUN, 2, SAMPLING, VOCABULARY, 64),
            config.train,
            self.pacing,
            Objective.of(config),
            MismatchWatch(None, "float32", quarantines=False, recompute=lambda _, **__: []),
            epoch=ledger.epoch,
            stopping=self.stopping,
        )

    def comes(self, task: TaskId, version: PolicyVersion = SERVED, *, flat: bool = False) -> None:
        group = answer(Task(RUN, task, (1,), "p", {}, SAMPLING, (1, 2)), version, flat=flat)
        self.publisher.publish(QUEUES.rollouts, group_message(group)).result(5)

    def batch(self, version: int) -> Sequence[HeldGroup]:
        """The next batch, or nothing where the intake would wait."""
        self.stopping.clear()
        return self.intake.next_batch(version, lambda _: self.stopping.set())

    def settled(self) -> Ledger:
        return self.settlement.write(0, lambda _: 0, max_attempts=1, parent="p")


def test_rule_8_lag_counts_from_the_version_that_the_gradient_is_taken_at() -> None:
    """All three came while the learner was at version 0; the third would be trained at version 2."""
    desk = Desk(Ledger.first(1, issue=3), groups_per_step=1, max_staleness=1)
    for task in (A, B, C):
        desk.comes(task)
    assert [held.task for held in desk.batch(0)] == [A]
    assert [held.task for held in desk.batch(1)] == [B]
    assert not desk.batch(2)
    assert desk.settled().settled == {"stale": (C,)}


def test_rule_8_a_version_that_a_takeover_gave_up_counts_as_the_one_it_grew_from() -> None:
    """Version 2 of epoch 1 was never durable: epoch 2 went on from version 0."""
    ledger = Ledger.first(1, issue=2).taken_over(2)
    desk = Desk(ledger, groups_per_step=1, max_staleness=1)
    desk.comes(A, PolicyVersion(1, 2))
    assert not desk.batch(2)
    assert desk.settled().settled == {"stale": (A,)}


@pytest.mark.parametrize(
    ("kl", "refill_flat", "trained"), [(0.0, False, False), (0.1, False, True), (0.1, True, None)]
)
def test_a_group_without_reward_variance_is_trained_for_a_kl_term_unless_another_is_asked_for(
    kl: float, refill_flat: bool, trained: bool | None
) -> None:
    desk = Desk(Ledger.first(1, issue=1), 1, 0, refill_flat=refill_flat, kl=kl)
    desk.comes(A, flat=True)
    assert [held.has_signal for held in desk.batch(0)] == ([] if trained is None else [trained])
    assert desk.settled().settled == ({"flat": (A,)} if trained is None else {})


@pytest.mark.parametrize("copies", [9, 10])
def test_rule_5_a_window_full_of_copies_makes_a_short_step(copies: int) -> None:
    """What fills the window is acked only by a commit, so waiting for a second group would be for ever."""
    desk = Desk(Ledger.first(1, issue=2), groups_per_step=2, max_staleness=0)
    assert desk.pacing.window == 10
    for _ in range(copies):
        desk.comes(A)
    assert [held.task for held in desk.batch(0)] == ([A] if copies == 10 else [])


def test_rule_2_a_dead_letter_of_a_settled_task_is_a_duplicate() -> None:
    desk = Desk(Ledger.first(1, issue=1), groups_per_step=1, max_staleness=0)
    for task in (TaskId(77), A):
        letter = Message(b"body", "m", {"task": str(task)})
        desk.publisher.publish(QUEUES.dead, letter).result(5)
    assert not desk.batch(0)
    assert desk.settlement.receipts == 1, "the duplicate is acked at once, the dead task is not"
    ledger = desk.settled()
    assert ledger.settled == {"dead": (A,)}
    assert ledger.counts.duplicate == 1


def test_what_was_decoded_during_a_step_is_judged_when_the_step_is_over() -> None:
    """A copy of A is wanted as it comes, and of a settled task by the time it is asked for; B is trained as ever."""
    desk = Desk(Ledger.first(1, issue=2), groups_per_step=1, max_staleness=1)
    desk.comes(A)
    assert [held.task for held in desk.batch(0)] == [A]
    decoded = threading.Semaphore(0)
    real = desk.intake._ahead._decode

    def counted(delivery: Delivery) -> Decoded:
        found = real(delivery)
        decoded.release()
        return found

    desk.intake._ahead._decode = counted
    with desk.intake.preparing():
        desk.comes(A)
        desk.comes(B)
        assert all(decoded.acquire(timeout=10) for _ in "AB")
        desk.settlement.settle("trained", [A])
        desk.settled()
        desk.settlement.landed()
    assert [held.task for held in desk.batch(0)] == [B]
    assert desk.settled().counts.duplicate == 1


def test_stale_groups_of_any_number_of_workers_are_counted_in_a_bounded_record() -> None:
    tally = Tally()
    assert tally.largest() == {}
    for index in range(5 * MOST_COUNTED):
        tally.add(f"w{index}")
        tally.add("slow")
    shown = tally.largest()
    assert len(shown) == MOST_SHOWN + 1
    assert shown["slow"] == 5 * MOST_COUNTED
    assert sum(shown.values()) == 10 * MOST_COUNTED
    assert shown[OTHERS] == 5 * MOST_COUNTED - (MOST_SHOWN - 1)
    assert len(tally._counts) <= MOST_COUNTED
