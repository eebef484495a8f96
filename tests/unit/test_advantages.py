from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spotgrpo.consumer.advantages import group_advantages

rewards = st.lists(st.floats(-100, 100), min_size=2, max_size=16)


def test_advantages_are_centred_and_divided_by_the_sample_deviation() -> None:
    found = group_advantages([1.0, 0.0, 0.0, 1.0], "group_std")
    deviation = np.sqrt(4 * 0.25 / 3)
    assert found.has_signal
    np.testing.assert_allclose(found.values, np.array([0.5, -0.5, -0.5, 0.5]) / (deviation + 1e-4))


def test_without_a_scale_they_are_only_centred() -> None:
    np.testing.assert_allclose(group_advantages([3.0, 0.0, 0.0], "none").values, [2.0, -1.0, -1.0])


def test_a_rollout_without_a_reward_takes_no_part() -> None:
    found = group_advantages([1.0, None, 0.0], "none")
    assert found.used.tolist() == [True, False, True]
    np.testing.assert_allclose(found.values, [0.5, 0.0, -0.5])


@pytest.mark.parametrize(
    "flat", [[1.0, 1.0, 1.0], [None, None], [None, 2.0], [], [0.1 + 0.2, 0.3], [1e9, 1e9 + 0.1]]
)
def test_a_flat_group_has_no_signal(flat: list[float | None]) -> None:
    found = group_advantages(flat, "group_std")
    assert not found.has_signal
    assert not found.values.any()


def test_a_reward_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        group_advantages([1.0, float("nan")], "none")


@given(rewards)
def test_advantages_add_up_to_nothing_and_keep_the_order(values: list[float]) -> None:
    found = group_advantages(values, "group_std")
    assert abs(found.values.sum()) < 1e-6 * len(values) * 1e3
    if found.has_signal:
        order = np.argsort(values, kind="stable")
        assert (np.diff(found.values[order]) >= 0).all()
