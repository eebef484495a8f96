"""Groups with drawn logprobs, for the losses and for their reference. No model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from spotgrpo.consumer.logprobs import TokenScores
from spotgrpo.consumer.losses.composed import LossSums, loss_of
from spotgrpo.consumer.losses.gather import gather, step_second_moment_limit
from spotgrpo.consumer.losses.objective import Objective
from spotgrpo.consumer.losses.plan import StepPlan, plan_step
from spotgrpo.consumer.losses.ratios import Tokens
from spotgrpo.consumer.packing import pack
from spotgrpo.shared.loss_config import LossConfig
from tests.tools.loss_reference import LONGEST, VERSION, Completion, Step, drawn_groups

Place = tuple[int, int, int]
WHOLE = 4096


class Scene:
    """Groups with drawn logprobs of policy and base: for the reference as a Step, for the loss as a plan."""

    def __init__(self, seed: int, *, spread: float = 0.4, **loss: Any) -> None:
        self.groups = drawn_groups(seed)
        random = np.random.default_rng(seed + 100)
        self.parts = LossConfig.model_validate(loss)
        self.objective = Objective(self.parts, max_new_tokens=LONGEST, completions=20)
        self.policy = {
            id(one.logprobs): one.logprobs + random.normal(0, spread, len(one.logprobs))
            for group in self.groups
            for one in group.rollouts
        }
        self.base = {
            key: values + random.normal(0, 0.3, len(values)) for key, values in self.policy.items()
        }
        self.entropy = {
            key: random.uniform(0.1, 2.0, len(values)) for key, values in self.policy.items()
        }
        self.plan = plan_step(self.groups, self.objective, VERSION)

    @property
    def step(self) -> Step:
        return [[self._completion(one) for one in group.rollouts] for group in self.groups]

    def _completion(self, one: Any) -> Completion:
        versions = [run.version.number for run in one.versions for _ in range(run.tokens)]
        key = id(one.logprobs)
        return Completion(
            p=self.policy[key].tolist(),
            fixed=self.policy[key].tolist(),
            mu=[float(value) for value in one.logprobs],
            base=self.base[key].tolist(),
            entropy=self.entropy[key].tolist(),
            trained=one.loss_mask.tolist(),
            lag=[VERSION - version for version in versions],
            reward=one.reward,
        )

    def place_of(self, sample: Any) -> tuple[int, int]:
        """Group and rollout that a sample came from."""
        return next(
            (g, i)
            for g, group in enumerate(self.groups)
            for i, one in enumerate(group.rollouts)
            if one.logprobs is sample.behaviour
        )

    def run(self, budget: int = WHOLE) -> tuple[float, dict[Place, float], LossSums]:
        """Loss and gradient by token, summed over the micro-batches of ``budget``, and the sums."""
        plan, parts = self.plan, self.parts
        leaves = {
            s.index: torch.tensor(self.policy[id(s.behaviour)], requires_grad=True)
            for s in plan.samples
        }
        bound = np.inf
        if "m2" in parts.corrections:
            found = {index: leaf.detach().numpy() for index, leaf in leaves.items()}
            bound = step_second_moment_limit(plan, found, parts.m2_limit)
        total, sums = 0.0, None
        for batch in pack(plan.samples, budget, share_worth=1e9).batches:
            loss, mine = loss_of(self._tokens(plan, batch, leaves), parts, m2_bound=bound)
            loss.backward()
            total += float(loss.detach())
            sums = mine if sums is None else sums + mine
        assert sums is not None
        gradient = {
            (*self.place_of(s), t): float(leaves[s.index].grad[t])
            for s in plan.samples
            for t in range(len(s.token_ids))
        }
        return total, gradient, sums

    def _tokens(self, plan: StepPlan, batch: Any, leaves: dict[int, Any]) -> Tokens:
        owners = list(dict.fromkeys(batch.owner_N.tolist()))
        keys = [id(plan.samples[owner].behaviour) for owner in owners]
        scores = TokenScores(
            torch.cat([leaves[owner] for owner in owners]),
            torch.from_numpy(np.concatenate([self.entropy[key] for key in keys])),
        )
        base = torch.from_numpy(np.concatenate([self.base[key] for key in keys]))
        return gather(batch, plan, scores, base)
