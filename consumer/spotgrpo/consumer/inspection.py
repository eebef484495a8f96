"""Where a step is not finite: the first token whose numbers are not, and the parameters whose gradient is not.

Shape suffixes: N predicted tokens of a micro-batch.
"""

# ruff: noqa: N803, N806  (shape suffixes: the legend is above)

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from torch import Tensor, nn

from spotgrpo.consumer.advantages import Float64Array
from spotgrpo.consumer.losses.composed import Terms
from spotgrpo.consumer.losses.plan import StepPlan
from spotgrpo.consumer.losses.ratios import Tokens
from spotgrpo.consumer.packing import BoolArray, Int64Array, MicroBatch


@dataclass(frozen=True)
class OddToken:
    """A token with a number that is not finite.

    Attributes:
        task: of its group; ``rollout`` which of it, ``token`` which of the completion, both from 0.
        id: of the token.
        is_trained: False where the mask leaves it out: its logprob still takes part in the backward pass.
        values: by name: logprob and behaviour_logprob, base_logprob where the loss has a KL term, ratio π/μ as the
            loss has it, advantage, entropy, and loss, its share in that of the step.
    """

    task: str
    rollout: int
    token: int
    id: int
    is_trained: bool
    values: Mapping[str, float]

    @property
    def odd(self) -> list[str]:
        """Names of the values that are not finite."""
        return [name for name, value in self.values.items() if not math.isfinite(value)]


@dataclass(frozen=True)
class OddGradient:
    """A parameter whose gradient is not finite: ``odd`` of its ``size`` entries, or (0) only its norm in float32."""

    name: str
    odd: int
    size: int


@dataclass
class Inspection:
    """Looks on while a step is taken (``trainer.Look``), and keeps where it is not finite.

    Attributes:
        apart: have every sequence in a row of its own: in a shared one, what is not finite spreads to the others,
            since 0 × nan is nan.
        first: the first odd token in the order of groups, rollouts and tokens. What is not finite spreads over its
            row to tokens before it too; :meth:`move_first` names another of the same rollout.
        tokens: looked at, untrained ones of trained rollouts too; ``odd_tokens`` of them, in ``odd_rollouts``.
        gradient_tasks: groups of the first micro-batch after which the gradient was not finite.
        odd_gradients: parameters, of ``parameters`` in all.
    """

    apart: bool = False
    first: OddToken | None = None
    tokens: int = 0
    odd_tokens: int = 0
    odd_rollouts: int = 0
    gradient_tasks: tuple[str, ...] = ()
    odd_gradients: tuple[OddGradient, ...] = ()
    parameters: int = 0
    _owner: int = -1
    _rollout: tuple[Int64Array, BoolArray, Mapping[str, Float64Array]] = field(
        default_factory=lambda: (np.zeros(0, np.int64), np.zeros(0, np.bool_), {})
    )

    def batch(
        self,
        batch: MicroBatch,
        plan: StepPlan,
        tokens: Tokens,
        terms: Terms,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        """Look at a micro-batch whose gradient was added to that of ``parameters``."""
        values = _values(tokens, terms)
        odd_N = _any_odd(values)
        self.tokens += len(odd_N)
        self.odd_tokens += int(odd_N.sum())
        self.odd_rollouts += len(np.unique(batch.owner_N[odd_N]))
        if odd_N.any():
            self._note_first(batch, plan, values, odd_N)
        if not self.gradient_tasks and any(map(_is_odd, parameters.values())):
            owners = np.unique(batch.owner_N)
            self.gradient_tasks = tuple(dict.fromkeys(str(plan.tasks[owner]) for owner in owners))

    def gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Look at the whole step's gradient."""
        self.parameters = len(parameters)
        self.odd_gradients = tuple(
            OddGradient(name, _odd_entries(one), one.numel())
            for name, one in parameters.items()
            if _is_odd(one)
        )

    def move_first(self, token: int) -> None:
        """Name ``token`` of the rollout that :attr:`first` is of."""
        if self.first is not None:
            ids, mask, values = self._rollout
            self.first = replace(
                self.first,
                token=token,
                id=int(ids[token]),
                is_trained=bool(mask[token]),
                values={name: float(array[token]) for name, array in values.items()},
            )

    def _note_first(
        self,
        batch: MicroBatch,
        plan: StepPlan,
        values: Mapping[str, Float64Array],
        odd_N: BoolArray,
    ) -> None:
        owner = int(batch.owner_N[odd_N].min())
        if self.first is not None and self._owner <= owner:
            return
        mine = batch.owner_N == owner  # in the order of the completion
        self._owner = owner
        self._rollout = (
            batch.target_N[mine],
            batch.mask_N[mine],
            {name: array[mine] for name, array in values.items()},
        )
        self.first = OddToken(str(plan.tasks[owner]), plan.rollouts[owner], 0, 0, True, {})
        self.move_first(int(np.flatnonzero(odd_N[mine])[0]))


def _values(tokens: Tokens, terms: Terms) -> dict[str, Float64Array]:
    found: dict[str, Tensor | None] = {
        "logprob": tokens.logprobs_N,
        "behaviour_logprob": tokens.behaviour_N,
        "base_logprob": tokens.base_N,
        "ratio": terms.log_ratio_N.exp(),
        "advantage": tokens.advantage_N,
        "entropy": tokens.entropy_N,
        "loss": terms.loss_N,
    }
    return {
        name: tensor.detach().double().cpu().numpy()
        for name, tensor in found.items()
        if tensor is not None
    }


def _any_odd(values: Mapping[str, Float64Array]) -> BoolArray:
    """Bool [N]: whether one of a token's values is not finite."""
    found = np.zeros(len(next(iter(values.values()))), dtype=np.bool_)
    for array in values.values():
        found |= ~np.isfinite(array)
    return found


def _odd_entries(parameter: nn.Parameter) -> int:
    gradient = parameter.grad
    return 0 if gradient is None else int((~gradient.isfinite()).sum())


def _is_odd(parameter: nn.Parameter) -> bool:
    """Whether an entry is not finite, or the sum of their squares, which the norm is made of."""
    gradient = parameter.grad
    return gradient is not None and not math.isfinite(float(gradient.norm()))
