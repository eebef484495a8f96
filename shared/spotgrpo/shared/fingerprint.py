"""Digests that tell whether two machines hold the same base model and tokenizer. Without torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from spotgrpo.shared.errors import ConfigError

KEY: Final = "model.name"
CONFIG: Final = "config.json"
WEIGHTS: Final = ("model*.safetensors", "pytorch_model*.bin", "*.gguf", "*.safetensors", "*.bin")
"""Kinds of weights in the order of preference; the first kind that a folder has is what is digested, as it is
what ``transformers`` loads (a machine may have downloaded one kind and another machine several)."""
NOT_WEIGHTS: Final = ("adapter_model", "training_args", "optimizer", "scheduler", "rng_state")
UNESSENTIAL: Final = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
)
"""Keys of config.json that say where a copy came from or how it is to be run, and nothing of the model."""
THREADS: Final = 8


def base_fingerprint(name: str, revision: str | None = None) -> str:
    """SHA-256 (hex) over the contents of a model's weights, in the order of their names, and its config.

    Args:
        name: folder or hub name.
        revision: of the hub.

    Raises:
        ConfigError: no such model in this folder, the local cache or the hub, or one without weights.
    """
    folder = model_folder(name, revision, (*WEIGHTS, CONFIG))
    files = weight_files(folder)
    if not files:  # the local cache may hold another part of this model
        folder = model_folder(name, revision, (*WEIGHTS, CONFIG), download=True)
        files = weight_files(folder)
    if not files:
        raise ConfigError(KEY, name, f"no weights ({', '.join(WEIGHTS)}) in {folder}")
    with ThreadPoolExecutor(
        min(THREADS, len(files))
    ) as pool:  # hashing lets go of the interpreter lock
        contents = list(pool.map(_sha256_of_file, files))
    whole = hashlib.sha256("\n".join(contents).encode())
    whole.update(_essential_config(folder, name))
    return whole.hexdigest()


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """SHA-256 (hex) over what decides token ids: vocabulary, rules, special tokens and chat template.

    Truncation, padding and the pad token are left out: calls and trainers change them, and no prompt depends on them.
    """
    special = {
        name: str(value)
        for name, value in tokenizer.special_tokens_map.items()
        if name != "pad_token"
    }
    made_of = {
        "rules": _rules(tokenizer),
        "special": special,
        "chat_template": tokenizer.chat_template,
    }
    return hashlib.sha256(_canonical(made_of)).hexdigest()


def model_folder(
    name: str, revision: str | None, patterns: Sequence[str], *, download: bool = False
) -> Path:
    """The folder of a model: itself, or what the local cache has of a hub model, or a download into it.

    Args:
        name: folder or hub name.
        revision: of the hub.
        patterns: files that are wanted, for a download.
        download: ask the hub even where the cache has something (``HF_HUB_OFFLINE`` still forbids it).

    Raises:
        ConfigError: not found.
    """
    folder = local_folder(name)
    if folder is not None:
        return folder
    try:
        import httpx
        from huggingface_hub import snapshot_download
    except ImportError as exc:
        remedy = (
            "no such folder, and hub names need huggingface_hub: pip install 'spotgrpo[worker]'"
        )
        raise ConfigError(KEY, name, remedy) from exc
    if not download:
        try:
            return Path(snapshot_download(name, revision=revision, local_files_only=True))
        except (OSError, ValueError):  # not in the cache, or not a name that a hub could have
            return model_folder(name, revision, patterns, download=True)
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except (OSError, ValueError, httpx.HTTPError) as exc:
        said = " ".join(str(exc).split())[:200]
        at = f" at revision {revision}" if revision else ""
        raise ConfigError(
            KEY,
            name,
            f"neither a folder nor a model{at} that the hub or its local cache has ({said})",
        ) from exc


def local_folder(name: str) -> Path | None:
    """The folder that ``name`` is, None for a hub name; ConfigError for a path to nowhere."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ConfigError(KEY, name, "no such folder")
    return None


def weight_files(folder: Path) -> list[Path]:
    """The weights that ``transformers`` would load, in the order of their names; [] where there are none."""
    for pattern in WEIGHTS:
        found = [path for path in folder.glob(pattern) if not path.name.startswith(NOT_WEIGHTS)]
        if found:
            return sorted(found, key=lambda path: path.name)
    return []


def read_json(path: Path, name: str) -> dict[str, Any]:
    """A JSON object of a model's folder, {} where there is no such file; ConfigError where it is not one."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as exc:
        raise ConfigError(KEY, name, f"{path} cannot be read: {exc}") from exc
    if not isinstance(found, dict):
        raise ConfigError(KEY, name, f"{path} is not a JSON object")
    return found


def _sha256_of_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as exc:
        raise ConfigError(KEY, str(path), f"cannot be read: {exc.strerror}") from exc


def _essential_config(folder: Path, name: str) -> bytes:
    return _canonical(_without(read_json(folder / CONFIG, name), UNESSENTIAL))


def _without(value: Any, names: frozenset[str]) -> Any:
    if isinstance(value, Mapping):
        return {key: _without(item, names) for key, item in value.items() if key not in names}
    return value


def _rules(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:  # a tokenizer in Python: its class and vocabulary are all that can be had
        return [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    rules = json.loads(backend.to_str())
    for state in ("truncation", "padding", "version"):
        rules.pop(state, None)
    merges = rules.get("model", {}).get("merges")
    if merges:  # written as text by some versions of the library, as pairs by others
        rules["model"]["merges"] = [
            one.split(" ", 1) if isinstance(one, str) else one for one in merges
        ]
    return rules


def _canonical(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()
