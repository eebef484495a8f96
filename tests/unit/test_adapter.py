"""What is read of an adapter's folder before any library sees it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from spotgrpo.producer.engines.adapter import Linear, read_adapter
from spotgrpo.producer.engines.trial import write_trial
from spotgrpo.shared.errors import IntegrityError

BASE = {f"model.layers.{layer}.{name}": Linear(8, 6) for layer in (0, 1) for name in ("q", "v")}
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound adapter of rank 1 on q and v."""
    write_trial(tmp_path / "v1", BASE, ("q", "v"))
    return tmp_path / "v1"


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_sound_adapter_fits(folder: Path) -> None:
    adapter = read_adapter(folder)
    adapter.check(BASE, 1, ("q", "v"))
    assert adapter.shapes.keys() == BASE.keys()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", True),
        ("lora_bias", True),
        ("bias", "lora_only"),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("layer_replication", [[0, 1], [0, 1]]),
        ("trainable_token_indices", [1, 2]),
        ("target_parameters", ["experts.gate_up_proj"]),
        ("alora_invocation_tokens", [1]),
        ("use_qalora", True),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
    ],
)
def test_a_setting_that_no_engine_serves_is_refused_by_name(
    folder: Path, key: str, value: Any
) -> None:
    change_config(folder, **{key: value})
    with pytest.raises(IntegrityError) as caught:
        read_adapter(folder)
    assert str(caught.value) == f"adapter v1 cannot be served with {key} = {value!r}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_dora", False),
        ("modules_to_save", None),
        ("init_lora_weights", "gaussian"),
        ("init_lora_weights", True),
        ("use_rslora", True),
        ("fan_in_fan_out", True),  # of models with transposed weights
        ("something_new", None),
    ],
)
def test_settings_without_consequence_are_none(folder: Path, key: str, value: Any) -> None:
    change_config(folder, **{key: value})
    read_adapter(folder).check(BASE, 1, ("q", "v"))


@pytest.mark.parametrize("dtype", [np.float64, np.int8])
def test_weights_of_another_kind_of_number_are_refused(folder: Path, dtype: Any) -> None:
    path = folder / WEIGHTS
    save_file({key: value.astype(dtype) for key, value in load_file(path).items()}, path)
    with pytest.raises(IntegrityError, match="none of F32, BF16, F16"):
        read_adapter(folder)


def test_a_scale_that_was_made_for_another_rank_is_refused(folder: Path) -> None:
    """Engines divide alpha by the config's rank, whatever the tensors' is."""
    change_config(folder, r=4)
    with pytest.raises(IntegrityError, match="has rank 1, but r = 4"):
        read_adapter(folder).check(BASE, 4, ("q", "v"))
    change_config(folder, rank_pattern={"q": 1, "v": 1})
    read_adapter(folder).check(BASE, 4, ("q", "v"))


def test_a_module_that_the_base_lacks_is_refused(folder: Path) -> None:
    less = {name: size for name, size in BASE.items() if ".1.v" not in name}
    with pytest.raises(IntegrityError, match=r"has no linear module model\.layers\.1\.v"):
        read_adapter(folder).check(less, 1, ("q", "v"))
    with pytest.raises(IntegrityError, match="none of the run's target modules"):
        read_adapter(folder).check(BASE, 1, ("q",))
