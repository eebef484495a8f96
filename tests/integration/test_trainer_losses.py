"""Every loss through the real trainer on a tiny Llama: independent of the packing, and with the gradient it means."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from spotgrpo.consumer import head as heads  # noqa: E402
from spotgrpo.consumer import trainer as training  # noqa: E402
from spotgrpo.consumer.losses.objective import Objective  # noqa: E402
from spotgrpo.consumer.trainer import StepStats, Trainer  # noqa: E402
from spotgrpo.shared.config import LoraConfig, ModelConfig, TrainConfig  # noqa: E402
from spotgrpo.shared.loss_config import PRESETS, LossConfig  # noqa: E402
from spotgrpo.shared.wire import Group  # noqa: E402
from tests.tools.loss_reference import LONGEST, drawn_groups  # noqa: E402
from tests.tools.tiny_model import build_tiny_model  # noqa: E402

pytestmark = pytest.mark.engine

LOSSES: dict[str, dict[str, Any]] = {
    **{name: {"preset": name} for name in PRESETS},
    "gspo, wide": {"preset": "gspo", "clip_low": 0.1, "clip_high": 0.1},
    "corrected": {
        "anchor": "proximal",
        "corrections": ["truncate", "reject", "tv"],
        "truncate_above": 1.2,
        "reject_below": 0.9,
        "reject_above": 1.1,
        "tv_limit": 0.02,
    },
    "regularised": {
        "kl": 0.3,
        "kl_weighted": True,
        "entropy": 0.05,
        "advantage_scale": "batch_std",
        "baseline": "leave_one_out",
        "overlong": "shape",
    },
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("losses") / "model")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make(tiny: Path, loss: dict[str, Any] | None = None, token_budget: int = 4096) -> Trainer:
    train = TrainConfig(
        learning_rate=1e-2, threads=1, device="cpu", max_grad_norm=1e9, token_budget=token_budget
    )
    objective = Objective(LossConfig.model_validate(loss or {}), LONGEST, completions=20)
    return Trainer(
        ModelConfig(name=str(tiny)), LoraConfig(rank=4, alpha=8.0), train, 0.9, 0, objective
    )


@pytest.fixture(scope="module")
def trained(tiny: Path) -> tuple[bytes, list[Group]]:
    """A state whose adapter is not zero, and groups that a policy near it sampled."""
    trainer = make(tiny)
    groups = drawn_groups(0)
    trainer.step(groups)
    random = np.random.default_rng(0)

    def near(group: Group) -> Group:
        pairs = zip(group.rollouts, trainer.logprobs(group), strict=True)
        return dataclasses.replace(
            group,
            rollouts=tuple(
                dataclasses.replace(
                    one, logprobs=(values + random.normal(0, 0.25, len(values))).astype(np.float32)
                )
                for one, values in pairs
            ),
        )

    return trainer.state(), [near(group) for group in groups]


def step(trainer: Trainer, groups: Sequence[Group]) -> tuple[StepStats, Any]:
    """What a step says, and its whole gradient as one vector."""
    captured: list[Any] = []
    real = torch.nn.utils.clip_grad_norm_

    def capture(given: Any, limit: float) -> Any:
        captured.append(torch.cat([p.grad.flatten() for p in given]))
        return real(given, limit)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", capture)
        stats = trainer.step(groups)
    return stats, captured[0]


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_does_not_depend_on_the_packing(
    tiny: Path, trained: tuple[bytes, list[Group]], name: str
) -> None:
    state, groups = trained
    found = []
    for budget in (4096, 60, 14):
        trainer = make(tiny, LOSSES[name], budget)
        trainer.restore(state)
        found.append(step(trainer, groups))
    (first, gradient), *others = found
    assert first.grad_norm > 1e-3
    assert (first.masked_fraction > 0) == (name in ("m2po", "corrected"))
    assert first.clipped_fraction > 0 or LossConfig.model_validate(LOSSES[name]).clip != "ratio"
    assert len({stats.batches for stats, _ in found}) == 3
    for stats, other in others:
        assert float((other - gradient).norm()) <= 1e-5 * first.grad_norm
        assert stats.loss == pytest.approx(first.loss, rel=1e-5, abs=1e-6)
        assert stats.masked_fraction == first.masked_fraction
        assert stats.clipped_fraction == pytest.approx(first.clipped_fraction)
        assert stats.effective_sample_size == pytest.approx(first.effective_sample_size, rel=1e-5)
        assert (stats.base_kl or 0.0) == pytest.approx(first.base_kl or 0.0, rel=1e-4)
        assert (stats.base_kl is None) == (first.base_kl is None) == ("kl" not in LOSSES[name])


@pytest.mark.parametrize(
    "loss",
    [
        {"preset": "grpo"},
        {"preset": "gspo", "clip": "none", "kl": 0.5, "kl_estimator": "k2"},
        {"preset": "gepo", "entropy": 0.3},
        {"preset": "dr_grpo", "kl": 0.5, "kl_weighted": True},
    ],
)
def test_the_gradient_of_a_step_is_the_slope_of_its_loss(
    tiny: Path,
    trained: tuple[bytes, list[Group]],
    loss: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Central differences along the gradient itself: its norm is the slope. The output head runs in chunks."""
    monkeypatch.setattr(heads, "TILE_ELEMENTS", 500)
    state, groups = trained
    trainer = make(tiny, loss)
    trainer.restore(state)
    stats, gradient = step(trainer, groups)
    losses = []
    for sign in (1.0, -1.0):
        trainer.restore(state)
        at = 0
        with torch.no_grad():
            for parameter in trainer._parameters.values():
                piece = gradient[at : at + parameter.numel()].view_as(parameter)
                parameter.add_(piece, alpha=sign * 2e-3 / stats.grad_norm)
                at += parameter.numel()
        losses.append(trainer.step(groups).loss)
    assert (losses[0] - losses[1]) / 4e-3 == pytest.approx(stats.grad_norm, rel=0.02)


@pytest.mark.parametrize(
    ("loss", "more"),
    [({"preset": "gepo"}, 0), ({"preset": "gspo"}, 0), ({"preset": "m2po"}, 1), ({"kl": 0.1}, 1)],
)
def test_a_forward_pass_more_is_paid_only_where_a_part_needs_it(
    tiny: Path,
    trained: tuple[bytes, list[Group]],
    loss: dict[str, Any],
    more: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []
    real = training.batch_scores

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(args)
        return real(*args, **options)

    monkeypatch.setattr(training, "batch_scores", counted)
    plain = make(tiny).step(trained[1])
    passes = len(calls)
    assert passes >= plain.batches
    calls.clear()
    assert make(tiny, loss).step(trained[1]).batches == plain.batches
    assert len(calls) == passes + more * plain.batches


def test_kl_is_against_the_base_at_the_sampling_temperature(
    tiny: Path, trained: tuple[bytes, list[Group]]
) -> None:
    state, groups = trained
    trainer = make(tiny, {"kl": 0.1})
    base = [trainer.logprobs(group) for group in groups]
    assert trainer.step(groups).base_kl == pytest.approx(0.0, abs=1e-9)
    trainer.restore(state)
    apart = [
        (now - before)[one.loss_mask]
        for group, old in zip(groups, base, strict=True)
        for one, now, before in zip(group.rollouts, trainer.logprobs(group), old, strict=True)
        if one.reward is not None
    ]
    gaps = np.concatenate(apart).astype(np.float64)
    wanted = float((np.exp(-gaps) - 1 + gaps).mean())
    assert wanted > 1e-3
    stats = trainer.step(groups)
    assert stats.base_kl == pytest.approx(wanted, rel=1e-3)
    assert (stats.groups, stats.flat) == (5, 0)


def test_a_bonus_keeps_the_entropy_up(tiny: Path, trained: tuple[bytes, list[Group]]) -> None:
    state, groups = trained
    entropies = []
    for weight in (0.0, 5.0):
        trainer = make(tiny, {"entropy": weight})
        trainer.restore(state)
        trainer.step(groups)
        entropies.append(trainer.step(groups).entropy)
    assert entropies[1] > entropies[0] + 0.01
