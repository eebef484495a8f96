"""One connection on one thread, which connects again for ever.

pika's connections belong to one thread each. That thread runs pika's loop from start to close, whatever the
caller computes meanwhile, so that heartbeats go on; others reach it through :meth:`Link.call_soon` alone.
"""

from __future__ import annotations

import functools
import logging
import struct
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from pika import SelectConnection
from pika.adapters.select_connection import IOLoop
from pika.exceptions import ConnectionClosedByClient
from pika.frame import Header, Method
from pika.spec import FRAME_BODY, FRAME_END

from spotgrpo.shared.rabbitmq.server import Backoff, Server

log = logging.getLogger(__name__)

ABORT_GRACE_S = 0.5
STEADY_S = 1.0
"""A connection that stood for less did not end the trouble: the pauses before the next ones go on growing."""
RECEIVE_BYTES = 1 << 17
BODY_FRAME = struct.Struct(">BHL")
FRAME_END_BYTE = bytes([FRAME_END])


class Connection(SelectConnection):
    """pika's connection, with a way to let go of a socket whose other end does not answer."""

    def abort(self) -> None:
        """Drop the socket now; what was not sent is lost."""
        if not self.is_closed:
            self._terminate_stream(ConnectionClosedByClient(200, "dropped"))  # type: ignore[attr-defined]

    def _send_message(self, channel_number: int, method: Any, content: Any) -> None:
        # pika copies a body twice and sends its three kinds of frames one by one: one copy and one write for
        # each body frame, with what belongs before the first, is a fifth cheaper for small bodies.
        properties, body = content
        head = Method(channel_number, method).marshal()
        head += Header(channel_number, len(body), properties).marshal()
        view, size = memoryview(body), self._body_max_length  # type: ignore[attr-defined]
        writes = []
        for start in range(0, len(body), size):
            part = view[start : start + size]
            frame = BODY_FRAME.pack(FRAME_BODY, channel_number, len(part))
            writes.append(b"".join((head, frame, part, FRAME_END_BYTE)))
            head = b""
        self._output_marshaled_frames(writes or [head])  # type: ignore[attr-defined]

    def _proto_connection_made(self, transport: Any) -> None:
        # pika reads 4 KiB at a time and puts frames of 128 KiB together from that: with whole frames a
        # consumer of big bodies costs half the CPU.
        transport._MAX_RECV_BYTES = RECEIVE_BYTES  # noqa: SLF001
        super()._proto_connection_made(transport)  # type: ignore[misc]

    def _on_connection_workflow_done(self, outcome: Any) -> None:
        # pika 1.4 hands over an exception's class where the connection was closed while it opened, and then
        # fails its own assertion that it is an instance.
        super()._on_connection_workflow_done(  # type: ignore[misc]
            outcome() if isinstance(outcome, type) else outcome
        )


class LinkUser(Protocol):
    """What a link tells its owner, always on the link's own thread."""

    def on_connected(self, connection: Connection) -> None:
        """A new connection stands; channels of the one before are gone."""

    def on_lost(self) -> None:
        """The connection is gone; another will follow."""

    def on_closing(self) -> None:
        """Last chance to send something before the connection is closed."""

    def on_ended(self, error: BaseException | None) -> None:
        """The thread ends: after ``close`` (None), or by an error that nobody foresaw."""


class Link:
    """Runs one connection on a daemon thread.

    Args:
        server: where to.
        name: what the connection is for, in thread names, logs and the broker's tools.
        user: told of what happens. An exception out of one of its methods ends the thread.
    """

    def __init__(self, server: Server, name: str, user: LinkUser) -> None:
        self._server = server
        self._name = name
        self._user = user
        self._loop = IOLoop()
        self._connection: Connection | None = None
        self._connected = threading.Event()
        self._backoff = Backoff()
        self._opened_at = 0.0
        self._closing = False
        self._crash: BaseException | None = None
        self.blocked = False
        self._thread = threading.Thread(target=self._run, name=f"spotgrpo-{name}", daemon=True)

    # ---- any thread ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, which connects at once."""
        self._thread.start()

    @property
    def is_connected(self) -> bool:
        return self._connected.is_set()

    def wait_connected(self, timeout_s: float) -> bool:
        """True once a connection stands."""
        return self._connected.wait(timeout_s)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Run ``call`` on the link's thread; dropped in silence once the thread has ended."""
        self._loop.add_callback_threadsafe(self.guard(call))

    def close(self, grace_s: float) -> None:
        """Close the connection, by force after ``grace_s``, and end the thread. Idempotent."""
        self.call_soon(functools.partial(self._begin_close, grace_s))
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(grace_s + 4 * ABORT_GRACE_S)

    # ---- the link's thread -----------------------------------------------------------------------------------

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Run ``call`` after ``delay_s``; from the link's thread only."""
        self._loop.call_later(delay_s, self.guard(call))

    def guard(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call`` for use as a pika callback.

        pika takes an exception out of a callback for a network fault and reconnects, for ever. Through this it
        ends the thread instead and is told to the user.
        """

        @functools.wraps(call)
        def guarded(*args: Any) -> Any:
            try:
                return call(*args)
            except Exception as exc:
                self._crash = self._crash or exc
                self._loop.stop()
                raise

        return guarded

    def _run(self) -> None:
        try:
            self._connect()
            self._serve()
        except Exception as exc:  # noqa: BLE001 - the thread's edge: it must come out of the user's calls
            self._crash = self._crash or exc
        if self._crash is not None:
            log.error("%s: its thread ended: %r", self._name, self._crash)
        self._let_go()
        self._user.on_ended(self._crash)

    def _serve(self) -> None:
        """Run pika's loop until it is stopped.

        What comes out of it without a crash of ours is pika's own: where a socket is reset in the very moment in
        which it connects, pika raises ValueError. That is a lost connection like any other.
        """
        while True:
            try:
                self._loop.start()
            except Exception as exc:
                if self._crash is not None:
                    raise
                lost, self._connection = self._connection, None
                if lost is None:
                    raise
                if lost.is_open:
                    lost.abort()
                self._forget(exc)
            else:
                return

    def _let_go(self) -> None:
        self._connected.clear()
        self._closing = True
        self._server.outage.forget(self)
        if self._connection is not None and not self._connection.is_closed:
            self._connection.abort()
            self._loop.call_later(ABORT_GRACE_S, self._loop.stop)
            self._loop.start()
        self._loop.close()

    def _connect(self) -> None:
        if self._closing:
            return
        self._connection = Connection(
            self._server.parameters(self._name),
            on_open_callback=self.guard(self._on_open),
            on_open_error_callback=self.guard(self._on_gone),
            on_close_callback=self.guard(self._on_gone),
            custom_ioloop=self._loop,
        )
        self._connection.add_on_connection_blocked_callback(self._on_blocked)
        self._connection.add_on_connection_unblocked_callback(self._on_unblocked)

    def _on_open(self, connection: Connection) -> None:
        self._server.outage.end(self, self._name)
        self._opened_at = time.monotonic()
        self.blocked = False
        self._connected.set()
        self._user.on_connected(connection)

    def _on_gone(self, connection: Connection, reason: BaseException | None) -> None:
        if connection is self._connection:
            self._forget(reason)

    def _forget(self, reason: BaseException | None) -> None:
        """The connection is gone: tell the user, and make another after a while."""
        was_connected = self._connected.is_set()
        self._connected.clear()
        self.blocked = False
        if was_connected:
            if time.monotonic() - self._opened_at >= STEADY_S:
                self._backoff.reset()
            self._user.on_lost()
        if self._closing:
            self._loop.stop()
            return
        error = self._server.connection_error(reason or ConnectionError("closed"))
        self._server.outage.begin(self, self._name, error)
        self._loop.call_later(self._backoff.next_s(), self.guard(self._connect))

    def _on_blocked(self, *_: object) -> None:
        self.blocked = True
        log.warning("%s: the broker raised an alarm and takes no messages for now", self._name)

    def _on_unblocked(self, *_: object) -> None:
        self.blocked = False
        log.info("%s: the broker takes messages again", self._name)

    def _begin_close(self, grace_s: float) -> None:
        if self._closing:
            return
        self._closing = True
        connection = self._connection
        if connection is None or connection.is_closed:
            self._loop.stop()
            return
        if self._connected.is_set():
            self._user.on_closing()
        if self.blocked:
            # The broker does not read from a blocked connection, so it would not answer a polite close.
            connection.abort()
        elif not connection.is_closing:
            connection.close()
        self._loop.call_later(grace_s, self._drop)
        self._loop.call_later(grace_s + ABORT_GRACE_S, self._loop.stop)

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.abort()
