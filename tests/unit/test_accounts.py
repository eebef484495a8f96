"""Lags and drops, counted by where they come from."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from spotgrpo.consumer.accounts import MOST_LAG, Accounts, flat_share
from spotgrpo.consumer.lately import Lately
from spotgrpo.consumer.staleness import Lag
from spotgrpo.shared.wire import Group
from tests.tools.wire_samples import GROUP


def group(*lengths: int) -> Group:
    rollouts = tuple(
        replace(GROUP.rollouts[0], token_ids=np.ones(tokens, np.int32)) for tokens in lengths
    )
    return replace(GROUP, rollouts=rollouts)


def test_lags_are_counted_where_they_come_from_and_drops_by_length_too() -> None:
    accounts = Accounts()
    accounts.batched(group(3, 64), Lag(in_flight=1, in_queue=0))
    accounts.batched(group(33), Lag(in_flight=0, in_queue=2))
    accounts.drop(group(65), Lag(in_flight=3, in_queue=0), max_staleness=2)
    accounts.drop(group(1, 1), Lag(in_flight=2, in_queue=1), max_staleness=2)
    accounts.drop(group(100), Lag(in_flight=MOST_LAG + 5, in_queue=0), max_staleness=2)
    accounts.quarantine(group(2))
    found = accounts.figures()
    assert found["staleness_in_flight_histogram"] == [1, 1, 1, 1, *[0] * 12, 1]
    assert found["staleness_in_queue_histogram"] == [3, 1, 1]
    assert (found["dropped_in_flight"], found["dropped_in_queue"]) == (2, 1)
    assert found["dropped_quarantine"] == 1
    assert found["batched_by_length"] == {"64": 2}
    assert found["dropped_by_length"] == {"1": 1, "2": 1, "128": 2}


def test_before_the_first_group_there_is_nothing_in_them() -> None:
    found = Accounts().figures()
    assert (found["staleness_in_flight_histogram"], found["batched_by_length"]) == ([], {})


def test_one_long_wait_does_not_change_what_workers_forecast_by() -> None:
    lately = Lately()
    assert (lately.step_s, lately.group_tokens) == (0.0, 0.0)
    for seconds in (300.0, 2.0, 4.0, 3.0):
        lately.stepped(seconds, seconds / 2, [group(10, 20), group(5, 30)])
    assert (lately.step_s, lately.train_s, lately.group_tokens) == (3.0, 1.5, 25.0)


def test_a_flat_groups_share_is_that_of_the_batch() -> None:
    def rewarded(*rewards: float | None) -> Group:
        rollouts = tuple(replace(GROUP.rollouts[0], reward=reward) for reward in rewards)
        return replace(GROUP, rollouts=rollouts)

    batch = [rewarded(0.0, 1.0), rewarded(1.0, 1.0), rewarded(1.0, None), rewarded(None, None)]
    assert flat_share(batch) == 0.75
