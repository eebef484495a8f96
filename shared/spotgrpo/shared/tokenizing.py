"""The base model's tokenizer, and the tokens at which the model stops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from spotgrpo.shared.config import ModelConfig
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.fingerprint import CONFIG, KEY, local_folder, model_folder, read_json

GENERATION_CONFIG: Final = "generation_config.json"


def load_tokenizer(config: ModelConfig) -> Any:
    """The tokenizer of ``transformers`` that comes with the model.

    Raises:
        ConfigError: transformers is not installed, no such model, no tokenizer in it, or one that needs code of its
            own, which ``model.trust_remote_code`` forbids.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError as exc:
        remedy = "its tokenizer needs transformers: pip install 'spotgrpo[learner]' or 'spotgrpo[worker]'"
        raise ConfigError(KEY, config.name, remedy) from exc
    name = str(local_folder(config.name) or config.name)
    try:
        return AutoTokenizer.from_pretrained(
            name, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, ImportError, KeyError, TypeError, AttributeError) as exc:
        said = " ".join(str(exc).split())
        if "trust_remote_code" in said and not config.trust_remote_code:
            remedy = "its tokenizer runs code of its own: set model.trust_remote_code = true if you trust it"
            raise ConfigError("model.trust_remote_code", config.trust_remote_code, remedy) from exc
        remedy = f"its tokenizer cannot be loaded: {type(exc).__name__}: {said[:300]}"
        raise ConfigError(KEY, config.name, remedy) from exc


def stop_ids(name: str, revision: str | None, tokenizer: Any) -> tuple[int, ...]:
    """All ids at which the model ends a completion, ascending.

    A chat model has several, and its files name different ones: ``generation_config.json``, ``config.json`` (also of
    the text part of a multimodal model) and the tokenizer.

    Args:
        name: folder or hub name of the model.
        revision: of the hub.
        tokenizer: of ``transformers``.

    Raises:
        ConfigError: no such model.
    """
    folder = model_folder(name, revision, (GENERATION_CONFIG, CONFIG))
    config = read_json(folder / CONFIG, name)
    named = (
        read_json(folder / GENERATION_CONFIG, name).get("eos_token_id"),
        config.get("eos_token_id"),
        (config.get("text_config") or {}).get("eos_token_id"),
        tokenizer.eos_token_id,
    )
    return tuple(sorted({one for value in named for one in _ids(value)}))


def _ids(value: Any) -> Iterator[int]:
    for one in value if isinstance(value, list | tuple) else (value,):
        if isinstance(one, int) and not isinstance(one, bool) and one >= 0:
            yield one
