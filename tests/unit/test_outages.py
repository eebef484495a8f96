"""What a worker knows of the outages that it met."""

from __future__ import annotations

import pytest

from spotgrpo.producer.outages import STANDS_STILL_S, Outages


def looked(*away: int, until: int = 20) -> Outages:
    """A look every half a second of the clock, in the course of which the broker is away at times ``away``."""
    found = Outages(0.0)
    for half in range(2 * until + 1):
        found.look(half / 2, is_away=half / 2 in away)
    return found


@pytest.mark.parametrize(
    ("since", "met"), [(0.0, True), (6.9, True), (7.0, True), (7.1, False), (19.0, False)]
)
def test_what_began_before_the_end_of_an_outage_met_it(since: float, met: bool) -> None:
    assert looked(5, 6, 7).any(since, 20.0) is met


def test_without_one_there_is_none() -> None:
    assert not looked().any(0.0, 20.0)


def test_a_process_that_was_stopped_stood_still_though_broker_and_bucket_were_there() -> None:
    found = looked(until=5)
    found.look(5.0 + STANDS_STILL_S, is_away=False)
    found.look(5.5 + STANDS_STILL_S, is_away=False)
    now = 5.5 + STANDS_STILL_S
    assert found.stood_still(4.0, now)
    assert found.any(4.0, now)
    assert not found.stood_still(now - 0.1, now)


def test_it_is_known_before_the_first_look_after_it() -> None:
    found = looked(until=5)
    assert found.stood_still(4.0, 5.0 + STANDS_STILL_S)
    assert not found.stood_still(4.0, 5.5)


def test_a_broker_that_is_away_stops_no_generation() -> None:
    assert not looked(5, 6, 7).stood_still(0.0, 20.0)
