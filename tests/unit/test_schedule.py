from __future__ import annotations

from typing import Literal

import pytest

from spotgrpo.consumer.schedule import learning_rate
from spotgrpo.shared.config import TrainConfig

Schedule = Literal["constant", "linear", "cosine"]


def config(
    schedule: Schedule, *, rate: float = 1.0, steps: int = 10, warmup: int = 2
) -> TrainConfig:
    return TrainConfig(
        learning_rate=rate, lr_schedule=schedule, max_steps=steps, warmup_steps=warmup
    )


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_warm_up_rises_in_equal_parts_and_never_starts_at_zero(schedule: Schedule) -> None:
    found = [learning_rate(step, config(schedule, warmup=4)) for step in range(5)]
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])


@pytest.mark.parametrize(
    ("schedule", "middle", "last", "beyond"),
    [("constant", 1.0, 1.0, 1.0), ("linear", 0.5, 0.125, 0.0), ("cosine", 0.5, 0.038060, 0.0)],
)
def test_the_rate_after_the_warm_up(
    schedule: Schedule, middle: float, last: float, beyond: float
) -> None:
    found = [learning_rate(step, config(schedule)) for step in (6, 9, 50)]
    assert found == pytest.approx([middle, last, beyond], abs=1e-6)


def test_a_resumed_run_may_have_more_steps_and_another_rate() -> None:
    assert learning_rate(6, config("linear", rate=2.0, steps=18)) == pytest.approx(1.5)
