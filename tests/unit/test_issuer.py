"""Tasks as they go out: what they ask for, when they go out again, and what tells that they do."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from spotgrpo.consumer.issuer import Issuer
from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.ports import Message, QueueDepth
from spotgrpo.shared.wire import decode_task
from tests.tools.loop_world import Prompts, config_of

A, B = TaskId(0), TaskId(1, 2)
EMPTY, WAITING = QueueDepth(0, 1), QueueDepth(1, 0)


class Outbox:
    """A publisher whose messages are confirmed when the test says so."""

    blocked = False

    def __init__(self) -> None:
        self.sent: list[Message] = []
        self.open: list[Future[None]] = []

    def publish(self, _queue: str, message: Message) -> Future[None]:
        self.sent.append(message)
        self.open.append(Future())
        return self.open[-1]

    def confirm(self) -> None:
        for future in self.open:
            future.set_result(None)
        self.open.clear()


class Desk:
    def __init__(self) -> None:
        self.now, self.outbox = 0.0, Outbox()
        self.issuer = Issuer(
            Prompts(),  # type: ignore[arg-type]
            self.outbox,  # type: ignore[arg-type]
            config_of(reissue_after_s=10.0),
            lambda: self.now,
        )

    def reissue(self, depth: QueueDepth | None = EMPTY) -> list[TaskId]:
        return self.issuer.reissue([(A, 0)], lambda _: depth)


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_rule_8_a_task_asks_for_the_version_at_its_issue(desk: Desk) -> None:
    desk.issuer.publish([(A, 3), (B, 7)])
    assert [decode_task(one.body).min_version for one in desk.outbox.sent] == [3, 7]


def test_rule_4_a_task_goes_out_again_under_its_id_after_reissue_after_s_with_backoff(
    desk: Desk,
) -> None:
    desk.issuer.publish([(A, 0)])
    desk.outbox.confirm()
    for wait in (10.0, 20.0, 40.0):
        desk.now += wait - 1.0
        assert desk.reissue() == []
        desk.now += 1.0
        assert desk.reissue() == [A]
        desk.outbox.confirm()
    assert {one.message_id for one in desk.outbox.sent} == {str(A)}
    assert {one.body for one in desk.outbox.sent} == {desk.outbox.sent[0].body}


def test_rule_4_not_while_a_publish_of_it_is_unconfirmed_or_tasks_wait(desk: Desk) -> None:
    desk.issuer.publish([(A, 0)])
    desk.now = 1000.0
    assert desk.reissue() == [], "the publisher repeats it by itself"
    desk.outbox.confirm()
    desk.now = 2000.0
    assert desk.reissue(WAITING) == [], "it may be among those that wait"
    desk.now += 5.0
    assert desk.reissue(None) == [], "as far as anybody knows"
    desk.now += 5.0
    assert desk.reissue(EMPTY) == [A]


def test_rule_4_a_task_that_later_ones_have_overtaken_goes_out_again_though_tasks_wait(
    desk: Desk,
) -> None:
    """In a run that flows, some task waits whenever one looks: a lost one would be missed for ever."""
    desk.issuer.publish([(A, 0), (B, 0)])
    desk.outbox.confirm()
    desk.now = 10.0
    assert desk.issuer.reissue([(A, 0), (B, 0)], lambda _: WAITING) == []
    desk.issuer.forget([B])
    desk.now = 11.0
    assert desk.issuer.reissue([(A, 0)], lambda _: WAITING) == [A]


def test_the_broker_is_not_asked_at_every_turn_for_how_many_tasks_wait(desk: Desk) -> None:
    """No worker may come for days."""
    asked: list[str] = []

    def depth(queue: str) -> QueueDepth:
        asked.append(queue)
        return WAITING

    desk.issuer.publish([(A, 0)])
    desk.outbox.confirm()
    for _ in range(500):
        desk.now += 0.2
        assert desk.issuer.reissue([(A, 0)], depth) == []
    assert 10 <= len(asked) <= 20


def test_rule_4_a_task_is_unconfirmed_from_each_of_its_publishes_until_the_broker_has_it(
    desk: Desk,
) -> None:
    desk.issuer.publish([(A, 0), (B, 0)])
    desk.issuer.expect([TaskId(7)])
    assert desk.issuer.unconfirmed == {A, B}
    desk.outbox.confirm()
    assert desk.issuer.unconfirmed == set()
    desk.now = 10.0
    assert desk.reissue() == [A]
    assert desk.issuer.unconfirmed == {A}
    desk.issuer.forget([A])
    assert desk.issuer.unconfirmed == set()


def test_what_may_have_been_published_before_says_so(desk: Desk) -> None:
    """A worker looks for a partial then, and only then."""
    desk.issuer.publish([(A, 0)])
    desk.outbox.confirm()
    desk.now = 10.0
    assert desk.reissue() == [A]
    desk.issuer.publish([(B, 0)], again=True)
    first, reissued, taken_over = desk.outbox.sent
    assert "again" not in first.headers
    assert reissued.headers["again"] == taken_over.headers["again"] == 1
