"""Which tasks a worker takes: forecasts by hand, and whole fleets played by the clock of a simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotgrpo.producer.admission import TRY_EVERY, Admission, Running
from spotgrpo.producer.forecast import MEMORY, Pace, Speed, Timing, Wait

GROUP, MOST = 8, 4


def speed(*timings: tuple[float, float], tokens: int = 100, rest_s: float = 0.0) -> Speed:
    found = Speed()
    for index, (load, token_s) in enumerate(timings):
        found.note(Timing(load, token_s))
        found.ended(tokens, Wait(100.0 * index, 100.0 * index + rest_s))
    return found


# ---- forecasts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pace", "seconds", "oldest", "lag"),
    [
        (Pace(newest=7, age_s=0.0, step_s=10.0), 25.0, 7, 2.5),
        (Pace(newest=7, age_s=5.0, step_s=10.0), 25.0, 7, 3.0),
        (Pace(newest=7, age_s=5.0, step_s=10.0), 25.0, 5, 5.0),  # two versions behind
        (Pace(newest=7, age_s=5.0, step_s=10.0, lead_s=4.0), 25.0, 7, 3.4),
        (Pace(newest=7, age_s=50.0, step_s=10.0), 25.0, 7, 1.5),  # the next one is overdue
    ],
)
def test_a_lag_is_forecast_from_how_fast_versions_come(
    pace: Pace, seconds: float, oldest: int, lag: float
) -> None:
    assert pace.lag_after(seconds, oldest) == pytest.approx(lag)


def test_what_one_load_says_of_another_is_the_best_that_could_be() -> None:
    one = speed((32, 0.4), (30, 0.4))
    assert one.token_s(16) == pytest.approx(0.4 * 16 / 31, rel=0.05)


def test_two_loads_say_what_fewer_sequences_would_bring() -> None:
    apart = speed((32, 0.40), (16, 0.30), rest_s=2.0)
    assert apart.token_s(8) == pytest.approx(0.25)
    assert apart.group_s(8) == pytest.approx(27.0)
    # As if fewer were slower, or beyond proportional: neither is believed.
    assert speed((32, 0.3), (16, 0.4)).token_s(8) == speed((32, 0.3), (16, 0.4)).token_s(64)
    assert speed((32, 0.4), (16, 0.1), (32, 0.4)).token_s(1) > 0


def test_a_worker_that_became_another_forgets_what_it_was() -> None:
    found = speed(*[(32, 1.0)] * MEMORY)
    found.note(Timing(32, 0.1))
    assert found.token_s(32) == pytest.approx(0.1)


def test_before_its_first_group_a_worker_goes_by_the_length_that_the_learner_names() -> None:
    found = Speed(tokens_before=50.0)
    assert (found.tokens, found.is_known) == (50.0, False)
    found.ended(80)
    assert found.tokens == 80.0


def waited(*waits: tuple[float, float] | None) -> Speed:
    found = Speed()
    for wait in waits:
        found.ended(100, Wait(*wait) if wait else None)
    return found


def test_rewards_and_publishing_take_what_most_groups_wait() -> None:
    assert waited((0, 2), (5, 8), (10, 14)).rest_s == 3
    assert waited(None, None).rest_s == 0, "all of them met an outage"
    assert waited((0, 2), None, (50, 52)).rest_s == 2


def test_groups_that_wait_side_by_side_say_once_how_long_that_takes() -> None:
    """A broker that stands still for a minute holds up all that is in flight, and no connection is lost."""
    outage = [(100 + second, 160.0) for second in range(MEMORY)]
    assert waited((0, 1), (10, 11), *outage).rest_s == 1
    assert waited((0, 1), *outage).rest_s == 1
    assert waited(*outage, (170, 171)).rest_s == 1


def test_a_queue_of_groups_at_a_slow_line_is_heard_of_again_and_again() -> None:
    assert waited(*[(second, second + 10.0) for second in range(60)]).rest_s == 10


# ---- decisions ------------------------------------------------------------------------------------------------------


def admission(token_s: float, load: float = GROUP * MOST, max_staleness: int = 2) -> Admission:
    """Groups of 100 tokens; versions are to come every 10 s."""
    found = Admission(max_staleness, GROUP, MOST)
    found.speed.note(Timing(load, token_s))
    found.speed.ended(100)
    return found


PACE = Pace(newest=9, age_s=0.0, step_s=10.0)


def tried(gate: Admission) -> Admission:
    """After as many groups came too late that forecasts are taken as they are."""
    for _ in range(5):
        gate.ended(lag=3)
    return gate


def begun(gate: Admission, pace: Pace = PACE) -> Admission:
    """After a group began."""
    gate.began(pace, pace.newest)
    gate.look(pace, pace.newest, 0)
    return gate


def test_a_worker_that_keeps_up_is_sent_as_many_as_it_has_places_for() -> None:
    gate = admission(0.25)  # 25 s: 2.5 versions
    begun(gate)
    assert not gate.asks


@pytest.mark.parametrize(("token_s", "width"), [(0.36, 3), (1.0, 1), (4.0, 0)])
def test_a_slower_one_takes_fewer_at_a_time_or_none(token_s: float, width: int) -> None:
    """At 0.36 s a token, 36 s a group of four at a time; three at a time may be done in 27 s."""
    gate = tried(admission(token_s))
    begun(gate)
    assert (gate.asks, gate.width) == (True, width)


def test_it_begins_nothing_late_in_a_version_that_it_could_early_in_it() -> None:
    gate = tried(admission(0.36))
    begun(gate)
    assert gate.width == 3
    gate.look(replace(PACE, age_s=9.0), 9, 0)
    assert gate.width == 2


def test_moments_at_which_none_begins_do_not_count() -> None:
    """Where more workers wait for tasks than there are tasks, all begin with a version."""
    gate = begun(admission(0.3))
    gate.look(replace(PACE, age_s=9.0), 9, 0)
    assert not gate.asks


def test_before_anything_is_known_all_is_taken() -> None:
    fresh, known = Admission(2, GROUP, MOST), admission(9.0)
    begun(fresh)
    begun(known, replace(PACE, step_s=0.0))  # no step yet
    assert not fresh.asks
    assert not known.asks


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 8])
def test_a_slow_worker_that_is_left_alone_works(max_staleness: int) -> None:
    """Whatever it lost of its trust: once no version comes, there is a time from which it takes tasks."""
    gate = admission(30.0, max_staleness=max_staleness)
    for _ in range(9):
        gate.ended(lag=99)
    begun(gate)
    assert gate.width == 0
    gate.look(replace(PACE, age_s=20_000.0), 9, 0)
    assert not gate.asks or gate.width >= 1


def test_one_that_takes_none_tries_one_now_and_then_in_case_it_became_faster() -> None:
    gate = begun(admission(5.0))
    for newest in range(9, 9 + TRY_EVERY):
        gate.look(replace(PACE, newest=newest), newest, 0)
        assert gate.width == 0
    gate.look(replace(PACE, newest=9 + TRY_EVERY), 9 + TRY_EVERY, 0)
    assert gate.width == 1
    gate.speed.note(Timing(GROUP, 0.05))
    gate.look(replace(PACE, newest=50), 50, 1)
    assert not gate.asks


def test_a_forecast_is_trusted_less_after_a_group_that_was_late() -> None:
    gate = admission(0.3)  # 3 versions: only with some trust
    begun(gate)
    assert not gate.asks
    for _ in range(6):
        gate.ended(lag=3)
    begun(gate)
    assert gate.asks
    for _ in range(20):
        gate.ended(lag=2)
    gate.asks = False
    begun(gate)
    assert not gate.asks


@pytest.mark.parametrize(
    ("changes", "is_hopeless"),
    [
        ({}, True),
        ({"is_again": True}, False),  # once is enough
        ({"tokens": 26}, False),  # too far to be thrown away
        ({"token_s": 0.39}, False),  # late, but not by far
        ({"token_s": 0.39, "oldest": 8}, True),
    ],
)
def test_a_group_that_cannot_be_in_time_goes_back_early_or_not_at_all(
    changes: dict[str, object], is_hopeless: bool
) -> None:
    gate = Admission(2, GROUP, MOST)
    gate.speed.tokens_before = 100.0
    group = Running(oldest=9, tokens=5, token_s=1.0, load=32.0)
    assert gate.is_hopeless(replace(group, **changes), PACE) is is_hopeless  # type: ignore[arg-type]
    assert not gate.is_hopeless(group, replace(PACE, step_s=0.0))


def test_what_it_gave_back_tells_a_new_worker_how_slow_it_is() -> None:
    gate = Admission(2, GROUP, MOST)
    gate.speed.tokens_before = 100.0
    gate.gave_back(Running(oldest=9, tokens=5, token_s=3.0, load=32.0))
    begun(gate)
    assert (gate.asks, gate.width) == (True, 0)
