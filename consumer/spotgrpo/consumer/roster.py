"""Which workers there are, from what they say of themselves on the telemetry exchange.

For looking at only: nothing that is trained, acked or issued depends on it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from spotgrpo.consumer.balance import Fleet, seconds_of
from spotgrpo.shared.errors import SpotGRPOError, WireError
from spotgrpo.shared.ports import Consumer
from spotgrpo.shared.wire import Json, Report, decode_report

log = logging.getLogger(__name__)

SEEN_S: Final = 60.0
"""A worker that reported within this long is there."""
FORGOTTEN_S: Final = 600.0
MOST_WORKERS: Final = 4096
MOST_AT_ONCE: Final = 1000
"""Reports taken in at one look, so that a flood of them holds no step up."""
LONGEST: Final = 80
LONGEST_WHY: Final = 160
"""Characters of what a worker says that are kept."""
LEFT: Final = "left"
"""The state in a worker's last report."""


@dataclass(frozen=True)
class Sighting:
    """A worker's last report.

    Attributes:
        at: when the learner heard it, by its own clock: those of other machines may be wrong.
        state: in the worker's words: idle, generating, scoring, waiting for a version, …, and at last left.
        version: that it serves, None before the first.
        inflight: sequences in its engine.
        tasks: in its hands.
        refused_why: why it does not serve the newest version; empty where it does.
    """

    worker: str
    at: float
    state: str
    version: str | None
    inflight: int
    tasks: int
    refused_why: str = ""

    @classmethod
    def of(cls, report: Report, at: float) -> Sighting:
        values = report.values
        version = values.get("version")
        return cls(
            worker=_plain(report.source),
            at=at,
            state=_plain(values.get("state", "?")),
            version=None if version is None else _plain(version),
            inflight=_count(values.get("inflight")),
            tasks=_count(values.get("tasks")),
            refused_why=_plain(values.get("refused_why") or "", LONGEST_WHY),
        )

    @property
    def has_left(self) -> bool:
        """It said goodbye: no more is to be heard of it."""
        return self.state == LEFT


class Roster:
    """Workers by their last report; those silent for some minutes are forgotten. Used by the main thread alone.

    Args:
        news: of the telemetry exchange; None where the broker's user may not listen.
        clock: monotonic seconds.

    Attributes:
        fleet: what all workers' places were used for, since this learner listens.
    """

    def __init__(self, news: Consumer | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._news, self._clock = news, clock
        self._sightings: dict[str, Sighting] = {}
        self._seconds: dict[str, dict[str, float]] = {}
        self.fleet = Fleet()

    @property
    def hears(self) -> bool:
        """False where no report can come, whatever workers there are."""
        return self._news is not None

    def listen(self) -> None:
        """Take in what was said since the last look; never waits."""
        for _ in range(MOST_AT_ONCE):
            if self._news is None:
                return
            try:
                delivery = self._news.take(0)
            except SpotGRPOError as exc:
                log.info("workers' reports are not heard any more: %s", exc)
                self._news = None
                return
            if delivery is None:
                return
            self._hear(delivery.message.body)

    def _hear(self, body: bytes) -> None:
        try:
            report = decode_report(body)
        except WireError:
            return  # for looking at only: what cannot be read is not looked at
        if report.role == "worker":
            self.heard(report)

    def heard(self, report: Report) -> None:
        """A worker is there."""
        now = self._clock()
        self._add_up(report)
        self._sightings.pop(report.source, None)  # the newest is last
        self._sightings[report.source] = Sighting.of(report, now)
        for worker, before in list(self._sightings.items()):
            if now - before.at <= FORGOTTEN_S and len(self._sightings) <= MOST_WORKERS:
                break
            del self._sightings[worker]
            self._seconds.pop(worker, None)

    def _add_up(self, report: Report) -> None:
        """What a worker's seconds grew by; of one that was there before this learner, from its first report on."""
        seconds = seconds_of(report.values)
        if report.source in self._seconds:
            self.fleet.grow(self._seconds[report.source], seconds)
        self._seconds[report.source] = seconds

    def seen(self) -> list[Sighting]:
        """Workers that reported within the last minute and have not left, the newest report first."""
        now = self._clock()
        newest_first = reversed(self._sightings.values())
        return [one for one in newest_first if now - one.at <= SEEN_S and not one.has_left]

    @property
    def last(self) -> Sighting | None:
        """The newest report of all, however old."""
        return next(reversed(self._sightings.values()), None)


def _plain(value: Json, longest: int = LONGEST) -> str:
    """Short and printable: it goes into the log as it is, and comes from another machine."""
    return "".join(one if one.isprintable() else "?" for one in str(value)[:longest])


def _count(value: Json) -> int:
    return value if isinstance(value, int) else 0
