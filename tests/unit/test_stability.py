from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from spotgrpo.consumer.stability import PATIENCE, StabilityWatch
from spotgrpo.shared.gaps import Repeats
from spotgrpo.shared.wire import Group, Json
from tests.tools.wire_samples import GROUP

FAR: dict[str, Json] = {"mismatch_kl": 0.5, "sample/staleness_mean": 2.0}
NEAR: dict[str, Json] = {"mismatch_kl": 0.01, "ratio_max": 3.0, "effective_sample_size": 0.9}


def scored(values: Sequence[float | None], source: str | None = None) -> Group:
    rollouts = tuple(
        dataclasses.replace(GROUP.rollouts[0], reward_parts={"exact": value, "length": 1.0})
        for value in values
    )
    return dataclasses.replace(GROUP, rollouts=rollouts, row={"source": source})


def test_what_stays_is_said_again_in_growing_gaps() -> None:
    watch = StabilityWatch()
    said = [step for step in range(200) if watch.look(FAR, [])]
    assert said == [0, 10, 30, 70, 150]


def test_what_comes_and_goes_is_not_said_more_often() -> None:
    watch = StabilityWatch()
    said = [step for step in range(40) if watch.look(NEAR if step % 2 else FAR, [])]
    assert said == [0, 20]


def test_figures_that_are_missing_or_no_numbers_warn_of_nothing() -> None:
    watch = StabilityWatch()
    nothing: dict[str, Json] = dict.fromkeys((*NEAR, "entropy"))
    wild: dict[str, Json] = dict.fromkeys((*NEAR, "entropy"), float("nan"))
    for record in [{}, nothing, wild] * 10:
        assert watch.look(record, []) == []


def test_patience_counts_steps_in_a_row() -> None:
    repeats = Repeats(patience=3, gap=2)
    shows = [True, True, False, True, True, True, True, True, True, True, True, True]
    due = [step for step, one in enumerate(shows) if repeats.is_due(one)]
    assert due == [5, 7, 11]


def test_a_reward_function_that_gives_none_for_most_is_named() -> None:
    watch = StabilityWatch()
    batch = [scored([None, None, None, 1.0]), scored([None, 0.0, None, None])]
    texts = [watch.look({}, batch) for _ in range(PATIENCE)]
    assert texts[:-1] == [[]] * (PATIENCE - 1)
    (text,) = texts[-1]
    assert text.startswith("reward exact gave None for 6 of 8 completions: most likely it raises")


@pytest.mark.parametrize("values", [[None, None, 1.0, 0.0], [1.0] * 4])
def test_a_reward_function_that_scores_half_is_not(values: Sequence[float | None]) -> None:
    watch = StabilityWatch()
    assert not any(watch.look({}, [scored(values)]) for _ in range(20))


def test_one_that_is_meant_for_another_source_is_not_warned_of() -> None:
    watch = StabilityWatch()
    batch = [scored([1.0, 0.0], "math"), *[scored([None] * 2, "code") for _ in range(5)]]
    assert not any(watch.look({}, batch) for _ in range(20))
    assert not any(watch.look({}, [scored([None] * 2, "code")]) for _ in range(20))
    late = [watch.look({}, [scored([None] * 4, "math")]) for _ in range(PATIENCE)]
    assert "gave None for 4 of 4 completions" in late[-1][0]


def test_one_that_never_gave_a_number_is_warned_of_whatever_the_source() -> None:
    watch = StabilityWatch()
    batch = [scored([None] * 2, "math"), scored([None] * 2, "code")]
    assert [bool(watch.look({}, batch)) for _ in range(PATIENCE)][-1]
