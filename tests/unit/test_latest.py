"""latest.json is moved by exactly one learner, whatever happens to the answers."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from spotgrpo.shared.errors import Fenced, StoreUnavailable, WireError
from spotgrpo.shared.ids import Keys
from spotgrpo.shared.latest import LatestPointer, fresh_nonce
from spotgrpo.shared.manifest import Durable, Latest, Serving
from spotgrpo.shared.memory.store import MemoryStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from spotgrpo.shared.ports import Stored

KEYS = Keys("r")
DIGEST = "0" * 64
SOON_S = 0.001


def latest(version: int, epoch: int = 1, writer: str = "w1", nonce: str | None = None) -> Latest:
    name = f"v{version}"
    return Latest(
        epoch=epoch,
        writer=writer,
        nonce=nonce or fresh_nonce(),
        serving=Serving(version=version, epoch=epoch, manifest=name, sha256=DIGEST),
        durable=Durable(
            version=version,
            epoch=epoch,
            manifest=name,
            manifest_sha256=DIGEST,
            state=name,
            state_sha256=DIGEST,
            ledger=name,
            ledger_sha256=DIGEST,
        ),
    )


class UnreliableStore(MemoryStore):
    """A store in memory whose answers get lost in every way that a network knows.

    ``plan`` says what happens to the next compare-and-swaps, then all is well: ``lost_before`` and ``lost_after``
    (the write), ``late`` (no answer, and the write arrives at ``land_late_ones``), ``refused_after`` (it landed,
    and the answer is a refusal, as after a repeat below us), ``refused_before`` (a refusal out of nothing).
    ``dead_reads`` reads fail.
    """

    def __init__(self) -> None:
        super().__init__()
        self.plan: list[str] = []
        self.dead_reads = 0
        self.late: list[tuple[bytes, str | None]] = []
        self.sent: list[bytes] = []
        self.landed: list[bytes] = []
        self.before_read: Callable[[], None] = lambda: None

    def get(self, key: str) -> Stored:
        self.before_read()
        if self.dead_reads:
            self.dead_reads -= 1
            raise StoreUnavailable("a read was lost")
        return super().get(key)

    def compare_and_swap(self, key: str, body: bytes, expected: str | None) -> str | None:
        self.sent.append(body)
        fate = self.plan.pop(0) if self.plan else "well"
        if fate in ("lost_before", "late"):
            if fate == "late":
                self.late.append((body, expected))
            raise StoreUnavailable("no answer")
        if fate == "refused_before":
            return None
        etag = self._really_swap(body, expected)
        if fate == "lost_after":
            raise StoreUnavailable("no answer")
        return None if fate == "refused_after" else etag

    def land_late_ones(self) -> None:
        while self.late:
            self._really_swap(*self.late.pop(0))

    def _really_swap(self, body: bytes, expected: str | None) -> str | None:
        etag = super().compare_and_swap(KEYS.latest, body, expected)
        if etag is not None:
            self.landed.append(body)
        return etag


FATES = ["well", "lost_before", "lost_after", "late", "refused_after", "refused_before"]


@pytest.fixture
def store() -> UnreliableStore:
    return UnreliableStore()


def pointer(store: MemoryStore, writer: str = "w1") -> LatestPointer:
    return LatestPointer(store, KEYS, writer, longest_wait_s=SOON_S)


# ---- one learner ------------------------------------------------------------------------------------------------


def test_a_run_that_never_committed_has_no_pointer(store: UnreliableStore) -> None:
    assert pointer(store).read() is None


def test_a_move_is_read_back_by_anyone(store: UnreliableStore) -> None:
    mine = pointer(store)
    mine.read()
    first, second = latest(0), latest(1)
    mine.move(first)
    mine.move(second)
    assert pointer(store, "w2").read() == second
    assert store.landed == [first.to_bytes(), second.to_bytes()]


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("dead_reads", [0, 2])
def test_rule_6_a_move_lands_exactly_once_whatever_happens_to_its_answer(
    store: UnreliableStore, fate: str, dead_reads: int
) -> None:
    mine = pointer(store)
    mine.move(latest(0))
    store.plan, store.dead_reads = [fate], dead_reads
    moved = latest(1)
    mine.move(moved)
    store.dead_reads = 0
    store.land_late_ones()
    assert store.landed.count(moved.to_bytes()) == 1
    assert store.get(KEYS.latest).body == moved.to_bytes()
    mine.check_mine()
    mine.move(latest(2))


def test_rule_6_only_identical_bytes_are_sent_while_an_answer_is_open(
    store: UnreliableStore,
) -> None:
    mine = pointer(store)
    mine.move(latest(0))
    store.plan = ["lost_before", "late", "refused_before", "lost_before"]
    moved = latest(1)
    mine.move(moved)
    assert store.sent[1:] == [moved.to_bytes()] * 5


def test_a_swap_that_landed_but_was_answered_with_a_refusal_is_not_a_loss(
    store: UnreliableStore,
) -> None:
    mine = pointer(store)
    mine.move(latest(0))
    store.plan = ["refused_after"]
    mine.move(latest(1))
    mine.move(latest(2))
    found = pointer(store).read()
    assert found is not None
    assert found.serving.version == 2


def test_a_write_that_lands_while_its_repeat_is_on_the_way_is_recognised(
    store: UnreliableStore,
) -> None:
    mine = pointer(store)
    mine.move(latest(0))
    store.plan = ["late", "refused_before"]
    reads = 0

    def land_before_the_second_read() -> None:
        nonlocal reads
        reads += 1
        if reads == 2:
            store.land_late_ones()

    # The first read back finds the parent; then the first write lands, and its repeat is refused.
    store.before_read = land_before_the_second_read
    moved = latest(1)
    mine.move(moved)
    assert store.landed[1:] == [moved.to_bytes()]
    mine.check_mine()


def test_a_move_waits_for_the_bucket_until_told_to_stop(store: UnreliableStore) -> None:
    mine = pointer(store)
    mine.move(latest(0))
    stopping = threading.Event()
    store.plan = ["lost_before"] * 1_000_000
    store.dead_reads = 1_000_000
    refused: list[StoreUnavailable] = []

    def move() -> None:
        try:
            mine.move(latest(1), stopping=stopping)
        except StoreUnavailable as exc:
            refused.append(exc)

    thread = threading.Thread(target=move)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive(), "it goes on while nobody says stop"
    stopping.set()
    thread.join(10)
    assert len(refused) == 1


def test_an_open_move_can_be_given_again_but_not_replaced(store: UnreliableStore) -> None:
    mine = pointer(store)
    mine.move(latest(0))
    stopping = threading.Event()
    stopping.set()
    store.plan, moved = ["late"], latest(1)
    with pytest.raises(StoreUnavailable):
        mine.move(moved, stopping=stopping)
    with pytest.raises(ValueError, match="may still land"):
        mine.move(latest(2))
    mine.check_mine()
    store.land_late_ones()
    mine.check_mine()
    mine.move(moved)
    assert store.landed[1:] == [moved.to_bytes()]


def test_a_body_that_is_no_pointer_is_a_wire_error(store: UnreliableStore) -> None:
    store.create(KEYS.latest, b"{}")
    with pytest.raises(WireError):
        pointer(store).read()


def test_another_etag_for_the_same_bytes_is_still_the_parent() -> None:
    class Restless(MemoryStore):
        """Names the state it has by an ETag that changes once, as a bucket does that is copied elsewhere."""

        moved = False

        def get(self, key: str) -> Stored:
            found = super().get(key)
            return type(found)(found.body, '"new"' if self.moved else found.etag)

        def compare_and_swap(self, key: str, body: bytes, expected: str | None) -> str | None:
            if self.moved and expected != '"new"':
                return None
            if expected == '"new"':
                self.moved, expected = False, super().get(key).etag
            return super().compare_and_swap(key, body, expected)

    store = Restless()
    mine = pointer(store)
    mine.move(latest(0))
    store.moved = True
    mine.move(latest(1))
    mine.check_mine()


# ---- two learners -----------------------------------------------------------------------------------------------


def test_of_two_that_start_from_one_state_the_later_is_fenced(store: UnreliableStore) -> None:
    one, two = pointer(store, "w1"), pointer(store, "w2")
    one.move(latest(0))
    two.read()
    two.move(latest(0, epoch=2, writer="w2"))
    with pytest.raises(Fenced, match=r"learner w2 at epoch 2.*w1 has lost"):
        one.move(latest(1))
    with pytest.raises(Fenced, match="w2"):
        one.check_mine()
    two.check_mine()
    two.move(latest(1, epoch=2, writer="w2"))


def test_two_that_race_for_the_first_commit_do_not_both_win(store: UnreliableStore) -> None:
    one, two = pointer(store, "w1"), pointer(store, "w2")
    assert one.read() is None
    assert two.read() is None
    one.move(latest(0, writer="w1"))
    with pytest.raises(Fenced, match="w1"):
        two.move(latest(0, writer="w2"))


@pytest.mark.parametrize("fate", ["lost_before", "late"])
def test_rule_6_a_learner_whose_answer_is_open_is_fenced_by_who_came_between(
    store: UnreliableStore, fate: str
) -> None:
    one, two = pointer(store, "w1"), pointer(store, "w2")
    one.move(latest(0))
    two.read()
    store.plan = [fate]
    taken_over = latest(0, epoch=2, writer="w2")

    def take_over() -> None:
        store.before_read = lambda: None
        two.move(taken_over)

    store.before_read = take_over
    with pytest.raises(Fenced, match="w2"):
        one.move(latest(1))
    store.land_late_ones()
    assert store.get(KEYS.latest).body == taken_over.to_bytes(), (
        "the late write finds its parent gone"
    )


@pytest.mark.parametrize(("body", "told"), [(b"junk", "something else"), (None, "gone")])
def test_a_pointer_that_was_removed_or_overwritten_fences(
    store: UnreliableStore, body: bytes | None, told: str
) -> None:
    mine = pointer(store)
    mine.move(latest(0))
    store.delete([KEYS.latest])
    if body is not None:
        store.create(KEYS.latest, body)
    with pytest.raises(Fenced, match=told):
        mine.check_mine()
    with pytest.raises(Fenced, match=told):
        mine.move(latest(1))


def test_racing_threads_have_one_winner_each_round(store: UnreliableStore) -> None:
    pointer(store).move(latest(0))
    outcomes: list[str] = []

    def run(name: str, start: threading.Barrier) -> None:
        mine = pointer(store, name)
        mine.read()
        start.wait()
        try:
            mine.move(latest(1, epoch=2, writer=name))
        except Fenced:
            outcomes.append("fenced")
        else:
            outcomes.append(name)

    for _ in range(10):
        outcomes.clear()
        start = threading.Barrier(4)
        threads = [threading.Thread(target=run, args=(f"w{i}", start)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert outcomes.count("fenced") == 3
        found = pointer(store).read()
        assert found is not None
        assert found.writer in outcomes


def test_a_check_does_not_fence_a_learner_whose_move_lands_meanwhile(
    store: UnreliableStore,
) -> None:
    mine = pointer(store)
    mine.move(latest(0))
    other = LatestPointer(store, KEYS, "reader")
    moves = iter([latest(1), latest(2)])

    def move_first() -> None:
        store.before_read = lambda: None
        for moved in moves:
            mine.move(moved)

    # Two moves land between what the check took for its own and what it then reads.
    store.before_read = move_first
    mine.check_mine()
    assert other.read() is not None


# ---- any order of events ----------------------------------------------------------------------------------------


class TwoLearners(RuleBasedStateMachine):
    """Two learners take over and commit in any order over a store that loses answers and delays writes."""

    def __init__(self) -> None:
        super().__init__()
        self.store = UnreliableStore()
        self.learners = [pointer(self.store, f"w{i}") for i in range(2)]
        self.fenced = [True, True]
        self.confirmed: list[bytes] = []
        self.given_up: set[bytes] = set()
        self.number = 0

    @initialize()
    def first_commit(self) -> None:
        self.take_over(0)

    @rule(who=st.integers(0, 1))
    def take_over(self, who: int) -> None:
        self.store.plan.clear()
        self.store.dead_reads = 0
        self.learners[who].read()
        self.fenced[who] = False
        self._move(who)

    @precondition(lambda self: not all(self.fenced))
    @rule(
        who=st.integers(0, 1),
        fates=st.lists(st.sampled_from(FATES), max_size=4),
        dead=st.integers(0, 3),
    )
    def commit(self, who: int, fates: list[str], dead: int) -> None:
        if not self.fenced[who]:
            self.store.plan, self.store.dead_reads = list(fates), dead
            self._move(who)

    @rule()
    def late_writes_land(self) -> None:
        self.store.land_late_ones()

    @rule(who=st.integers(0, 1))
    def check(self, who: int) -> None:
        self.store.dead_reads = 0
        current = Latest.from_bytes(self.store.get(KEYS.latest).body)
        if self.fenced[who]:
            return
        try:
            self.learners[who].check_mine()
        except Fenced:
            assert current.writer != f"w{who}"
        else:
            assert current.writer == f"w{who}"

    def _move(self, who: int) -> None:
        self.number += 1
        moved = latest(self.number, epoch=self.number, writer=f"w{who}")
        before = len(self.store.landed)
        try:
            self.learners[who].move(moved)
        except Fenced:
            self.fenced[who] = True
            self.given_up.add(moved.to_bytes())
            # Fenced only where the other one's bytes were there when this learner looked.
            assert Latest.from_bytes(self.store.get(KEYS.latest).body).writer != f"w{who}"
        else:
            self.confirmed.append(moved.to_bytes())
            assert moved.to_bytes() in self.store.landed[before:]

    @invariant()
    def every_move_that_returned_landed_once_and_no_other_did(self) -> None:
        assert self.store.landed == self.confirmed

    @invariant()
    def what_was_given_up_never_lands(self) -> None:
        assert not self.given_up & set(self.store.landed)


TestTwoLearners = TwoLearners.TestCase
TestTwoLearners.settings = settings(
    max_examples=100, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
