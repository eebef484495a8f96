"""What a publisher says of a queue that refuses, without a broker."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from pika import BasicProperties

from spotgrpo.shared.rabbitmq.publisher import UNLIMITED, RabbitMQPublisher, _Lane, _Pending


class Later:
    """A link whose time is the test's."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def call_later(self, _delay_s: float, call: Callable[[], None]) -> None:
        self.calls.append(call)

    def run(self) -> None:
        due, self.calls = self.calls, []
        for call in due:
            call()


def test_a_queue_that_is_full_again_and_again_is_said_once_and_once_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "spotgrpo")
    publisher = RabbitMQPublisher.__new__(RabbitMQPublisher)
    publisher._link = link = Later()  # type: ignore[assignment]
    publisher._channel, publisher._window = None, 8
    lane = _Lane("q")
    for serial in range(5):
        pending = _Pending(serial, "q", b"", BasicProperties(), Future())
        publisher._hold(lane, pending, "the queue is full")
        lane.waiting.clear()  # the probe passes
        publisher._open_wider(lane)
        assert lane.limit == UNLIMITED
    assert caplog.text.count("refuses messages") == 1
    assert "takes messages again" not in caplog.text
    link.run()
    assert caplog.text.count("takes messages again") == 1
    publisher._hold(lane, pending, "the queue is full")
    assert caplog.text.count("refuses messages") == 2
