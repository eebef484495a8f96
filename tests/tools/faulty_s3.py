"""An HTTP proxy of our own in front of a real S3 server, which plays the faults of networks and servers.

The client's ``Host`` header is passed on as it is: SigV4 signs it, and the server checks it against what it gets.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "content-length", "expect"}
)


@dataclass(frozen=True)
class Request:
    """A request, whole."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Response:
    """A response, whole. ``length`` is the Content-Length that is claimed."""

    status: int
    headers: dict[str, str]
    body: bytes
    length: int


# ---- faults -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cut:
    """The connection breaks after ``after`` bytes of the answer's body."""

    after: int


@dataclass(frozen=True)
class Truncate:
    """The body ends after ``after`` bytes, and Content-Length says that this is all."""

    after: int


@dataclass(frozen=True)
class Flip:
    """One bit of the answer's body is another."""

    at: int


@dataclass(frozen=True)
class Answer:
    """This error in place of the server's answer; ``forward``: the server got and did what was asked all the same."""

    status: int
    code: str
    forward: bool = False


@dataclass(frozen=True)
class Swallow:
    """The connection breaks with no answer; ``forward``: the server got and did what was asked all the same."""

    forward: bool


@dataclass(frozen=True)
class Stall:
    """No byte of an answer until the proxy closes; the server does not see the request."""


@dataclass(frozen=True)
class Slow:
    """The request passes ``seconds`` late."""

    seconds: float


@dataclass(frozen=True)
class Late:
    """The connection breaks with no answer, and the server gets the request at :meth:`FaultyS3.land_late_ones`."""


@dataclass(frozen=True)
class First:
    """``event`` runs, then the request passes."""

    event: Callable[[], object]


@dataclass(frozen=True)
class IgnoreConditions:
    """The server never sees these headers; the request is signed again without them."""

    names: tuple[str, ...] = ("if-match", "if-none-match")


Fault = Cut | Truncate | Flip | Answer | Swallow | Stall | Slow | Late | First | IgnoreConditions


@dataclass
class Rule:
    """``fault`` for the next ``times`` requests of ``method`` (any if empty) whose path contains ``part``."""

    fault: Fault
    method: str = ""
    part: str = ""
    times: int = 1

    def fits(self, request: Request) -> bool:
        return self.times > 0 and self.method in ("", request.method) and self.part in request.path


@dataclass
class FaultyS3:
    """A context manager; ``url`` is the endpoint to give to a client. Without rules everything passes.

    Attributes:
        seen: every request, while ``keeps_requests``.
        played: faults that met a request.
    """

    upstream: str
    access_key_id: str
    secret_access_key: str
    seen: list[Request] = field(default_factory=list)
    closing: threading.Event = field(default_factory=threading.Event)
    played: int = 0
    keeps_requests: bool = True
    _rules: list[Rule] = field(default_factory=list)
    _late: list[Request] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Self:
        proxy = self

        class Handler(_Handler):
            faulty = proxy

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def play(self, fault: Fault, method: str = "", part: str = "", times: int = 1) -> None:
        """Play ``fault`` for the next ``times`` requests that fit."""
        with self._lock:
            self._rules.append(Rule(fault, method, part, times))

    def behave(self) -> None:
        """Play no more faults."""
        with self._lock:
            self._rules.clear()

    def count(self, method: str = "", part: str = "") -> int:
        """Requests of this method and path that came so far."""
        with self._lock:
            return sum(Rule(Stall(), method, part).fits(request) for request in self.seen)

    @property
    def unplayed(self) -> int:
        """Faults that were asked for and met no request."""
        with self._lock:
            return sum(rule.times for rule in self._rules)

    def land_late_ones(self) -> list[int]:
        """Let the server have what was held back, in order; the statuses that it answered."""
        with self._lock:
            held, self._late = self._late, []
        return [self.forward(request).status for request in held]

    def fault_for(self, request: Request) -> Fault | None:
        with self._lock:
            if self.keeps_requests:
                self.seen.append(request)
            for rule in self._rules:
                if rule.fits(request):
                    rule.times -= 1
                    self.played += 1
                    if isinstance(rule.fault, Late):
                        self._late.append(request)
                    return rule.fault
        return None

    def forward(self, request: Request) -> Response:
        parts = urlsplit(self.upstream)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=30)
        with contextlib.closing(connection):
            # Host goes as the client signed it; Content-Length again, since it was cut from the headers.
            connection.putrequest(
                request.method, request.path, skip_host=True, skip_accept_encoding=True
            )
            for name, value in request.headers.items():
                if name.lower() not in HOP_BY_HOP:
                    connection.putheader(name, value)
            if request.body or request.method in ("PUT", "POST"):
                connection.putheader("Content-Length", str(len(request.body)))
            connection.endheaders(request.body or None)
            answer = connection.getresponse()
            body = answer.read()
            headers = {
                name: value for name, value in answer.getheaders() if name.lower() not in HOP_BY_HOP
            }
            length = int(answer.getheader("Content-Length") or len(body))
            return Response(answer.status, headers, body, length)

    def without(self, names: tuple[str, ...], request: Request) -> Request:
        kept = {
            name: value
            for name, value in request.headers.items()
            if name.lower() not in {*names, "authorization", *HOP_BY_HOP}
        }
        again = AWSRequest(
            request.method, f"http://{kept['Host']}{request.path}", kept, request.body
        )
        S3SigV4Auth(
            Credentials(self.access_key_id, self.secret_access_key), "s3", "us-east-1"
        ).add_auth(again)
        return Request(request.method, request.path, dict(again.headers.items()), request.body)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that is gone in mid-request was killed by a test; anything else is shown."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faulty: FaultyS3

    def do_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        request = Request(self.command, self.path, dict(self.headers.items()), body)
        fault = self.faulty.fault_for(request)
        try:
            self._play(fault, request)
        except (ConnectionError, TimeoutError):
            self.close_connection = True

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do_any  # noqa: N815

    def _play(self, fault: Fault | None, request: Request) -> None:
        match fault:
            case Stall():
                self.faulty.closing.wait()
                self._break_off()
            case Late():
                self._break_off()
            case Slow(seconds):
                self.faulty.closing.wait(seconds)
                self._send(self.faulty.forward(request))
            case First(event):
                event()
                self._send(self.faulty.forward(request))
            case Swallow(forward):
                if forward:
                    self.faulty.forward(request)
                self._break_off()
            case Answer(status, code, forward):
                if forward:
                    self.faulty.forward(request)
                self._send(_error(status, code))
            case IgnoreConditions(names):
                self._send(self.faulty.forward(self.faulty.without(names, request)))
            case _:
                self._send(_damaged(self.faulty.forward(request), fault))

    def _send(self, response: Response) -> None:
        self.send_response_only(response.status)
        for name, value in response.headers.items():
            self.send_header(name, value)
        if response.status != http.client.NOT_MODIFIED:
            self.send_header("Content-Length", str(response.length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)
            if len(response.body) < response.length and response.status != http.client.NOT_MODIFIED:
                self.wfile.flush()
                self._break_off(reset=False)

    def _break_off(self, *, reset: bool = True) -> None:
        if reset:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


def _damaged(response: Response, fault: Fault | None) -> Response:
    body = response.body
    match fault:
        case Cut(after):
            return Response(response.status, response.headers, body[:after], len(body))
        case Truncate(after):
            return Response(response.status, response.headers, body[:after], after)
        case Flip(at):
            flipped = body[:at] + bytes([body[at] ^ 1]) + body[at + 1 :]
            return Response(response.status, response.headers, flipped, len(body))
        case _:
            return response


def _error(status: int, code: str) -> Response:
    body = (
        f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>played</Message></Error>".encode()
    )
    return Response(status, {"Content-Type": "application/xml"}, body, len(body))
