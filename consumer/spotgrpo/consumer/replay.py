"""A skipped step taken again, in memory: is it finite now, and if not, where is it not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import load

from spotgrpo.consumer.inspection import Inspection, OddToken
from spotgrpo.consumer.losses.objective import Objective
from spotgrpo.consumer.replays import Recorded, Settings, changes, check_base, check_lora
from spotgrpo.consumer.skips import likely_cause
from spotgrpo.consumer.trainer import Trainer
from spotgrpo.shared.errors import IntegrityError

if TYPE_CHECKING:
    from spotgrpo.shared.config import Config
    from spotgrpo.shared.wire import Group

WEIGHT = "weight."
"""What names of the adapter's weights begin with in a trainer state."""
GROWN = 1e3
"""An adapter weight beyond it has grown out of all bounds: they begin within 1, and steps are of the learning rate."""


@dataclass(frozen=True)
class Weights:
    """What the trainer state holds of the adapter: tensors with a number that is not finite, and the greatest size."""

    odd: tuple[str, ...]
    greatest: float


@dataclass(frozen=True)
class Replayed:
    """What came of a step that was taken again.

    Attributes:
        recorded: loss and gradient norm when it was skipped.
        changed: settings that were not as recorded: by dotted key, then and now.
        dtype: that the base computed in.
        is_trained: False where these settings leave nothing to train.
        found: where it is not finite; ``apart`` unless all is finite, or only where sequences share a row.
        worker: whose group ``found.first`` is of; ``before``: id of the token before it, the last that the model read.
        base_is_finite: whether the base without the adapter gives that token a finite logprob; None where there is
            none, or its logprob is finite.
        weights: of the adapter before the step.
    """

    step: str
    version: int
    recorded: tuple[str, str]
    changed: Mapping[str, tuple[object, object]]
    dtype: str
    is_trained: bool
    loss: float
    grad_norm: float
    trained_tokens: int
    found: Inspection
    worker: str | None
    before: int | None
    base_is_finite: bool | None
    weights: Weights

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def cause(self) -> str | None:
        """Most likely; None where the step is finite."""
        if self.is_finite:
            return None
        if self.weights.odd:
            return f"weights of the adapter are not finite themselves: {self.weights.odd[0]}"
        if self.base_is_finite is False:
            return "the base alone is not finite there: the model's files, or its dtype"
        if self.weights.greatest > GROWN:
            there = "the base alone is finite there; " if self.base_is_finite else ""
            return (
                f"{there}weights of the adapter have grown to {self.weights.greatest:.2g}: train.learning_rate is far "
                "too large (in a new run; these weights stay as they are)"
            )
        return likely_cause(self.loss, self.dtype)

    def to_dict(self) -> dict[str, object]:
        """As JSON has it; numbers that are not finite as Python writes them."""
        found, first = self.found, self.found.first
        shown: dict[str, object] = {
            **{name: value for name, value in asdict(self).items() if name != "found"},
            "recorded": {"loss": self.recorded[0], "grad_norm": self.recorded[1]},
            "changed": {key: {"then": a, "now": b} for key, (a, b) in self.changed.items()},
            "finite": self.is_finite,
            "cause": self.cause,
            "tokens": found.tokens,
            "odd_tokens": found.odd_tokens,
            "odd_rollouts": found.odd_rollouts,
            "first": None if first is None else {**asdict(first), "odd": first.odd},
            "odd_gradients": [asdict(one) for one in found.odd_gradients],
            "gradient_tasks": found.gradient_tasks,
            "parameters": found.parameters,
        }
        return {name: _plain(value) for name, value in shown.items()}


def replay(recorded: Recorded, settings: Settings, config: Config) -> Replayed:
    """Take ``recorded`` again with ``settings``, on the base and the device that ``config`` names; nothing is stored.

    Raises:
        ConfigError: the model is not the run's base, or the adapter has another shape.
        IntegrityError: the state does not fit.
    """
    check_base(recorded, config.model.name, config.model.revision)
    sampling, train = settings.sampling, settings.train
    objective = Objective(
        settings.loss, sampling.max_new_tokens, train.groups_per_step * sampling.group_size
    )
    trainer = Trainer(
        config.model, config.lora, train, sampling.temperature, config.run.seed, objective
    )
    check_lora(recorded, config.lora, trainer.target_modules)
    trainer.restore(recorded.state)
    if trainer.steps_done != recorded.step.version:
        raise IntegrityError(
            f"{recorded.step.state} is of version {trainer.steps_done}, not {recorded.step.version}"
        )
    found = Inspection()
    stats = trainer.step(recorded.groups, found)
    if found.first is not None:
        trainer.restore(recorded.state)
        apart = Inspection(apart=True)
        trainer.step(recorded.groups, apart)
        found = apart if apart.first is not None else found
    group = None if found.first is None else _group_of(recorded, found.first)
    if group is not None:
        _move_to_cause(trainer, group, found)
    first = found.first
    return Replayed(
        step=str(recorded.step.id),
        version=recorded.step.version,
        recorded=(recorded.step.loss, recorded.step.grad_norm),
        changed=changes(recorded.step, settings),
        dtype=trainer.dtype,
        is_trained=stats.tokens > 0,
        loss=stats.loss,
        grad_norm=stats.grad_norm,
        trained_tokens=stats.tokens,
        found=found,
        worker=None if group is None else group.worker,
        before=None
        if first is None or group is None
        else _ids(group, first.rollout, first.token)[-1],
        base_is_finite=None
        if first is None or group is None
        else _base_is_finite(trainer, group, first),
        weights=_weights(recorded.state),
    )


def _group_of(recorded: Recorded, token: OddToken) -> Group:
    return next(group for group in recorded.groups if str(group.task_id) == token.task)


def _move_to_cause(trainer: Trainer, group: Group, found: Inspection) -> None:
    """Name the first token whose logprob is not finite where nothing follows it: found by halving."""
    first = found.first
    if first is None or "logprob" not in first.odd:
        return
    fine, odd = -1, len(group.rollouts[first.rollout].token_ids) - 1
    if _is_finite_at(trainer, group, first.rollout, odd, adapter=True):
        return  # not of this rollout alone
    while odd - fine > 1:
        middle = (fine + odd) // 2
        if _is_finite_at(trainer, group, first.rollout, middle, adapter=True):
            fine = middle
        else:
            odd = middle
    found.move_first(odd)


def _base_is_finite(trainer: Trainer, group: Group, token: OddToken) -> bool | None:
    """Of the base alone, at ``token``; None where its logprob is finite with the adapter."""
    if "logprob" not in token.odd:
        return None
    return _is_finite_at(trainer, group, token.rollout, token.token, adapter=False)


def _is_finite_at(
    trainer: Trainer, group: Group, rollout: int, token: int, *, adapter: bool
) -> bool:
    """Whether the logprob of a token is, with nothing behind it."""
    ids = _ids(group, rollout, token + 1)
    return bool(np.isfinite(trainer.sequence_logprobs(ids, adapter=adapter)[-1]))


def _ids(group: Group, rollout: int, tokens: int) -> list[int]:
    """The prompt and the first ``tokens`` tokens of a rollout."""
    ids: list[int] = group.rollouts[rollout].token_ids[:tokens].tolist()
    return [*group.prompt_ids.tolist(), *ids]


def _weights(state: bytes) -> Weights:
    tensors = {
        name.removeprefix(WEIGHT): tensor
        for name, tensor in load(state).items()
        if name.startswith(WEIGHT)
    }
    odd = tuple(sorted(name for name, one in tensors.items() if not np.isfinite(one).all()))
    sizes = [float(np.abs(one[np.isfinite(one)]).max(initial=0.0)) for one in tensors.values()]
    return Weights(odd, max(sizes, default=0.0))


def _plain(value: Any) -> Any:
    """``value`` with every number that JSON has not as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
