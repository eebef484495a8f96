"""What the roles need of a broker and of a bucket. ``rabbitmq``, ``s3`` and ``memory`` implement it.

One contract suite (tests/contracts) runs against every implementation, so the in-memory ones cannot lie.
All methods are safe to call from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

# ---- bucket ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stored:
    """An object's bytes, and the ETag that names this state of it."""

    body: bytes
    etag: str


@dataclass(frozen=True)
class ObjectInfo:
    """An object in a listing; ``modified`` in Unix seconds."""

    key: str
    size: int
    modified: float


class ObjectStore(Protocol):
    """A bucket, under a prefix. Keys are relative to the prefix.

    Every method raises StoreUnavailable where the server does not answer or answers with a fault of its own, and
    ConfigError where it refuses the credentials or has no such bucket. Reads and unconditional writes are retried
    inside for some seconds first; conditional writes are not, since their outcome is for the caller to settle.
    """

    def create(self, key: str, body: bytes) -> None:
        """Store an immutable object. The same bytes again are fine; other bytes raise IntegrityError."""

    def get(self, key: str) -> Stored:
        """The object, whole, its transfer checked. Raises NotStored."""

    def get_if_changed(self, key: str, etag: str | None) -> Stored | None:
        """The object, or None while its ETag is still ``etag``. Raises NotStored."""

    def compare_and_swap(self, key: str, body: bytes, expected: str | None) -> str | None:
        """Replace the object whose ETag is ``expected`` (None: create it where none is), once, without retry.

        Returns the new ETag, or None where the condition was refused. After StoreUnavailable the outcome is
        unknown: read back.
        """

    def download(self, key: str, path: Path, size: int, sha256: str) -> None:
        """Write the object to ``path``, going on where a cut transfer stopped; ``path`` appears whole or not at all.

        Raises NotStored, and IntegrityError where the bytes are not those of ``size`` and ``sha256`` (hex).
        """

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose keys start with ``prefix``, in key order."""

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing ones are fine."""


# ---- broker ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Message:
    """A persistent message. ``headers`` are short strings and integers (run, task, schema, worker, kind)."""

    body: bytes
    message_id: str = ""
    headers: Mapping[str, str | int] = field(default_factory=dict)


@dataclass(frozen=True)
class Handle:
    """What acks a delivery. A handle of a generation that is gone is dropped: it would name another message."""

    generation: int
    tag: int


@dataclass(frozen=True)
class Delivery:
    """A message in the consumer's hands until its handle is settled or its channel dies."""

    message: Message
    handle: Handle
    redelivered: bool = False


@dataclass(frozen=True)
class QueueDepth:
    """Messages ready (not those in consumers' hands), and consumers."""

    ready: int
    consumers: int


class Publisher(Protocol):
    """Own connection, own thread: heartbeats go on whatever the caller computes."""

    def publish(self, queue: str, message: Message) -> Future[None]:
        """Publish persistent and mandatory; done once the broker confirmed.

        Repeated with the same id through reconnects, refusals of a full queue and unroutable answers, for ever,
        with backoff. Blocks while the window of unconfirmed messages is full. The future fails only with
        BrokerUnavailable after ``close``, or ConfigError where the broker refuses for good (permissions).
        """

    def broadcast(self, exchange: str, message: Message) -> None:
        """Publish transient to a fanout exchange; dropped in silence where that is not possible now."""

    @property
    def blocked(self) -> bool:
        """True while the broker holds publishers back (alarm), a queue refuses, or no connection stands."""

    def close(self, timeout_s: float = 5.0) -> None:
        """Wait up to ``timeout_s`` for what is unconfirmed, then close. Idempotent."""


class Consumer(Protocol):
    """Own connection, own thread. Reconnects for ever with backoff; a new channel is a new generation."""

    def take(self, timeout_s: float | None = None) -> Delivery | None:
        """The next delivery, or None after ``timeout_s`` or once closed.

        Deliveries of a dead channel that were not taken yet are not handed out any more. Raises what ended the
        consumer for good (Fenced from ``authorize``, ConfigError from refused permissions).
        """

    def ask_beyond(self) -> None:
        """Ask for one delivery where the prefetch window is used up, or while paused. At once, and nothing may come.

        For a caller that has room for more than it is given: a bigger window would fill whether it has or not.
        """

    def pause(self) -> None:
        """Be sent nothing any more, and give back what was not taken yet; ``ask_beyond`` goes on. Idempotent."""

    def resume(self) -> None:
        """Undo ``pause``: the window is filled again, beside what is in hand still. Idempotent."""

    def ack(self, handles: Sequence[Handle]) -> None:
        """Ack; handles of another generation than the live one are dropped. Returns at once."""

    def reject(self, handle: Handle, *, requeue: bool) -> None:
        """Hand back (``requeue``) or dead-letter a delivery. Returns at once."""

    @property
    def generation(self) -> int:
        """The live channel's generation, from 1; 0 while none stands."""

    def cancel(self) -> None:
        """Take no new deliveries; those in hand can still be acked. Idempotent."""

    def close(self, timeout_s: float = 5.0) -> None:
        """Send the acks given so far, then close: the broker requeues the rest. Idempotent."""


class LeaderConsumer(Consumer, Protocol):
    """The rollouts consumer of a learner: one connection holds the exclusive leader queue and consumes."""

    def lead(self, timeout_s: float | None = None) -> bool:
        """Wait until this connection holds the leader queue; False after ``timeout_s``."""

    def start(self, authorize: Callable[[], None]) -> None:
        """Begin to consume. After every reconnect: hold the leader queue, call ``authorize``, then consume.

        ``authorize`` runs on the connection's thread; Fenced from it ends the consumer and comes out of ``take``;
        TransientError from it is retried.
        """


class Broker(Protocol):
    """One broker and run. Every method raises BrokerUnavailable (start deadline passed) or ConfigError (refused)."""

    def declare(self) -> None:
        """Declare the run's durable queues and exchanges (learner only). ConfigError where arguments differ."""

    def wait_until_declared(self, timeout_s: float | None = None) -> bool:
        """Wait for the learner's queues (workers, who may not declare); False after ``timeout_s``."""

    def publisher(self, window: int = 64) -> Publisher:
        """A publisher with at most ``window`` unconfirmed messages."""

    def consumer(self, queue: str, prefetch: int) -> Consumer:
        """A consumer of a work queue with at most ``prefetch`` unsettled deliveries."""

    def leader_consumer(self, prefetch: int) -> LeaderConsumer:
        """The learner's consumer of the rollouts queue, not yet consuming."""

    def subscribe(self, exchange: str) -> Consumer | None:
        """A consumer of a fanout exchange (acks are not needed), or None where permissions do not allow a queue."""

    def depth(self, queue: str) -> QueueDepth | None:
        """Depth of a queue, or None where that cannot be had now."""

    def close(self) -> None:
        """Close everything this broker gave out. Idempotent."""
