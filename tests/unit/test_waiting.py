"""Waits are named in growing gaps, and once more when they end."""

from __future__ import annotations

import itertools
import logging
import threading
import time

import pytest

from spotgrpo.producer.waiting import Watchdog, aloud
from spotgrpo.shared.errors import BrokerUnavailable, ConfigError, SpotGRPOError
from spotgrpo.shared.gaps import gaps
from spotgrpo.shared.rabbitmq.outage import Outage


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _hears_all(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.mark.parametrize(
    ("warn_s", "first"),
    [(30.0, [30.0, 60.0, 120.0, 240.0, 480.0, 600.0, 600.0]), (900.0, [900.0] * 3)],
)
def test_gaps_double_up_to_ten_minutes(warn_s: float, first: list[float]) -> None:
    assert list(itertools.islice(gaps(warn_s), len(first))) == first
    assert next(itertools.islice(gaps(warn_s), 10_000, None)) == max(600.0, warn_s)


def said_at(watchdog: Watchdog, clock: Clock, until_s: int, **options: bool) -> list[float]:
    """The seconds at which it spoke, looked at once a second with nothing going on."""
    spoke: list[float] = []

    def what() -> str:
        spoke.append(clock.now)
        return "x"

    while clock.now < until_s:
        clock.now += 1.0
        watchdog.look("the same", what, **options)
    return spoke


def test_a_stall_is_named_in_growing_gaps() -> None:
    clock = Clock()
    watchdog = Watchdog(30.0, clock)
    watchdog.look("the same", str)
    assert said_at(watchdog, clock, 2200) == [30, 90, 210, 450, 930, 1530, 2130]


def test_idleness_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watchdog = Watchdog(30.0, clock)
    watchdog.look("the same", str)
    assert said_at(watchdog, clock, 86_400, is_fine=True) == [30]
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_what_goes_on_is_said_once_and_only_after_a_line(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watchdog = Watchdog(30.0, clock)
    for mark in range(100):
        clock.now += 29.0
        watchdog.look(mark, lambda: "never")
    assert not caplog.messages
    clock.now += 31.0
    watchdog.look(99, lambda: "the queue")
    clock.now += 9.0
    for mark in (100, 101, 102):
        watchdog.look(mark, lambda: "never")
    assert caplog.messages == ["nothing done for 31 s: the queue", "going on after 40 s"]
    clock.now += 30.0
    watchdog.look(102, lambda: "again")
    assert caplog.messages[-1] == "nothing done for 30 s: again"


def test_a_block_that_takes_long_is_named_though_it_computes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with aloud("the engine to start", 0.05):
        time.sleep(0.25)
    assert caplog.text.count("for the engine to start") == 2  # at 0.05 and 0.15 s
    assert caplog.messages[-1].startswith("going on after 0")
    assert "aloud" not in {thread.name for thread in threading.enumerate()}


def test_a_block_that_is_quick_or_fails_says_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    with aloud("nothing", 5.0):
        pass
    with pytest.raises(SpotGRPOError), aloud("nothing", 5.0):
        raise SpotGRPOError
    assert not caplog.messages


def test_one_brokers_absence_is_two_lines_for_all_connections(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    outage = Outage("amqp://b", clock)
    for name in ("publisher", "consumer", "consumer", "publisher", "subscription"):
        outage.begin(name, name, BrokerUnavailable("refused"))
    clock.now = 61.0
    outage.forget("subscription")
    for name in ("publisher", "consumer", "consumer"):
        outage.end(name, name)
    assert caplog.messages == [
        "publisher: no connection: refused; trying again",
        "consumer: connected to amqp://b again after 61 s",
    ]


def test_a_refusal_in_an_absence_is_said_once_more(caplog: pytest.LogCaptureFixture) -> None:
    outage = Outage("amqp://b", Clock())
    for _ in range(3):
        outage.begin("a", "publisher", BrokerUnavailable("away"))
    for _ in range(3):
        outage.begin("a", "publisher", ConfigError("broker.url", "amqp://b", "wrong password"))
    assert len(caplog.messages) == 2
    assert "wrong password" in caplog.messages[1]
