"""Questions to the broker on a connection kept for them: one short-lived channel each."""

from __future__ import annotations

import functools
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

from pika.channel import Channel

from spotgrpo.shared.ports import QueueDepth
from spotgrpo.shared.rabbitmq.link import Connection, Link
from spotgrpo.shared.rabbitmq.server import Server

ANSWER_TIMEOUT_S = 2.0
CLOSE_GRACE_S = 1.0


class Control:
    """Asks for queue depths."""

    def __init__(self, server: Server) -> None:
        self._connection: Connection | None = None
        self._link = Link(server, "control", self)
        self._link.start()

    def depth(self, queue: str) -> QueueDepth | None:
        """Depth of ``queue``, or None where it is missing or the broker does not answer."""
        if not self._link.wait_connected(ANSWER_TIMEOUT_S):
            return None
        answer: Future[QueueDepth | None] = Future()
        self._link.call_soon(functools.partial(self._ask, queue, answer))
        try:
            return answer.result(ANSWER_TIMEOUT_S)
        except FutureTimeout:
            return None

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self._link.close(CLOSE_GRACE_S)

    # ---- the link's thread -----------------------------------------------------------------------------------

    def on_connected(self, connection: Connection) -> None:
        """Remember where to ask."""
        self._connection = connection

    def on_lost(self) -> None:
        """Nowhere to ask for now."""
        self._connection = None

    def on_closing(self) -> None:
        """Nothing is left to send."""

    def on_ended(self, error: BaseException | None) -> None:
        """Questions from now on find no connection."""
        del error
        self._connection = None

    def _ask(self, queue: str, answer: Future[QueueDepth | None]) -> None:
        if self._connection is None or not self._connection.is_open:
            answer.set_result(None)
            return
        ask = functools.partial(self._declare_passively, queue, answer)
        channel = self._connection.channel(on_open_callback=self._link.guard(ask))
        channel.add_on_close_callback(lambda *_: None if answer.done() else answer.set_result(None))

    def _declare_passively(
        self, queue: str, answer: Future[QueueDepth | None], channel: Channel
    ) -> None:
        answered = self._link.guard(functools.partial(self._on_depth, channel, answer))
        channel.queue_declare(queue, passive=True, callback=answered)

    @staticmethod
    def _on_depth(channel: Channel, answer: Future[QueueDepth | None], frame: Any) -> None:
        answer.set_result(QueueDepth(frame.method.message_count, frame.method.consumer_count))
        channel.close()
