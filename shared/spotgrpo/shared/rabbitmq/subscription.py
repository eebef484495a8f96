"""Reading a fanout exchange through a queue of one's own."""

from __future__ import annotations

import functools
import threading
from typing import Any

from pika.channel import Channel

from spotgrpo.shared.errors import SpotGRPOError
from spotgrpo.shared.rabbitmq.consumer import RabbitMQConsumer
from spotgrpo.shared.rabbitmq.server import Server
from spotgrpo.shared.rabbitmq.topology import BROADCAST_BACKLOG


class RabbitMQSubscription(RabbitMQConsumer):
    """Implements ports.Consumer over a server-named queue, which goes with the connection.

    Users without the right to declare queues cannot have one: ``allowed`` says so, since polling does without.
    """

    _auto_ack = True

    def __init__(self, server: Server, exchange: str) -> None:
        self._exchange = exchange
        self._known = threading.Event()
        self._allowed = True
        super().__init__(server, "subscription", exchange, prefetch=0)

    def allowed(self, timeout_s: float) -> bool:
        """False where the broker refused; True where it did not, or has not answered within ``timeout_s``."""
        self._known.wait(timeout_s)
        return self._allowed

    def _prepare(self, channel: Channel) -> None:
        arguments = {"x-max-length": BROADCAST_BACKLOG, "x-overflow": "drop-head"}
        channel.queue_declare(
            "",
            exclusive=True,
            auto_delete=True,
            arguments=arguments,
            callback=self._link.guard(functools.partial(self._bind, channel)),
        )

    def _bind(self, channel: Channel, frame: Any) -> None:
        queue: str = frame.method.queue
        bound = self._link.guard(lambda _frame: self._consume(channel, queue))
        channel.queue_bind(queue, self._exchange, callback=bound)

    def _on_consuming(self, channel: Channel, frame: Any) -> None:
        super()._on_consuming(channel, frame)
        self._known.set()

    def _on_refused(self, error: SpotGRPOError) -> None:
        # Not an error of take(): a subscription that is refused later is as silent as an exchange without news.
        del error
        self._allowed = False
        self._known.set()
        self._link.close(0.0)

    def _on_channel_closed(self, channel: Channel, reason: BaseException) -> None:
        super()._on_channel_closed(channel, reason)
        self._known.set()
