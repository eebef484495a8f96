"""What a learner needs to go on exactly where another stood, as safetensors: no pickle in the bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from torch.optim import Optimizer

from spotgrpo.shared.errors import IntegrityError

SCHEMA = 1
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Counters:
    """The part of the state that is neither weights nor moments.

    Attributes:
        steps_done: optimizer steps, which is the version's number.
        probe_ids: tokens of the probe.
    """

    steps_done: int
    probe_ids: tuple[int, ...]


def pack_state(
    parameters: Mapping[str, nn.Parameter], optimizer: Optimizer, counters: Counters
) -> bytes:
    """float32 master weights, AdamW moments, counters and random state, as one safetensors body."""
    tensors = {
        "schema": torch.tensor(SCHEMA),
        "steps_done": torch.tensor(counters.steps_done),
        "probe_ids": torch.tensor(counters.probe_ids, dtype=torch.int64),
        "random.cpu": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        tensors["random.cuda"] = torch.cuda.get_rng_state()
    for name, parameter in parameters.items():
        tensors[f"weight.{name}"] = parameter.detach()
        # No moments before the first step.
        tensors |= {
            f"{key}.{name}": value for key, value in optimizer.state.get(parameter, {}).items()
        }
    return save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()})


def unpack_state(
    state: bytes, parameters: Mapping[str, nn.Parameter], optimizer: Optimizer
) -> Counters:
    """Put ``state`` back into ``parameters`` and ``optimizer``, bit for bit; the optimizer's options stay its own.

    Raises:
        IntegrityError: not such a state, or one of other modules or shapes. Nothing is changed then.
    """
    try:
        tensors = load(state)
    except SafetensorError as exc:
        raise IntegrityError(f"trainer state is not safetensors: {exc}") from exc
    _check(tensors, parameters)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[f"weight.{name}"])
    moments = {
        index: {key: tensors[f"{key}.{name}"] for key in MOMENTS}
        for index, name in enumerate(parameters)
        if f"exp_avg.{name}" in tensors
    }
    optimizer.load_state_dict(
        {"state": moments, "param_groups": optimizer.state_dict()["param_groups"]}
    )
    torch.set_rng_state(tensors["random.cpu"])
    if torch.cuda.is_available() and "random.cuda" in tensors:
        torch.cuda.set_rng_state(tensors["random.cuda"])
    return Counters(int(tensors["steps_done"]), tuple(tensors["probe_ids"].tolist()))


def _check(tensors: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]) -> None:
    missing = {"schema", "steps_done", "probe_ids", "random.cpu"} - tensors.keys()
    if missing:
        raise IntegrityError(f"trainer state lacks {', '.join(sorted(missing))}")
    if int(tensors["schema"]) != SCHEMA:
        raise IntegrityError(f"trainer state has schema {int(tensors['schema'])}, not {SCHEMA}")
    found = {
        name: tuple(tensor.shape) for name, tensor in tensors.items() if name.startswith("weight.")
    }
    wanted = {f"weight.{name}": tuple(parameter.shape) for name, parameter in parameters.items()}
    if found != wanted:
        differing = sorted(name for name, _ in found.items() ^ wanted.items())
        raise IntegrityError(
            f"trainer state is of another adapter: {len(differing)} tensors differ, first {differing[0]}"
        )
