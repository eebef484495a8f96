"""RabbitMQ as the broker port. Nothing outside this package imports pika."""

from spotgrpo.shared.rabbitmq.broker import RabbitMQBroker
from spotgrpo.shared.rabbitmq.inspection import BrokerReport, inspect
from spotgrpo.shared.rabbitmq.server import redact

__all__ = ["BrokerReport", "RabbitMQBroker", "inspect", "redact"]
