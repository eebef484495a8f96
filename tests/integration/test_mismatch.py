"""What a step of the real trainer says of behaviour logprobs that are right, and of some that are not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from spotgrpo.consumer.diagnosis import explain
from spotgrpo.consumer.fit import Fit, group_fit
from spotgrpo.consumer.mismatch import MismatchWatch
from tests.integration.test_trainer import group, make, on_policy, one_thread, tiny
from tests.tools.wrong_engine import sampled

if TYPE_CHECKING:
    from spotgrpo.consumer.trainer import Trainer
    from spotgrpo.shared.wire import Float32Array, Group

__all__ = ["one_thread", "tiny"]
pytestmark = pytest.mark.engine

RIGHT = 1e-4
"""Nats; an alarm in float32 comes at 1e-2."""


def trained(tiny: Path, *, temperature: float = 1.0, **train: Any) -> Trainer:
    """A trainer some steps away from the base: always the same weights."""
    trainer = make(tiny, temperature=temperature, **train)
    for index in range(3):
        trainer.step([group(index)])
    return trainer


def with_logprobs(found: Group, logprobs: Sequence[Float32Array]) -> Group:
    pairs = zip(found.rollouts, logprobs, strict=True)
    return dataclasses.replace(
        found, rollouts=tuple(dataclasses.replace(one, logprobs=each) for one, each in pairs)
    )


def of_base(trainer: Trainer, found: Group) -> list[Float32Array]:
    """What an engine that lost the adapter answers."""
    start = len(found.prompt_ids) - 1
    return [
        trainer.sequence_logprobs([*found.prompt_ids, *one.token_ids], adapter=False)[start:]
        for one in found.rollouts
    ]


@pytest.mark.parametrize("token_budget", [24, 4096])
def test_at_lag_zero_right_logprobs_fit_and_wrong_ones_do_not(
    tiny: Path, token_budget: int
) -> None:
    """Each group by itself, though they share micro-batches, or are cut up among many."""
    trainer = trained(tiny, token_budget=token_budget)
    hotter = trained(tiny, temperature=0.7)
    older = make(tiny)
    older.step([group(0)])
    groups = {
        "right": on_policy(trainer, group(5)),
        "another temperature": on_policy(hotter, group(6)),
        "the base": with_logprobs(group(7), of_base(trainer, group(7))),
        "an older version": on_policy(older, group(8)),
        "right too": on_policy(trainer, group(9)),
    }
    foretold = {name: group_fit(each, trainer.logprobs(each)) for name, each in groups.items()}
    stats = trainer.step(list(groups.values()))
    fits = {name: stats.fits[each.task_id] for name, each in groups.items()}
    for name, fit in fits.items():
        expect_same(fit, foretold[name])
        if name.startswith("right"):
            assert fit.mean_gap < RIGHT
            assert 0.0 <= fit.mean_kl < RIGHT
        else:
            assert fit.mean_gap > 0.02, name
            assert fit.mean_kl > 0.0005, name
    everything = sum(fits.values(), Fit())
    assert everything.tokens == stats.tokens
    np.testing.assert_allclose(everything.mean_kl, stats.mismatch_kl, rtol=1e-4)


def expect_same(fit: Fit, foretold: Fit) -> None:
    """What a group looked like before the step is what the step says of it."""
    assert fit.tokens == foretold.tokens
    np.testing.assert_allclose(fit.mean_gap, foretold.mean_gap, rtol=1e-2, atol=1e-5)
    np.testing.assert_allclose(fit.mean_kl, foretold.mean_kl, rtol=1e-2, atol=1e-8)


def test_flat_groups_and_masked_tokens_say_nothing(tiny: Path) -> None:
    trainer = make(tiny)
    half = on_policy(trainer, group(0))
    first = half.rollouts[0]
    mask = np.arange(len(first.token_ids)) == 0
    wrong = np.where(mask, first.logprobs, -9.0).astype(np.float32)
    odd = dataclasses.replace(first, loss_mask=mask, logprobs=wrong)
    half = dataclasses.replace(half, rollouts=(odd, *half.rollouts[1:]))
    stats = trainer.step([half, group(1, rewards=(1.0, 1.0, 1.0, 1.0))])
    assert set(stats.fits) == {half.task_id}
    fit = stats.fits[half.task_id]
    assert fit.tokens == 1 + sum(len(one.token_ids) for one in half.rollouts[1:])
    assert fit.mean_gap < RIGHT


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "cooler": ({"temperature": 0.7}, "they are those of temperature 0.7 (within"),
    "a little cooler": ({"temperature": 0.9}, "they are those of temperature 0.9 (within"),
    "hotter": ({"temperature": 1.4}, "they are those of temperature 1.4 (within"),
    "truncated": ({"top_p": 0.9}, "it samples from a truncated distribution"),
    "hardly truncated": ({"top_p": 0.98}, "it samples from a truncated distribution"),
    "the base": ({"adapter": False}, "its engine does not apply the adapter"),
}


@pytest.mark.parametrize(
    ("name", "quarantines"), [("hotter", True), *((name, False) for name in WRONG)]
)
def test_an_engine_that_samples_wrongly_is_told_how(
    tiny: Path, caplog: pytest.LogCaptureFixture, name: str, quarantines: bool
) -> None:
    """With quarantine before anything is trained, else with the first group after the step that found it."""
    options, cause = WRONG[name]
    trainer = trained(tiny, learning_rate=3e-3)
    watch = MismatchWatch(None, "float32", quarantines=quarantines, recompute=trainer.logprobs)
    for version in (3, 4):
        groups = [
            sampled(trainer, group(version), **options),
            dataclasses.replace(on_policy(trainer, group(version + 9)), worker="well"),
        ]
        for each in groups:
            watch.arrived(each, version)
        if quarantines:
            break
        stats = trainer.step(groups)
        watch.trained([(each.worker, stats.fits[each.task_id]) for each in groups], version)
    assert watch.mismatched == ["w"]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (1 if quarantines else 2)
    assert "worker w does not sample what it says" in said[0]
    assert cause in said[-1]


def test_an_older_version_is_blamed_on_nothing_else(
    tiny: Path, caplog: pytest.LogCaptureFixture
) -> None:
    older = make(tiny)
    older.step([group(0)])
    trainer = trained(tiny)
    wrong = sampled(older, group(5))
    assert explain(wrong, trainer.logprobs) is None
    watch = MismatchWatch(None, "float32", quarantines=True, recompute=trainer.logprobs)
    watch.arrived(wrong, 3)
    assert "the adapter is another version's" in caplog.text


def test_logprobs_of_before_the_temperature_are_told_from_right_ones(tiny: Path) -> None:
    """As a server gives them that was started without --logprobs-mode processed_logprobs."""
    trainer = trained(tiny, temperature=0.7)
    right = sampled(trainer, group(5), temperature=0.7)
    right = dataclasses.replace(
        right, sampling=dataclasses.replace(right.sampling, temperature=0.7)
    )
    assert group_fit(right, trainer.logprobs(right)).mean_gap < RIGHT
    raw = with_logprobs(right, trainer.logprobs(right, temperature=1.0))
    found = explain(raw, trainer.logprobs)
    assert found is not None
    assert "temperature 1 (within" in found
    assert "logprobs of before the temperature" in found
