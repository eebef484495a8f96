"""A task whose ack was void is acked when it comes again, and only then."""

from __future__ import annotations

from collections.abc import Sequence

from spotgrpo.producer.acks import Acks
from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.ports import Delivery, Handle, Message
from spotgrpo.shared.wire import AGAIN


class Channel:
    """The part of a consumer that acks go to."""

    def __init__(self) -> None:
        self.generation = 1
        self.acked: list[Handle] = []

    def ack(self, handles: Sequence[Handle]) -> None:
        self.acked += [one for one in handles if one.generation == self.generation]


def delivery(generation: int, *, redelivered: bool = True) -> Delivery:
    return Delivery(Message(b""), Handle(generation, 7), redelivered)


def acks(most: int = 4) -> tuple[Acks, Channel]:
    channel = Channel()
    return Acks(channel, most), channel  # type: ignore[arg-type]


TASK = TaskId(1)


def test_a_task_that_was_acked_is_done_anew_when_it_comes_again() -> None:
    given, channel = acks()
    given.give(TASK, [Handle(1, 1)])
    assert channel.acked == [Handle(1, 1)]
    assert not given.gave(TASK, delivery(1))


def test_a_task_whose_ack_was_void_is_acked_once_when_it_is_redelivered() -> None:
    given, channel = acks()
    channel.generation = 0
    given.give(TASK, [Handle(1, 1)])
    channel.generation = 2
    assert not given.gave(TaskId(2), delivery(2))
    assert given.gave(TASK, delivery(2))
    assert channel.acked == [Handle(2, 7)]
    assert not given.gave(TASK, delivery(2))


def test_a_task_that_was_published_anew_is_done_anew() -> None:
    given, channel = acks()
    given.give(TASK, [Handle(0, 1)])
    assert not given.gave(TASK, delivery(1, redelivered=False))
    assert not channel.acked


def test_a_task_that_was_published_anew_is_done_anew_though_its_first_worker_died() -> None:
    """The group was lost with the broker's disk, so the learner published its task again: nothing else brings it."""
    given, channel = acks()
    given.give(TASK, [Handle(0, 1)])
    anew = Delivery(Message(b"", headers={AGAIN: 1}), Handle(1, 7), redelivered=True)
    assert not given.gave(TASK, anew)
    assert not channel.acked


def test_a_channel_that_is_lost_again_voids_the_ack_again() -> None:
    given, channel = acks()
    given.give(TASK, [Handle(0, 1)])
    late = delivery(1)
    channel.generation = 2
    assert given.gave(TASK, late)
    assert given.gave(TASK, delivery(2))
    assert channel.acked == [Handle(2, 7)]


def test_a_copy_on_a_living_channel_makes_the_ack_good() -> None:
    given, _ = acks()
    given.give(TASK, [Handle(0, 1), Handle(1, 1)])
    assert not given.gave(TASK, delivery(1))


def test_few_are_remembered() -> None:
    given, _ = acks(most=3)
    for index in range(10):
        given.give(TaskId(index), [Handle(0, index)])
    assert [given.gave(TaskId(index), delivery(1)) for index in range(10)] == 7 * [False] + [
        True,
        True,
        True,
    ]
