"""What a learner warns of, by the figures of real steps that go well and of such that do not."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")

from spotgrpo.consumer.stability import StabilityWatch
from tests.integration.test_trainer import group, make, on_policy, one_thread, tiny
from tests.tools.wrong_engine import sampled

if TYPE_CHECKING:
    from spotgrpo.consumer.trainer import StepStats
    from spotgrpo.shared.wire import Group

__all__ = ["one_thread", "tiny"]
pytestmark = pytest.mark.engine


def look(
    watch: StabilityWatch, stats: StepStats, *, lag: float = 0.0, mismatched: Sequence[str] = ()
) -> list[str]:
    """What is warned of after a step with these figures."""
    record: dict[str, Any] = {
        "mismatch_kl": stats.mismatch_kl,
        "ratio_max": stats.ratio_max,
        "effective_sample_size": stats.effective_sample_size,
        "entropy": stats.entropy,
        "sample/staleness_mean": lag,
        "lag0_tokens": 12,
        "mismatched": [*mismatched],
    }
    return watch.look(record, [])


def lagged(tiny: Path, rate: float, versions: int) -> StepStats:
    """Of a step on groups that were sampled so many versions ago."""
    trainer = make(tiny, learning_rate=rate)
    old = [sampled(trainer, group(index), tokens=12) for index in (20, 21)]
    for index in range(versions):
        trainer.step([on_policy(trainer, group(index))])
    return trainer.step(old)


def test_a_policy_that_lag_has_taken_far_away_is_warned_of(tiny: Path) -> None:
    stats = lagged(tiny, 0.03, versions=5)
    assert stats.mismatch_kl > 0.1
    assert stats.ratio_max > 100
    assert stats.effective_sample_size < 0.1
    (text,) = look(StabilityWatch(), stats, lag=5.0)
    for part in ("(mismatch_kl)", "(ratio_max)", "(effective_sample_size)"):
        assert part in text
    assert f"{stats.ratio_max:.3g} times as likely" in text
    assert "too much lag: groups were 5.0 versions old on average" in text
    assert "what was sampled at lag 0 fits" in text


def test_as_much_lag_at_a_moderate_rate_is_not_worth_a_word(tiny: Path) -> None:
    stats = lagged(tiny, 1e-3, versions=5)
    assert 0 < stats.mismatch_kl < 0.01
    assert look(StabilityWatch(), stats, lag=5.0) == []


@pytest.mark.parametrize(
    ("mismatched", "cause"),
    [
        (["hot", "cold"], "most likely since hot, cold do not sample what they say"),
        ([f"w{n}" for n in range(9)], "w0, w1, w2, w3 and others do not sample"),
        ([], "engine and learner compute some tokens differently"),
    ],
)
def test_without_lag_it_is_the_workers(tiny: Path, mismatched: list[str], cause: str) -> None:
    """Sampled at temperature 0.5."""
    trainer = make(tiny)
    stats = trainer.step([sampled(trainer, group(3), temperature=0.5)])
    assert stats.mismatch_kl > 0.1
    (text,) = look(StabilityWatch(), stats, mismatched=mismatched)
    assert cause in text


def test_a_single_token_that_is_far_more_likely_now_is_warned_of(tiny: Path) -> None:
    trainer = make(tiny)
    right = on_policy(trainer, group(5))
    first = right.rollouts[0]
    logprobs = first.logprobs.copy()
    logprobs[0] -= 5.0
    odd = dataclasses.replace(first, logprobs=logprobs)
    many = [on_policy(trainer, group(index)) for index in range(6, 60)]
    stats = trainer.step([dataclasses.replace(right, rollouts=(odd, *right.rollouts[1:])), *many])
    assert stats.ratio_max == pytest.approx(148.4, rel=1e-3)
    assert stats.mismatch_kl < 0.5
    text = look(StabilityWatch(), stats)[0]
    assert "a token is 148 times as likely as when it was sampled (ratio_max)" in text


def test_entropy_that_collapses_is_warned_of_once_it_has(tiny: Path) -> None:
    """The same group again and again: two of four rollouts are all that is left."""
    trainer, watch = make(tiny), StabilityWatch()
    said: list[tuple[int, float, str]] = []
    for step in range(25):
        same: Group = on_policy(trainer, group(0))
        stats = trainer.step([same])
        said += [(step, stats.entropy, text) for text in look(watch, stats)]
    ((step, entropy, text),) = said
    assert "entropy has fallen to" in text
    assert step > 10
    assert entropy < 0.3
