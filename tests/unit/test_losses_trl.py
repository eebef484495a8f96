"""Where TRL has the same loss, its own code gives the same value and gradient on the same tensors.

TRL's trainer is made without its ``__init__``: ``_compute_loss`` reads settings and tensors, and the one method that
runs a model is replaced by one that returns the tensors of the scene.
"""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from spotgrpo.consumer.losses.objective import Objective  # noqa: E402
from spotgrpo.consumer.losses.plan import plan_step  # noqa: E402
from spotgrpo.shared.wire import Group  # noqa: E402
from tests.tools.loss_reference import LONGEST, VERSION  # noqa: E402
from tests.tools.loss_scene import Scene  # noqa: E402


@pytest.fixture(scope="module")
def grpo_trainer() -> Any:
    """The class, without vLLM: nothing is generated, and TRL warns of versions that it does not know."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        utilities = importlib.import_module("trl.import_utils")
        patch.setattr(utilities, "is_vllm_available", lambda *_, **__: False)
        from trl.trainer.grpo_trainer import GRPOTrainer

    return GRPOTrainer


class TrlScene(Scene):
    """Every rollout has a reward and a trained token, and no group is flat: TRL counts those too."""

    def __init__(self, seed: int, **loss: Any) -> None:
        super().__init__(seed, **loss)
        random = np.random.default_rng(seed)
        self.groups = [self._full(group, random) for group in self.groups[:4]]
        self.objective = Objective(self.parts, LONGEST, completions=16)
        self.plan = plan_step(self.groups, self.objective, VERSION)

    @staticmethod
    def _full(group: Group, random: np.random.Generator) -> Group:
        rollouts = []
        for one in group.rollouts:
            mask = one.loss_mask.copy()
            mask[0] = True
            reward = float(random.normal())
            rollouts.append(dataclasses.replace(one, reward=reward, loss_mask=mask))
        return dataclasses.replace(group, rollouts=tuple(rollouts))

    def padded(self, by_key: dict[int, Any]) -> Any:
        """[completions, LONGEST], zeros behind the end."""
        rows = torch.zeros(len(self.plan.samples), LONGEST, dtype=torch.float64)
        for row, sample in zip(rows, self.plan.samples, strict=True):
            values = np.array(by_key[id(sample.behaviour)], dtype=np.float64)
            row[: len(values)] = torch.from_numpy(values)
        return rows

    def trl(self, kind: Any, settings: dict[str, Any]) -> tuple[float, Any]:
        """TRL's loss and its gradient, [completions, LONGEST]."""
        policy = self.padded(self.policy).requires_grad_()
        behaviour = self.padded({id(s.behaviour): s.behaviour for s in self.plan.samples})
        mask = self.padded({id(s.behaviour): s.mask for s in self.plan.samples})
        entropy = self.padded(self.entropy)

        class Fed(kind):  # type: ignore[misc]
            def _get_per_token_logps_and_entropies(self, *_: Any, **__: Any) -> Any:
                return policy, entropy, None

        trainer = object.__new__(Fed)
        vars(trainer).update(trl_settings(settings))
        ids = torch.zeros(len(policy), 1, dtype=torch.int64)
        inputs = {
            "prompt_ids": ids,
            "prompt_mask": ids,
            "completion_ids": mask.long(),
            "completion_mask": mask,
            "advantages": torch.tensor([s.advantage for s in self.plan.samples]).double(),
            "old_per_token_logps": behaviour,
            "ref_per_token_logps": self.padded(self.base),
            "num_items_in_batch": mask.sum(),
        }
        if (
            "importance_sampling_ratio" in settings
        ):  # old logprobs computed again: those of the policy
            weigh = settings["importance_sampling_ratio"]
            inputs["old_per_token_logps"] = policy.detach()
            inputs["importance_sampling_ratio"] = weigh((policy.detach() - behaviour).exp())
        loss = trainer._compute_loss(None, inputs)
        loss.backward()
        return float(loss.detach()), policy.grad


def trl_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Attributes that ``_compute_loss`` reads, with TRL's own defaults but no KL weighting."""
    accelerator = SimpleNamespace(
        num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x
    )
    arguments = {"delta": None, "use_bias_correction_kl": False}
    given = {
        "loss_type": "dapo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": "importance_sampling_ratio" in settings,
        "vllm_importance_sampling_correction": True,
        "aux_loss_enabled": False,
        "_entropy_bonus_enabled": "entropy_coef" in settings,
        "use_adaptive_entropy": False,
        "max_completion_length": LONGEST,
        "accelerator": accelerator,
        "model": SimpleNamespace(training=False),
        "_metrics": {"eval": defaultdict(list)},
        **{key: value for key, value in settings.items() if key not in arguments},
    }
    given["args"] = SimpleNamespace(
        **{key: settings.get(key, value) for key, value in arguments.items()}
    )
    return given


def truncated(ratio: Any) -> Any:
    """TRL's ``token_truncate`` up to 1.3."""
    return ratio.clamp(max=1.3)


def icepop(ratio: Any) -> Any:
    """TRL's ``token_mask`` between 0.8 and 1.3."""
    return ratio.masked_fill((ratio < 0.8) | (ratio > 1.3), 0.0)


SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"preset": "grpo"}, {"loss_type": "grpo"}),
    "dr_grpo": ({"preset": "dr_grpo"}, {"loss_type": "dr_grpo"}),
    "dapo": ({"preset": "dapo"}, {"epsilon_high": 0.28}),
    "gspo": (
        {"preset": "gspo"},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 3e-4,
            "epsilon_high": 4e-4,
        },
    ),
    "gspo, wide": (
        {"preset": "gspo", "clip_low": 0.1, "clip_high": 0.1},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 0.1,
            "epsilon_high": 0.1,
        },
    ),
    "cispo": ({"preset": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "cispo, tight": (
        {"preset": "cispo", "clip_high": 0.1},
        {"loss_type": "cispo", "epsilon_high": 1.1},
    ),
    "two-sided": ({"clip_high": 0.2, "clip_cap": 1.4}, {"delta": 1.4}),
    "kl": ({"preset": "grpo", "kl": 0.3}, {"loss_type": "grpo", "beta": 0.3}),
    "kl, weighted": (
        {"preset": "grpo", "kl": 0.3, "kl_weighted": True},
        {"loss_type": "grpo", "beta": 0.3, "use_bias_correction_kl": True},
    ),
    "entropy": ({"clip_high": 0.2, "entropy": 0.2}, {"entropy_coef": 0.2}),
    "truncated": (
        {"anchor": "current", "corrections": ["truncate"], "truncate_above": 1.3},
        {"importance_sampling_ratio": truncated},
    ),
    "masked": (
        {
            "preset": "grpo",
            "anchor": "current",
            "corrections": ["mask"],
            "mask_below": 0.8,
            "mask_above": 1.3,
        },
        {"loss_type": "grpo", "importance_sampling_ratio": icepop},
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_trl_has_the_same_value_and_gradient(grpo_trainer: Any, name: str) -> None:
    ours, theirs = SAME[name]
    scene = TrlScene(6, **ours)
    wanted, slope = scene.trl(grpo_trainer, theirs)
    found, gradient, _ = scene.run(budget=40)
    assert found == pytest.approx(wanted, abs=1e-5)
    assert float(slope.abs().max()) > 1e-3
    for row, sample in zip(slope, scene.plan.samples, strict=True):
        place = scene.place_of(sample)
        mine = [gradient[(*place, t)] for t in range(len(sample.token_ids))]
        np.testing.assert_allclose(mine, row[: len(mine)].numpy(), atol=1e-5)
