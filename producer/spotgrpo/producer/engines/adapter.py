"""A version's PEFT folder as an engine sees it: which modules it changes, and whether they are the base's.

Both libraries pass over tensors that match no module and then serve the base model, so an adapter is
compared with the base before it is handed to either. Only headers are read here; no torch.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from safetensors import SafetensorError, safe_open

from spotgrpo.shared.errors import IntegrityError
from spotgrpo.shared.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TENSOR: Final = re.compile(r"base_model\.model\.(.+)\.lora_(A|B)\.weight")
UNSUPPORTED: Final = (
    "use_dora",
    "lora_bias",
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "use_bdlora",
    "use_qalora",
    "arrow_config",
    "monteclora_config",
    "velora_config",
    "kasa_config",
)
"""Settings of peft under which an adapter is more than two matrices a module, or computed otherwise."""
CHANGES_BASE: Final = ("pissa", "olora", "loftq", "corda")
"""Beginnings of ``init_lora_weights`` that take the adapter's start out of the base's weights."""
DTYPES: Final = ("F32", "BF16", "F16")
SELECTIVE: Final = ("layers_to_transform", "layers_pattern", "exclude_modules")


@dataclass(frozen=True)
class Linear:
    """Sizes of a linear module: [in_features] to [out_features]."""

    in_features: int
    out_features: int


@dataclass(frozen=True)
class Adapter:
    """What a PEFT folder says of itself; ``shapes`` has (A, B) of each module, A [r, in], B [out, r]."""

    folder: Path
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]

    def check(
        self, base: Mapping[str, Linear], max_rank: int, target_modules: tuple[str, ...]
    ) -> None:
        """Raise IntegrityError unless every tensor has its place in ``base`` and every place its tensors."""
        for name, (a, b) in self.shapes.items():
            linear = base.get(name)
            if linear is None:
                raise self.broken(f"the base model has no linear module {name}")
            if not is_target(name, target_modules):
                raise self.broken(f"{name} is none of the run's target modules {target_modules}")
            rank = a[0] if a else 0
            if not 1 <= rank <= max_rank:
                raise self.broken(f"{name} has rank {rank}, outside 1 to {max_rank}")
            if rank != self.config.get("r") and not self.config.get("rank_pattern"):
                raise self.broken(f"{name} has rank {rank}, but r = {self.config.get('r')}")
            if a != (rank, linear.in_features) or b != (linear.out_features, rank):
                raise self.broken(f"{name} has shapes A {a}, B {b}, but the base has {linear}")
        missing = self._named_by_config(base) - set(self.shapes)
        if missing:
            raise self.broken(f"its config names {min(missing)}, but it has no tensors for it")

    def _named_by_config(self, base: Mapping[str, Linear]) -> set[str]:
        targets = self.config.get("target_modules")
        if any(self.config.get(key) for key in SELECTIVE) or not isinstance(targets, list):
            return set()
        return {name for name in base if is_target(name, tuple(targets))}

    def broken(self, why: str) -> IntegrityError:
        """The error that says what is wrong with this adapter."""
        return IntegrityError(f"adapter {self.folder.name}: {why}")


def is_target(name: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a module's full name ends in one of ``suffixes``, whole parts only (peft's rule)."""
    return any(name == suffix or name.endswith(f".{suffix}") for suffix in suffixes)


def read_adapter(folder: Path) -> Adapter:
    """Read config and tensor headers of a PEFT folder, or raise IntegrityError."""
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        shapes = _tensor_shapes(folder / ADAPTER_WEIGHTS)
    except (OSError, ValueError, SafetensorError) as exc:
        raise IntegrityError(f"adapter {folder.name} cannot be read: {exc}") from exc
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise IntegrityError(f"adapter {folder.name} is not a LoRA adapter")
    unsupported = _unsupported(config)
    if unsupported:
        raise IntegrityError(f"adapter {folder.name} cannot be served with {unsupported}")
    return Adapter(folder, config, _pair(folder, shapes))


def _unsupported(config: Mapping[str, Any]) -> str:
    """The first setting that no engine serves, with its value; empty where there is none."""
    if config.get("bias", "none") != "none":
        return f"bias = {config['bias']!r}"
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        return f"init_lora_weights = {start!r}"
    return next((f"{key} = {config[key]!r}" for key in UNSUPPORTED if config.get(key)), "")


def _tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(path, framework="numpy") as tensors:
        slices = {key: tensors.get_slice(key) for key in tensors.keys()}  # noqa: SIM118
        for key, found in slices.items():
            if found.get_dtype() not in DTYPES:
                raise ValueError(f"{key} is {found.get_dtype()}, none of {', '.join(DTYPES)}")
        return {key: tuple(found.get_shape()) for key, found in slices.items()}


def _pair(
    folder: Path, tensors: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    halves: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, shape in tensors.items():
        match = TENSOR.fullmatch(key)
        if match is None:
            raise IntegrityError(f"adapter {folder.name}: tensor {key} is not a LoRA weight")
        halves.setdefault(match[1], {})[match[2]] = shape
    lone = next((name for name, half in halves.items() if len(half) != 2), None)
    if lone is not None or not halves:
        raise IntegrityError(f"adapter {folder.name}: {lone or 'every module'} lacks A or B")
    return {name: (half["A"], half["B"]) for name, half in halves.items()}
