"""The settlement rules, each by its number, and a random walk against them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotgrpo.consumer.audit import audit_chain
from spotgrpo.consumer.ledger import CAUSES, Ledger, decode_ledger, encode_ledger
from spotgrpo.consumer.settlement import Settlement
from spotgrpo.shared.errors import WireError
from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.wire import pack_body


def settlement(issue: int = 4) -> Settlement[str]:
    return Settlement(Ledger.first(epoch=1, issue=issue))


def write(one: Settlement[str], version: int = 1, issue: int = 0, max_attempts: int = 3) -> Ledger:
    return one.write(version, lambda _: issue, max_attempts, parent="parent")


A, B, C, D = (TaskId(i) for i in range(4))


def test_rule_1_outstanding_means_the_committed_ledger_until_the_commit_has_landed() -> None:
    one = settlement()
    one.receive(A, "a1")
    one.settle("trained", [A])
    write(one)
    assert one.receive(A, "a2") == "copy", (
        "the commit in flight may still fail: nothing is a duplicate yet"
    )
    one.landed()
    assert one.receive(A, "a3") == "duplicate"


def test_rule_2_a_task_that_is_not_outstanding_is_a_duplicate_however_late() -> None:
    one = settlement()
    assert one.receive(TaskId(99), "x") == "duplicate"
    assert one.receive(A, "a") == "held"


def test_rule_2_a_copy_of_a_held_group_is_kept_and_acked_with_it() -> None:
    one = settlement()
    one.receive(A, "a1")
    assert one.receive(A, "a2") == "copy"
    one.settle("trained", [A])
    write(one)
    one.receive(A, "a3")
    assert one.landed().acks == ("a1", "a2", "a3")


def test_rule_3_nothing_is_acked_before_its_commit_has_landed() -> None:
    one = settlement()
    for task, receipt in ((A, "a"), (B, "b")):
        one.receive(task, receipt)
    one.settle("trained", [A])
    write(one)
    one.settle("trained", [B])  # settled while the commit is in flight: belongs to the next
    assert one.landed().acks == ("a",)
    write(one, version=2)
    assert one.landed().acks == ("b",)


def test_rule_3_receipts_of_a_dead_channel_are_dropped_and_their_task_stays_held() -> None:
    one = settlement()
    one.receive(A, "old1")
    one.receive(A, "new1")
    one.drop_void(lambda receipt: receipt.startswith("old"))
    assert one.receipts == 1
    one.drop_void(lambda _: True)
    assert one.receipts == 0
    assert one.receive(A, "new2") == "copy", "the broker delivers it again, and it is in hand still"
    one.settle("trained", [A])
    write(one)
    assert one.landed().acks == ("new2",)


def test_a_ledger_lists_what_was_settled_in_the_order_of_the_steps_batch() -> None:
    """Not in the order of receipt: replaying a run needs the order in which its groups were trained."""
    one = settlement()
    for task in (A, B, C, D):
        one.receive(task, str(task))
    one.settle("trained", [C, A])
    one.settle("flat", [D])
    one.settle("trained", [B])
    assert write(one).settled == {"trained": (C, A, B), "flat": (D,)}
    assert one.landed().settled == (C, A, D, B)


def test_rule_4_what_a_commit_issues_is_known_only_once_it_has_landed() -> None:
    one = settlement(issue=1)
    one.receive(A, "a")
    one.settle("trained", [A])
    write(one, issue=2)
    assert one.committed.outstanding.keys() == {A}
    assert one.landed().issued == (B, C)
    assert one.committed.outstanding.keys() == {B, C}


def test_rule_4_a_ledger_names_what_earlier_ones_issued_and_the_broker_has_not_confirmed() -> None:
    one = settlement()
    one.receive(A, "a")
    one.settle("trained", [A])
    unconfirmed = {A, C, D, TaskId(99)}  # A is settled by now, and 99 is not of this run's books
    ledger = one.write(1, lambda _: 1, 3, parent="parent", unconfirmed=unconfirmed)
    assert set(ledger.unpublished) == {C, D}
    assert not set(ledger.issued) & set(ledger.unpublished)
    assert decode_ledger(encode_ledger(ledger)) == ledger
    one.landed()
    assert write(one).unpublished == ()


def test_a_ledger_of_before_that_was_written_down_is_read() -> None:
    ledger = settlement().committed
    fields = msgpack.unpackb(msgpack.unpackb(encode_ledger(ledger))["payload"])
    del fields["unpublished"]
    assert decode_ledger(pack_body("ledger", fields)) == ledger


def test_rule_5_settled_tasks_and_their_copies_ask_for_a_commit_of_their_own() -> None:
    one = settlement()
    assert not one.has_settleable
    one.receive(A, "a")
    assert not one.has_settleable
    one.settle("stale", [A])
    assert one.has_settleable
    write(one, version=0)
    assert not one.has_settleable
    one.landed()


def test_requests_go_before_new_prompts_and_take_their_room() -> None:
    """However many a person asks for, no more are outstanding than can be trained in time."""
    one = settlement(issue=4)
    for task in (A, B, C):
        one.receive(task, str(task))
    one.settle("dead", [A, B, C])
    one.write(1, lambda left: 2 - left, max_attempts=1, parent="p")
    one.landed()
    asked = [task.next_attempt() for task in (A, B, C)]
    ledger = one.write(1, lambda left: 3 - left, max_attempts=1, parent="p", requeue=asked)
    assert ledger.issued == (A.next_attempt(),), "two are outstanding, three can be trained in time"
    one.landed()
    for task in one.committed.outstanding:
        one.receive(task, "r")
    one.settle("trained", list(one.committed.outstanding))
    ledger = one.write(2, lambda left: 3 - left, max_attempts=1, parent="p", requeue=asked[1:])
    assert ledger.issued == (B.next_attempt(), C.next_attempt(), TaskId(5))
    assert ledger.balanced
    assert ledger.cursor == 6


def test_a_stale_prompt_is_issued_again_as_the_next_attempt_up_to_max_attempts() -> None:
    one = settlement(issue=1)
    task = A
    for attempt in (1, 2, 3):
        assert task.attempt == attempt
        one.receive(task, "r")
        one.settle("stale", [task])
        write(one, max_attempts=3)
        issued = one.landed().issued
        task = task.next_attempt()
        assert issued == ((task,) if attempt < 3 else ())
    assert one.committed.counts.stale == 3
    assert one.committed.balanced


def test_settling_twice_or_writing_twice_is_a_fault_of_the_caller() -> None:
    one = settlement()
    one.receive(A, "a")
    one.settle("flat", [A])
    with pytest.raises(ValueError, match="settled already"):
        one.settle("trained", [A])
    write(one)
    with pytest.raises(ValueError, match="in flight"):
        write(one)
    one.landed()
    with pytest.raises(ValueError, match="no commit"):
        one.landed()
    with pytest.raises(ValueError, match="not outstanding"):
        one.committed.next(
            settled={"flat": (A,)}, version=1, issue=0, max_attempts=1, duplicates=0, parent="p"
        )


def test_a_ledger_survives_its_bytes_and_refuses_others() -> None:
    one = settlement()
    one.receive(A, "a")
    one.receive(B, "b")
    one.settle("trained", [A])
    one.settle("dead", [B])
    ledger = write(one, issue=2).taken_over(epoch=3)
    assert decode_ledger(encode_ledger(ledger)) == ledger
    with pytest.raises(WireError):
        decode_ledger(encode_ledger(ledger)[:-1])


def test_a_takeover_remembers_where_each_epoch_began() -> None:
    first = settlement()
    ledger = write(first, version=5)
    taken = ledger.taken_over(epoch=4)
    assert taken.takeovers == {1: 0, 4: 5}
    assert taken.epoch == 4


class Walk:
    """A learner, the broker's unacked deliveries, and the chain of landed ledgers, one action at a time."""

    def __init__(self) -> None:
        self.chain = [Ledger.first(epoch=1, issue=4)]
        self.one = Settlement[str](self.chain[0])
        self.acked: set[str] = set()
        self.unacked: dict[str, TaskId] = {}
        self._numbers = itertools.count()

    def deliver(self, pick: int) -> None:
        outstanding = sorted(self.one.committed.outstanding)
        if outstanding:
            self._receive(f"r{next(self._numbers)}", outstanding[pick % len(outstanding)])

    def again(self, pick: int) -> None:
        if self.unacked:
            tasks = list(self.unacked.values())
            self._receive(f"r{next(self._numbers)}", tasks[pick % len(tasks)])

    def settle(self, pick: int) -> None:
        open_ones = sorted(task for task in set(self.unacked.values()) if _is_open(self.one, task))
        if open_ones:
            self.one.settle(CAUSES[pick % 4], [open_ones[pick % len(open_ones)]])

    def write(self, pick: int) -> None:
        if not self.one.in_flight:
            self.one.write(pick, lambda left: max(0, 4 - left), 2, parent="p")

    def land(self, _pick: int) -> None:
        if not self.one.in_flight:
            return
        landed = self.one.landed()
        self.chain.append(self.one.committed)
        assert not self.acked & set(landed.acks), "acked twice"
        self.acked |= set(landed.acks)
        for receipt in landed.acks:
            assert self.unacked.pop(receipt) not in self.one.committed.outstanding

    def crash(self, _pick: int) -> None:
        """The next learner starts from the last landed ledger and is handed all that was not acked."""
        self.one = Settlement(self.chain[-1])
        before, self.unacked = self.unacked, {}
        for receipt, task in before.items():
            self._receive(receipt, task)

    def _receive(self, receipt: str, task: TaskId) -> None:
        if self.one.receive(task, receipt) != "duplicate":
            self.unacked[receipt] = task


STEPS = st.lists(
    st.tuples(
        st.sampled_from([Walk.deliver, Walk.again, Walk.settle, Walk.write, Walk.land, Walk.crash]),
        st.integers(0, 10_000),
    ),
    max_size=120,
)


@given(STEPS)
def test_whatever_happens_the_books_balance_and_every_task_ends_once(
    steps: list[tuple[Callable[[Walk, int], None], int]],
) -> None:
    walk = Walk()
    for step, pick in steps:
        step(walk, pick)
        report = audit_chain("r", walk.chain)
        assert report.balanced, report
        assert walk.one.committed.balanced


def _is_open(one: Settlement[str], task: TaskId) -> bool:
    entry = one._entries.get(task)
    return entry is not None and entry.cause is None
