"""Requests to try dead tasks again: what the chain says of them, and what a learner does about each."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import pytest

from spotgrpo.consumer.ledger import Cause, Ledger, encode_ledger
from spotgrpo.consumer.requeue import LAST_ATTEMPT, Past, Requeues, encode_request
from spotgrpo.shared.errors import Fenced, IntegrityError, StoreUnavailable
from spotgrpo.shared.ids import Keys, TaskId
from spotgrpo.shared.memory.store import MemoryStore
from spotgrpo.shared.ports import ObjectInfo, Stored

KEYS = Keys("r")
A, B, C, D = (TaskId(i) for i in range(4))


class Chain:
    """Ledgers in a bucket, and the learner's side of requests on top of the newest."""

    def __init__(self, store: MemoryStore | None = None) -> None:
        self.store = store or MemoryStore()
        self.now = 0.0
        self.is_mine = True
        self.newest = Ledger.first(epoch=1, issue=4)
        self._keep()
        self.requeues = self.restarted()

    def _keep(self) -> None:
        self.store.create(KEYS.ledger(self.newest.sequence, 1), encode_ledger(self.newest))

    def restarted(self) -> Requeues:
        """The same after a death: all that is known is in the bucket."""
        past = Past(self.store, self.newest)
        self.requeues = Requeues(self.store, KEYS, past, self._check_mine, lambda: self.now)
        return self.requeues

    def _check_mine(self) -> None:
        if not self.is_mine:
            raise Fenced("another's")

    def written(
        self,
        cause: Cause | None = None,
        tasks: Sequence[TaskId] = (),
        requeued: Sequence[TaskId] = (),
        max_attempts: int = 1,
    ) -> None:
        """One more ledger, on its way."""
        self.newest = self.newest.next(
            settled={cause: tuple(tasks)} if cause else {},
            version=0,
            issue=0,
            max_attempts=max_attempts,
            duplicates=0,
            parent=KEYS.ledger(self.newest.sequence, 1),
            requeued=tuple(requeued),
        )
        self.requeues.written(self.newest)

    def landed(self) -> None:
        self._keep()
        self.requeues.landed()

    def ask(self, task: TaskId) -> None:
        self.store.create(KEYS.dead(task), b"body")
        self.store.create(KEYS.requeue(task), encode_request(task))

    def look(self) -> list[TaskId]:
        self.now += 100.0
        self.requeues.look()
        return self.requeues.wanted

    def there(self, prefix: str) -> list[str]:
        return [info.key.removeprefix(prefix) for info in self.store.list(prefix)]


@pytest.fixture
def chain() -> Chain:
    return Chain()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_dead_task_that_was_asked_for_is_wanted(chain: Chain, restarts: bool) -> None:
    chain.written("dead", [A])
    chain.landed()
    for _ in range(3):  # the death is some ledgers back
        chain.written()
        chain.landed()
    chain.ask(A)
    if restarts:
        chain.restarted()
    assert chain.look() == [A.next_attempt()]


def test_request_and_body_stay_until_the_ledger_that_answers_has_landed(chain: Chain) -> None:
    chain.written("dead", [A])
    chain.landed()
    chain.ask(A)
    chain.written(requeued=chain.look())
    assert chain.look() == [], "it is on its way: not a second time"
    assert chain.there(KEYS.requeues) == [str(A)]
    assert chain.there(KEYS.dead_letters) == [str(A)]
    chain.landed()
    assert chain.there(KEYS.requeues) == chain.there(KEYS.dead_letters) == []


def test_a_request_seen_again_after_a_death_issues_nothing(chain: Chain) -> None:
    """The learner died between its commit and the deletion."""
    chain.written("dead", [A])
    chain.landed()
    chain.ask(A)
    chain.written(requeued=chain.look())
    chain._keep()
    chain.restarted()
    assert chain.look() == []
    assert chain.there(KEYS.requeues) == chain.there(KEYS.dead_letters) == []


def test_a_request_whose_ledger_never_landed_is_wanted_again(chain: Chain) -> None:
    chain.written("dead", [A])
    chain.landed()
    before = chain.newest
    chain.ask(A)
    chain.written(requeued=chain.look())
    chain.newest = before
    chain.restarted()
    assert chain.look() == [A.next_attempt()]


def test_even_an_attempt_that_ended_long_ago_is_not_issued_again(chain: Chain) -> None:
    chain.written("dead", [A])
    chain.landed()
    again = A.next_attempt()
    chain.written(requeued=[again])
    chain.landed()
    chain.written("trained", [again])
    chain.landed()
    chain.ask(A)
    chain.restarted()
    assert chain.look() == []


def test_what_did_not_fit_is_wanted_in_the_next_ledger(chain: Chain) -> None:
    chain.written("dead", [A, B])
    chain.landed()
    chain.ask(A)
    chain.ask(B)
    chain.written(requeued=chain.look()[:1])
    chain.landed()
    assert chain.requeues.wanted == [B.next_attempt()]
    assert chain.there(KEYS.requeues) == [str(B)]


def test_a_requeued_attempt_that_dies_too_can_be_requeued(chain: Chain) -> None:
    chain.written("dead", [A])
    chain.landed()
    again = A.next_attempt()
    chain.written(requeued=[again])
    chain.landed()
    chain.written("dead", [again])
    chain.landed()
    chain.ask(again)
    assert chain.look() == [again.next_attempt()]


def test_requests_that_make_no_sense_are_dropped_and_named(
    chain: Chain, caplog: pytest.LogCaptureFixture
) -> None:
    chain.written("dead", [A], max_attempts=3)  # retried by itself
    chain.landed()
    chain.written("trained", [B])
    chain.landed()
    chain.ask(A)
    for task in (B, C, TaskId(77), TaskId(0, LAST_ATTEMPT)):
        chain.store.create(KEYS.requeue(task), b"?")
    chain.store.create(KEYS.requeue("unknown.abc"), b"?")
    chain.restarted()
    with caplog.at_level(logging.WARNING):
        assert chain.look() == []
    for name in map(str, (A, B, C, TaskId(77), "unknown.abc")):
        assert f"task {name} again is dropped" in caplog.text
    assert chain.there(KEYS.requeues) == []
    assert chain.there(KEYS.dead_letters) == [str(A)], "nobody asked for this to be deleted"


def test_a_deposed_learner_drops_no_request(chain: Chain) -> None:
    """The task is outstanding in its own books, and dead in those of the learner that took over."""
    chain.ask(A)
    chain.is_mine = False
    with pytest.raises(Fenced):
        chain.look()
    assert chain.there(KEYS.requeues) == [str(A)]


def test_looks_are_rare(chain: Chain) -> None:
    chain.written("dead", [A])
    chain.landed()
    chain.requeues.look()
    chain.ask(A)
    chain.requeues.look()
    assert chain.requeues.wanted == []
    assert chain.look() == [A.next_attempt()]


class Flaky(MemoryStore):
    """A bucket that can be away, and counts reads."""

    is_down, reads = False, 0

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if self.is_down:
            raise StoreUnavailable("away")
        return super().list(prefix)

    def get(self, key: str) -> Stored:
        self.reads += 1
        return super().get(key)


def test_an_unreachable_bucket_costs_a_look_and_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Flaky()
    chain = Chain(store)
    chain.written("dead", [A])
    chain.landed()
    chain.ask(A)
    store.is_down = True
    with caplog.at_level(logging.WARNING):
        assert chain.look() == chain.look() == []
    assert caplog.text.count("cannot look for tasks to try again") == 1
    store.is_down = False
    assert chain.look() == [A.next_attempt()]
    store.is_down = True
    chain.look()
    assert caplog.text.count("cannot look for tasks to try again") == 2


def test_the_chain_is_read_in_bites_and_only_when_somebody_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("spotgrpo.consumer.requeue.LEDGERS_A_LOOK", 2)
    store = Flaky()
    chain = Chain(store)
    chain.written("dead", [A])
    chain.landed()
    for _ in range(4):
        chain.written()
        chain.landed()
    chain.restarted()
    assert chain.look() == []
    assert store.reads == 0
    chain.ask(A)
    assert chain.look() == []
    assert store.reads == 2
    assert chain.there(KEYS.requeues) == [str(A)], "not known yet is not refused"
    assert chain.look() == [A.next_attempt()]
    assert store.reads == 4


def test_a_broken_chain_issues_and_drops_nothing(chain: Chain) -> None:
    chain.written("dead", [A])
    chain.landed()
    chain.written()
    chain.landed()
    chain.ask(A)
    chain.store.delete([chain.newest.parent or ""])
    chain.restarted()
    assert chain.look() == []
    assert chain.there(KEYS.requeues) == [str(A)]
    with pytest.raises(IntegrityError):
        Past(chain.store, chain.newest).read([A])


def test_a_bucket_that_refuses_deletes_issues_once_all_the_same() -> None:
    class NoDelete(MemoryStore):
        def delete(self, keys: Sequence[str]) -> None:
            if keys:
                raise StoreUnavailable("no deletes today")

    chain = Chain(NoDelete())
    chain.written("dead", [A])
    chain.landed()
    chain.ask(A)
    chain.written(requeued=chain.look())
    chain.landed()
    assert chain.look() == []
    assert chain.look() == []


def test_whoever_asks_writes_the_same_bytes() -> None:
    store = MemoryStore()
    for _ in range(2):
        store.create(KEYS.requeue(D), encode_request(D))
    assert [info.key for info in store.list(KEYS.requeues)] == [KEYS.requeue(D)]


def test_a_ledger_refuses_to_requeue_what_is_outstanding_new_or_named_twice() -> None:
    first = Ledger.first(epoch=1, issue=2)
    dead = {"settled": {"dead": (A,)}, "version": 0, "issue": 0, "duplicates": 0, "parent": "p"}
    again = A.next_attempt()
    assert first.next(**dead, max_attempts=1, requeued=(again,)).issued == (again,)  # type: ignore[arg-type]
    for attempts, requeued in (
        (3, (again,)),
        (1, (again, again)),
        (1, (TaskId(1),)),
        (1, (TaskId(9, 2),)),
    ):
        with pytest.raises(ValueError, match="requeues"):
            first.next(**dead, max_attempts=attempts, requeued=requeued)  # type: ignore[arg-type]
