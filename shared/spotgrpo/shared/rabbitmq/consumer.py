"""Consuming: deliveries cross over to the caller, and their acks cross back."""

from __future__ import annotations

import functools
import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pika import BasicProperties
from pika.channel import Channel
from pika.connection import Connection as PikaConnection
from pika.exceptions import ChannelClosedByBroker
from pika.frame import Method
from pika.spec import Basic

from spotgrpo.shared.errors import SpotGRPOError
from spotgrpo.shared.ports import Delivery, Handle, Message
from spotgrpo.shared.rabbitmq.link import Connection, Link
from spotgrpo.shared.rabbitmq.server import ACCESS_REFUSED, NOT_FOUND, Backoff, Server

log = logging.getLogger(__name__)

LONGEST_CHANNEL_WAIT_S = 3.0
CLOSE_GRACE_S = 1.0


class RabbitMQConsumer:
    """Implements ports.Consumer; what else its channel needs is for subclasses.

    Args:
        server: where to.
        name: of the connection.
        queue: what is consumed.
        prefetch: unsettled deliveries at most.
    """

    _auto_ack = False

    def __init__(self, server: Server, name: str, queue: str, prefetch: int) -> None:
        self._server = server
        self._name = name
        self._queue = queue
        self._prefetch = prefetch
        self._changed = threading.Condition()
        self._buffer: deque[Delivery] = deque()
        self._generation = 0
        self._generations = 0
        self._finished = self._is_paused = False
        self._error: SpotGRPOError | None = None
        self._settlements: deque[tuple[Handle, bool | None]] = deque()
        self._wake_is_due = False
        # Below: the link's thread only.
        self._channel: Channel | None = None
        self._consumer_tag: str | None = None
        self._subscribe: Callable[[], None] | None = None
        self._outstanding: dict[int, None] = {}
        self._is_getting = False
        self._channel_backoff = Backoff(LONGEST_CHANNEL_WAIT_S)
        self._said = ""
        self._link = Link(server, name, self)
        self._link.start()

    # ---- any thread ------------------------------------------------------------------------------------------

    def take(self, timeout_s: float | None = None) -> Delivery | None:
        """See ports.Consumer."""
        with self._changed:
            self._changed.wait_for(lambda: self._buffer or self._finished or self._error, timeout_s)
            if self._buffer:
                return self._buffer.popleft()
            if self._error is not None:
                raise self._error
            return None

    def ask_beyond(self) -> None:
        """See ports.Consumer."""
        with self._changed:
            if self._buffer or self._finished:
                return
        self._link.call_soon(self._get_one)

    def pause(self) -> None:
        """See ports.Consumer."""
        with self._changed:
            if self._is_paused:
                return
            self._is_paused = True
            untaken = [(delivery.handle, True) for delivery in self._buffer]
            self._buffer.clear()
        self._link.call_soon(self._follow_pause)  # first, or what goes back would come again
        self._settle(untaken)

    def resume(self) -> None:
        """See ports.Consumer."""
        with self._changed:
            self._is_paused = False
        self._link.call_soon(self._follow_pause)

    def ack(self, handles: Sequence[Handle]) -> None:
        """See ports.Consumer."""
        self._settle([(handle, None) for handle in handles])

    def reject(self, handle: Handle, *, requeue: bool) -> None:
        """See ports.Consumer."""
        self._settle([(handle, requeue)])

    @property
    def generation(self) -> int:
        return self._generation

    def cancel(self) -> None:
        """See ports.Consumer. Deliveries that were not taken yet go back to the queue."""
        with self._changed:
            self._finished = True
            untaken = [(delivery.handle, True) for delivery in self._buffer]
            self._buffer.clear()
            self._changed.notify_all()
        self._settle(untaken)
        self._link.call_soon(self._cancel)

    def close(self, timeout_s: float = 5.0) -> None:
        """See ports.Consumer."""
        with self._changed:
            self._finished = True
            self._buffer.clear()
            self._changed.notify_all()
        self._link.close(timeout_s)

    def _settle(self, settlements: Sequence[tuple[Handle, bool | None]]) -> None:
        if not settlements:
            return
        with self._changed:
            self._settlements.extend(settlements)
            wake, self._wake_is_due = not self._wake_is_due, True
        if wake:
            self._link.call_soon(self._send_settlements)

    # ---- the link's thread: connection and channel -----------------------------------------------------------

    def on_connected(self, connection: Connection) -> None:
        """A new connection: a new channel, and with it a new generation."""
        self._open_channel(connection)

    def on_lost(self) -> None:
        """Handles of the dead channel name nothing any more."""
        self._drop_channel()

    def on_closing(self) -> None:
        """Acks given so far are sent before the close, on the same channel."""
        self._send_settlements()

    def on_ended(self, error: BaseException | None) -> None:
        """Nothing more will come; a caller must not wait for it."""
        self._drop_channel()
        if error is not None:
            why = SpotGRPOError(f"{self._name}: its thread ended: {error!r}")
            why.__cause__ = error
            self._end(why)
        with self._changed:
            self._finished = True
            self._changed.notify_all()

    def _open_channel(self, connection: PikaConnection) -> None:
        if self._finished or self._error is not None or not connection.is_open:
            return
        channel = connection.channel(on_open_callback=self._link.guard(self._on_channel_open))
        channel.add_on_close_callback(self._link.guard(self._on_channel_closed))

    def _on_channel_open(self, channel: Channel) -> None:
        self._channel = channel
        channel.add_on_cancel_callback(self._link.guard(self._on_cancelled_by_broker))
        channel.add_callback(self._link.guard(self._on_nothing), [Basic.GetEmpty], one_shot=False)
        self._prepare(channel)

    def _prepare(self, channel: Channel) -> None:
        """What comes between an open channel and consuming; ends with ``_consume``."""
        self._consume(channel, self._queue)

    def _consume(self, channel: Channel, queue: str) -> None:
        if self._finished:
            return
        self._subscribe = functools.partial(self._be_sent, channel, queue)
        self._follow_pause()
        # Before the broker's answer, since its first delivery may come in one piece with it.
        with self._changed:
            self._generations += 1
            self._generation = self._generations

    def _follow_pause(self) -> None:
        """Be sent messages, or none: deliveries in hand stay valid, since the channel is the same."""
        if self._is_paused or self._finished:
            self._cancel()
        elif self._consumer_tag is None and self._subscribe is not None:
            self._subscribe()

    def _be_sent(self, channel: Channel, queue: str) -> None:
        if not channel.is_open:
            return
        channel.basic_qos(prefetch_count=self._prefetch)
        self._consumer_tag = channel.basic_consume(
            queue,
            self._link.guard(self._on_message),
            auto_ack=self._auto_ack,
            callback=self._link.guard(functools.partial(self._on_consuming, channel)),
        )

    def _on_consuming(self, _channel: Channel, _frame: Method[Basic.ConsumeOk]) -> None:
        self._channel_backoff.reset()
        if self._said:
            log.info("%s: consuming again", self._name)
            self._said = ""

    def _on_cancelled_by_broker(self, _frame: Method[Basic.Cancel]) -> None:
        """The queue was deleted. The channel goes with it, so that what it handed out is void."""
        if self._channel is not None and self._channel.is_open:
            self._channel.close()

    def _on_channel_closed(self, channel: Channel, reason: BaseException) -> None:
        if channel is self._channel:
            self._drop_channel()
        if not channel.connection.is_open:
            return
        if isinstance(reason, ChannelClosedByBroker) and reason.reply_code == ACCESS_REFUSED:
            self._on_refused(self._server.refused(f"use {self._queue}", reason))
            return
        self._say_once(self._explain(reason))
        self._link.call_later(
            self._reopen_after_s(reason), functools.partial(self._open_channel, channel.connection)
        )

    def _on_refused(self, error: SpotGRPOError) -> None:
        self._end(error)

    def _reopen_after_s(self, _reason: BaseException) -> float:
        return self._channel_backoff.next_s()

    def _explain(self, reason: BaseException) -> str:
        if isinstance(reason, ChannelClosedByBroker) and reason.reply_code == NOT_FOUND:
            return f"waiting for {self._queue} to be declared"
        return f"the channel was closed ({reason}); opening another"

    def _say_once(self, text: str) -> None:
        if text != self._said:
            log.warning("%s: %s", self._name, text)
            self._said = text

    def _drop_channel(self) -> None:
        self._channel = self._consumer_tag = self._subscribe = None
        self._is_getting = False
        self._outstanding.clear()
        with self._changed:
            self._generation = 0
            self._buffer.clear()

    def _end(self, error: SpotGRPOError | None) -> None:
        """End for good: ``take`` raises ``error``. The connection is closed, and whatever it held is free."""
        with self._changed:
            self._error = self._error or error
            self._buffer.clear()
            self._changed.notify_all()
        self._link.close(CLOSE_GRACE_S)

    # ---- the link's thread: messages -------------------------------------------------------------------------

    def _on_message(
        self,
        channel: Channel,
        method: Basic.Deliver | Basic.GetOk,
        properties: BasicProperties,
        body: bytes,
    ) -> None:
        tag = method.delivery_tag or 0
        if not self._auto_ack:
            self._outstanding[tag] = None
        message = Message(body, properties.message_id or "", plain_headers(properties.headers))
        with self._changed:
            is_late = self._is_paused and isinstance(method, Basic.Deliver)  # sent before the pause
            if not self._finished and not is_late:
                self._buffer.append(
                    Delivery(message, Handle(self._generation, tag), method.redelivered)
                )
                self._changed.notify()
                return
        if not self._auto_ack and channel.is_open:
            del self._outstanding[tag]
            channel.basic_reject(tag, requeue=True)

    def _get_one(self) -> None:
        """Ask for a message beyond the window, unless the broker sends or owes one anyhow."""
        channel = self._channel
        if channel is None or not channel.is_open or self._subscribe is None or self._is_getting:
            return
        if self._consumer_tag is not None and len(self._outstanding) < self._prefetch:
            return
        self._is_getting = True
        channel.basic_get(self._queue, self._link.guard(self._on_got))

    def _on_got(
        self, channel: Channel, method: Basic.GetOk, properties: BasicProperties, body: bytes
    ) -> None:
        self._is_getting = False
        self._on_message(channel, method, properties, body)

    def _on_nothing(self, _frame: Method[Basic.GetEmpty]) -> None:
        self._is_getting = False

    def _send_settlements(self) -> None:
        with self._changed:
            settlements = list(self._settlements)
            self._settlements.clear()
            self._wake_is_due = False
        if self._channel is None or not self._channel.is_open:
            return
        acked: set[int] = set()
        for handle, requeue in settlements:
            if handle.generation != self._generation or handle.tag not in self._outstanding:
                continue
            if requeue is None:
                acked.add(handle.tag)
            elif handle.tag not in acked:
                del self._outstanding[handle.tag]
                self._channel.basic_reject(handle.tag, requeue=requeue)
        self._send_acks(self._channel, acked)

    def _send_acks(self, channel: Channel, acked: set[int]) -> None:
        """One ``multiple`` ack for the tags below which nothing else is outstanding, single ones for the rest."""
        lowest: list[int] = []
        for tag in self._outstanding:
            if tag not in acked:
                break
            lowest.append(tag)
        if lowest:
            channel.basic_ack(lowest[-1], multiple=len(lowest) > 1)
        for tag in sorted(acked.difference(lowest)):
            channel.basic_ack(tag)
        for tag in acked:
            del self._outstanding[tag]

    def _cancel(self) -> None:
        if self._channel is not None and self._channel.is_open and self._consumer_tag is not None:
            self._channel.basic_cancel(self._consumer_tag)
            self._consumer_tag = None


def plain_headers(headers: Mapping[str, Any] | None) -> dict[str, str | int]:
    """The headers that the port knows: strings and integers (the broker adds tables of its own)."""
    return {
        name: value
        for name, value in (headers or {}).items()
        if isinstance(value, str | int) and not isinstance(value, bool)
    }
