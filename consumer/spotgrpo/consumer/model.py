"""The base model and the adapter on it, as ``transformers`` and ``peft`` make them."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spotgrpo.consumer.tree_attention import leave_uncompiled
from spotgrpo.shared.errors import ConfigError

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from spotgrpo.shared.config import LoraConfig, ModelConfig

ADAPTER = "default"


def resolve_device(name: str) -> torch.device:
    """The device called ``name``; ``auto`` is the GPU where there is one. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as exc:
        remedy = f"use auto, cpu, cuda or cuda:N with {torch.cuda.device_count()} GPUs here"
        raise ConfigError("train.device", name, remedy) from exc
    return device


def load_base(
    config: ModelConfig, device: torch.device, quantize: str | None = None
) -> PreTrainedModel:
    """The frozen base model on ``device`` in ``config.dtype``, in evaluation mode (no dropout).

    ``quantize`` "nf4" holds its linear layers in 4 bits, QLoRA (arXiv:2305.14314) §3, and computes in ``config.dtype``.

    Raises:
        ConfigError: no such model, not a causal language model, or it needs code that the config does not allow.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    options: dict[str, Any] = {} if quantize is None else _in_four_bits(quantize, config, device)
    if config.attn_implementation is not None:
        options["attn_implementation"] = config.attn_implementation
    try:
        model = AutoModelForCausalLM.from_pretrained(
            config.name,
            revision=config.revision,
            dtype=getattr(torch, config.dtype),
            trust_remote_code=config.trust_remote_code,
            **options,
        )
    except (OSError, ValueError, ImportError, KeyError) as exc:
        raise ConfigError(
            "model.name", config.name, f"{first_line(exc)}; {_remedy(config)}"
        ) from exc
    model.requires_grad_(False)
    return model.eval() if quantize is not None else model.eval().to(device)


def _in_four_bits(quantize: str, config: ModelConfig, device: torch.device) -> dict[str, Any]:
    """What ``from_pretrained`` needs for it; it puts such a model on its device itself."""
    if device.type != "cuda":
        raise ConfigError("train.quantize", quantize, f"needs a GPU, and train.device is {device}")
    if importlib.util.find_spec("bitsandbytes") is None:
        remedy = "bitsandbytes is not installed: pip install 'spotgrpo[qlora]', or leave it out"
        raise ConfigError("train.quantize", quantize, remedy)
    from transformers import BitsAndBytesConfig

    form = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=quantize,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=getattr(torch, config.dtype),
    )
    return {"quantization_config": form, "device_map": {"": device}}


def max_context(model: PreTrainedModel, config: ModelConfig) -> int:
    """Longest prompt plus completion, in tokens. Raises ConfigError where more is asked for than the model has."""
    own = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if own is None:
        if config.max_context is None:
            raise ConfigError(
                "model.max_context", None, "this model does not say its context length: set it"
            )
        return config.max_context
    if config.max_context is not None and config.max_context > own:
        raise ConfigError(
            "model.max_context",
            config.max_context,
            f"this model has {own} positions: use at most that",
        )
    return config.max_context or int(own)


def add_lora(model: PreTrainedModel, config: LoraConfig, seed: int) -> PeftModel:
    """Put a fresh adapter on ``model``: float32 whatever the base's dtype, the same for the same seed, and zero.

    Zero means that B is 0, so that the adapted model is the base (version 0).

    Raises:
        ConfigError: a target module that the model does not have, or that cannot carry an adapter.
    """
    import peft

    _check_targets(model, config)
    present = ", ".join(linear_names(model))
    lora = peft.LoraConfig(
        r=config.rank,
        lora_alpha=int(config.alpha) if config.alpha.is_integer() else config.alpha,
        target_modules=config.target_modules,
        use_rslora=config.use_rslora,
        lora_dropout=config.dropout,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            adapted = peft.get_peft_model(model, lora, adapter_name=ADAPTER)
    except ValueError as exc:
        remedy = f"{first_line(exc)}; this model has {present}"
        raise ConfigError("lora.target_modules", config.target_modules, remedy) from exc
    others = sorted(_adapted_parameters(adapted))
    if others:
        remedy = (
            f"engines serve no adapter on {', '.join(others)} of this model; use some of {present}"
        )
        raise ConfigError("lora.target_modules", config.target_modules, remedy)
    return adapted


def adapted_modules(model: PeftModel) -> list[str]:
    """Full names of the modules that carry an adapter; sorted."""
    return sorted(
        name for name, module in model.named_modules() if ADAPTER in getattr(module, "lora_A", {})
    )


def adapter_config(model: PeftModel, base_name: str) -> bytes:
    """``adapter_config.json`` as peft writes it, with sorted target modules so that equal configs give equal bytes."""
    values: dict[str, Any] = dict(model.peft_config[ADAPTER].to_dict())
    values |= {"base_model_name_or_path": base_name, "inference_mode": True}
    plain = {
        key: sorted(value) if isinstance(value, set) else value for key, value in values.items()
    }
    return json.dumps(plain, indent=2, sort_keys=True).encode()


def linear_names(model: PreTrainedModel) -> list[str]:
    """Last name parts of the linear modules that can carry an adapter (not the output head); sorted."""
    head = model.get_output_embeddings()
    return sorted(
        {name.rsplit(".", 1)[-1] for name, module in _linears(model) if module is not head}
    )


def checkpoint_gradients(model: PreTrainedModel) -> None:
    """Compute activations again in backward; everything else stays in evaluation mode (no dropout)."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True  # this module alone: train() would switch on dropout below it


def compile_layers(model: PreTrainedModel) -> None:
    """Compile each layer on its own, for any number of tokens; attention over trees stays as it is.

    A layer at a time, since all of them are compiled as one, and since only they have what compiling makes faster.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    leave_uncompiled()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(dynamic=True)


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    from transformers.pytorch_utils import Conv1D

    return (
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, (nn.Linear, Conv1D))
    )


def _adapted_parameters(model: PeftModel) -> set[str]:
    """Last name parts of what carries an adapter and is no linear module: experts and their routers, mostly."""
    from peft.tuners.lora import LoraLayer
    from transformers.pytorch_utils import Conv1D

    return {
        name.removesuffix(".base_layer").rsplit(".", 1)[-1]
        for name, module in model.named_modules()
        if isinstance(module, LoraLayer)
        and ADAPTER in module.lora_A
        and not isinstance(module.get_base_layer(), (nn.Linear, Conv1D))
    }


def _check_targets(model: PreTrainedModel, config: LoraConfig) -> None:
    """The library passes over a name that matches nothing as long as another one matches; we do not."""
    if config.target_modules == "all-linear":
        return
    names = [name for name, _ in model.named_modules() if name]
    present = ", ".join(linear_names(model))
    outer = (model.get_output_embeddings(), model.get_input_embeddings())
    for target in config.target_modules:
        found = [name for name in names if name == target or name.endswith(f".{target}")]
        if not found:
            remedy = f"{target!r} is no module of this model; it has {present}"
            raise ConfigError("lora.target_modules", config.target_modules, remedy)
        if any(model.get_submodule(name) in outer for name in found):
            remedy = f"engines serve no adapter on {target!r}; use some of {present}"
            raise ConfigError("lora.target_modules", config.target_modules, remedy)


def first_line(exc: BaseException) -> str:
    """What to say of an exception of a library."""
    lines = str(exc).strip().splitlines()
    return lines[0][:300] if lines else type(exc).__name__


def _remedy(config: ModelConfig) -> str:
    if not config.trust_remote_code:
        return "give a hub name or a folder with config.json and weights (model.trust_remote_code if it brings code)"
    return "give a hub name or a folder with config.json and weights of a causal language model"
