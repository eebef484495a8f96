"""What engines serve, as far as a learner and a configuration have to know it. Importable without torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from spotgrpo.shared.errors import ConfigError

VLLM_RANKS: Final = (8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as its ``max_lora_rank``; smaller adapters are padded."""

_WHOLE: Final = (
    "leave it out: tokens are sampled from the whole distribution at sampling.temperature"
)
NOT_SERVED: Final[Mapping[str, str]] = {
    "lora.use_dora": "leave it out: vLLM serves no DoRA",
    "lora.bias": "leave it out: vLLM serves no biases",
    "lora.lora_bias": "leave it out: vLLM serves no biases",
    "lora.modules_to_save": "leave it out: vLLM serves adapters, and no whole modules beside them",
    "lora.trainable_token_indices": "leave it out: vLLM serves adapters, and no embeddings beside them",
    "lora.layer_replication": "leave it out: vLLM serves the base's own layers",
    "lora.target_parameters": "leave it out, and name linear modules in lora.target_modules",
    "lora.rank_pattern": "leave it out: lora.rank is every module's",
    "lora.alpha_pattern": "leave it out: lora.alpha is every module's",
    "lora.init_lora_weights": "leave it out: version 0 has to be the base, so B begins with zero",
    "sampling.top_p": _WHOLE,
    "sampling.top_k": _WHOLE,
    "sampling.min_p": _WHOLE,
    "sampling.repetition_penalty": _WHOLE,
    "sampling.presence_penalty": _WHOLE,
    "sampling.frequency_penalty": _WHOLE,
}
"""Settings of other programs that people try here, and what to do about each."""


def vllm_rank(rank: int) -> int:
    """The ``max_lora_rank`` for adapters of ``rank``. Raises ConfigError where there is none."""
    fitting = next((allowed for allowed in VLLM_RANKS if allowed >= rank), None)
    if fitting is None:
        remedy = (
            f"vLLM serves ranks up to {VLLM_RANKS[-1]}: use one, or worker.engine = 'transformers'"
        )
        raise ConfigError("lora.rank", rank, remedy)
    return fitting
