"""A small adapter of zeros for all of a run's target modules: what an engine does with it is seen at the start."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

import numpy as np
from safetensors.numpy import save_file

from spotgrpo.producer.engines.adapter import Linear, is_target
from spotgrpo.shared.ids import PolicyVersion
from spotgrpo.shared.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

TRIAL: Final = PolicyVersion(epoch=0, number=0)
"""No version of a run: epochs begin with 1."""


def write_trial(folder: Path, base: Mapping[str, Linear], target_modules: tuple[str, ...]) -> None:
    """Write a PEFT folder of rank 1, with A and B zero, for every module of ``base`` that is a target."""
    chosen = {name: size for name, size in base.items() if is_target(name, target_modules)}
    tensors = {}
    for name, size in chosen.items():
        prefix = f"base_model.model.{name}.lora"
        tensors[f"{prefix}_A.weight"] = np.zeros((1, size.in_features), dtype=np.float32)
        tensors[f"{prefix}_B.weight"] = np.zeros((size.out_features, 1), dtype=np.float32)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 1,
        "lora_alpha": 1,
        "target_modules": list(target_modules),
        "bias": "none",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / ADAPTER_WEIGHTS)
