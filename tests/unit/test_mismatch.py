from __future__ import annotations

import logging
from dataclasses import replace

import numpy as np
import pytest

from spotgrpo.consumer.diagnosis import Recompute
from spotgrpo.consumer.fit import Fit, StepFits, group_fit
from spotgrpo.consumer.mismatch import (
    BOUND,
    ENOUGH,
    KNOWN_FOR,
    MOST_EXPLAINED,
    MOST_WORKERS,
    MismatchWatch,
)
from spotgrpo.consumer.packing import Float32Array, Sample, pack
from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.wire import Group
from tests.tools.wire_samples import GROUP

GOOD, BAD = Fit(ENOUGH, 0.0, 0.0), Fit(ENOUGH, 1.0 * ENOUGH, 0.5 * ENOUGH)


class Recomputing:
    """A trainer whose logprobs are ``apart`` from those of any group; it counts how often it is asked."""

    def __init__(self) -> None:
        self.apart, self.asked = 0.0, 0

    def __call__(
        self, group: Group, *, temperature: float | None = None, adapter: bool = True
    ) -> list[Float32Array]:
        self.asked += 1
        return [one.logprobs + np.float32(self.apart) for one in group.rollouts]


def watch(
    *,
    bound: float | None = 0.1,
    dtype: str = "float32",
    quarantines: bool = True,
    recompute: Recompute | None = None,
) -> MismatchWatch:
    return MismatchWatch(
        bound, dtype, quarantines=quarantines, recompute=recompute or Recomputing()
    )


def of_worker(worker: str) -> Group:
    return replace(GROUP, worker=worker)


# ---- sums ------------------------------------------------------------------------------------------


def test_the_fit_of_a_group_is_that_of_its_unmasked_tokens() -> None:
    group = GROUP
    mask = np.concatenate([one.loss_mask for one in group.rollouts])
    recomputed = [one.logprobs + np.where(one.loss_mask, 0.5, 9.0) for one in group.rollouts]
    fit = group_fit(group, [one.astype(np.float32) for one in recomputed])
    assert fit.tokens == mask.sum() > 0
    assert fit.mean_gap == pytest.approx(0.5)
    assert fit.mean_kl == pytest.approx(np.exp(0.5) - 1.0 - 0.5)
    assert group_fit(group, [one.logprobs for one in group.rollouts]).mean_gap == 0.0


@pytest.mark.parametrize("token_budget", [8, 1024])
def test_a_step_adds_up_each_groups_tokens_however_it_was_packed(token_budget: int) -> None:
    random = np.random.default_rng(0)
    tasks = [TaskId(0), TaskId(0), TaskId(1), TaskId(0)]
    samples = [
        Sample(
            index,
            random.integers(0, 50, 3, dtype=np.int32),
            random.integers(0, 50, 4, dtype=np.int32),
            np.full(4, -2.0, dtype=np.float32),
            np.array([True, True, index != 3, False]),
            1.0,
        )
        for index in range(4)
    ]
    fits = StepFits(tasks)
    packed = pack(samples, token_budget, share_worth=0.0)
    assert (len(packed.batches) > 1) == (token_budget == 8)
    for batch in packed.batches:
        fits.add(batch, np.where(batch.owner_N == 2, -1.0, -2.5).astype(np.float32))
    assert {task: (fit.tokens, fit.gap) for task, fit in fits.by_task.items()} == {
        TaskId(0): (8, 4.0),
        TaskId(1): (3, 3.0),
    }


def test_what_is_far_off_stays_finite() -> None:
    group = GROUP
    fit = group_fit(group, [one.logprobs + np.float32(1e6) for one in group.rollouts])
    assert np.isfinite([fit.mean_gap, fit.mean_kl]).all()


# ---- alarms ----------------------------------------------------------------------------------------


def test_a_worker_over_the_bound_is_named_once_with_what_it_may_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    watching = watch(quarantines=False)
    for version in range(5):
        watching.trained([("hot", BAD), ("well", GOOD)], version)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "worker hot does not sample what it says" in record.getMessage()
    assert "by 1 nats on average, over the bound of 0.1" in record.getMessage()
    assert "what makes it differ is looked into" in record.getMessage()
    assert not watching.refuses("hot")
    assert watching.quarantined == []


def test_what_stays_wrong_is_said_again_in_growing_gaps(caplog: pytest.LogCaptureFixture) -> None:
    watching = watch(quarantines=False)
    said = []
    for version in range(100):
        watching.trained([("hot", BAD)], version)
        said.append(len(caplog.records))
    assert [version for version in range(1, 100) if said[version] > said[version - 1]] == [
        10,
        30,
        70,
    ]


def test_a_small_difference_is_called_one_of_precision(caplog: pytest.LogCaptureFixture) -> None:
    watching = watch(bound=None)
    watching.trained([("coarse", Fit(1000, 40.0))], 1)
    watching.arrived(of_worker("coarse"), 2)
    assert "computes in less than float32" in caplog.text


def test_what_makes_many_workers_differ_is_looked_for_in_a_few(
    caplog: pytest.LogCaptureFixture,
) -> None:
    recomputing = Recomputing()
    watching = watch(quarantines=False, recompute=recomputing)
    for number in range(2 * MOST_EXPLAINED):
        watching.trained([(f"w{number}", BAD)], 1)
        watching.arrived(of_worker(f"w{number}"), 2)
    assert recomputing.asked == MOST_EXPLAINED
    assert caplog.text.count("as with those before it") == MOST_EXPLAINED


def test_what_made_a_worker_differ_is_forgotten_once_it_fits_and_looked_for_anew_where_it_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    causes = iter(["the first fault", "the second fault"])
    watching = watch(quarantines=False)
    watching._cause = lambda group, fit: next(causes)  # type: ignore[method-assign]
    for version, fit in enumerate([BAD, BAD, GOOD, BAD, BAD]):
        watching.arrived(of_worker("w"), version)
        watching.trained([("w", fit)], version)
    assert caplog.text.count("the first fault") == 1
    assert caplog.text.count("the second fault") == 1


def test_a_worker_that_fits_on_too_few_tokens_keeps_its_cause() -> None:
    recomputing = Recomputing()
    watching = watch(recompute=recomputing)
    watching.trained([("w", BAD)], 1)
    watching.arrived(of_worker("w"), 1)
    asked = recomputing.asked
    watching.trained([("w", Fit(1, 0.0))], 1)
    watching.arrived(of_worker("w"), 1)
    assert recomputing.asked == asked


@pytest.mark.parametrize("dtype", sorted(BOUND))
def test_the_bound_goes_by_dtype(dtype: str) -> None:
    def refuses(mean: float) -> bool:
        watching = watch(bound=None, dtype=dtype)
        watching.trained([("w", Fit(1000, 1000 * mean))], 1)
        return watching.refuses("w")

    assert not refuses(0.9 * BOUND[dtype])
    assert refuses(1.1 * BOUND[dtype])
    assert refuses(float("nan"))


def test_a_single_odd_token_is_no_alarm_and_many_of_them_are() -> None:
    watching = watch()
    watching.trained([("w", Fit(1, 0.4))], 1)
    assert not watching.refuses("w")
    for version in range(ENOUGH):
        watching.trained([("w", Fit(1, 0.4))], version)
    assert watching.refuses("w")


def test_figures_are_of_what_was_compared_since_the_last_ones() -> None:
    watching = watch()
    watching.trained(
        [
            ("hot", BAD),
            ("well", GOOD),
            ("well", GOOD),
            ("none", Fit()),
        ],
        1,
    )
    assert watching.figures() == {
        "sampling/sampling_logp_difference/mean": pytest.approx(1 / 3),
        "lag0_tokens": 3 * ENOUGH,
        "mismatch_by_worker": {"hot": 1.0, "well": 0.0},
        "mismatch_kl_by_worker": {"hot": 0.5, "well": 0.0},
        "mismatched": ["hot"],
        "quarantined": ["hot"],
    }
    assert watching.figures() == {
        "sampling/sampling_logp_difference/mean": None,
        "lag0_tokens": 0,
        "mismatch_by_worker": {},
        "mismatch_kl_by_worker": {},
        "mismatched": ["hot"],
        "quarantined": ["hot"],
    }


# ---- quarantine ------------------------------------------------------------------------------------


def test_a_worker_is_let_in_again_once_enough_of_its_tokens_fit() -> None:
    watching = watch()
    watching.trained([("w", BAD)], 1)
    watching.trained([("w", Fit(1, 0.0))], 2)
    assert watching.refuses("w")
    watching.trained([("w", GOOD)], 3)
    assert not watching.refuses("w")
    watching.trained([("w", BAD)], 4)
    assert watching.refuses("w")


def test_what_comes_is_looked_at_only_with_quarantine() -> None:
    recomputing = Recomputing()
    watch(quarantines=False, recompute=recomputing).arrived(of_worker("w"), 0)
    assert not recomputing.asked


def test_an_unknown_worker_is_looked_at_before_anything_of_it_is_trained() -> None:
    recomputing = Recomputing()
    recomputing.apart = 10.0
    watching = watch(recompute=recomputing)
    assert not watching.refuses("w")
    watching.arrived(of_worker("w"), 7)
    assert watching.refuses("w")


def test_one_in_quarantine_is_looked_at_once_a_version_and_a_known_one_now_and_then() -> None:
    recomputing = Recomputing()
    watching = watch(recompute=recomputing)

    def asked_at(version: int) -> int:
        before = recomputing.asked
        for _ in range(3):
            watching.arrived(of_worker("w"), version)
        return recomputing.asked - before

    watching.trained([("w", BAD)], 1)
    assert asked_at(1) == 1, "why it differs is looked into"
    assert [asked_at(version) for version in (1, 2, 3)] == [0, 1, 1]
    watching.trained([("w", GOOD)], 3)
    assert [asked_at(version) for version in (4, 2 + KNOWN_FOR)] == [0, 0]
    assert asked_at(3 + KNOWN_FOR) == 1


def test_what_is_remembered_is_bounded() -> None:
    watching = watch()
    watching.trained([("first", BAD), ("second", BAD)], 1)
    watching.trained([("first", BAD)], 2)
    for number in range(MOST_WORKERS - 1):
        watching.trained([(f"w{number}", GOOD)], 2)
    assert watching.quarantined == ["first"]
