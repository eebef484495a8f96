"""The optimizer step: groups in, a new policy version out."""

# ruff: noqa: N806  (N: predicted tokens of a micro-batch)

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from peft import get_peft_model_state_dict
from safetensors.torch import save
from torch import Tensor, nn

from spotgrpo.consumer.breakdown import Moments
from spotgrpo.consumer.fit import Fit, StepFits
from spotgrpo.consumer.logprobs import (
    Layout,
    TokenScores,
    batch_scores,
    head_is_faithful,
    layout_of,
    per_sample,
)
from spotgrpo.consumer.lora import fuse_lora
from spotgrpo.consumer.losses.composed import LossSums, Terms, loss_of, token_terms
from spotgrpo.consumer.losses.gather import gather, step_second_moment_limit
from spotgrpo.consumer.losses.objective import Objective
from spotgrpo.consumer.losses.plan import StepPlan, plan_step
from spotgrpo.consumer.losses.ratios import Tokens
from spotgrpo.consumer.model import (
    ADAPTER,
    adapted_modules,
    adapter_config,
    add_lora,
    checkpoint_gradients,
    compile_layers,
    first_line,
    load_base,
    max_context,
    resolve_device,
)
from spotgrpo.consumer.packing import Float32Array, MicroBatch, Packed, Sample, pack
from spotgrpo.consumer.schedule import learning_rate
from spotgrpo.consumer.trainer_state import Counters, pack_state, unpack_state
from spotgrpo.shared.config import LoraConfig, ModelConfig, TrainConfig
from spotgrpo.shared.errors import ConfigError, SpotGRPOError
from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Probe
from spotgrpo.shared.steps import Step, reached
from spotgrpo.shared.wire import Group, Rollout

log = logging.getLogger(__name__)

PROBE_TOKENS = 16
PROBE_EVERY = 8
"""Versions that share the tokens of their probe; the first ones less, since they have just begun to differ."""
PROBED_GROUPS = 8
"""Of a step, whose rollouts are tried for a new probe: their tokens are few beside the step's own."""
FIRST_PROBE_IDS = tuple(range(2, 2 + PROBE_TOKENS))
"""Probe of a version that has trained nothing yet; it is the base on any tokens."""
HALF_SCALE = 1024.0
"""float16 gradients are computed this much bigger, so that small ones do not vanish."""


@dataclass(frozen=True)
class StepStats:
    """What one optimizer step did.

    Attributes:
        version: number of the version that the weights are now.
        skipped: True where they stayed as they were: nothing to train, or a loss or gradient not finite.
        loss: as the run's ``[loss]`` has it; of most near 0 on policy whatever the progress.
        grad_norm: before clipping.
        ratio_mean, ratio_max: importance ratios π/μ of the trained tokens, before any clip or truncation.
        effective_sample_size: (Σ r)² / (N Σ r²) of these ratios, 1 where all are equal.
        clipped_fraction: of trained tokens, those whose ratio the clip held, below and above: ``clipped_low_fraction``
            and ``clipped_high_fraction`` add up to it.
        masked_fraction: of trained tokens, those that an off-policy correction left out.
        mismatch_kl: mean of r − 1 − log r (nats): policy against the policies that sampled.
        base_kl: mean of the estimates of KL to the base (nats); None where the loss has no such term.
        entropy: mean over trained tokens, of the distribution they were sampled from (nats).
        reward_mean, reward_std: over all scored rollouts, flat groups included.
        advantage_std, advantage_max: over trained rollouts; the latter is the greatest size. ``advantages`` by group.
        groups, flat: groups that were trained, and those without a gradient.
        tokens: trained tokens; ``input_tokens`` those that went through the model, ``rows`` and ``batches`` in how
            many rows and forward passes; ``over_budget`` sequences longer than the token budget.
        fits: of each group with trained tokens, how its behaviour logprobs fit those of the step.
        seconds: wall time.
    """

    version: int
    skipped: bool
    loss: float
    grad_norm: float
    learning_rate: float
    ratio_mean: float
    ratio_max: float
    effective_sample_size: float
    clipped_fraction: float
    clipped_low_fraction: float
    clipped_high_fraction: float
    masked_fraction: float
    mismatch_kl: float
    base_kl: float | None
    entropy: float
    reward_mean: float
    reward_std: float
    advantage_std: float
    advantage_max: float
    advantages: Mapping[TaskId, Moments]
    groups: int
    flat: int
    tokens: int
    input_tokens: int
    rows: int
    batches: int
    over_budget: int
    fits: Mapping[TaskId, Fit]
    seconds: float


class Look(Protocol):
    """Is shown what a step computes; must not change it."""

    @property
    def apart(self) -> bool:
        """Whether every sequence gets a row of its own."""

    def batch(
        self,
        batch: MicroBatch,
        plan: StepPlan,
        tokens: Tokens,
        terms: Terms,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        """After the gradient of ``batch`` was added to that of ``parameters``."""

    def gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """With the whole step's gradient, before it is clipped."""


class Trainer:
    """A base model with the adapter that is trained. Version 0 is the base: the adapter starts as zero.

    Not for several threads at once. ``adapter_files`` and ``state`` are copies: the next step does not change them.

    Args:
        temperature: the sampling temperature; logprobs of the loss are taken at it.
        seed: of the adapter's initial weights.
        objective: what is minimised; none: the defaults.

    Raises:
        ConfigError: model, device or target modules are not there.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        lora_config: LoraConfig,
        train_config: TrainConfig,
        temperature: float,
        seed: int,
        objective: Objective | None = None,
    ) -> None:
        if train_config.threads is not None:
            torch.set_num_threads(train_config.threads)
        self._config = train_config
        self._temperature = temperature
        self._objective = objective or Objective()
        device = resolve_device(train_config.device)
        self._base = load_base(model_config, device, train_config.quantize)
        self.max_context = max_context(self._base, model_config)
        self._layout = self._try_the_model(model_config.name)
        self._adapted = add_lora(self._base, lora_config, seed)
        fuse_lora(self._adapted, ADAPTER)
        if train_config.gradient_checkpointing:
            checkpoint_gradients(self._base)
        if train_config.compile:
            self._compile()
        self._adapter_config = adapter_config(self._adapted, model_config.name)
        self._parameters = {n: p for n, p in self._adapted.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=train_config.learning_rate,
            betas=train_config.betas,
            eps=train_config.eps,
            weight_decay=train_config.weight_decay,
            fused=True,
        )
        self.steps_done = 0
        self.probe_ids: tuple[int, ...] = FIRST_PROBE_IDS
        self._probed_base: tuple[tuple[int, ...], Float32Array] | None = None
        self._modules = adapted_modules(self._adapted)

    @property
    def modules(self) -> int:
        """Modules that carry the adapter."""
        return len(self._modules)

    @property
    def target_modules(self) -> list[str]:
        """Last name parts of those modules, sorted: what an engine has to make room for."""
        return sorted({name.rsplit(".", 1)[-1] for name in self._modules})

    @property
    def dtype(self) -> str:
        """What hidden states are computed in: float32, bfloat16 or float16."""
        if self._config.autocast:
            return "bfloat16"
        return str(self._base.dtype).removeprefix("torch.")

    @property
    def vocabulary(self) -> int:
        """Rows of the input embedding: token ids are below this."""
        return int(self._base.get_input_embeddings().weight.shape[0])

    def probe(self) -> Probe:
        """Tokens that tell this version from the base and from every other version.

        Logprobs at temperature 1 of both on the end of what was trained not long ago. For version 0 both are equal,
        so that an engine can only call the probe inconclusive. One forward pass, two right after :meth:`restore`.

        Raises:
            SpotGRPOError: logprobs are not finite: no worker could sample from this version.
        """
        version, base = self.probe_logprobs()
        if not np.isfinite(version).all():
            raise SpotGRPOError(
                f"version {self.steps_done} gives logprobs that are not finite, so it is not committed and the run "
                "stops: weights have grown until the model's own numbers overflow, most likely since "
                "train.learning_rate is far too large; with a smaller one the same command goes on from the version "
                "before"
            )
        return Probe(
            token_ids=list(self.probe_ids),
            version_logprobs=version.tolist(),
            base_logprobs=base.tolist(),
            dtype=self.dtype,
        )

    @property
    def shares_prompts(self) -> bool:
        """True where rows hold a prompt once for all its completions."""
        return self._layout != "rows"

    def step(self, groups: Sequence[Group], look: Look | None = None) -> StepStats:
        """Take one optimizer step on ``groups`` and make the next version.

        Groups without a gradient are passed over. Where that leaves none, or loss or gradient are not finite, the step
        is skipped: nothing of :meth:`state` changes, so that version and schedule count steps that were taken.

        Args:
            look: is shown what the step computes on the way.
        """
        started = time.monotonic()
        plan = plan_step(groups, self._objective, self.steps_done)
        packed = self._pack(plan.samples, apart=look is not None and look.apart)
        total = _Totals(plan.tokens, has_base=self._objective.parts.kl > 0)
        fits = StepFits(plan.tasks)
        rate = learning_rate(self.steps_done, self._config)
        if total.trained:
            m2_bound = self._m2_bound(plan)
            for batch in packed.batches:
                total.add(*self._backward(batch, plan, m2_bound, fits, look))
            reached(Step.LEARNER_STEPPING)
            total.norm = self._clip_gradient(look)
        is_taken = total.trained > 0 and total.finite
        if is_taken:
            self._choose_probe(plan.groups)
            self._update(rate)
        self._optimizer.zero_grad(set_to_none=True)
        return StepStats(
            version=self.steps_done,
            skipped=not is_taken,
            learning_rate=rate,
            **total.means(),
            **_reward_stats(groups),
            **_advantage_stats(plan),
            **_size_stats(packed),
            groups=len(plan.groups),
            flat=plan.flat,
            tokens=total.trained,
            fits=fits.by_task,
            seconds=time.monotonic() - started,
        )

    def adapter_files(self) -> dict[str, bytes]:
        """The version as a PEFT folder: file name to bytes. Weights are in the base's dtype, as engines hold them."""
        weights: dict[str, Tensor] = get_peft_model_state_dict(
            self._adapted, adapter_name=ADAPTER, save_embedding_layers=False
        )
        stored = {
            name: tensor.detach().to(device="cpu", dtype=self._base.dtype).contiguous()
            for name, tensor in sorted(weights.items())
        }
        return {
            ADAPTER_CONFIG: self._adapter_config,
            ADAPTER_WEIGHTS: save(stored, {"format": "pt"}),
        }

    def state(self) -> bytes:
        """Everything that :meth:`restore` needs to go on bit for bit, as safetensors."""
        return pack_state(
            self._parameters, self._optimizer, Counters(self.steps_done, self.probe_ids)
        )

    def restore(self, state: bytes) -> None:
        """Go on from ``state``, under this trainer's own learning rate and schedule. Raises IntegrityError."""
        counters = unpack_state(state, self._parameters, self._optimizer)
        self.steps_done, self.probe_ids = counters.steps_done, counters.probe_ids

    def logprobs(
        self, group: Group, *, temperature: float | None = None, adapter: bool = True
    ) -> list[Float32Array]:
        """Logprobs of each rollout's tokens, float32: of this version at the sampling temperature, unless told else.

        ``adapter`` False takes the base instead of this version.
        """
        samples = [_sample(i, group, rollout, 0.0) for i, rollout in enumerate(group.rollouts)]
        with contextlib.nullcontext() if adapter else self._adapted.disable_adapter():
            found = self._score(samples, temperature or self._temperature)
        return [found[index] for index in range(len(samples))]

    def sequence_logprobs(self, token_ids: Sequence[int], *, adapter: bool) -> Float32Array:
        """Logprobs at temperature 1 of ``token_ids[1:]`` given what stands before each, float32 [T-1].

        ``adapter`` False takes the base instead of this version.
        """
        return self._sequences_logprobs([token_ids], adapter=adapter)[0]

    def probe_logprobs(self) -> tuple[Float32Array, Float32Array]:
        """:meth:`sequence_logprobs` of ``probe_ids`` under this version and under the base; the latter is kept."""
        if self._probed_base is None or self._probed_base[0] != self.probe_ids:
            base = self.sequence_logprobs(self.probe_ids, adapter=False)
            self._probed_base = (self.probe_ids, base)
        return self.sequence_logprobs(self.probe_ids, adapter=True), self._probed_base[1]

    def _sequences_logprobs(
        self, sequences: Sequence[Sequence[int]], *, adapter: bool
    ) -> list[Float32Array]:
        samples = [_whole(index, token_ids) for index, token_ids in enumerate(sequences)]
        with contextlib.nullcontext() if adapter else self._adapted.disable_adapter():
            found = self._score(samples, 1.0)
        return [found[index] for index in range(len(samples))]

    def _try_the_model(self, name: str) -> Layout:
        if not head_is_faithful(self._base):
            raise ConfigError(
                "model.name",
                name,
                "its logits are not its output head's: this model is not supported",
            )
        layout = layout_of(self._base, self.max_context)
        if layout == "rows":
            log.warning(
                "%s does not heed a given attention mask: prompts are not shared, steps take longer",
                name,
            )
        return layout

    def _compile(self) -> None:
        """Raises ConfigError where compiling fails: it is tried here, and not in the first step."""
        try:
            compile_layers(self._base)
            self._score([_whole(0, FIRST_PROBE_IDS)], 1.0)
        except Exception as exc:
            remedy = f"torch cannot compile this model here ({first_line(exc)}): leave it out"
            raise ConfigError("train.compile", True, remedy) from exc

    def _pack(self, samples: Sequence[Sample], *, apart: bool = False) -> Packed:
        layout: Layout = "rows" if apart else self._layout
        width: int = self._base.config.get_text_config().hidden_size
        worth = 0.0 if layout == "rows" else 6.0 * width
        budget = self._config.token_budget
        return pack(samples, budget, share_worth=worth, by_node=layout == "nodes")

    def _score(self, samples: Sequence[Sample], temperature: float) -> dict[int, Float32Array]:
        found: dict[int, Float32Array] = {}
        with torch.no_grad():
            for batch in self._pack(samples).batches:
                found |= per_sample(batch, self._scores(batch, temperature).logprobs_N)
        return found

    def _m2_bound(self, plan: StepPlan) -> float:
        """Where M2PO masks, inf for any other loss: the one part that costs a forward pass of the step."""
        parts = self._objective.parts
        if "m2" not in parts.corrections:
            return math.inf
        found = self._score(plan.samples, self._temperature)
        return step_second_moment_limit(plan, found, parts.m2_limit)

    def _backward(
        self,
        batch: MicroBatch,
        plan: StepPlan,
        m2_bound: float,
        fits: StepFits,
        look: Look | None,
    ) -> tuple[Tensor, LossSums]:
        """Add the gradient of ``batch``; returns its loss and sums, detached."""
        parts = self._objective.parts
        base_N = self._base_logprobs(batch) if parts.kl > 0 else None
        scores = self._scores(batch, self._temperature, entropy_gradient=parts.entropy > 0)
        tokens = gather(batch, plan, scores, base_N)
        loss, sums = loss_of(tokens, parts, m2_bound=m2_bound)
        (loss * self._gradient_scale).backward()
        if look is not None:
            with torch.no_grad():
                terms = token_terms(tokens, parts, m2_bound=m2_bound)
                look.batch(batch, plan, tokens, terms, self._parameters)
        fits.add(batch, scores.logprobs_N.detach().cpu().numpy())
        return loss.detach(), sums

    def _base_logprobs(self, batch: MicroBatch) -> Tensor:
        """Of the untouched base, at the sampling temperature."""
        with torch.no_grad(), self._adapted.disable_adapter():
            return self._scores(batch, self._temperature).logprobs_N

    def _scores(
        self, batch: MicroBatch, temperature: float, *, entropy_gradient: bool = False
    ) -> TokenScores:
        return batch_scores(
            self._base,
            batch,
            temperature,
            entropy_gradient=entropy_gradient,
            autocast=self._config.autocast,
        )

    @property
    def _gradient_scale(self) -> float:
        return HALF_SCALE if self._base.dtype == torch.float16 else 1.0

    def _clip_gradient(self, look: Look | None) -> float:
        """Clip the gradient; returns its norm before."""
        parameters = list(self._parameters.values())
        if self._gradient_scale != 1.0:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= self._gradient_scale
        if look is not None:
            look.gradients(self._parameters)
        limit = self._config.max_grad_norm
        return float(torch.nn.utils.clip_grad_norm_(parameters, limit))

    def _update(self, rate: float) -> None:
        """Step with the gradient as it is."""
        for options in self._optimizer.param_groups:
            options["lr"] = rate
        self._optimizer.step()
        self.steps_done += 1

    def _choose_probe(self, trained: Sequence[Group]) -> None:
        """Of some groups' best and worst rollouts, the end at which this version differs most from the base.

        Kept for some versions. Chosen before the update, so that no version waits for it: the next one will differ at
        about the same tokens.
        """
        done = self.steps_done
        is_due = done & (done - 1) == 0 if done < PROBE_EVERY else done % PROBE_EVERY == 0
        if not is_due and self.probe_ids != FIRST_PROBE_IDS:
            return
        ends = [end for group in trained[-PROBED_GROUPS:] for end in _best_and_worst(group)]
        mine = self._sequences_logprobs(ends, adapter=True)
        base = self._sequences_logprobs(ends, adapter=False)
        apart = [float(np.linalg.norm(a - b)) for a, b in zip(mine, base, strict=True)]
        chosen = int(np.argmax(apart))
        self.probe_ids = ends[chosen]
        self._probed_base = (ends[chosen], base[chosen])


class _Totals:
    """Sums over the micro-batches of a step of ``trained`` tokens; ``has_base``: the loss has a KL term."""

    def __init__(self, trained: int, *, has_base: bool) -> None:
        self.trained, self._has_base = trained, has_base
        self.loss = self.norm = 0.0
        self._sums: LossSums | None = None

    @property
    def finite(self) -> bool:
        return math.isfinite(self.norm) and math.isfinite(self.loss)

    def add(self, loss: Tensor, sums: LossSums) -> None:
        self.loss += float(loss)
        self._sums = sums if self._sums is None else self._sums + sums

    def means(self) -> dict[str, Any]:
        """Fields of StepStats."""
        sums = defaultdict(float, self._sums.floats() if self._sums else {})
        tokens = max(self.trained, 1)
        squares = tokens * sums["ratio_square"]
        return {
            "loss": self.loss,
            "grad_norm": self.norm,
            "ratio_mean": sums["ratio"] / tokens,
            "ratio_max": sums["ratio_max"],
            "effective_sample_size": sums["ratio"] ** 2 / squares if squares else 0.0,
            "clipped_fraction": (sums["clipped_low"] + sums["clipped_high"]) / tokens,
            "clipped_low_fraction": sums["clipped_low"] / tokens,
            "clipped_high_fraction": sums["clipped_high"] / tokens,
            "masked_fraction": sums["dropped"] / tokens,
            "mismatch_kl": sums["kl"] / tokens,
            "base_kl": sums["base_kl"] / tokens if self._has_base else None,
            "entropy": sums["entropy"] / tokens,
        }


def _best_and_worst(group: Group) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The last PROBE_TOKENS tokens, prompt included, of the rollouts with the most and the least reward."""
    rewards = [math.nan if one.reward is None else one.reward for one in group.rollouts]
    best, worst = np.nanargmax(rewards), np.nanargmin(rewards)
    sequences = [[*group.prompt_ids, *group.rollouts[i].token_ids] for i in (best, worst)]
    ends = [tuple(int(one) for one in ids[-PROBE_TOKENS:]) for ids in sequences]
    return ends[0], ends[1]


def _whole(index: int, token_ids: Sequence[int]) -> Sample:
    """All but the first token are predicted, none is trained."""
    ids = np.asarray(token_ids, dtype=np.int32)
    blank = np.zeros(len(ids) - 1, dtype=np.float32)
    return Sample(index, ids[:1], ids[1:], blank, blank > 0.0, advantage=0.0)


def _reward_stats(groups: Sequence[Group]) -> dict[str, Any]:
    rewards = [r.reward for group in groups for r in group.rollouts if r.reward is not None]
    return {
        "reward_mean": float(np.mean(rewards)) if rewards else 0.0,
        "reward_std": float(np.std(rewards)) if rewards else 0.0,
    }


def _advantage_stats(plan: StepPlan) -> dict[str, Any]:
    advantages = [sample.advantage for sample in plan.samples]
    by_task: dict[TaskId, list[float]] = defaultdict(list)
    for task, advantage in zip(plan.tasks, advantages, strict=True):
        by_task[task].append(advantage)
    return {
        "advantages": {task: Moments.of(values) for task, values in by_task.items()},
        "advantage_std": float(np.std(advantages)) if advantages else 0.0,
        "advantage_max": max(map(abs, advantages), default=0.0),
    }


def _size_stats(packed: Packed) -> dict[str, Any]:
    return {
        "input_tokens": sum(batch.filled_tokens for batch in packed.batches),
        "rows": sum(batch.rows for batch in packed.batches),
        "batches": len(packed.batches),
        "over_budget": packed.over_budget,
    }


def _sample(index: int, group: Group, rollout: Rollout, advantage: float) -> Sample:
    return Sample(
        index, group.prompt_ids, rollout.token_ids, rollout.logprobs, rollout.loss_mask, advantage
    )
