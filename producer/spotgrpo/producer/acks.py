"""Acks of done tasks, also of those that come again because the channel of their first ack was gone."""

from __future__ import annotations

from collections.abc import Sequence

from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.ports import Consumer, Delivery, Handle
from spotgrpo.shared.wire import AGAIN


class Acks:
    """Spares the worker from sampling a group twice after an outage of the broker.

    A group is confirmed, but the channel that its task came on is lost: the broker delivers the task again. It is
    acked then, as it would have been before. Only a redelivery is: a task that was published anew is to be done
    anew, since its group may have been lost with the broker's disk.

    Args:
        most: tasks remembered at a time.
    """

    def __init__(self, consumer: Consumer, most: int) -> None:
        self._consumer, self._most = consumer, most
        self._void: dict[TaskId, None] = {}

    def give(self, task_id: TaskId, handles: Sequence[Handle]) -> None:
        """Ack a task whose group was confirmed."""
        self._consumer.ack(handles)
        if all(handle.generation != self._consumer.generation for handle in handles):
            self._void[task_id] = None
            if len(self._void) > self._most:
                del self._void[next(iter(self._void))]

    def gave(self, task_id: TaskId, delivery: Delivery) -> bool:
        """Whether ``delivery`` is of a task that was done: it is acked now, and nothing is left to do."""
        is_anew = bool(
            delivery.message.headers.get(AGAIN)
        )  # redelivered as well, if its first worker died
        if is_anew or not delivery.redelivered or task_id not in self._void:
            return False
        del self._void[task_id]
        self.give(task_id, [delivery.handle])
        return True
