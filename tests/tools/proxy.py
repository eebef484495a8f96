"""A TCP proxy between a client and RabbitMQ that a test can break in the ways that networks do."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from types import TracebackType
from typing import Self

CHUNK = 1 << 16
BASIC_ACK = struct.pack(">HH", 60, 80)
METHOD_FRAME = 1
FRAME_OVERHEAD = 8
POLL_S = 0.2


class Proxy:
    """Forwards connections to ``host:port`` until told to do worse.

    Attributes:
        refusing: reset every new connection at once.
        confirms_to_swallow: so many confirms are kept from the client, each with the connection that it came on.
        accepted: connections so far.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._upstream = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(POLL_S)
        self.port: int = self._listener.getsockname()[1]
        self.refusing = False
        self.confirms_to_swallow = 0
        self.accepted = 0
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

    def cut(self) -> None:
        """Reset every connection that stands."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for sock in pair:
                _reset(sock)

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
        ways = ((client, server, None), (server, client, _ConfirmFinder()))
        for source, target, finder in ways:
            thread = threading.Thread(
                target=self._forward, args=(source, target, finder), daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def _forward(
        self, source: socket.socket, target: socket.socket, finder: _ConfirmFinder | None
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK):
                self._flowing.wait()
                if finder is not None and finder.sees(data) and self.confirms_to_swallow > 0:
                    self.confirms_to_swallow -= 1
                    break
                target.sendall(data)
        for sock in (source, target):
            _reset(sock)


class _ConfirmFinder:
    """Follows AMQP's frames through a stream cut anywhere, looking for basic.ack."""

    def __init__(self) -> None:
        self._held = b""

    def sees(self, data: bytes) -> bool:
        """True where a basic.ack ends in ``data``."""
        self._held += data
        found = False
        while len(self._held) >= FRAME_OVERHEAD - 1:
            kind, _channel, size = struct.unpack(">BHI", self._held[:7])
            if len(self._held) < size + FRAME_OVERHEAD:
                break
            payload = self._held[7 : 7 + size]
            found = found or (kind == METHOD_FRAME and payload.startswith(BASIC_ACK))
            self._held = self._held[size + FRAME_OVERHEAD :]
        return found


def _reset(sock: socket.socket) -> None:
    """Close with RST, and wake whoever reads from it."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.shutdown(socket.SHUT_RD)  # SHUT_WR would send a polite FIN
    sock.close()
