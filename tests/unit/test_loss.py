from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from spotgrpo.consumer.loss import clipped_surrogate  # noqa: E402

LOW, HIGH = 0.2, 0.28


def reference(
    current: np.ndarray,
    behaviour: np.ndarray,
    advantage: np.ndarray,
    mask: np.ndarray,
    denominator: float,
) -> float:
    """The formula, token by token, in float64."""
    total = 0.0
    for p, q, a, trained in zip(current, behaviour, advantage, mask, strict=True):
        if trained:
            ratio = np.exp(np.float64(p) - np.float64(q))
            total += min(ratio * a, min(max(ratio, 1 - LOW), 1 + HIGH) * a)
    return -total / denominator


def drawn(seed: int, count: int = 64) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    current = random.uniform(-4, -0.1, count).astype(np.float32)
    behaviour = (current + random.normal(0, 0.4, count)).astype(np.float32)
    return (
        current,
        behaviour,
        random.normal(0, 1, count).astype(np.float32),
        random.random(count) < 0.8,
    )


def loss_of(current, behaviour, advantage, mask, denominator):  # type: ignore[no-untyped-def]
    given = [torch.as_tensor(array) for array in (behaviour, advantage, mask)]
    return clipped_surrogate(current, *given, clip_low=LOW, clip_high=HIGH, denominator=denominator)


@pytest.mark.parametrize("seed", range(5))
def test_the_loss_is_the_formula(seed: int) -> None:
    arrays = drawn(seed)
    loss, _ = loss_of(torch.from_numpy(arrays[0]), *arrays[1:], 50.0)
    assert float(loss) == pytest.approx(reference(*arrays, 50.0), rel=1e-5)


def test_the_gradient_is_the_slope_of_the_formula() -> None:
    arrays = drawn(7)
    current = torch.from_numpy(arrays[0]).double().requires_grad_()
    loss_of(current, *arrays[1:], 50.0)[0].backward()
    for place in range(len(arrays[0])):
        step = np.zeros(len(arrays[0]))
        step[place] = 1e-6
        up = reference(arrays[0] + step, *arrays[1:], 50.0)
        down = reference(arrays[0] - step, *arrays[1:], 50.0)
        assert float(current.grad[place]) == pytest.approx((up - down) / 2e-6, abs=1e-7)


def test_micro_batches_add_up_to_the_step() -> None:
    arrays = drawn(3)
    whole = float(loss_of(torch.from_numpy(arrays[0]), *arrays[1:], 50.0)[0])
    halves = [[array[part] for array in arrays] for part in (slice(0, 20), slice(20, None))]
    parts = [float(loss_of(torch.from_numpy(half[0]), *half[1:], 50.0)[0]) for half in halves]
    assert sum(parts) == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize(
    ("ratio", "advantage", "is_clipped"),
    [
        (1.27, 1, False),
        (1.3, 1, True),
        (1.3, -1, False),
        (0.79, -1, True),
        (0.79, 1, False),
        (0.81, -1, False),
    ],
)
def test_the_clip_takes_the_gradient_only_where_it_would_go_further(
    ratio: float, advantage: float, is_clipped: bool
) -> None:
    current = torch.tensor([np.log(ratio)], dtype=torch.float64, requires_grad=True)
    one = np.ones(1)
    loss, sums = loss_of(current, 0 * one, advantage * one, one > 0, 1.0)
    loss.backward()
    assert int(sums.clipped) == is_clipped
    assert (float(current.grad[0]) == 0.0) == is_clipped


def test_a_token_that_is_not_trained_changes_nothing_however_wild() -> None:
    current = torch.tensor([-1.0, -1e4, 0.0], requires_grad=True)
    behaviour = np.array([-1.0, 0.0, -1e4], dtype=np.float32)
    mask = np.array([True, False, False])
    loss, sums = loss_of(current, behaviour, np.ones(3, dtype=np.float32), mask, 1.0)
    loss.backward()
    assert loss.item() == pytest.approx(-1.0)
    assert current.grad.tolist() == [-1.0, 0.0, 0.0]
    assert float(sums.ratio_max) == 1.0
    assert int(sums.tokens) == 1


def test_a_ratio_out_of_this_world_stays_finite() -> None:
    current = torch.tensor([0.0], requires_grad=True)
    one = np.ones(1, dtype=np.float32)
    loss, _ = loss_of(current, -1e4 * one, -one, one > 0, 1.0)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(current.grad).all()


def test_the_sums_are_those_of_the_trained_tokens() -> None:
    current, behaviour, advantage, mask = drawn(11)
    _, sums = loss_of(torch.from_numpy(current), behaviour, advantage, mask, 1.0)
    log_ratio = (current.astype(np.float64) - behaviour)[mask]
    assert float(sums.ratio) == pytest.approx(np.exp(log_ratio).sum(), rel=1e-5)
    assert float(sums.kl) == pytest.approx((np.exp(log_ratio) - 1 - log_ratio).sum(), rel=1e-4)
    assert float(sums.ratio_max) == pytest.approx(np.exp(log_ratio).max(), rel=1e-5)
