"""Every preset and part against an independent float64 reference: values, gradients, and however a step is packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from spotgrpo.consumer.losses.clipping import clipped_ratio, clipped_weight  # noqa: E402
from spotgrpo.consumer.losses.composed import loss_of  # noqa: E402
from spotgrpo.consumer.losses.corrections import (  # noqa: E402
    second_moment_limit,
    truncate,
    within_second_moment,
)
from spotgrpo.consumer.losses.objective import Objective  # noqa: E402
from spotgrpo.consumer.losses.overlong import length_penalty, shaped_rewards  # noqa: E402
from spotgrpo.consumer.losses.plan import plan_step  # noqa: E402
from spotgrpo.consumer.losses.ratios import Tokens  # noqa: E402
from spotgrpo.shared.loss_config import LossConfig  # noqa: E402
from spotgrpo.shared.wire import Group  # noqa: E402
from tests.tools import loss_reference as reference  # noqa: E402
from tests.tools.loss_reference import (  # noqa: E402
    LONGEST,
    VERSION,
    Completion,
    Step,
    drawn_groups,
)
from tests.tools.loss_scene import Place, Scene  # noqa: E402


def slopes(step: Step, loss: Callable[[Step], float]) -> dict[Place, float]:
    """Central differences of the reference in every logprob."""
    return {
        (g, i, t): (
            loss(reference.shifted(step, (g, i, t), 1e-6))
            - loss(reference.shifted(step, (g, i, t), -1e-6))
        )
        / 2e-6
        for g, group in enumerate(step)
        for i, one in enumerate(group)
        for t in range(len(one.p))
    }


def check(scene: Scene, loss: Callable[[Step], float]) -> None:
    """Value and gradient are those of the reference; tokens that are not trained have none."""
    found, gradient, _ = scene.run()
    assert found == pytest.approx(loss(scene.step), rel=1e-5, abs=1e-7)
    wanted = slopes(scene.step, loss)
    assert any(abs(value) > 1e-3 for value in wanted.values())
    for place, slope in wanted.items():
        assert gradient.get(place, 0.0) == pytest.approx(slope, rel=1e-4, abs=1e-6), place


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("preset", reference.PRESETS)
def test_a_preset_is_its_papers_formula_in_value_and_gradient(preset: str, seed: int) -> None:
    check(Scene(seed, preset=preset), reference.PRESETS[preset])


@pytest.mark.parametrize("preset", reference.PRESETS)
def test_micro_batches_add_up_to_the_step_however_it_is_packed(preset: str) -> None:
    scene = Scene(5, preset=preset, kl=0.1, entropy=0.01)
    whole, gradient, sums = scene.run()
    for budget in (60, 14):
        loss, other, again = scene.run(budget)
        assert loss == pytest.approx(whole, rel=1e-9)
        assert other == pytest.approx(gradient, rel=1e-9, abs=1e-12)
        assert again.floats() == pytest.approx(sums.floats(), rel=1e-6)


def test_the_presets_differ() -> None:
    losses = {name: Scene(1, preset=name).run()[0] for name in reference.PRESETS}
    assert len({round(value, 6) for value in losses.values()}) == len(losses)


Term = Callable[[Completion, int, float], float]


def surrogate(one: Completion, t: int, a: float) -> float:
    return reference._pessimist(one.ratio(t), a, 0.2, 0.28)


def truncated(one: Completion, t: int, a: float) -> float:
    r = one.fixed_ratio(t)
    return surrogate(one, t, a) * min(r, 1.3) / r


def icepop(one: Completion, t: int, a: float) -> float:
    return surrogate(one, t, a) if 0.8 <= one.fixed_ratio(t) <= 1.3 else 0.0


def rejected(one: Completion, t: int, a: float) -> float:
    return surrogate(one, t, a) if 0.95 <= reference.geometric_mean(one) <= 1.1 else 0.0


def total_variation(one: Completion, t: int, a: float) -> float:
    moved = abs(np.exp(one.fixed[t]) - np.exp(one.mu[t]))
    r = one.fixed_ratio(t)
    leaves = (a > 0 and r > 1) or (a < 0 and r < 1)
    return 0.0 if leaves and moved > 0.05 else one.ratio(t) * a


def recomputed(one: Completion, t: int, a: float) -> float:
    """PPO whose old policy is computed again before the step, with a truncated weight against the sampler."""
    return min(one.fixed_ratio(t), 1.3) * np.exp(one.p[t] - one.fixed[t]) * a


def recomputed_icepop(one: Completion, t: int, a: float) -> float:
    r = one.fixed_ratio(t)
    return r * np.exp(one.p[t] - one.fixed[t]) * a if 0.8 <= r <= 1.3 else 0.0


def decoupled_truncated(one: Completion, t: int, a: float) -> float:
    alpha = 1.0 / max(one.lag[t], 1)
    proximal = alpha * one.mu[t] + (1 - alpha) * one.fixed[t]
    weight = min(np.exp(proximal - one.mu[t]), 1.1)
    return weight * reference._pessimist(np.exp(one.p[t] - proximal), a, 0.2, 0.28)


def two_of_them(one: Completion, t: int, a: float) -> float:
    r = one.fixed_ratio(t)
    return icepop(one, t, a) * min(r, 1.1) / r


def capped(one: Completion, t: int, a: float) -> float:
    return max(surrogate(one, t, a), 1.4 * a) if a < 0 else surrogate(one, t, a)


MASK = {"mask_below": 0.8, "mask_above": 1.3}
PARTS: dict[str, tuple[dict[str, Any], Term]] = {
    "truncate": ({"corrections": ["truncate"], "truncate_above": 1.3}, truncated),
    "mask": ({"corrections": ["mask"], **MASK}, icepop),
    "reject": (
        {"corrections": ["reject"], "reject_below": 0.95, "reject_above": 1.1},
        rejected,
    ),
    "tv": ({"corrections": ["tv"], "tv_limit": 0.05, "clip": "none"}, total_variation),
    "both": (
        {"corrections": ["mask", "truncate"], "truncate_above": 1.1, **MASK},
        two_of_them,
    ),
    "recomputed": (
        {"anchor": "current", "corrections": ["truncate"], "truncate_above": 1.3},
        recomputed,
    ),
    "recomputed mask": ({"anchor": "current", "corrections": ["mask"], **MASK}, recomputed_icepop),
    "decoupled": (
        {"anchor": "proximal", "corrections": ["truncate"], "truncate_above": 1.1},
        decoupled_truncated,
    ),
    "cap": ({"clip_cap": 1.4}, capped),
}


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_its_formula_in_value_and_gradient(name: str) -> None:
    options, term = PARTS[name]
    check(Scene(2, **options), lambda step: reference.token_terms(step, term))
    plain = Scene(2).run()[0]
    assert Scene(2, **options).run()[0] != pytest.approx(plain, rel=1e-6)


KL: dict[str, Callable[[float], float]] = {
    "k1": lambda gap: gap,
    "k2": lambda gap: gap * gap / 2,
    "k3": lambda gap: float(np.exp(-gap) - 1 + gap),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("estimator", KL)
def test_kl_to_the_base_is_added_and_flat_groups_are_trained_for_it(
    estimator: str, weighted: bool
) -> None:
    scene = Scene(3, kl=0.3, kl_estimator=estimator, kl_weighted=weighted, entropy=0.05)
    assert scene.plan.flat == 0

    def loss(step: Step) -> float:
        total, count = 0.0, 0
        for group in step:
            values = reference.advantages([one.reward for one in group], "none")
            scored = [one.reward for one in group if one.reward is not None]
            deviation = np.std(scored, ddof=1) + 1e-4 if len(set(scored)) > 1 else 1.0
            for one, value in zip(group, values, strict=True):
                if value is None:
                    continue
                for t in one.places:
                    penalty = KL[estimator](one.p[t] - one.base[t])
                    penalty *= one.ratio(t) if weighted else 1.0
                    total += 0.3 * penalty - surrogate(one, t, value / deviation)
                    total -= 0.05 * one.entropy[t]
                    count += 1
        return total / count

    check(scene, loss)
    _, _, sums = scene.run()
    assert float(sums.base_kl) == pytest.approx(
        sum(
            KL[estimator](one.p[t] - one.base[t])
            for group in scene.step
            for one in group
            if one.reward is not None
            for t in one.places
        ),
        rel=1e-5,
    )


def test_the_sums_are_those_of_the_trained_tokens_before_anything_is_cut() -> None:
    scene = Scene(4, spread=0.7, corrections=["truncate", "mask"], truncate_above=1.1, **MASK)
    _, _, sums = scene.run(20)
    ratios, advantages, entropies = [], [], []
    for one, a, _ in reference._weighed(scene.step, "group_std"):
        ratios += [one.ratio(t) for t in one.places]
        entropies += [one.entropy[t] for t in one.places]
        advantages += [a] * len(one.places)
    r, a = np.array(ratios), np.array(advantages)
    found = sums.floats()
    assert found["tokens"] == len(r)
    assert found["ratio"] == pytest.approx(r.sum(), rel=1e-5)
    assert found["ratio_square"] == pytest.approx((r * r).sum(), rel=1e-5)
    assert found["ratio_max"] == pytest.approx(r.max(), rel=1e-5)
    assert found["kl"] == pytest.approx((r - 1 - np.log(r)).sum(), rel=1e-4)
    assert found["entropy"] == pytest.approx(sum(entropies), rel=1e-5)
    assert found["clipped_low"] == ((r < 0.8) & (a < 0)).sum() > 0
    assert found["clipped_high"] == ((r > 1.28) & (a > 0)).sum() > 0
    assert found["dropped"] == ((r < 0.8) | (r > 1.3)).sum() > 0


# ---- the plan: what is trained, and how much it counts ----------------------------------------------------------


def test_advantages_of_the_step_are_scaled_by_its_own_deviation() -> None:
    scene = Scene(1, advantage_scale="batch_std", baseline="leave_one_out")
    rewards = [[one.reward for one in group.rollouts] for group in scene.groups]
    everyone = [reward for given in rewards for reward in given if reward is not None]
    for sample in scene.plan.samples:
        g, i = scene.place_of(sample)
        scored = [reward for reward in rewards[g] if reward is not None]
        mine = rewards[g][i]
        assert mine is not None
        others = (sum(scored) - mine) / (len(scored) - 1)
        wanted = (mine - others) / (np.std(everyone, ddof=1) + 1e-4)
        assert sample.advantage == pytest.approx(wanted, rel=1e-9)


def test_a_constant_of_its_own_and_flat_groups_do_not_change_what_a_token_counts() -> None:
    scene = Scene(1, preset="dr_grpo", constant_tokens=50)
    assert set(scene.plan.weight_S) == {1 / (20 * 50)}
    fewer = plan_step(scene.groups[:1], scene.objective, VERSION)
    assert set(fewer.weight_S) == {1 / (20 * 50)}


def test_completions_that_the_limit_cut_are_left_out_or_marked_down() -> None:
    groups = drawn_groups(9)
    cut = [one for group in groups[:3] for one in group.rollouts if one.truncated]
    assert any(one.reward is not None for one in cut)
    kept, masked, shaped = (
        plan_step(groups, Objective(LossConfig(overlong=how), LONGEST, 20), VERSION)
        for how in ("keep", "mask", "shape")
    )
    behaviours = [id(sample.behaviour) for sample in masked.samples]
    assert not any(id(one.logprobs) in behaviours for one in cut)
    assert 0 < len(masked.samples) < len(kept.samples)
    # The flat group's completions differ in length: what a penalty takes off gives it a gradient.
    assert (kept.flat, shaped.flat) == (2, 1)


@pytest.mark.parametrize(
    ("tokens", "taken"), [(1, 0.0), (80, 0.0), (81, 0.05), (90, 0.5), (100, 1.0), (101, 1.0)]
)
def test_the_length_penalty_grows_over_the_last_tokens(tokens: int, taken: float) -> None:
    assert length_penalty(tokens, 100, 20) == pytest.approx(taken)


@pytest.mark.parametrize(("soft", "longest"), [(None, LONGEST), (5, LONGEST), (50, 6)])
def test_a_shaped_reward_is_less_by_the_penalty_of_its_length(
    soft: int | None, longest: int
) -> None:
    """By default the last fifth is soft; no more than the whole can be."""
    parts = LossConfig(overlong="shape", overlong_tokens=soft, overlong_penalty=0.5)
    group = drawn_groups(1)[1]
    rewards = shaped_rewards(group, Objective(parts, longest, 20))
    last = min(soft or longest // 5, longest)
    for one, reward in zip(group.rollouts, rewards, strict=True):
        if one.reward is None:
            assert reward is None
        else:
            taken = 0.5 * length_penalty(len(one.token_ids), longest, last)
            assert reward == pytest.approx(one.reward - taken)
    assert rewards != [one.reward for one in group.rollouts]


def test_a_version_ahead_of_the_learner_has_no_lag() -> None:
    plan = plan_step(drawn_groups(0), Objective(), version=2)
    assert min(int(lags.min()) for lags in plan.lags) == 0
    assert max(int(lags.max()) for lags in plan.lags) <= 2


# ---- the parts, alone -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ratio", "advantage", "side"),
    [
        (1.27, 1.0, None),
        (1.3, 1.0, "high"),
        (1.3, -1.0, None),
        (0.79, -1.0, "low"),
        (0.79, 1.0, None),
        (0.81, -1.0, None),
        (2.9, -1.0, None),
        (3.1, -1.0, "high"),
    ],
)
def test_the_clip_takes_the_gradient_only_where_it_would_go_further(
    ratio: float, advantage: float, side: str | None
) -> None:
    given = torch.tensor([ratio], dtype=torch.float64, requires_grad=True)
    found = clipped_ratio(given, torch.tensor([advantage]).double(), 0.2, 0.28, cap=3.0)
    found.value_N.sum().backward()
    assert (float(given.grad[0]) == 0.0) == (side is not None)
    assert bool(found.low_N[0]) == (side == "low")
    assert bool(found.high_N[0]) == (side == "high")
    assert float(found.value_N.detach()[0]) >= -3.0


def test_a_bounded_weight_leaves_every_token_its_gradient() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    ratio = torch.tensor([0.5, 9.0, 2.0])
    found = clipped_weight(ratio, torch.ones(3), logprobs, 0.2, 4.0)
    found.value_N.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([0.8, 5.0, 2.0])
    assert (found.low_N.tolist(), found.high_N.tolist()) == (
        [True, False, False],
        [False, True, False],
    )


def test_a_truncated_weight_stops_at_its_bound() -> None:
    gap = torch.log(torch.tensor([0.5, 1.9, 2.1, 8.0]))
    weights = gap.exp() * truncate(gap, 2.0)
    assert weights.tolist() == pytest.approx([0.5, 1.9, 2.0, 2.0])


@pytest.mark.parametrize("limit", [1e-6, 0.02, 0.1, 10.0])
def test_the_second_moment_of_what_stays_is_within_the_limit(limit: float) -> None:
    random = torch.Generator().manual_seed(3)
    apart = torch.randn(200, generator=random) * 0.4
    advantage = torch.randn(200, generator=random)
    bound = second_moment_limit(apart, advantage, limit)
    leaving = apart * advantage > 0
    kept = leaving & (within_second_moment(apart, advantage, bound) == 1)
    if kept.any():
        assert float((apart[kept] ** 2).mean()) <= limit
    first_out = apart[leaving & ~kept].abs().min() if (leaving & ~kept).any() else None
    if first_out is not None:
        more = torch.cat([apart[kept], first_out[None]])
        assert float((more**2).mean()) > limit
    assert within_second_moment(apart, advantage, bound)[~leaving].all()


def flat_tokens(current: Any, behaviour: list[float], mask: list[bool]) -> Tokens:
    count = len(behaviour)
    ones = torch.ones(count)
    return Tokens(
        logprobs_N=current,
        behaviour_N=torch.tensor(behaviour),
        advantage_N=ones,
        mask_N=torch.tensor(mask),
        weight_N=ones,
        sequence_N=torch.zeros(count, dtype=torch.int64),
        sequences=1,
        entropy_N=ones,
        lag_N=torch.full((count,), 3),
        group_log_q_N=-ones,
        base_N=-ones,
    )


@pytest.mark.parametrize("preset", reference.PRESETS)
def test_a_token_that_is_not_trained_changes_nothing_however_wild(preset: str) -> None:
    parts = LossConfig.model_validate({"preset": preset, "kl": 0.1, "entropy": 0.1})
    wild = torch.tensor([-1.1, -1e4, float("nan"), 0.0], requires_grad=True)
    tokens = flat_tokens(wild, [-1.0, 0.0, -1.0, -1e4], [True, False, False, False])
    loss, sums = loss_of(tokens, parts)
    loss.backward()
    alone = torch.tensor([-1.1], requires_grad=True)
    wanted, _ = loss_of(flat_tokens(alone, [-1.0], [True]), parts)
    wanted.backward()
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    assert wild.grad.tolist() == pytest.approx([alone.grad.item(), 0.0, 0.0, 0.0])
    assert float(sums.ratio_max) == pytest.approx(np.exp(-0.1))
    assert int(sums.tokens) == 1


@pytest.mark.parametrize("preset", reference.PRESETS)
def test_a_ratio_out_of_this_world_stays_finite(preset: str) -> None:
    parts = LossConfig.model_validate({"preset": preset, "kl": 0.1, "kl_weighted": True})
    for current, behaviour in ((0.0, -1e4), (-1e4, 0.0)):
        given = torch.tensor([current], requires_grad=True)
        loss, _ = loss_of(flat_tokens(given, [behaviour], [True]), parts)
        loss.backward()
        assert torch.isfinite(loss)
        assert torch.isfinite(given.grad).all()


def test_a_group_of_the_wire_is_what_the_scene_says_it_is() -> None:
    """The reference reads the same groups; what makes them hard has to be in them."""
    groups: list[Group] = drawn_groups(0)
    rollouts = [one for group in groups for one in group.rollouts]
    assert len({len(one.token_ids) for one in rollouts}) > 3
    assert any(one.reward is None for one in rollouts)
    assert any(not one.loss_mask.all() for one in rollouts)
    assert any(not one.loss_mask.any() and one.reward is not None for one in rollouts)
    assert any(len(one.versions) > 1 for one in rollouts)
