from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest

from spotgrpo.consumer.breakdown import MOST_SHOWN, Moments, by_function, by_source, source_of
from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.wire import Group, Json, Rollout, Row
from tests.tools.wire_samples import GROUP


def rollout(reward: float | None, **parts: float | None) -> Rollout:
    return dataclasses.replace(GROUP.rollouts[0], reward=reward, reward_parts=parts)


def group(index: int, row: Row, rewards: Sequence[float | None]) -> Group:
    rollouts = tuple(rollout(reward) for reward in rewards)
    return dataclasses.replace(GROUP, task_id=TaskId(index), row=row, rollouts=rollouts)


@pytest.mark.parametrize(
    ("row", "source"),
    [
        ({}, None),
        ({"source": "gsm8k"}, "gsm8k"),
        ({"data_source": "openai/gsm8k", "source": "other"}, "openai/gsm8k"),
        ({"data_source": None, "source": " math\n"}, "math"),
        ({"source": "a\tb"}, "a?b"),
        ({"source": ""}, None),
        ({"source": 7}, None),
        ({"source": ["x"]}, None),
        ({"entry": {"metadata": {"source_dataset": "chain_sum"}}}, "chain_sum"),
        ({"entry": {"metadata": None}}, None),
        ({"source": "x" * 1000}, "x" * 60),
    ],
)
def test_the_source_of_a_prompt_is_what_its_row_says(row: dict[str, Json], source: str) -> None:
    assert source_of(row) == source


def test_rewards_and_advantages_are_shown_by_source() -> None:
    groups = [
        group(0, {"source": "a"}, [1.0, 0.0, None]),
        group(1, {"source": "a"}, [1.0, 1.0]),
        group(2, {"source": "b"}, [None, None]),
        group(3, {}, [5.0, 5.0]),
    ]
    advantages = {TaskId(0): Moments.of([0.7, -0.7]), TaskId(3): Moments.of([9.0])}
    assert by_source(groups, advantages) == {
        "groups_by_source": {"a": 2, "b": 1},
        "reward_by_source": {"a": 0.75, "b": None},
        "reward_std_by_source": {"a": pytest.approx(np.std([1, 0, 1, 1])), "b": None},
        "advantage_by_source": {"a": 0.0, "b": None},
        "advantage_std_by_source": {"a": pytest.approx(0.7), "b": None},
    }


def test_only_the_largest_sources_are_shown() -> None:
    groups = [group(n, {"source": f"s{n:03d}"}, [0.0]) for n in range(2 * MOST_SHOWN)]
    groups.append(group(999, {"source": "s063"}, [0.0]))
    shown = by_source(groups, {})["groups_by_source"]
    assert isinstance(shown, dict)
    assert len(shown) == MOST_SHOWN
    assert next(iter(shown.items())) == ("s063", 2)


def test_of_each_function_numbers_and_nones_are_counted() -> None:
    rollouts = [
        rollout(1.0, exact=1.0, style=None),
        rollout(0.0, exact=0.0, style=None),
        rollout(0.5, exact=0.5),
    ]
    assert by_function(rollouts) == {
        "rewards/exact/mean": 0.5,
        "rewards/exact/std": pytest.approx(np.std([1, 0, 0.5])),
        "rewards/exact/none": 0,
        "rewards/style/mean": None,
        "rewards/style/std": None,
        "rewards/style/none": 3,
    }


def test_moments_add_up_to_those_of_all() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, 50)
    found = sum((Moments.of(part) for part in np.split(values, 5)), Moments())
    assert found.mean == pytest.approx(values.mean())
    assert found.std == pytest.approx(values.std())
    assert (Moments().mean, Moments().std) == (None, None)
