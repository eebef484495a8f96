"""The learner's consumer: the connection that holds the leader queue is the one that consumes."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

from pika.channel import Channel
from pika.exceptions import ChannelClosedByBroker

from spotgrpo.shared.errors import SpotGRPOError, TransientError
from spotgrpo.shared.ids import Queues
from spotgrpo.shared.rabbitmq.consumer import RabbitMQConsumer
from spotgrpo.shared.rabbitmq.server import RESOURCE_LOCKED, Backoff, Server
from spotgrpo.shared.rabbitmq.topology import Declaration

log = logging.getLogger(__name__)

STANDBY_POLL_S = 0.5


class RabbitMQLeaderConsumer(RabbitMQConsumer):
    """Implements ports.LeaderConsumer.

    The exclusive queue is gone with its connection; another learner's next try then gets it. After every loss the
    order is run again: hold the queue, authorize, declare what a wiped broker may have lost, consume.
    """

    def __init__(self, server: Server, queues: Queues, prefetch: int) -> None:
        self._queues = queues
        self._leads = False
        self._authorize: Callable[[], None] | None = None
        self._authorize_backoff = Backoff()
        self._declaration: Declaration | None = None
        super().__init__(server, "leader", queues.rollouts, prefetch)

    # ---- any thread ------------------------------------------------------------------------------------------

    def lead(self, timeout_s: float | None = None) -> bool:
        """See ports.LeaderConsumer."""
        with self._changed:
            self._changed.wait_for(lambda: self._leads or self._finished or self._error, timeout_s)
            if self._error is not None:
                raise self._error
            return self._leads

    def start(self, authorize: Callable[[], None]) -> None:
        """See ports.LeaderConsumer. ``authorize`` is called before the first consuming too."""
        self._authorize = authorize
        self._link.call_soon(self._begin)

    # ---- the link's thread -----------------------------------------------------------------------------------

    def _prepare(self, channel: Channel) -> None:
        channel.queue_declare(
            self._queues.leader, exclusive=True, callback=self._link.guard(self._on_leading)
        )

    def _on_leading(self, _frame: Any) -> None:
        self._set_leads(True)
        self._begin()

    def _begin(self) -> None:
        """Authorize, once the queue is held and ``start`` was called, whichever comes last."""
        channel = self._channel
        if (
            channel is None
            or not channel.is_open
            or not self._leads
            or self._authorize is None
            or self._declaration
        ):
            return
        try:
            self._authorize()
        except TransientError as exc:
            self._say_once(
                f"cannot learn whether this learner still owns the run: {exc}; trying again"
            )
            self._link.call_later(self._authorize_backoff.next_s(), self._begin)
            return
        except SpotGRPOError as exc:
            self._end(exc)
            return
        self._authorize_backoff.reset()
        self._declaration = Declaration(
            channel,
            self._server.config,
            self._queues,
            self._link.guard,
            lambda: self._consume(channel, self._queues.rollouts),
        )

    def _on_channel_closed(self, channel: Channel, reason: BaseException) -> None:
        refusal = self._declaration.refusal(reason) if self._declaration else None
        if refusal is not None:
            self._end(refusal)
        super()._on_channel_closed(channel, reason)

    def _reopen_after_s(self, reason: BaseException) -> float:
        if _is_locked(reason):
            return STANDBY_POLL_S * random.uniform(0.8, 1.2)
        return super()._reopen_after_s(reason)

    def _explain(self, reason: BaseException) -> str:
        if _is_locked(reason):
            return "another learner leads this run; standing by"
        return super()._explain(reason)

    def _drop_channel(self) -> None:
        super()._drop_channel()
        self._declaration = None
        self._set_leads(False)

    def _set_leads(self, leads: bool) -> None:
        with self._changed:
            self._leads = leads
            self._changed.notify_all()


def _is_locked(reason: BaseException) -> bool:
    return isinstance(reason, ChannelClosedByBroker) and reason.reply_code == RESOURCE_LOCKED
