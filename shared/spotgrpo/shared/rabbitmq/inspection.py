"""What ``spotgrpo doctor`` asks of a broker. Nothing of a run's own queues is changed."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from pika import BasicProperties, DeliveryMode
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import ChannelClosedByBroker, NackError, UnroutableError

from spotgrpo.shared.config import BrokerConfig
from spotgrpo.shared.errors import SpotGRPOError
from spotgrpo.shared.ids import Queues, check_run_id
from spotgrpo.shared.ports import QueueDepth
from spotgrpo.shared.rabbitmq.broker import blocking_connection
from spotgrpo.shared.rabbitmq.server import Server
from spotgrpo.shared.rabbitmq.topology import Arguments, work_queues

PROBE_EXPIRES_MS = 60_000
GET_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class BrokerReport:
    """What a broker is and what the configured user may do there.

    Attributes:
        url: without password.
        problem: why there is no connection, or None where there is one; what follows then holds.
        product, version: as the server calls itself.
        heartbeat_s: negotiated; 0 means that a dead link is never noticed.
        can_declare: the user may declare and delete durable queues (a learner must, a worker need not).
        arguments_accepted: the broker takes quorum queues with the run's arguments; None where not known.
        can_publish, can_consume: tried on the temporary queue; None where none could be declared.
        consumer_timeout_s: longest time that a delivery may stay unacked. AMQP does not tell: always None here.
        depths: ready messages and consumers of the run's queues, None for those that are not declared.
        refusals: what the broker answered, by what was tried.
    """

    url: str
    problem: SpotGRPOError | None = None
    product: str = ""
    version: str = ""
    heartbeat_s: int = 0
    can_declare: bool = False
    arguments_accepted: bool | None = None
    can_publish: bool | None = None
    can_consume: bool | None = None
    consumer_timeout_s: float | None = None
    depths: Mapping[str, QueueDepth | None] = field(default_factory=dict)
    refusals: Mapping[str, str] = field(default_factory=dict)

    @property
    def can_connect(self) -> bool:
        return self.problem is None


def inspect(config: BrokerConfig, run: str) -> BrokerReport:
    """Connect once and try what a learner needs, on a temporary queue that is deleted again.

    Raises:
        ConfigError: the URL, the CA file or the run id cannot be used at all.
    """
    server, queues = Server(config), Queues(check_run_id(run))
    report = BrokerReport(server.shown)
    try:
        with blocking_connection(server, "doctor") as connection:
            return _Inspection(connection, config, queues).run(report)
    except SpotGRPOError as exc:
        return replace(report, problem=exc)


class _Inspection:
    def __init__(
        self, connection: BlockingConnection, config: BrokerConfig, queues: Queues
    ) -> None:
        self._connection = connection
        self._config = config
        self._queues = queues
        self._probe = f"spotgrpo.{queues.run}.doctor.{uuid.uuid4().hex[:8]}"
        self._refusals: dict[str, str] = {}

    def run(self, report: BrokerReport) -> BrokerReport:
        # pika keeps the server's greeting nowhere else.
        impl = self._connection._impl  # type: ignore[attr-defined]  # noqa: SLF001
        properties: Mapping[str, object] = impl.server_properties or {}
        report = replace(
            report,
            product=str(properties.get("product", "")),
            version=str(properties.get("version", "")),
            heartbeat_s=int(impl.params.heartbeat or 0),
            depths={
                queue.name: self._depth(queue.name)
                for queue in work_queues(self._config, self._queues)
            },
        )
        plain: Arguments = {"x-queue-type": "quorum", "x-expires": PROBE_EXPIRES_MS}
        if not self._try("declare", lambda channel: self._declare_and_delete(channel, plain)):
            return replace(report, refusals=self._refusals)
        full = {
            **work_queues(self._config, self._queues)[-1].arguments,
            "x-expires": PROBE_EXPIRES_MS,
        }
        accepted = self._try("arguments", lambda channel: self._declare_and_delete(channel, full))
        report = replace(report, can_declare=True, arguments_accepted=accepted)
        return self._try_messages(report, full if accepted else plain)

    def _try_messages(self, report: BrokerReport, arguments: Arguments) -> BrokerReport:
        self._try(
            "declare",
            lambda channel: channel.queue_declare(self._probe, durable=True, arguments=arguments),
        )
        try:
            can_publish = self._try("publish", self._publish)
            can_consume = self._try("consume", self._consume)
        finally:
            self._try("delete", lambda channel: channel.queue_delete(self._probe))
        return replace(
            report, can_publish=can_publish, can_consume=can_consume, refusals=self._refusals
        )

    def _try(self, what: str, call: Callable[[BlockingChannel], object]) -> bool:
        """Run ``call`` on a channel of its own, which a refusal closes."""
        channel = self._connection.channel()
        try:
            call(channel)
        except (ChannelClosedByBroker, NackError, UnroutableError) as exc:
            self._refusals[what] = str(getattr(exc, "reply_text", "") or exc)
            return False
        finally:
            if channel.is_open:
                channel.close()
        return True

    def _declare_and_delete(self, channel: BlockingChannel, arguments: Arguments) -> None:
        channel.queue_declare(self._probe, durable=True, arguments=arguments)
        channel.queue_delete(self._probe)

    def _publish(self, channel: BlockingChannel) -> None:
        channel.confirm_delivery()
        properties = BasicProperties(delivery_mode=DeliveryMode.Persistent)
        channel.basic_publish("", self._probe, b"doctor", properties, mandatory=True)

    def _consume(self, channel: BlockingChannel) -> None:
        for method, _properties, _body in channel.consume(
            self._probe, inactivity_timeout=GET_TIMEOUT_S
        ):
            if method is not None:
                channel.basic_ack(method.delivery_tag or 0)
            break
        channel.cancel()

    def _depth(self, name: str) -> QueueDepth | None:
        channel = self._connection.channel()
        try:
            found = channel.queue_declare(name, passive=True).method
        except ChannelClosedByBroker:
            return None
        channel.close()
        return QueueDepth(found.message_count, found.consumer_count)
