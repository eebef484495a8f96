"""Lag: cases by hand, pacing by table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spotgrpo.consumer.pacing import Pacing
from spotgrpo.consumer.staleness import is_sampled_by, lag_of
from spotgrpo.shared.ids import PolicyVersion, lineage_version
from spotgrpo.shared.wire import VersionRun
from tests.tools.wire_samples import GROUP


@pytest.mark.parametrize(
    ("version", "takeovers", "counts_as"),
    [
        (PolicyVersion(1, 7), {1: 0}, 7),
        (PolicyVersion(1, 7), {1: 0, 2: 5}, 5),  # v7.e1 was given up: it grew from v5
        (PolicyVersion(1, 3), {1: 0, 2: 5}, 3),  # still an ancestor
        (PolicyVersion(2, 9), {1: 0, 2: 5}, 9),
        (PolicyVersion(1, 9), {1: 0, 2: 8, 3: 4}, 4),  # given up twice
        (PolicyVersion(2, 9), {1: 0, 2: 8, 3: 4}, 4),
    ],
)
def test_rule_8_a_version_that_was_given_up_counts_as_the_one_it_grew_from(
    version: PolicyVersion, takeovers: dict[int, int], counts_as: int
) -> None:
    assert lineage_version(version, takeovers) == counts_as


@pytest.mark.parametrize(
    ("runs", "version", "takeovers", "is_it"),
    [
        ([(1, 4)], 4, {1: 0}, True),
        ([(1, 4)], 5, {1: 0}, False),
        ([(1, 3), (1, 4)], 4, {1: 0}, False),  # switched on the way
        ([(1, 4)], 4, {1: 0, 2: 4}, True),  # what the learner of epoch 2 resumed from
        ([(2, 4)], 4, {1: 0, 2: 4}, True),
        ([(1, 5)], 4, {1: 0, 2: 4}, False),  # given up: counts as v4, and is another version
        ([(1, 5)], 5, {1: 0, 2: 4}, False),
        ([(2, 5)], 5, {1: 0, 2: 4}, True),
    ],
)
def test_a_group_is_of_a_version_only_where_every_token_is_of_its_very_weights(
    runs: list[tuple[int, int]], version: int, takeovers: dict[int, int], is_it: bool
) -> None:
    rollouts = tuple(
        replace(GROUP.rollouts[0], versions=(VersionRun(PolicyVersion(*run), 1),)) for run in runs
    )
    assert is_sampled_by(replace(GROUP, rollouts=rollouts), version, takeovers) == is_it


@pytest.mark.parametrize(
    ("oldest", "arrived", "version", "in_flight", "in_queue"),
    [(3, 3, 3, 0, 0), (3, 4, 6, 1, 2), (3, 6, 6, 3, 0), (3, 2, 5, 0, 2), (3, 9, 5, 2, 0)],
)
def test_lag_is_split_where_the_group_reached_the_learner(
    oldest: int, arrived: int, version: int, in_flight: int, in_queue: int
) -> None:
    lag = lag_of(oldest, arrived, version)
    assert (lag.in_flight, lag.in_queue) == (in_flight, in_queue)
    assert lag.total == version - oldest


@pytest.mark.parametrize(
    ("version", "outstanding", "budget"),
    [(0, 0, 24), (0, 20, 4), (0, 30, 0), (8, 0, 16), (9, 8, 0), (9, 3, 5), (10, 0, 0), (12, 0, 0)],
)
def test_only_what_can_and_need_be_trained_is_issued(
    version: int, outstanding: int, budget: int
) -> None:
    pacing = Pacing(
        max_steps=10, groups_per_step=8, max_staleness=2, max_attempts=3, durable_every=1
    )
    assert pacing.budget(version, outstanding) == budget


@pytest.mark.parametrize(
    ("version", "unsettled", "due"), [(4, 99, True), (5, 99, False), (5, 3, True), (10, 99, True)]
)
def test_a_state_is_stored_every_n_versions_at_the_end_and_before_tasks_run_short(
    version: int, unsettled: int, due: bool
) -> None:
    pacing = Pacing(
        max_steps=10, groups_per_step=2, max_staleness=3, max_attempts=3, durable_every=4
    )
    assert pacing.is_durable_due(version, unsettled) is due
