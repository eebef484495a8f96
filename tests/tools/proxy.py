"""A TCP proxy between a client and RabbitMQ that a test can break in the ways that networks do."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

CHUNK = 1 << 16
BASIC_ACK = struct.pack(">HH", 60, 80)
METHOD_FRAME = 1
FRAME_OVERHEAD = 8
POLL_S = 0.2
TOGETHER_S = 0.02
"""Acks that follow one upon another so soon were given at once."""


@dataclass
class Trap:
    """Springs when acks pass on a connection: a confirm on its way to the client, or the client's own acks.

    Attributes:
        of: whose acks.
        passing: how many acks that belong together (TOGETHER_S) are let through before it springs on the next.
        spring: gets the client's port; False where that is not whom the trap is for, and it stays set.
    """

    of: Literal["broker", "client"]
    passing: int
    spring: Callable[[int], bool]
    _passed: dict[int, tuple[float, int]] = field(default_factory=dict)

    def allows(self, port: int, acks: int) -> int | None:
        """How many of the next ``acks`` on the connection of ``port`` may pass; None for all."""
        now = time.monotonic()
        at, before = self._passed.get(port, (0.0, 0))
        before = before if now - at < TOGETHER_S else 0
        if before + acks > self.passing and self.spring(port):
            return max(0, self.passing - before)
        self._passed[port] = (now, before + acks)
        return None


class Proxy:
    """Forwards connections to ``host:port`` until told to do worse.

    Attributes:
        refusing: reset every new connection at once.
        confirms_to_swallow: so many confirms are kept from the client, each with the connection that it came on.
        accepted: connections so far.
        cuts: connections that were reset in mid-stream.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._upstream = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(POLL_S)
        self.port: int = self._listener.getsockname()[1]
        self.refusing = False
        self.confirms_to_swallow = 0
        self.accepted = 0
        self.cuts = 0
        self._bytes_left: int | None = None
        self._trap: Trap | None = None
        self._flowing = threading.Event()
        self._flowing.set()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._accept, name="proxy", daemon=True)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def cut(self) -> int:
        """Reset every connection that stands; how many there were."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for sock in pair:
                _reset(sock)
        return len(pairs)

    def cut_after(self, count: int) -> None:
        """Reset the connection on which the ``count``-th byte from now on passes, and let that be its last."""
        with self._lock:
            self._bytes_left = count

    def set_trap(self, trap: Trap | None) -> None:
        """Set a trap; the connection on which it springs is reset."""
        with self._lock:
            self._trap = trap

    def stall(self) -> None:
        """Forward nothing, and tell nobody."""
        self._flowing.clear()

    def resume(self) -> None:
        """Forward again, what was held back first."""
        self._flowing.set()

    def close(self) -> None:
        """Cut everything and stop listening."""
        self._ended.set()
        self._flowing.set()
        self._threads[0].join(5)  # or it would take in whoever connects again after the cut
        self.cut()
        for thread in self._threads:
            thread.join(5)
        self._listener.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            self.accepted += 1
            if self.refusing:
                _reset(client)
                continue
            try:
                server = socket.create_connection(self._upstream, 5)
            except OSError:
                _reset(client)
                continue
            self._forward_both_ways(client, server)

    def _forward_both_ways(self, client: socket.socket, server: socket.socket) -> None:
        for sock in (client, server):
            sock.settimeout(None)
        with self._lock:
            self._pairs.append((client, server))
        ways: tuple[tuple[socket.socket, socket.socket, Literal["broker", "client"]], ...] = (
            (client, server, "client"),
            (server, client, "broker"),
        )
        for source, target, sender in ways:
            thread = threading.Thread(
                target=self._forward, args=(source, target, sender, client), daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _forward(
        self,
        source: socket.socket,
        target: socket.socket,
        sender: Literal["broker", "client"],
        client: socket.socket,
    ) -> None:
        finder = _AckFinder()
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                self._flowing.wait()
                passing = self._passing(data, sender, finder.ends(data), client)
                target.sendall(data[:passing])
                if passing < len(data):
                    self.cuts += 1
                    break
        for sock in (source, target):
            _reset(sock)

    def _passing(
        self,
        data: bytes,
        sender: Literal["broker", "client"],
        acks: list[int],
        client: socket.socket,
    ) -> int:
        """How many bytes of ``data`` may pass; fewer than all end the connection."""
        if sender == "broker" and acks and self.confirms_to_swallow > 0:
            self.confirms_to_swallow -= 1
            return 0
        with self._lock:
            trap = self._trap
            if trap is not None and trap.of == sender and acks:
                allowed = trap.allows(client.getpeername()[1], len(acks))
                if allowed is not None:
                    self._trap = None
                    return acks[allowed - 1] if allowed else 0
            if self._bytes_left is not None:
                if self._bytes_left < len(data):
                    passing, self._bytes_left = self._bytes_left, None
                    return passing
                self._bytes_left -= len(data)
        return len(data)


class _AckFinder:
    """Follows AMQP's frames through a stream cut anywhere, looking for basic.ack."""

    def __init__(self) -> None:
        self._held = b""

    def ends(self, data: bytes) -> list[int]:
        """Where in ``data`` each basic.ack ends."""
        before = len(self._held)
        self._held += data
        ends, at = [], 0
        while len(self._held) - at >= FRAME_OVERHEAD - 1:
            if self._held.startswith(b"AMQP", at):  # the header that a client begins with
                at += FRAME_OVERHEAD
                continue
            kind, _channel, size = struct.unpack_from(">BHI", self._held, at)
            end = at + size + FRAME_OVERHEAD
            if len(self._held) < end:
                break
            if kind == METHOD_FRAME and self._held.startswith(BASIC_ACK, at + 7):
                ends.append(end - before)
            at = end
        self._held = self._held[at:]
        return ends


def _reset(sock: socket.socket) -> None:
    """Close with RST, and wake whoever reads from it."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.shutdown(socket.SHUT_RD)  # SHUT_WR would send a polite FIN
    sock.close()
