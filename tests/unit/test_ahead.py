"""What is taken during a step comes in order, decoded where that went well, and only while its channel stands."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from spotgrpo.consumer.ahead import Ahead, Taken
from spotgrpo.shared.errors import WireError
from spotgrpo.shared.ids import Queues
from spotgrpo.shared.memory.broker import MemoryBroker, MemoryBrokerServer
from spotgrpo.shared.ports import Consumer, Delivery, Message

RUN = "r"


class Scene:
    def __init__(self, most: int = 10) -> None:
        self.server = MemoryBrokerServer()
        broker = MemoryBroker(self.server, RUN)
        broker.declare()
        self.publisher = broker.publisher()
        self.consumer: Consumer = broker.consumer(Queues(RUN).rollouts, most)
        self.decoded: list[bytes] = []
        self.came, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self.wanted = 1
        self.ahead: Ahead[bytes] = Ahead(self.consumer, self._decode, most)

    def _decode(self, delivery: Delivery) -> bytes:
        body = delivery.message.body
        self.decoded.append(body)
        if len(self.decoded) >= self.wanted:
            self.came.set()
        self.go_on.wait(10)
        if body == b"bad":
            raise WireError("bad")
        return body.upper()

    def comes(self, *bodies: bytes) -> None:
        for number, body in enumerate(bodies):
            self.publisher.publish(Queues(RUN).rollouts, Message(body, str(number))).result(5)

    def rest(self) -> Iterator[Taken[bytes]]:
        while (taken := self.ahead.take(0)) is not None:
            yield taken


def test_what_comes_during_a_step_is_decoded_and_handed_out_in_order() -> None:
    scene = Scene()
    scene.comes(b"a", b"bad", b"c")
    scene.wanted = 3
    with scene.ahead.busy(0):
        assert scene.came.wait(10)
    scene.comes(b"later")
    rest = list(scene.rest())
    assert [taken.delivery.message.body for taken in rest] == [b"a", b"bad", b"c", b"later"]
    assert [taken.result() for taken in rest] == [b"A", None, b"C", None]
    assert scene.decoded == [b"a", b"bad", b"c"]


def test_no_more_is_taken_than_there_is_room_for_and_nothing_after_the_step() -> None:
    scene = Scene(most=3)
    with scene.ahead.busy(2):
        scene.comes(b"a", b"b")
        assert scene.came.wait(10)
    with scene.ahead.busy(3):
        pass
    assert [taken.decoded is None for taken in scene.rest()] == [False, True]
    assert scene.decoded == [b"a"]


def test_the_end_of_a_step_does_not_wait_for_what_is_being_decoded() -> None:
    scene = Scene()
    scene.go_on.clear()
    scene.comes(b"a", b"b")
    with scene.ahead.busy(0):
        assert scene.came.wait(10)
    first = scene.ahead.take(0)
    assert first is not None
    assert first.decoded is not None
    assert not first.decoded.done()
    scene.go_on.set()
    assert first.result() == b"A"
    second = scene.ahead.take(0)
    assert second is not None
    assert second.decoded is None


def test_deliveries_of_a_dead_channel_are_not_handed_out() -> None:
    scene = Scene()
    scene.comes(b"a")
    with scene.ahead.busy(0):
        assert scene.came.wait(10)
    scene.server.drop_connections()
    again = scene.ahead.take(5)
    assert again is not None
    assert again.decoded is None
    assert again.delivery.handle.generation == scene.consumer.generation
