"""What both engines have to know of the base model: end tokens, context length, linear modules.

Read with transformers whatever engine serves it, so that a completion ends in the same places and an
adapter is held against the same modules everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.pytorch_utils import Conv1D

from spotgrpo.producer.engines.adapter import Linear, is_target
from spotgrpo.producer.engines.ends import Ends
from spotgrpo.shared.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotgrpo.producer.engines.base import EngineSpec

LOAD_ERRORS = (OSError, ValueError, KeyError, ImportError, RuntimeError, AttributeError)
"""What transformers raises for a model that is missing, of unknown kind, or does not fit its config."""


@dataclass(frozen=True)
class BaseModel:
    """The base model's facts; ``end_ids`` are all ids that end a completion."""

    config: Any
    tokenizer: Any
    end_ids: frozenset[int]
    max_context: int

    @property
    def ends(self) -> Ends:
        """Where completions of this model end."""
        vocabulary = self.config.get_text_config().vocab_size
        return Ends(self.tokenizer, self.end_ids, self.max_context, vocabulary)


def describe(spec: EngineSpec) -> BaseModel:
    """Read config and tokenizer. Raises ConfigError for a model that is missing or does not fit."""
    options = {"revision": spec.revision, "trust_remote_code": spec.trust_remote_code}
    try:
        config = transformers.AutoConfig.from_pretrained(spec.model, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(spec.model, **options)
    except LOAD_ERRORS as exc:
        raise not_loadable(spec, exc) from exc
    try:
        generation = transformers.GenerationConfig.from_pretrained(
            spec.model, revision=spec.revision
        )
    except OSError:  # many models have none
        generation = None
    return BaseModel(
        config, tokenizer, _end_ids(config, generation, tokenizer), _max_context(spec, config)
    )


def not_loadable(spec: EngineSpec, exc: Exception) -> ConfigError:
    """The error for a base model that cannot be loaded, with the library's first line."""
    first_line = (str(exc).strip().splitlines() or [type(exc).__name__])[0]
    return ConfigError(
        "model.name", spec.model, f"give a causal language model that loads here ({first_line})"
    )


def _end_ids(config: Any, generation: Any, tokenizer: Any) -> frozenset[int]:
    """Chat models often name their end of turn in only one of these places."""
    found: set[int] = set()
    for source in (config, config.get_text_config(), generation, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return frozenset(found)


def _max_context(spec: EngineSpec, config: Any) -> int:
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    if spec.max_context is None and not isinstance(limit, int):
        raise ConfigError("model.max_context", None, "the model's config has no limit: give one")
    if spec.max_context is None:
        return int(limit or 0)
    if isinstance(limit, int) and spec.max_context > limit:
        raise ConfigError("model.max_context", spec.max_context, f"the model takes at most {limit}")
    return spec.max_context


def linear_modules(model: torch.nn.Module) -> dict[str, Linear]:
    """Names and sizes of the modules that a LoRA adapter can change."""
    return dict(_linears(model))


def _linears(model: torch.nn.Module) -> Iterator[tuple[str, Linear]]:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            yield name, Linear(module.in_features, module.out_features)
        elif isinstance(module, Conv1D):
            yield name, Linear(module.weight.shape[0], module.weight.shape[1])


def check_targets(spec: EngineSpec, modules: dict[str, Linear]) -> None:
    """Raise ConfigError unless each of the run's target modules is in the model."""
    for suffix in spec.target_modules:
        if not any(is_target(name, (suffix,)) for name in modules):
            known = sorted({name.rsplit(".", 1)[-1] for name in modules})
            raise ConfigError("lora.target_modules", suffix, f"the model has {', '.join(known)}")


def refuse_head(spec: EngineSpec, model: Any) -> None:
    """Raise ConfigError for an adapter on the output head: vLLM's logprobs leave it out."""
    head = model.get_output_embeddings()
    for suffix in spec.target_modules:
        if any(
            is_target(name, (suffix,)) for name, module in model.named_modules() if module is head
        ):
            remedy = "leave the output head out: vLLM's logprobs are without its adapter"
            raise ConfigError("lora.target_modules", suffix, remedy)


def skeleton(spec: EngineSpec, config: Any) -> Any:
    """The model without weights (on torch's meta device), for its modules' names and sizes."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            config, trust_remote_code=spec.trust_remote_code
        )
