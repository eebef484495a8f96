"""What AWS, GCP and Azure tell a machine that they take back, as the metadata server of each says it.

A cloud here is asked, never called back. ``look`` raises TransientError for every answer that is none, so that a
server that is silent, overloaded or talks nonsense is asked again. Time left is counted by the clock of the server
that states the end (its ``Date`` header), since this machine's may be wrong, and never exceeds what that cloud gives.
"""

from __future__ import annotations

import http.client
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from email.utils import parsedate_to_datetime
from typing import Any, ClassVar, Protocol
from urllib.parse import urlsplit

from spotgrpo.shared.errors import TransientError

log = logging.getLogger(__name__)

LINK_LOCAL_URL = "http://169.254.169.254"
"""Of all three clouds; metadata.google.internal is the same address."""
TIMEOUT_S = 2.0
MAX_BODY_BYTES = 1 << 20
OK, UNAUTHORIZED, NOT_FOUND = 200, 401, 404


@dataclass(frozen=True)
class Notice:
    """That this machine goes, or may go.

    Attributes:
        what: as a sentence, for the log.
        within_s: seconds until it is gone; None for a risk without an end.
    """

    what: str
    within_s: float | None

    def __str__(self) -> str:
        return self.what if self.within_s is None else f"{self.what} in {self.within_s:.0f} s"


class Cloud(Protocol):
    """One cloud's way of saying so. Both methods raise TransientError where nothing usable is answered."""

    name: ClassVar[str]
    poll_s: ClassVar[float]

    def is_here(self) -> bool:
        """True where the server answers what only this cloud's does."""
        ...

    def look(self) -> Notice | None:
        """The notice that stands now."""
        ...


@dataclass(frozen=True)
class Answer:
    """What a metadata server answered."""

    status: int
    headers: Message
    body: bytes

    @property
    def text(self) -> str:
        """The body, stripped."""
        return self.body.decode("utf-8", "replace").strip()

    def seconds_until(self, end: datetime, most_s: float) -> float:
        """From this answer to ``end``, from 0 to ``most_s``."""
        now = _http_date(self.headers.get("Date")) or datetime.now(UTC)
        return min(max(0.0, (end - now).total_seconds()), most_s)


class MetadataServer:
    """HTTP to one address, without proxies (the address is link-local) and without redirects."""

    def __init__(self, url: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        parts = urlsplit(url or LINK_LOCAL_URL)
        self._host, self._port = parts.hostname or "", parts.port or http.client.HTTP_PORT
        self._prefix = parts.path.rstrip("/")
        self._timeout_s = timeout_s

    def ask(
        self,
        path: str,
        headers: Mapping[str, str],
        *,
        method: str = "GET",
        timeout_s: float | None = None,
    ) -> Answer:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection(
            self._host, self._port, timeout=timeout_s or self._timeout_s
        )
        try:
            connection.request(method, self._prefix + path, headers=dict(headers))
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read(MAX_BODY_BYTES))
        except (OSError, http.client.HTTPException) as exc:
            why = str(exc) or type(exc).__name__
            raise TransientError(
                f"the metadata server {self._host}:{self._port} does not answer ({why})"
            ) from exc
        finally:
            connection.close()


class Aws:
    """EC2's instance metadata, version 2: every request carries a token, and an expired one is answered 401.

    A spot interruption is stated in ``instance-action`` two minutes ahead. A rebalance recommendation is no end but
    a raised risk: it may come earlier, with it, or never be followed by one.
    """

    name: ClassVar[str] = "AWS"
    poll_s: ClassVar[float] = 5.0
    """What AWS recommends."""
    NOTICE_S = 120.0
    SESSION = "/latest/api/token"
    SESSION_HEADER = "X-aws-ec2-metadata-token"
    SESSION_TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
    SESSION_TTL_S = 21600
    ROOT = "/latest/meta-data/"
    INSTANCE_ACTION = "/latest/meta-data/spot/instance-action"
    REBALANCE = "/latest/meta-data/events/recommendations/rebalance"

    def __init__(self, server: MetadataServer, *, drain_on_rebalance: bool = True) -> None:
        self._server = server
        self._drain_on_rebalance = drain_on_rebalance
        self._token = ""

    def is_here(self) -> bool:
        """Only EC2 hands out such tokens. One that gets lost on its way into a container leaves the 401 without it."""
        try:
            self._renew()
        except TransientError:
            return self._server.ask(self.ROOT, {}).status == UNAUTHORIZED
        return True

    def look(self) -> Notice | None:
        """An interruption before a recommendation, where both stand."""
        interruption = self._get(self.INSTANCE_ACTION)
        if interruption is not None:
            return Notice("AWS takes this machine back", self._left_s(interruption))
        if self._drain_on_rebalance and self._get(self.REBALANCE) is not None:
            return Notice("AWS may take this machine back soon (rebalance recommendation)", None)
        return None

    def _left_s(self, answer: Answer) -> float:
        """From ``{"action": "terminate", "time": "2017-09-18T08:22:00Z"}``; one that cannot be read is no less true."""
        try:
            end = datetime.fromisoformat(json.loads(answer.body)["time"])
        except (ValueError, TypeError, KeyError):
            log.warning("an AWS interruption notice cannot be read: %.200r", answer.text)
            return self.NOTICE_S
        return answer.seconds_until(_utc(end), self.NOTICE_S)

    def _get(self, path: str) -> Answer | None:
        """What stands at ``path``, None where nothing does."""
        if not self._token:
            self._renew()
        answer = self._server.ask(path, {self.SESSION_HEADER: self._token})
        if answer.status == UNAUTHORIZED:
            self._renew()
            answer = self._server.ask(path, {self.SESSION_HEADER: self._token})
        return None if answer.status == NOT_FOUND else _ok(answer, path)

    def _renew(self) -> None:
        hint = "in a container raise the instance's metadata hop limit to 2"
        try:
            answer = self._server.ask(
                self.SESSION, {self.SESSION_TTL_HEADER: str(self.SESSION_TTL_S)}, method="PUT"
            )
        except TransientError as exc:
            raise TransientError(f"{exc}; {hint}") from exc
        if answer.status != OK or self.SESSION_TTL_HEADER not in answer.headers:
            raise TransientError(f"the metadata server gave no token (HTTP {answer.status})")
        if not re.fullmatch(r"[!-~]+", answer.text):
            raise TransientError("the metadata server gave a token that is none")
        self._token = answer.text


class Gcp:
    """Compute Engine's metadata: ``preempted`` turns TRUE as the preemption begins, about 30 s before the end.

    The shutdown itself comes as an ACPI event, by which the system stops its services: SIGTERM, heard elsewhere.
    """

    name: ClassVar[str] = "GCP"
    poll_s: ClassVar[float] = 1.0
    NOTICE_S = 30.0
    FLAVOR_HEADER, FLAVOR = "Metadata-Flavor", "Google"
    PREEMPTED = "/computeMetadata/v1/instance/preempted"

    def __init__(self, server: MetadataServer) -> None:
        self._server = server

    def is_here(self) -> bool:
        """The header comes back from Google's server alone."""
        return self._ask().headers.get(self.FLAVOR_HEADER) == self.FLAVOR

    def look(self) -> Notice | None:
        """Preempted or not; no time is stated."""
        said = _ok(self._ask(), self.PREEMPTED).text
        if said not in ("TRUE", "FALSE"):
            raise TransientError(f"the metadata server says neither TRUE nor FALSE: {said[:80]!r}")
        return Notice("GCP takes this machine back", self.NOTICE_S) if said == "TRUE" else None

    def _ask(self) -> Answer:
        return self._server.ask(self.PREEMPTED, {self.FLAVOR_HEADER: self.FLAVOR})


class Azure:
    """Azure's scheduled events. They go to all machines of a scale set; those that do not name this one are others'.

    Preempt (a spot VM is evicted) and Terminate (it is deleted) end the machine and drain. Freeze does not: it pauses
    the machine for seconds and keeps its memory. Reboot and Redeploy do not: they are stated many minutes or even
    days ahead, the machine comes back, and when they happen the system's shutdown sends SIGTERM, which drains.

    No event is approved (``StartRequests``): that would bring the end forward, and for every machine it names.
    """

    name: ClassVar[str] = "Azure"
    poll_s: ClassVar[float] = 2.0
    LEAST_NOTICE_S = 30.0
    MOST_NOTICE_S = 900.0
    """Preempt is stated 30 s ahead or more, Terminate 5 to 15 minutes, as the scale set wants it."""
    FIRST_TIMEOUT_S = 150.0
    """The first request for events switches them on, which may take two minutes."""
    ENDS = ("Preempt", "Terminate")
    HEADERS: ClassVar[Mapping[str, str]] = {"Metadata": "true"}
    NAME = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
    EVENTS = "/metadata/scheduledevents?api-version=2020-07-01"

    def __init__(self, server: MetadataServer) -> None:
        self._server = server
        self._vm = ""
        self._is_on = False

    def is_here(self) -> bool:
        """A machine's name, where a server that answers everything would give a page."""
        return bool(self._machine())

    def look(self) -> Notice | None:
        """The event that ends this machine first."""
        machine = self._machine()
        answer = self._server.ask(
            self.EVENTS, self.HEADERS, timeout_s=None if self._is_on else self.FIRST_TIMEOUT_S
        )
        events = self._events(_ok(answer, self.EVENTS))
        self._is_on = True
        notices = [
            Notice(f"Azure takes this machine back ({event['EventType']})", left_s)
            for event in events
            if event.get("EventType") in self.ENDS and _names(event.get("Resources"), machine)
            for left_s in [self._left_s(event, answer)]
        ]
        return min(notices, key=lambda notice: notice.within_s or 0.0, default=None)

    def _machine(self) -> str:
        if not self._vm:
            answer = self._server.ask(self.NAME, self.HEADERS)
            name = _ok(answer, self.NAME).text
            if not re.fullmatch(r"[\w.-]{1,100}", name):
                raise TransientError(f"the metadata server names no machine: {name[:80]!r}")
            self._vm = name
        return self._vm

    def _events(self, answer: Answer) -> list[dict[str, Any]]:
        try:
            events = json.loads(answer.body)["Events"]
        except (ValueError, TypeError, KeyError) as exc:
            raise TransientError(f"scheduled events cannot be read: {answer.text[:80]!r}") from exc
        return [event for event in events if isinstance(event, dict)] if events else []

    def _left_s(self, event: Mapping[str, Any], answer: Answer) -> float:
        """From ``NotBefore``: "Mon, 19 Sep 2016 18:29:47 GMT", or empty once the event has started."""
        stated = event.get("NotBefore")
        if not stated:
            return 0.0
        end = _http_date(stated)
        if end is None:
            log.warning("the time of an Azure event cannot be read: %.200r", stated)
            return self.LEAST_NOTICE_S
        return answer.seconds_until(end, self.MOST_NOTICE_S)


def _ok(answer: Answer, path: str) -> Answer:
    if answer.status != OK:
        raise TransientError(f"the metadata server answers HTTP {answer.status} to {path}")
    return answer


def _names(resources: object, machine: str) -> bool:
    """True where the list holds the machine's name; Azure's names know no case."""
    return isinstance(resources, list) and machine.casefold() in [
        str(one).casefold() for one in resources
    ]


def _http_date(text: object) -> datetime | None:
    try:
        return _utc(parsedate_to_datetime(str(text)))
    except ValueError:
        return None


def _utc(moment: datetime) -> datetime:
    """A time that names no zone is UTC."""
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
