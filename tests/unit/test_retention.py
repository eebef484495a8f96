"""What the learner deletes of what workers stored, by table."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

from spotgrpo.consumer.ledger import Ledger
from spotgrpo.consumer.retention import UNKNOWN_S, Retention
from spotgrpo.shared.errors import Fenced, StoreUnavailable
from spotgrpo.shared.ids import Keys, TaskId
from spotgrpo.shared.manifest import Durable, Latest, Serving
from spotgrpo.shared.memory.store import MemoryStore
from spotgrpo.shared.ports import ObjectInfo

KEYS = Keys("r")
NOW = 2_000_000_000.0
LEDGER = replace(
    Ledger.first(epoch=1, issue=10), outstanding={TaskId(7): 0, TaskId(8, 2): 0, TaskId(9): 0}
)
LATEST = Latest(
    epoch=1,
    writer="w",
    nonce="n",
    serving=Serving(version=0, epoch=1, manifest="m", sha256="0" * 64),
    durable=Durable(
        version=0, epoch=1, manifest="m", manifest_sha256="0" * 64,
        state="s", state_sha256="0" * 64, ledger="l", ledger_sha256="0" * 64,
    ),
)  # fmt: skip


class AgedStore(MemoryStore):
    """All that it holds was stored ``age_s`` before NOW."""

    age_s = 0.0

    def _put(self, key: str, body: bytes) -> None:
        self._objects[key] = (body, NOW - self.age_s)


def swept(store: MemoryStore) -> None:
    retention = Retention(
        store, KEYS, keep=3, every=None, check_mine=lambda: None, clock=lambda: NOW
    )
    retention.apply(LATEST, [], LEDGER)


@pytest.mark.parametrize(
    ("task", "age_s", "stays"),
    [
        (TaskId(7), 1e7, True),  # outstanding, however long
        (TaskId(3), 0.0, False),  # settled
        (TaskId(3, 2), 0.0, False),
        (TaskId(8, 1), 0.0, False),  # settled, tried again
        (TaskId(8, 2), 0.0, True),
        (TaskId(8, 3), 0.0, True),  # a learner that took over may have issued it
        (TaskId(10), 0.0, True),  # so may it this
        (TaskId(10), UNKNOWN_S + 1, False),
    ],
)
def test_rule_9_what_belongs_to_a_settled_task_is_deleted(
    task: TaskId, age_s: float, stays: bool
) -> None:
    store = AgedStore()
    store.age_s = age_s
    for key in (KEYS.group(task, "ab" * 32), KEYS.partial(task, "host.domain-1", 1)):
        store.create(key, b"x")
    swept(store)
    assert len(list(store.list(""))) == (2 if stays else 0)


@pytest.mark.parametrize(("age_s", "stays"), [(UNKNOWN_S - 1, True), (UNKNOWN_S + 1, False)])
def test_rule_9_what_belongs_to_no_task_is_deleted_after_a_day(age_s: float, stays: bool) -> None:
    store = AgedStore()
    store.age_s = age_s
    store.create(f"{KEYS.partials}notes.txt", b"x")
    store.create(f"{KEYS.groups}00000003.01.x", b"x")
    swept(store)
    assert len(list(store.list(""))) == (2 if stays else 0)


def test_rule_9_a_learner_that_lost_the_run_deletes_nothing_of_a_task_that_the_next_one_requeued() -> (
    None
):
    """Task 3 is dead in this ledger. The next learner issued its second attempt, since somebody asked."""
    store = AgedStore()
    store.create(KEYS.group(TaskId(3, 2), "ab" * 32), b"x")

    def check_mine() -> None:
        assert list(store.list(KEYS.groups)), "it is asked after the listing, before the deleting"
        raise Fenced("lost the run")

    retention = Retention(store, KEYS, keep=3, every=None, check_mine=check_mine, clock=lambda: NOW)
    with pytest.raises(Fenced):
        retention.apply(LATEST, [], LEDGER)
    assert list(store.list(KEYS.groups))


def test_other_objects_are_left_alone() -> None:
    store = AgedStore()
    for key in (KEYS.dead(TaskId(3)), "other/partials/00000003.1.w.1", "r/partials", "r/notes"):
        store.create(key, b"x")
    swept(store)
    assert len(list(store.list(""))) == 4


def test_failing_to_delete_costs_space_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    class Stubborn(AgedStore):
        def delete(self, keys: object) -> None:
            raise StoreUnavailable("not now")

    store = Stubborn()
    store.create(KEYS.partial(TaskId(3), "w", 1), b"x")
    retention = Retention(
        store, KEYS, keep=3, every=None, check_mine=lambda: None, clock=lambda: NOW
    )
    for _ in range(3):
        retention.apply(LATEST, [], LEDGER)
    assert caplog.text.count("takes space") == 1


class Flaky(MemoryStore):
    is_away = False

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        if self.is_away:
            raise StoreUnavailable("away")
        return super().list(prefix)


def test_each_outage_is_named_once_and_so_is_its_end(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spotgrpo")
    store = Flaky()
    retention = Retention(store, KEYS, keep=3, every=None, check_mine=lambda: None)
    for is_away in (True, True, False, False, True):
        store.is_away = is_away
        retention.apply(LATEST, [], LEDGER)
    assert caplog.text.count("cannot delete") == 2
    assert caplog.text.count("can be deleted again") == 1
