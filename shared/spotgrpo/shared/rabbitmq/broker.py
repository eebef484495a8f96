"""The adapter's front: what ports.Broker asks for, over RabbitMQ."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import pika
from pika.adapters.blocking_connection import BlockingConnection
from pika.exceptions import AMQPConnectionError, AMQPError, ChannelClosedByBroker

from spotgrpo.shared.config import BrokerConfig
from spotgrpo.shared.errors import BrokerUnavailable
from spotgrpo.shared.ids import Queues, check_run_id
from spotgrpo.shared.ports import QueueDepth
from spotgrpo.shared.rabbitmq.consumer import RabbitMQConsumer
from spotgrpo.shared.rabbitmq.control import Control
from spotgrpo.shared.rabbitmq.leader import RabbitMQLeaderConsumer
from spotgrpo.shared.rabbitmq.publisher import RabbitMQPublisher
from spotgrpo.shared.rabbitmq.server import ACCESS_REFUSED, NOT_FOUND, PRECONDITION_FAILED, Server
from spotgrpo.shared.rabbitmq.subscription import RabbitMQSubscription
from spotgrpo.shared.rabbitmq.topology import WorkQueue, fanouts, mismatch, work_queues
from spotgrpo.shared.retry import retry

log = logging.getLogger(__name__)
T = TypeVar("T")

DECLARED_POLL_S = 0.5
SETTLED_TIMEOUT_S = 10.0


class _Closable(Protocol):
    def close(self) -> None: ...


class RabbitMQBroker:
    """Implements ports.Broker.

    The first method that needs the broker makes first contact, and tries up to ``config.start_deadline_s``. Once
    it stood, every connection that this broker gave out connects again for ever.

    Args:
        config: where the broker is, and the settings of its queues.
        run: run id, part of every name.
        stopping: once set, first contact is given up (BrokerUnavailable).

    Raises:
        ConfigError: the URL or the run id cannot be used.
    """

    def __init__(
        self, config: BrokerConfig, run: str, stopping: threading.Event | None = None
    ) -> None:
        self._config, self._stopping = config, stopping
        self._queues = Queues(check_run_id(run))
        self._server = Server(config)
        self._lock = threading.Lock()
        self._was_reached = False
        self._said_waiting = False
        self._control: Control | None = None
        self._given_out: list[_Closable] = []
        self._closed = False

    @property
    def queues(self) -> Queues:
        """The names of this run."""
        return self._queues

    def declare(self) -> None:
        """See ports.Broker."""
        self._first_contact("declaring queues", self._declare_once)

    def wait_until_declared(self, timeout_s: float | None = None) -> bool:
        """See ports.Broker."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        return self._first_contact(
            "looking for the run's queues", lambda c: self._poll_declared(c, deadline)
        )

    def publisher(self, window: int = 64) -> RabbitMQPublisher:
        """See ports.Broker."""
        self._reach()
        publisher = self._give_out(RabbitMQPublisher(self._server, window))
        publisher.wait_ready(SETTLED_TIMEOUT_S)
        return publisher

    def consumer(self, queue: str, prefetch: int) -> RabbitMQConsumer:
        """See ports.Broker."""
        self._reach()
        return self._give_out(RabbitMQConsumer(self._server, "consumer", queue, prefetch))

    def leader_consumer(self, prefetch: int) -> RabbitMQLeaderConsumer:
        """See ports.Broker."""
        self._reach()
        return self._give_out(RabbitMQLeaderConsumer(self._server, self._queues, prefetch))

    def subscribe(self, exchange: str) -> RabbitMQSubscription | None:
        """See ports.Broker."""
        self._reach()
        subscription = self._give_out(RabbitMQSubscription(self._server, exchange))
        if subscription.allowed(SETTLED_TIMEOUT_S):
            return subscription
        subscription.close()
        return None

    def depth(self, queue: str) -> QueueDepth | None:
        """See ports.Broker."""
        self._reach()
        with self._lock:
            if self._control is None and not self._closed:
                self._control = Control(self._server)
                self._given_out.append(self._control)
            control = self._control
        return control.depth(queue) if control is not None else None

    def close(self) -> None:
        """See ports.Broker."""
        with self._lock:
            self._closed = True
            given_out, self._given_out = self._given_out, []
        for one in reversed(given_out):
            one.close()

    # ---- first contact ---------------------------------------------------------------------------------------

    def _reach(self) -> None:
        if self._closed or not self._was_reached:
            self._first_contact("connecting", lambda _connection: None)

    def _first_contact(self, what: str, call: Callable[[BlockingConnection], T]) -> T:
        """``call`` with a connection of its own, tried until the start deadline."""
        if self._closed:
            raise BrokerUnavailable("this broker was closed")

        def attempt() -> T:
            with blocking_connection(self._server, "start") as connection:
                return call(connection)

        deadline_s = self._config.start_deadline_s
        try:
            result = retry(
                f"{what} at {self._server.shown}",
                attempt,
                deadline_s=deadline_s,
                stopping=self._stopping,
            )
        except BrokerUnavailable as exc:
            if self._stopping is not None and self._stopping.is_set():
                raise
            raise BrokerUnavailable(
                f"broker.url = {self._server.shown!r}: no answer within broker.start_deadline_s = {deadline_s:g}: "
                f"check the address, the network and that the server runs ({exc})"
            ) from exc
        self._was_reached = True
        return result

    def _give_out(self, one: T) -> T:
        with self._lock:
            self._given_out.append(one)  # type: ignore[arg-type]
        return one

    # ---- declaring -------------------------------------------------------------------------------------------

    def _declare_once(self, connection: BlockingConnection) -> None:
        for queue in work_queues(self._config, self._queues):
            self._declare_queue(connection, queue)
        for exchange in fanouts(self._queues):
            try:
                connection.channel().exchange_declare(exchange, "fanout", durable=True)
            except ChannelClosedByBroker as exc:
                raise self._server.refused(f"declare {exchange}", exc) from exc

    def _declare_queue(self, connection: BlockingConnection, queue: WorkQueue) -> None:
        channel = connection.channel()
        try:
            channel.queue_declare(queue.name, durable=True, arguments=queue.arguments)
        except ChannelClosedByBroker as exc:
            if exc.reply_code == PRECONDITION_FAILED:
                raise mismatch(queue, self._config, exc.reply_text) from exc
            if exc.reply_code == ACCESS_REFUSED:
                raise self._server.refused(f"declare {queue.name}", exc) from exc
            raise
        channel.close()

    def _poll_declared(self, connection: BlockingConnection, deadline: float | None) -> bool:
        while not self._is_declared_once(connection):
            if deadline is not None and time.monotonic() >= deadline:
                return False
            if not self._said_waiting:
                self._said_waiting = True
                log.info(
                    "waiting for a learner to begin run %s: is the id right, and is one started?",
                    self._queues.run,
                )
            connection.sleep(DECLARED_POLL_S * random.uniform(0.5, 1.5))
        return True

    def _is_declared_once(self, connection: BlockingConnection) -> bool:
        for queue in work_queues(self._config, self._queues):
            channel = connection.channel()
            try:
                channel.queue_declare(queue.name, passive=True)
            except ChannelClosedByBroker as exc:
                if exc.reply_code == NOT_FOUND:
                    return False
                if exc.reply_code == ACCESS_REFUSED:
                    raise self._server.refused(f"look at {queue.name}", exc) from exc
                raise
            channel.close()
        return True


@contextmanager
def blocking_connection(server: Server, name: str) -> Iterator[BlockingConnection]:
    """A connection for a few synchronous calls.

    Raises:
        BrokerUnavailable: not reachable, or lost meanwhile.
        ConfigError: refused.
    """
    parameters = server.parameters(name)
    try:
        connection = pika.BlockingConnection(parameters)
    except (AMQPError, OSError, ValueError) as exc:
        # ValueError: what pika raises where the socket is reset in the very moment in which it connects.
        raise server.connection_error(exc) from exc
    try:
        yield connection
    except AMQPConnectionError as exc:
        raise server.connection_error(exc) from exc
    except AMQPError as exc:
        raise BrokerUnavailable(f"{server.shown}: {exc}") from exc
    finally:
        if connection.is_open:
            try:
                connection.close()
            except AMQPError as exc:
                log.debug("closing a connection to %s: %s", server.shown, exc)
