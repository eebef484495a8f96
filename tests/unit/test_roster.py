"""Workers seen by their reports, and what a stalled learner says of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping

import pytest

from spotgrpo.consumer import roster as roster_module
from spotgrpo.consumer.roster import FORGOTTEN_S, SEEN_S, Roster, Sighting
from spotgrpo.consumer.stall import Scene
from spotgrpo.consumer.standby import FIRST_S, Standby
from spotgrpo.shared.errors import ConfigError, StoreUnavailable
from spotgrpo.shared.ids import Keys, Queues
from spotgrpo.shared.memory.broker import MemoryBroker, MemoryBrokerServer
from spotgrpo.shared.memory.store import MemoryStore
from spotgrpo.shared.ports import Message, QueueDepth, Stored
from spotgrpo.shared.retry import retry
from spotgrpo.shared.wire import Json, Report, encode_report

QUEUES = Queues("r")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def report(worker: str = "w", **values: Json) -> Report:
    return Report(worker, "worker", 0.0, {"state": "generating", "version": "v1", **values})


# ---- roster -------------------------------------------------------------------------------------------------------


def test_a_worker_is_seen_for_a_minute_after_its_last_report() -> None:
    clock = Clock()
    roster = Roster(None, clock)
    roster.heard(report("a"))
    clock.now = SEEN_S - 1
    roster.heard(report("b", state="idle", inflight=3, tasks=1))
    assert [one.worker for one in roster.seen()] == ["b", "a"]
    assert roster.seen()[0] == Sighting("b", clock.now, "idle", "v1", 3, 1)
    clock.now = SEEN_S + 1
    assert [one.worker for one in roster.seen()] == ["b"]
    roster.heard(report("a"))
    assert [one.worker for one in roster.seen()] == ["a", "b"]


def test_a_worker_that_said_goodbye_is_not_seen_but_remembered() -> None:
    clock = Clock()
    roster = Roster(None, clock)
    for name in ("a", "b"):
        roster.heard(report(name))
    roster.heard(report("b", state="left"))
    assert [one.worker for one in roster.seen()] == ["a"]
    assert roster.last is not None
    assert roster.last.has_left


def test_workers_that_come_and_go_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    roster = Roster(None, clock)
    for i in range(1000):
        clock.now += 1
        roster.heard(report(f"w{i}"))
    assert len(roster._sightings) <= FORGOTTEN_S + 1
    monkeypatch.setattr(roster_module, "MOST_WORKERS", 10)
    roster.heard(report("one more"))
    assert len(roster._sightings) == 10
    assert roster.last is not None
    assert roster.last.worker == "one more"


@pytest.mark.parametrize(
    "values",
    [
        {"state": "x\n2026 ERROR forged\x1b[2J" + "y" * 10_000, "inflight": "many", "tasks": None},
        {"state": {"a": 1}, "version": [1, 2], "inflight": 1.5, "refused_why": "\n" * 1000},
        {},
    ],
)
def test_what_a_worker_says_is_kept_short_and_printable(values: dict[str, Json]) -> None:
    roster = Roster(None, Clock())
    roster.heard(Report("w\n", "worker", 0.0, values))
    (seen,) = roster.seen()
    for text in (seen.worker, seen.state, seen.version or "", seen.refused_why):
        assert text.isprintable()
        assert len(text) <= 160
    assert seen.inflight == seen.tasks == 0


def test_the_roster_hears_the_exchange_and_passes_over_what_it_cannot_read() -> None:
    broker = MemoryBroker(MemoryBrokerServer(), "r")
    broker.declare()
    roster, publisher = Roster(broker.subscribe(QUEUES.telemetry)), broker.publisher()
    learner = Report("me", "learner", 0.0, {})
    bodies = [b"nonsense", encode_report(learner), encode_report(report("a"))]
    for body in bodies:
        publisher.broadcast(QUEUES.telemetry, Message(body))
    roster.listen()
    assert [one.worker for one in roster.seen()] == ["a"]
    roster.listen()  # nothing more: does not wait


def test_a_subscription_that_ends_for_good_makes_the_roster_deaf_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Refused:
        def take(self, _timeout_s: float) -> None:
            raise ConfigError("broker.url", "x", "the user may not read")

    roster = Roster(Refused())  # type: ignore[arg-type]
    with caplog.at_level(logging.INFO):
        roster.listen()
        roster.listen()
    assert not roster.hears
    assert caplog.text.count("not heard any more") == 1


# ---- the sentences ------------------------------------------------------------------------------------------------


def scene(
    *workers: Mapping[str, Json],
    ready: int = 3,
    consumers: int | None = None,
    last: Sighting | None = None,
    **changes: object,
) -> str:
    seen = [Sighting.of(report(f"w{i}", **values), 98.0) for i, values in enumerate(workers)]
    connected = len(workers) if consumers is None else consumers
    known = {
        "tasks": QueueDepth(ready, connected),
        "rollouts": QueueDepth(0, 1),
        "hears": True,
        "leads": True,
        **changes,
    }
    whole = Scene(
        outstanding=6,
        seen=seen,
        last=last or (seen[0] if seen else None),
        now=100.0,
        **known,  # type: ignore[arg-type]
    )
    return whole.describe(QUEUES)


BUSY: dict[str, Json] = {"inflight": 8, "tasks": 2}
WAITS: dict[str, Json] = {"state": "waiting for a version", "version": None}


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ("no worker has been seen: start one with `spotgrpo worker …`", scene()),
        (
            "no worker is left, the last was heard 90 s ago: start one",
            scene(last=Sighting.of(report(), 10.0)),
        ),
        ("they are connected, but silent", scene(consumers=2)),
        ("reports cannot be heard", scene(consumers=2, hears=False)),
        ("2 of 3 wait for a version", scene(WAITS, BUSY, WAITS)),
        ("1 of 3 generate", scene(WAITS, BUSY, WAITS)),
        ("1 of 1 cannot publish: the broker", scene({"state": "publishing blocked"})),
        ("1 of 1 generate", scene({"inflight": 0, "tasks": 2})),
        ("1 of 1 have generated and wait for rewards", scene({"state": "scoring"})),
        ("1 of 1 wait for the bucket to take a group", scene({"state": "storing"})),
        ("1 of 1 wait for the broker to confirm", scene({"state": "publishing"})),
        (
            "2 of 2 begin tasks",
            scene({"state": "looking for partials"}, {"state": "waiting for room"}),
        ),
        ("1 of 1 were told to stop", scene({"state": "draining"})),
        (
            "w0 generating, v1 (refused: v00000002.e0001: probe), 0 in flight",
            scene({"refused_why": "v00000002.e0001: probe"}),
        ),
        (
            "no worker is left, the last left 90 s ago: start one",
            scene(last=Sighting.of(report(state="left"), 10.0)),
        ),
        ("1 of 1 are idle and no task waits", scene({"state": "idle"}, ready=0)),
        ("1 of 1 are idle though tasks wait", scene({"state": "idle"}, ready=2)),
        ("1 of 1 do something else", scene({"state": "dancing"})),
        ("the broker does not answer", scene(BUSY, tasks=None)),
        ("the broker does not answer", scene(BUSY, rollouts=None)),
        (f"this learner is not connected to {QUEUES.leader}", scene(BUSY, leads=False)),
    ],
)
def test_each_state_has_a_sentence_of_its_own(said: str, text: str) -> None:
    assert said in text
    assert "\n" not in text


def test_the_sentence_names_queue_tasks_workers_and_a_few_last_reports() -> None:
    text = scene(*[BUSY] * 6)
    assert f"waiting for groups in {QUEUES.rollouts} (0 there)" in text
    assert "6 tasks outstanding, 3 of them not taken yet" in text
    assert "6 workers seen in the last minute, 6 connected" in text
    assert "w0 generating, v1, 8 in flight, 2 s ago" in text
    assert text.count("in flight") == 4
    assert text.endswith("and 2 more")


def test_workers_in_quarantine_are_named_since_their_groups_make_no_step() -> None:
    text = scene(*[BUSY] * 2, quarantined=[f"q{number}" for number in range(6)])
    assert "groups of q0, q1, q2, q3 and 2 more are not trained" in text
    assert "quarantine" not in scene(*[BUSY] * 2)


# ---- standby and retries ------------------------------------------------------------------------------------------


class Away(MemoryStore):
    def get(self, key: str) -> Stored:
        raise StoreUnavailable(f"{key}: the bucket is away")


@pytest.mark.parametrize(
    ("store", "is_up", "said"),
    [
        (MemoryStore(), True, "it has not begun the run yet"),
        (Away(), True, "the bucket does not say now"),
        (MemoryStore(), False, "the broker does not answer"),
    ],
)
def test_a_standby_says_whom_it_waits_for_soon_and_then_now_and_then(
    caplog: pytest.LogCaptureFixture, store: MemoryStore, is_up: bool, said: str
) -> None:
    clock = Clock()
    depth = QueueDepth(0, 0) if is_up else None
    standby = Standby(store, Keys("r"), QUEUES, lambda _: depth, 30.0, clock)
    with caplog.at_level(logging.INFO):
        for _ in range(100):
            standby.still_waiting()
            assert clock.now >= FIRST_S or not caplog.text
            clock.now += 1.0
        assert caplog.text.count(said) == 1
        clock.now += 120.0
        standby.still_waiting()
    assert caplog.text.count(said) == 2


def test_a_long_outage_is_named_once_a_minute_and_never_once_a_try(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotgrpo.shared.retry.SAY_AGAIN_S", 0.3)
    began, tries = time.monotonic(), 0

    def fail_for_a_second() -> int:
        nonlocal tries
        tries += 1
        if time.monotonic() - began < 1.0:
            raise StoreUnavailable("away")
        return tries

    stopping = threading.Event()
    with caplog.at_level(logging.INFO):
        retry("reading x", fail_for_a_second, stopping=stopping, longest_wait_s=0.05)
    assert caplog.text.count("away; trying again") == 1
    assert 1 <= caplog.text.count("away; still trying after") <= 3 < tries
    assert caplog.text.count("works again") == 1
