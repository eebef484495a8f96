"""Metadata servers of AWS, GCP and Azure on a local port, each as strict as the real one about its headers."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

Server = TypeVar("Server", bound="MetadataServer")


class MetadataServer:
    """What the three have in common: a port that stays the same when the server dies and comes back.

    Attributes:
        requests: method and path of every request so far.
        clock_ahead_s: how far its clock is ahead of this machine's.
        says_date: False leaves the Date header out.
        status: answered to everything instead of what is right.
        delay_s: passes before each answer.
    """

    server_name = "metadata"

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.clock_ahead_s = 0.0
        self.says_date = True
        self.status: int | None = None
        self.delay_s = 0.0
        self._port = 0
        self._http: ThreadingHTTPServer | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def now(self) -> float:
        """Seconds since the epoch by the server's clock."""
        return time.time() + self.clock_ahead_s

    def start(self) -> None:
        """Listen, on the port of before where there was one."""
        owner = self

        class Handler(_Handler):
            server_of = owner

        self._http = ThreadingHTTPServer(("127.0.0.1", self._port), Handler)
        self._http.daemon_threads = True
        self._port = self._http.server_port
        threading.Thread(
            target=self._http.serve_forever, args=(0.01,), name="metadata", daemon=True
        ).start()

    def stop(self) -> None:
        """Refuse connections from now on."""
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def answer(self, request: _Handler) -> tuple[int, str, dict[str, str]]:
        """Status, body and headers."""
        raise NotImplementedError


class _Handler(BaseHTTPRequestHandler):
    server_of: MetadataServer
    protocol_version = "HTTP/1.1"

    def handle_one(self) -> None:
        server = self.server_of
        server.requests.append(f"{self.command} {self.path}")
        time.sleep(server.delay_s)
        status, body, headers = server.answer(self)
        if server.status is not None:
            status, body = server.status, "<html>no</html>"
        self.send_response_only(status)
        self.send_header("Server", server.server_name)
        if server.says_date:
            self.send_header("Date", self.date_time_string(int(server.now)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body.encode())))
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        self.handle_one()

    def do_PUT(self) -> None:
        self.handle_one()

    def do_POST(self) -> None:
        self.handle_one()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # the name of the base
        """Say nothing."""


class AwsMetadata(MetadataServer):
    """Instance metadata of EC2, version 2 only.

    Attributes:
        instance_action: body of ``spot/instance-action``; None: there is none (404).
        rebalance: body of the rebalance recommendation; None: there is none (404).
        token_life_s: after so long a token is answered 401, whatever life was asked for.
        tokens: so many were given out.
        loses_tokens: a token's answer does not arrive (the hop limit of a container's network).
    """

    server_name = "EC2ws"

    def __init__(self) -> None:
        self.instance_action: str | None = None
        self.rebalance: str | None = None
        self.token_life_s = 21600.0
        self.tokens = 0
        self.loses_tokens = False
        self._ends: dict[str, float] = {}
        super().__init__()

    def interrupt(self, in_s: float, action: str = "terminate") -> None:
        """State an interruption."""
        self.instance_action = json.dumps(
            {"action": action, "time": _iso(self.now + in_s)}, indent=1
        )

    def recommend(self) -> None:
        """Recommend to rebalance."""
        self.rebalance = json.dumps({"noticeTime": _iso(self.now)})

    def answer(self, request: _Handler) -> tuple[int, str, dict[str, str]]:
        if request.path == "/latest/api/token":
            return self._token(request)
        token = request.headers.get("X-aws-ec2-metadata-token", "")
        if self._ends.get(token, 0.0) < time.monotonic():
            return 401, "<html>401 - Unauthorized</html>", {}
        found = {
            "/latest/meta-data/": "ami-id\nspot/",
            "/latest/meta-data/spot/instance-action": self.instance_action,
            "/latest/meta-data/events/recommendations/rebalance": self.rebalance,
        }.get(request.path)
        if found is None:
            return 404, "<html>404 - Not Found</html>", {}
        return 200, found, {"Content-Type": "text/plain"}

    def _token(self, request: _Handler) -> tuple[int, str, dict[str, str]]:
        header = "X-aws-ec2-metadata-token-ttl-seconds"
        ttl = request.headers.get(header, "")
        if request.command != "PUT":
            return 405, "", {"Allow": "OPTIONS, PUT"}
        if "X-Forwarded-For" in request.headers:
            return 403, "", {}
        if not ttl.isdigit() or not 1 <= int(ttl) <= 21600:
            return 400, "", {}
        if self.loses_tokens:
            time.sleep(1.0)
        token = secrets.token_urlsafe(32) + "=="
        self._ends[token] = time.monotonic() + self.token_life_s
        self.tokens += 1
        return 200, token, {header: ttl, "Content-Type": "text/plain"}


class GcpMetadata(MetadataServer):
    """Compute Engine's metadata.

    Attributes:
        preempted: what ``instance/preempted`` says.
    """

    server_name = "Metadata Server for VM"

    def __init__(self) -> None:
        self.preempted = "FALSE"
        super().__init__()

    def answer(self, request: _Handler) -> tuple[int, str, dict[str, str]]:
        headers = {"Metadata-Flavor": "Google", "Content-Type": "application/text"}
        if request.headers.get("Metadata-Flavor") != "Google":
            return 403, "Missing Metadata-Flavor:Google header.", headers
        if "X-Forwarded-For" in request.headers:
            return 403, "", headers
        if request.path != "/computeMetadata/v1/instance/preempted":
            return 404, "", headers
        return 200, self.preempted, headers


class AzureMetadata(MetadataServer):
    """Azure's instance metadata with scheduled events.

    Attributes:
        machine: this virtual machine's name.
        events: the ``Events`` of the document.
        document: body instead of a right one.
        first_delay_s: passes before the first answer about events, which switches them on.
    """

    server_name = "IMDS/150.870.65.1594"

    def __init__(self) -> None:
        self.machine = "Vmss_3"
        self.events: list[Any] = []
        self.document: str | None = None
        self.first_delay_s = 0.0
        self._incarnation = 1
        super().__init__()

    def schedule(
        self, kind: str, *machines: str, in_s: float | None = None, not_before: object = None
    ) -> None:
        """Add an event; without ``in_s`` and ``not_before`` it has started."""
        at = format_datetime(datetime.fromtimestamp(self.now + (in_s or 0.0), UTC), usegmt=True)
        has_started = in_s is None and not_before is None
        self.events.append(
            {
                "EventId": secrets.token_hex(16).upper(),
                "EventStatus": "Started" if has_started else "Scheduled",
                "EventType": kind,
                "ResourceType": "VirtualMachine",
                "Resources": list(machines or (self.machine,)),
                "NotBefore": not_before or ("" if has_started else at),
                "Description": "",
                "EventSource": "Platform",
                "DurationInSeconds": -1,
            }
        )
        self._incarnation += 1

    def answer(self, request: _Handler) -> tuple[int, str, dict[str, str]]:
        headers = {"Content-Type": "application/json; charset=utf-8"}
        place = urlsplit(request.path)
        query = parse_qs(place.query)
        if request.headers.get("Metadata", "").lower() != "true":
            return 400, '{"error": "Bad request: Required metadata header not specified"}', headers
        if "X-Forwarded-For" in request.headers or "api-version" not in query:
            return 400, '{"error": "Bad request"}', headers
        if place.path == "/metadata/instance/compute/name" and query.get("format") == ["text"]:
            return 200, self.machine, {"Content-Type": "text/plain; charset=utf-8"}
        if place.path != "/metadata/scheduledevents":
            return 404, '{"error": "Not found"}', headers
        delay_s, self.first_delay_s = self.first_delay_s, 0.0
        time.sleep(delay_s)
        document = {"DocumentIncarnation": self._incarnation, "Events": self.events}
        return 200, self.document or json.dumps(document), headers


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """Stop the server at the block's end."""
    try:
        yield server
    finally:
        server.stop()


def _iso(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
