"""A broker in memory: several roles in one process share its queues, and a test can break what they stand on.

It follows RabbitMQ where the roles can tell: unsettled deliveries go back to the head of their queue with a delivery
count, a message over its delivery limit goes to the dead-letter queue, a full queue refuses, a lost channel voids
its handles. What it has not: bytes on a wire, heartbeats, and time between a cause and its effect.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import TypeVar

from spotgrpo.shared.errors import BrokerUnavailable, ConfigError, SpotGRPOError, TransientError
from spotgrpo.shared.ids import Queues, check_run_id
from spotgrpo.shared.ports import Delivery, Handle, Message, QueueDepth

T = TypeVar("T")

BROADCAST_BACKLOG = 100
RETRY_AUTHORIZE_S = 0.02
UNLIMITED = 1 << 60


@dataclass(eq=False)
class _Stored:
    message: Message
    returns: int = 0

    def delivered(self) -> Message:
        if not self.returns:
            return self.message
        return replace(
            self.message, headers={**self.message.headers, "x-delivery-count": self.returns}
        )


@dataclass(eq=False)
class _Queue:
    name: str
    delivery_limit: int
    max_length: int = UNLIMITED
    dead: str | None = None
    ready: deque[_Stored] = field(default_factory=deque)
    consumers: list[MemoryConsumer] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        # RabbitMQ's quorum queues begin to refuse with one message more than x-max-length.
        return len(self.ready) > self.max_length


@dataclass(eq=False)
class _Held:
    """A published message that is not confirmed yet."""

    queue: str
    message: Message
    future: Future[None]


class MemoryBrokerServer:
    """What several :class:`MemoryBroker` views share. Thread-safe."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.queues: dict[str, _Queue] = {}
        self.exchanges: dict[str, list[MemoryConsumer]] = {}
        self.leaders: dict[str, MemoryConsumer] = {}
        self.consumers: list[MemoryConsumer] = []
        self.publishers: list[MemoryPublisher] = []
        self.is_up = True
        self._lost_confirms = 0

    # ---- for tests -------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Take the broker away: every channel dies, unsettled deliveries are back in their queues."""
        with self.changed:
            self._lose_channels()
            self.is_up = False

    def start(self) -> None:
        """Bring it back, with the messages it had."""
        with self.changed:
            self.is_up = True
        self.work()

    def drop_connections(self) -> None:
        """Cut every connection once; all come back at once, as new generations."""
        with self.changed:
            self._lose_channels()
        self.work()

    def wipe(self) -> None:
        """Lose the disk: connections, queues and messages are gone until a learner declares again."""
        with self.changed:
            self._lose_channels()
            self.queues.clear()
            self.exchanges.clear()
        self.work()

    def lose_confirms(self, count: int = 1) -> None:
        """Store the next ``count`` messages but lose their confirms: each is repeated, under the same id."""
        with self.changed:
            self._lost_confirms += count

    # ---- for the views ---------------------------------------------------------------------------------------

    def work(self) -> None:
        """Move everything that can move: attach consumers, store what was held back, hand out deliveries.

        Not under the lock, or callbacks of confirmed messages would run under it.
        """
        confirmed: list[Future[None]] = []
        with self.changed:
            if self.is_up:
                for consumer in list(self.consumers):
                    consumer.attach()
                moved = True
                while moved:
                    moved = False
                    for queue in self.queues.values():
                        moved = self._hand_out(queue) or moved
                    for publisher in self.publishers:
                        stored = publisher.store_held()
                        confirmed += stored
                        moved = moved or bool(stored)
            self.changed.notify_all()
        for future in confirmed:
            future.set_result(None)

    def try_store(self, name: str, message: Message) -> bool:
        """True where a queue took the message (and its confirm was not lost for good)."""
        queue = self.queues.get(name)
        if queue is None or queue.is_full:
            return False
        if self._lost_confirms:
            self._lost_confirms -= 1
            queue.ready.append(_Stored(message))
        queue.ready.append(_Stored(message))
        return True

    def give_back(self, queue: _Queue, stored: Sequence[_Stored]) -> None:
        """Unsettled messages return to the head of their queue, in their order; poison goes to the dead letters."""
        for one in reversed(stored):
            one.returns += 1
            if one.returns > queue.delivery_limit:
                self.bury(queue, one, "delivery_limit")
            else:
                queue.ready.appendleft(one)

    def bury(self, queue: _Queue, stored: _Stored, reason: str) -> None:
        """Dead-letter a message. One without a dead-letter queue is dropped, as RabbitMQ does."""
        target = self.queues.get(queue.dead or "")
        if target is None:
            return
        headers = {
            **stored.message.headers,
            "x-first-death-reason": reason,
            "x-first-death-queue": queue.name,
            "x-first-death-exchange": "",
        }
        target.ready.append(_Stored(replace(stored.message, headers=headers)))

    def _lose_channels(self) -> None:
        self.leaders.clear()
        for consumer in list(self.consumers):
            consumer.lose_channel()
        self.changed.notify_all()

    @staticmethod
    def _hand_out(queue: _Queue) -> bool:
        moved = False
        while queue.ready:
            consumer = next((one for one in queue.consumers if one.has_room), None)
            if consumer is None:
                break
            queue.consumers.remove(consumer)
            queue.consumers.append(consumer)
            consumer.deliver(queue.ready.popleft())
            moved = True
        return moved


class MemoryPublisher:
    """Implements ports.Publisher."""

    def __init__(self, server: MemoryBrokerServer, window: int) -> None:
        self._server = server
        self._window = window
        self._held: list[_Held] = []
        self._closed = False
        with server.changed:
            server.publishers.append(self)

    def publish(self, queue: str, message: Message) -> Future[None]:
        """See ports.Publisher."""
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()
        if not message.message_id:
            message = replace(message, message_id=uuid.uuid4().hex)
        with self._server.changed:
            self._server.changed.wait_for(lambda: len(self._held) < self._window or self._closed)
            if not self._closed:
                self._held.append(_Held(queue, message, future))
        if self._closed:
            future.set_exception(BrokerUnavailable("the publisher is closed"))
        else:
            self._server.work()
        return future

    def broadcast(self, exchange: str, message: Message) -> None:
        """See ports.Publisher."""
        with self._server.changed:
            if self._server.is_up and not self._closed:
                for consumer in self._server.exchanges.get(exchange, []):
                    consumer.deliver(_Stored(message))
            self._server.changed.notify_all()

    @property
    def blocked(self) -> bool:
        with self._server.changed:
            return bool(self._held) or not self._server.is_up

    def close(self, timeout_s: float = 5.0) -> None:
        """See ports.Publisher."""
        with self._server.changed:
            if not self._closed:
                self._closed = True
                self._server.changed.notify_all()
                self._server.changed.wait_for(lambda: not self._held, timeout_s)
                self._server.publishers.remove(self)
            left, self._held = self._held, []
        for held in left:
            held.future.set_exception(
                BrokerUnavailable("the publisher was closed before the broker confirmed")
            )

    def store_held(self) -> list[Future[None]]:
        """Store what the broker takes now, keeping the order within each queue; the futures to confirm."""
        confirmed, refusing, left = [], set(), []
        for held in self._held:
            if held.queue not in refusing and self._server.try_store(held.queue, held.message):
                confirmed.append(held.future)
            else:
                refusing.add(held.queue)
                left.append(held)
        self._held = left
        return confirmed


class MemoryConsumer:
    """Implements ports.Consumer."""

    def __init__(self, server: MemoryBrokerServer, source: str, prefetch: int) -> None:
        self._server = server
        self._source = source
        self._prefetch = prefetch
        self._queue: _Queue | None = None
        self._buffer: deque[Delivery] = deque()
        self._unsettled: dict[int, _Stored] = {}
        self._generation = 0
        self._generations = 0
        self._tag = 0
        self._finished = self._is_paused = False
        self._error: SpotGRPOError | None = None
        with server.changed:
            server.consumers.append(self)
        server.work()

    # ---- the port --------------------------------------------------------------------------------------------

    def take(self, timeout_s: float | None = None) -> Delivery | None:
        """See ports.Consumer."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            again_s = self._advance()
            with self._server.changed:
                if self._buffer:
                    return self._buffer.popleft()
                if self._error is not None:
                    raise self._error
                left = None if deadline is None else deadline - time.monotonic()
                if self._finished or (left is not None and left <= 0):
                    return None
                if not self._is_due():
                    self._server.changed.wait(left)
            if again_s:
                time.sleep(again_s if left is None else min(again_s, max(0.0, left)))

    def ask_beyond(self) -> None:
        """See ports.Consumer."""
        with self._server.changed:
            if self._queue is None or self._finished or self._buffer:
                return
            if self.has_room and not self._is_paused:
                return
            if self._queue.ready:
                self.deliver(self._queue.ready.popleft())
                self._server.changed.notify_all()

    def pause(self) -> None:
        """See ports.Consumer."""
        with self._server.changed:
            self._is_paused = True
            self._stand_back()
        self._server.work()

    def resume(self) -> None:
        """See ports.Consumer."""
        with self._server.changed:
            self._is_paused = False
            if self._queue is not None and self not in self._queue.consumers:
                self._queue.consumers.append(self)
        self._server.work()

    def ack(self, handles: Sequence[Handle]) -> None:
        """See ports.Consumer."""
        with self._server.changed:
            for handle in handles:
                self._pop(handle)
        self._server.work()

    def reject(self, handle: Handle, *, requeue: bool) -> None:
        """See ports.Consumer."""
        with self._server.changed:
            stored, queue = self._pop(handle), self._queue
            if stored is not None and queue is not None:
                if requeue:
                    self._server.give_back(queue, [stored])
                else:
                    self._server.bury(queue, stored, "rejected")
        self._server.work()

    @property
    def generation(self) -> int:
        return self._generation

    def cancel(self) -> None:
        """See ports.Consumer. Deliveries that were not taken yet go back to the queue."""
        with self._server.changed:
            self._finished = True
            self._stand_back()
        self._server.work()

    def _stand_back(self) -> None:
        """Be handed nothing any more; what was not taken yet goes back."""
        untaken = [delivery.handle for delivery in self._buffer]
        self._buffer.clear()
        if self._queue is not None:
            if self in self._queue.consumers:
                self._queue.consumers.remove(self)
            self._server.give_back(
                self._queue, [one for one in map(self._pop, untaken) if one is not None]
            )

    def close(self, timeout_s: float = 5.0) -> None:
        """See ports.Consumer."""
        del timeout_s
        with self._server.changed:
            self._finished = True
            self.lose_channel()
            if self in self._server.consumers:
                self._server.consumers.remove(self)
        self._server.work()

    # ---- for the server, under its lock ----------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        return len(self._unsettled) < self._prefetch

    def deliver(self, stored: _Stored) -> None:
        """Put a message into this consumer's hands."""
        self._tag += 1
        self._unsettled[self._tag] = stored
        handle = Handle(self._generation, self._tag)
        self._buffer.append(Delivery(stored.delivered(), handle, stored.returns > 0))

    def attach(self) -> None:
        """Begin to consume, where the queue stands."""
        queue = self._server.queues.get(self._source)
        if self._generation or self._finished or self._error is not None or queue is None:
            return
        self._open_generation()
        self._queue = queue
        if not self._is_paused:
            queue.consumers.append(self)

    def lose_channel(self) -> None:
        """The channel dies: its handles are void, and what it held is back in the queue."""
        queue, self._queue = self._queue, None
        if queue is not None:
            if self in queue.consumers:
                queue.consumers.remove(self)
            self._server.give_back(queue, list(self._unsettled.values()))
        self._unsettled.clear()
        self._buffer.clear()
        self._generation = 0

    def _open_generation(self) -> None:
        self._generations += 1
        self._generation = self._generations
        self._tag = 0

    def _is_due(self) -> bool:
        """True where ``_advance`` has something to do."""
        return False

    def _advance(self) -> float:
        """What is due before the next delivery can come; seconds to pause before it is tried again."""
        return 0.0

    def _pop(self, handle: Handle) -> _Stored | None:
        return (
            self._unsettled.pop(handle.tag, None) if handle.generation == self._generation else None
        )


class MemoryLeaderConsumer(MemoryConsumer):
    """Implements ports.LeaderConsumer. ``authorize`` runs in the thread that calls ``start`` or ``take``."""

    def __init__(self, server: MemoryBrokerServer, broker: MemoryBroker, prefetch: int) -> None:
        self._broker = broker
        self._leader = broker.queues.leader
        self._authorize: Callable[[], None] | None = None
        self._advancing = False
        super().__init__(server, broker.queues.rollouts, prefetch)

    def lead(self, timeout_s: float | None = None) -> bool:
        """See ports.LeaderConsumer."""
        with self._server.changed:
            self._server.changed.wait_for(
                lambda: self._hold() or self._finished or self._error, timeout_s
            )
            if self._error is not None:
                raise self._error
            return self._hold()

    def start(self, authorize: Callable[[], None]) -> None:
        """See ports.LeaderConsumer. ``authorize`` is called before the first consuming too."""
        self._authorize = authorize
        self._advance()

    def attach(self) -> None:
        """Only after the order of a takeover, which ``_advance`` runs."""

    def lose_channel(self) -> None:
        """The leader queue goes with the connection."""
        super().lose_channel()
        if self._server.leaders.get(self._leader) is self:
            del self._server.leaders[self._leader]

    def _hold(self) -> bool:
        if not self._server.is_up or self._finished:
            return False
        return self._server.leaders.setdefault(self._leader, self) is self

    def _is_due(self) -> bool:
        started = self._authorize is not None and not self._advancing
        return started and not (self._generation or self._finished or self._error) and self._hold()

    def _advance(self) -> float:
        with self._server.changed:
            if not self._is_due():
                return 0.0
            self._advancing = True
        try:
            self._enter()
        except TransientError:
            return RETRY_AUTHORIZE_S
        except SpotGRPOError as exc:
            with self._server.changed:
                self._error = exc
                self.lose_channel()
                self._server.changed.notify_all()
        finally:
            self._advancing = False
        return 0.0

    def _enter(self) -> None:
        """Hold the leader queue, authorize, declare what a wiped broker lost, consume."""
        if self._authorize is not None:
            self._authorize()
        self._broker.declare()
        with self._server.changed:
            if self._hold():
                super().attach()
        self._server.work()


class MemorySubscription(MemoryConsumer):
    """A consumer of a fanout exchange; the oldest news are dropped first."""

    def deliver(self, stored: _Stored) -> None:
        """Keep the newest only."""
        super().deliver(stored)
        self._unsettled.clear()
        if len(self._buffer) > BROADCAST_BACKLOG:
            self._buffer.popleft()

    def attach(self) -> None:
        """Bind to the exchange, where it stands."""
        bound = self._server.exchanges.get(self._source)
        if self._generation or self._finished or bound is None:
            return
        self._open_generation()
        bound.append(self)

    def lose_channel(self) -> None:
        """The queue goes with the connection."""
        super().lose_channel()
        bound = self._server.exchanges.get(self._source, [])
        if self in bound:
            bound.remove(self)


class MemoryBroker:
    """Implements ports.Broker: one role's view of a shared server.

    Args:
        server: shared by all roles of a test.
        run: run id.
        delivery_limit: as broker.delivery_limit.
        max_queued_groups: as broker.max_queued_groups.
        may_declare: False for a user with ``configure ^$``, as workers have.
    """

    def __init__(
        self,
        server: MemoryBrokerServer,
        run: str,
        *,
        delivery_limit: int = 100,
        max_queued_groups: int = 10_000,
        may_declare: bool = True,
    ) -> None:
        self._server = server
        self.queues = Queues(check_run_id(run))
        self._delivery_limit = delivery_limit
        self._max_queued_groups = max_queued_groups
        self._may_declare = may_declare
        self._given_out: list[MemoryPublisher | MemoryConsumer] = []
        self._closed = False

    def declare(self) -> None:
        """See ports.Broker."""
        self._reach()
        if not self._may_declare:
            raise ConfigError("broker.url", "memory", "the user may not declare queues")
        limit, names = self._delivery_limit, self.queues
        wanted = [
            _Queue(names.dead, UNLIMITED),
            _Queue(names.tasks, limit, dead=names.dead),
            _Queue(names.rollouts, limit, self._max_queued_groups, names.dead),
        ]
        with self._server.changed:
            for queue in wanted:
                stands = self._server.queues.setdefault(queue.name, queue)
                if (stands.delivery_limit, stands.max_length) != (
                    queue.delivery_limit,
                    queue.max_length,
                ):
                    raise ConfigError("broker", queue.name, "the queue stands with other arguments")
            for exchange in (names.versions, names.telemetry):
                self._server.exchanges.setdefault(exchange, [])
        self._server.work()

    def wait_until_declared(self, timeout_s: float | None = None) -> bool:
        """See ports.Broker."""
        self._reach()
        wanted = {self.queues.dead, self.queues.tasks, self.queues.rollouts}
        with self._server.changed:
            return self._server.changed.wait_for(
                lambda: wanted <= self._server.queues.keys(), timeout_s
            )

    def publisher(self, window: int = 64) -> MemoryPublisher:
        """See ports.Broker."""
        self._reach()
        return self._give_out(MemoryPublisher(self._server, window))

    def consumer(self, queue: str, prefetch: int) -> MemoryConsumer:
        """See ports.Broker."""
        self._reach()
        return self._give_out(MemoryConsumer(self._server, queue, prefetch))

    def leader_consumer(self, prefetch: int) -> MemoryLeaderConsumer:
        """See ports.Broker."""
        self._reach()
        return self._give_out(MemoryLeaderConsumer(self._server, self, prefetch))

    def subscribe(self, exchange: str) -> MemoryConsumer | None:
        """See ports.Broker."""
        self._reach()
        return (
            self._give_out(MemorySubscription(self._server, exchange, UNLIMITED))
            if self._may_declare
            else None
        )

    def depth(self, queue: str) -> QueueDepth | None:
        """See ports.Broker."""
        with self._server.changed:
            stands = self._server.queues.get(queue)
            if stands is None or not self._server.is_up:
                return None
            return QueueDepth(len(stands.ready), len(stands.consumers))

    def close(self) -> None:
        """See ports.Broker."""
        self._closed = True
        given_out, self._given_out = self._given_out, []
        for one in reversed(given_out):
            one.close()

    def _reach(self) -> None:
        if self._closed or not self._server.is_up:
            raise BrokerUnavailable(
                "the broker is down" if not self._closed else "this broker was closed"
            )

    def _give_out(self, one: T) -> T:
        self._given_out.append(one)  # type: ignore[arg-type]
        return one
