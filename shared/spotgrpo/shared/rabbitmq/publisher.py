"""Publishing until confirmed: what is refused, returned or lost with a connection is sent again under its own id."""

from __future__ import annotations

import functools
import heapq
import itertools
import logging
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field

from pika import BasicProperties, DeliveryMode
from pika.channel import Channel
from pika.connection import Connection as PikaConnection
from pika.exceptions import ChannelClosedByBroker
from pika.frame import Method
from pika.spec import Basic, Confirm

from spotgrpo.shared.errors import BrokerUnavailable, ConfigError, SpotGRPOError
from spotgrpo.shared.ports import Message
from spotgrpo.shared.rabbitmq.link import Connection, Link
from spotgrpo.shared.rabbitmq.server import ACCESS_REFUSED, PRECONDITION_FAILED, Backoff, Server

log = logging.getLogger(__name__)

MAX_UNCONFIRMED_BYTES = 64 << 20
"""Bytes on their way to the broker at most (one message may be bigger): pika copies every body that it holds."""
LONGEST_REFUSAL_S = 2.0
QUIET_S = 60.0
"""So long a queue has to take everything before it counts as no longer full."""
UNLIMITED = 1 << 30
CLOSE_GRACE_S = 1.0


@dataclass(eq=False, slots=True)
class _Pending:
    """A message that was not confirmed yet, ordered by when it was first given to us."""

    serial: int
    queue: str
    body: bytes
    properties: BasicProperties
    future: Future[None]
    returned: bool = False

    def __lt__(self, other: _Pending) -> bool:
        return self.serial < other.serial


@dataclass(eq=False)
class _Lane:
    """Messages for one queue. A refusal stops the lane; then one message probes, and success opens it step by step.

    A queue that is full again and again is one trouble: it is said once, and once when it takes all for a while.
    """

    queue: str
    waiting: list[_Pending] = field(default_factory=list)
    in_flight: int = 0
    limit: int = UNLIMITED
    paused: bool = False
    refusals: int = 0
    is_troubled: bool = False
    backoff: Backoff = field(default_factory=lambda: Backoff(LONGEST_REFUSAL_S))

    @property
    def refuses(self) -> bool:
        return self.limit < UNLIMITED


class RabbitMQPublisher:
    """Implements ports.Publisher.

    Args:
        server: where to.
        window: unconfirmed messages at most; ``publish`` blocks at it.
    """

    def __init__(self, server: Server, window: int) -> None:
        self._server = server
        self._window = window
        # A blocked caller is woken for a quarter of the window at once: two threads that wake each other for
        # every message cost a third of the throughput of small ones.
        self._wake_at = window - max(1, window // 4)
        self._changed = threading.Condition()
        self._ready = threading.Event()
        self._new: deque[_Pending] = deque()
        self._wake_is_due = False
        self._unsettled = 0
        self._closed = False
        self._fatal: SpotGRPOError | None = None
        self._serials = itertools.count()
        # Below: the link's thread only.
        self._channel: Channel | None = None
        self._casts: Channel | None = None
        self._tag = 0
        self._unconfirmed: dict[int, tuple[_Lane, _Pending]] = {}
        self._bytes = 0
        self._lanes: dict[str, _Lane] = {}
        self._channel_backoff = Backoff()
        self._link = Link(server, "publisher", self)
        self._link.start()

    # ---- any thread ------------------------------------------------------------------------------------------

    def publish(self, queue: str, message: Message) -> Future[None]:
        """See ports.Publisher."""
        pending = self._pending(queue, message)
        with self._changed:
            while self._unsettled >= self._window and not self._is_over:
                self._changed.wait()
            if self._is_over:
                pending.future.set_exception(
                    self._fatal or BrokerUnavailable("the publisher is closed")
                )
                return pending.future
            self._unsettled += 1
            pending.serial = next(self._serials)
            pending.properties.correlation_id = str(pending.serial)
            self._new.append(pending)
            wake, self._wake_is_due = not self._wake_is_due, True
        if wake:
            self._link.call_soon(self._take_new)
        return pending.future

    def broadcast(self, exchange: str, message: Message) -> None:
        """See ports.Publisher."""
        if self._link.is_connected and not self._link.blocked:
            self._link.call_soon(functools.partial(self._broadcast, exchange, message))

    @property
    def blocked(self) -> bool:
        return (
            not self._link.is_connected
            or self._link.blocked
            or any(lane.refuses for lane in list(self._lanes.values()))
        )

    def wait_ready(self, timeout_s: float) -> bool:
        """True once connection and channels have stood."""
        return self._ready.wait(timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """See ports.Publisher."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            already, self._closed = self._closed, True
            self._changed.notify_all()
            if not already:
                self._changed.wait_for(
                    lambda: self._unsettled == 0 or self._fatal is not None,
                    deadline - time.monotonic(),
                )
        self._link.close(min(CLOSE_GRACE_S, max(0.0, timeout_s)))

    @property
    def _is_over(self) -> bool:
        return self._closed or self._fatal is not None

    @staticmethod
    def _pending(queue: str, message: Message) -> _Pending:
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()  # from here on it cannot be cancelled
        properties = BasicProperties(
            delivery_mode=DeliveryMode.Persistent,
            message_id=message.message_id or uuid.uuid4().hex,
            headers=dict(message.headers),
        )
        return _Pending(-1, queue, message.body, properties, future)

    # ---- the link's thread: connection and channels ----------------------------------------------------------

    def on_connected(self, connection: Connection) -> None:
        """Open both channels: one with confirms, and one for broadcasts, whose errors must not touch the first."""
        self._open_channel(connection)
        self._open_casts(connection)

    def on_lost(self) -> None:
        """Everything unconfirmed goes back in line, in its first order."""
        self._channel = self._casts = None
        self._requeue_unconfirmed()

    def on_closing(self) -> None:
        """Nothing to send: ``close`` has waited for the confirms."""

    def on_ended(self, error: BaseException | None) -> None:
        """No more confirms will come."""
        why: SpotGRPOError = BrokerUnavailable(
            "the publisher was closed before the broker confirmed"
        )
        if error is not None:
            why = SpotGRPOError(f"the publisher's thread ended: {error!r}")
            why.__cause__ = error
        self._end(why)

    def _open_channel(self, connection: PikaConnection) -> None:
        if not connection.is_open:
            return
        channel = connection.channel(on_open_callback=self._link.guard(self._on_channel_open))
        channel.add_on_close_callback(self._link.guard(self._on_channel_closed))

    def _on_channel_open(self, channel: Channel) -> None:
        channel.add_on_return_callback(self._link.guard(self._on_return))
        ready = functools.partial(self._on_confirms_selected, channel)
        channel.confirm_delivery(
            self._link.guard(self._on_confirm), callback=self._link.guard(ready)
        )

    def _on_confirms_selected(self, channel: Channel, _frame: Method[Confirm.SelectOk]) -> None:
        self._channel, self._tag = channel, 0
        self._note_ready()
        for lane in self._lanes.values():
            self._pump(lane)

    def _on_channel_closed(self, channel: Channel, reason: BaseException) -> None:
        connection = channel.connection
        if not connection.is_open:
            return
        self._channel = None
        if isinstance(reason, ChannelClosedByBroker):
            if reason.reply_code == ACCESS_REFUSED:
                self._end(self._server.refused("publish", reason))
                return
            if reason.reply_code == PRECONDITION_FAILED:
                self._refuse_too_big(reason)
        self._requeue_unconfirmed()
        log.warning("publisher: the broker closed the channel: %s; opening another", reason)
        self._link.call_later(
            self._channel_backoff.next_s(), functools.partial(self._open_channel, connection)
        )

    def _requeue_unconfirmed(self) -> None:
        for lane, pending in self._unconfirmed.values():
            pending.returned = False
            heapq.heappush(lane.waiting, pending)
        for lane in self._lanes.values():
            lane.in_flight = 0
        self._unconfirmed.clear()
        self._bytes = 0

    def _refuse_too_big(self, reason: ChannelClosedByBroker) -> None:
        """Without this, a message over the broker's own limit would be repeated, and close the channel, for ever."""
        match = re.search(r"larger than .*max size '?(\d+)", reason.reply_text)
        if match is None:
            return
        limit = int(match[1])
        too_big = [
            tag for tag, (_, pending) in self._unconfirmed.items() if len(pending.body) > limit
        ]
        for tag in too_big:
            lane, pending = self._unconfirmed.pop(tag)
            lane.in_flight -= 1
            remedy = f"raise max_message_size: a message of {len(pending.body)} bytes is over the broker's {limit}"
            self._settle([pending], ConfigError("broker.url", self._server.shown, remedy))

    # ---- the link's thread: messages -------------------------------------------------------------------------

    def _take_new(self) -> None:
        with self._changed:
            new = list(self._new)
            self._new.clear()
            self._wake_is_due = False
        for pending in new:
            lane = self._lanes.get(pending.queue) or self._lanes.setdefault(
                pending.queue, _Lane(pending.queue)
            )
            heapq.heappush(lane.waiting, pending)
        for lane in self._lanes.values():
            self._pump(lane)

    def _pump(self, lane: _Lane) -> None:
        if self._channel is None or lane.paused:
            return
        while (
            lane.waiting
            and lane.in_flight < lane.limit
            and self._has_room(len(lane.waiting[0].body))
        ):
            pending = heapq.heappop(lane.waiting)
            self._tag += 1
            self._unconfirmed[self._tag] = (lane, pending)
            self._bytes += len(pending.body)
            lane.in_flight += 1
            self._channel.basic_publish(
                "", pending.queue, pending.body, pending.properties, mandatory=True
            )

    def _has_room(self, size: int) -> bool:
        return self._bytes == 0 or self._bytes + size <= MAX_UNCONFIRMED_BYTES

    def _on_return(
        self, _channel: Channel, method: Basic.Return, properties: BasicProperties, _body: bytes
    ) -> None:
        """The confirm of an unroutable message follows its return, and is no success."""
        serial = int(properties.correlation_id or -1)
        for _, pending in self._unconfirmed.values():
            if pending.serial == serial:
                pending.returned = True
                return
        log.warning("publisher: %s came back unasked", method.routing_key)

    def _on_confirm(self, frame: Method[Basic.Ack | Basic.Nack]) -> None:
        accepted = isinstance(frame.method, Basic.Ack)
        done: list[_Pending] = []
        for lane, pending in self._confirmed(frame.method.delivery_tag, frame.method.multiple):
            lane.in_flight -= 1
            self._bytes -= len(pending.body)
            if accepted and not pending.returned:
                self._open_wider(lane)
                done.append(pending)
            else:
                self._hold(
                    lane,
                    pending,
                    "it has no such queue" if pending.returned else "the queue is full",
                )
        if done:
            self._channel_backoff.reset()
            self._settle(done, None)
        for lane in self._lanes.values():
            self._pump(lane)

    def _confirmed(self, tag: int, multiple: bool) -> list[tuple[_Lane, _Pending]]:
        if not multiple:
            entry = self._unconfirmed.pop(tag, None)
            return [] if entry is None else [entry]
        tags = list(itertools.takewhile(lambda one: one <= tag, self._unconfirmed))
        return [self._unconfirmed.pop(one) for one in tags]

    def _open_wider(self, lane: _Lane) -> None:
        if not lane.refuses:
            return
        lane.limit += 1
        if lane.limit > self._window or not lane.waiting:
            lane.limit = UNLIMITED
            lane.backoff.reset()
            over = functools.partial(self._note_over, lane, lane.refusals)
            self._link.call_later(QUIET_S, over)

    @staticmethod
    def _note_over(lane: _Lane, refusals: int) -> None:
        """``QUIET_S`` after it opened: nothing was refused since."""
        if lane.is_troubled and lane.refusals == refusals:
            lane.is_troubled = False
            log.info("publisher: %s takes messages again", lane.queue)

    def _hold(self, lane: _Lane, pending: _Pending, why: str) -> None:
        pending.returned = False
        heapq.heappush(lane.waiting, pending)
        lane.refusals += 1
        if not lane.is_troubled:
            log.warning(
                "publisher: the broker refuses messages for %s: %s; trying again", lane.queue, why
            )
        lane.is_troubled = True
        lane.limit = 1
        if not lane.paused:
            lane.paused = True
            self._link.call_later(lane.backoff.next_s(), lambda: self._resume(lane))

    def _resume(self, lane: _Lane) -> None:
        lane.paused = False
        self._pump(lane)

    def _settle(self, messages: Iterable[_Pending], error: SpotGRPOError | None) -> None:
        count = 0
        for pending in messages:
            count += 1
            if error is None:
                pending.future.set_result(None)
            else:
                pending.future.set_exception(error)
        with self._changed:
            self._unsettled -= count
            if self._unsettled <= self._wake_at:
                self._changed.notify_all()

    def _end(self, error: SpotGRPOError) -> None:
        """Fail everything that is not confirmed, and whatever comes after."""
        with self._changed:
            self._fatal = self._fatal or error
            left = [*self._new]
            self._new.clear()
            self._changed.notify_all()
        left += [pending for _, pending in self._unconfirmed.values()]
        left += [pending for lane in self._lanes.values() for pending in lane.waiting]
        self._unconfirmed.clear()
        self._lanes.clear()
        self._bytes = 0
        self._settle(left, error)

    # ---- the link's thread: broadcasts -----------------------------------------------------------------------

    def _open_casts(self, connection: PikaConnection) -> None:
        if not connection.is_open:
            return
        channel = connection.channel(on_open_callback=self._link.guard(self._on_casts_open))
        channel.add_on_close_callback(self._link.guard(self._on_casts_closed))

    def _on_casts_open(self, channel: Channel) -> None:
        self._casts = channel
        self._note_ready()

    def _note_ready(self) -> None:
        if self._channel is not None and self._casts is not None:
            self._ready.set()

    def _on_casts_closed(self, channel: Channel, _reason: BaseException) -> None:
        """The exchange is missing or not ours to write; the next broadcast may fare better."""
        self._casts = None
        connection = channel.connection
        if connection.is_open:
            self._link.call_later(
                LONGEST_REFUSAL_S, functools.partial(self._open_casts, connection)
            )

    def _broadcast(self, exchange: str, message: Message) -> None:
        if self._casts is None or not self._casts.is_open or self._link.blocked:
            return
        properties = BasicProperties(
            delivery_mode=DeliveryMode.Transient,
            message_id=message.message_id or None,
            headers=dict(message.headers),
        )
        self._casts.basic_publish(exchange, "", message.body, properties)
