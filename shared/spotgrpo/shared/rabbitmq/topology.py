"""The queues and exchanges of a run, with the arguments that every declaration must repeat exactly."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from pika.channel import Channel
from pika.exceptions import ChannelClosedByBroker

from spotgrpo.shared.config import BrokerConfig
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.ids import Queues
from spotgrpo.shared.rabbitmq.server import PRECONDITION_FAILED

Arguments: TypeAlias = dict[str, str | int]

DEAD_DELIVERY_LIMIT = 1_000_000
"""Dead letters have nowhere further to go: reading them often must not drop them (RabbitMQ 4 drops after 20)."""
BROADCAST_BACKLOG = 100


@dataclass(frozen=True)
class WorkQueue:
    """A durable quorum queue, and the setting that a person would change where its arguments differ."""

    name: str
    arguments: Arguments
    setting: str = "run.id"


def work_queues(config: BrokerConfig, queues: Queues) -> list[WorkQueue]:
    """The durable queues, the dead-letter queue first, since the others name it."""
    common: Arguments = {
        "x-queue-type": "quorum",
        # Both are what at-least-once dead-lettering needs; the overflow also makes a full queue push back.
        "x-overflow": "reject-publish",
        "x-dead-letter-strategy": "at-least-once",
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": queues.dead,
        "x-delivery-limit": config.delivery_limit,
    }
    return [
        WorkQueue(queues.dead, {"x-queue-type": "quorum", "x-delivery-limit": DEAD_DELIVERY_LIMIT}),
        WorkQueue(queues.tasks, common, "broker.delivery_limit"),
        WorkQueue(
            queues.rollouts,
            {**common, "x-max-length": config.max_queued_groups},
            "broker.max_queued_groups",
        ),
    ]


def fanouts(queues: Queues) -> list[str]:
    """The transient exchanges."""
    return [queues.versions, queues.telemetry]


def mismatch(queue: WorkQueue, config: BrokerConfig, reply: str) -> ConfigError:
    """A queue that stands already with other arguments; a broker answers 406."""
    value = getattr(config, queue.setting.partition(".")[2], queue.name)
    remedy = (
        f"queue {queue.name} stands with other arguments: set this back, take another run.id, "
        f"or delete the queue once it is empty ({reply})"
    )
    return ConfigError(queue.setting, value, remedy)


class Declaration:
    """Declares everything on one channel, without blocking the link's thread; a refusal closes the channel.

    Args:
        guard: wraps callbacks (Link.guard).
        done: called when everything stands.
    """

    def __init__(
        self,
        channel: Channel,
        config: BrokerConfig,
        queues: Queues,
        guard: Callable[[Callable[..., object]], Callable[..., object]],
        done: Callable[[], None],
    ) -> None:
        self._config = config
        self._done = done
        self._current: WorkQueue | None = None
        self._steps = itertools.chain(
            [
                functools.partial(self._declare_queue, channel, queue)
                for queue in work_queues(config, queues)
            ],
            [functools.partial(self._declare_exchange, channel, name) for name in fanouts(queues)],
        )
        self._next = guard(self._step)
        self._step()

    def refusal(self, reason: BaseException) -> ConfigError | None:
        """What a closed channel says about the step that was under way, or None where it says nothing."""
        if (
            isinstance(reason, ChannelClosedByBroker)
            and reason.reply_code == PRECONDITION_FAILED
            and self._current is not None
        ):
            return mismatch(self._current, self._config, reason.reply_text)
        return None

    def _step(self, *_: object) -> None:
        step = next(self._steps, None)
        if step is None:
            self._current = None
            self._done()
        else:
            step(self._next)

    def _declare_queue(
        self, channel: Channel, queue: WorkQueue, then: Callable[..., object]
    ) -> None:
        self._current = queue
        channel.queue_declare(queue.name, durable=True, arguments=queue.arguments, callback=then)

    def _declare_exchange(
        self, channel: Channel, exchange: str, then: Callable[..., object]
    ) -> None:
        self._current = None
        channel.exchange_declare(exchange, "fanout", durable=True, callback=then)
