"""A policy version out of the bucket, as a folder that peft, vLLM and others load as it is.

Plain export is in the base install; torch and peft are imported only to merge.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from spotgrpo.shared.errors import ConfigError, IntegrityError, NotStored
from spotgrpo.shared.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS, Latest, Manifest, sha256_hex

if TYPE_CHECKING:
    from spotgrpo.shared.config import ModelConfig
    from spotgrpo.shared.ids import Keys, PolicyVersion
    from spotgrpo.shared.ports import ObjectStore


def export_version(
    store: ObjectStore,
    keys: Keys,
    version: PolicyVersion | None,
    out: Path,
    *,
    merge: bool,
    model_config: ModelConfig,
) -> PolicyVersion:
    """Write a version into ``out``, which appears whole or not at all, and return which one it was.

    Args:
        store: the bucket.
        keys: of the run.
        version: what to export; None is the newest that is served.
        out: folder to make; it may exist, but empty.
        merge: write a full model with its tokenizer instead of an adapter.
        model_config: base model, for ``merge``.

    Raises:
        ConfigError: ``out`` is in use, or there is no such run or version, or what merging needs is not installed.
        IntegrityError: what is stored does not match its digests.
        StoreUnavailable: the bucket does not answer.
    """
    _check_out(out)
    manifest = _manifest(store, keys, version)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        adapter = Path(scratch) / "adapter"
        adapter.mkdir()
        _download(store, keys, manifest, adapter)
        if merge:
            merged = Path(scratch) / "merged"
            _merge(model_config, adapter, merged)
            merged.replace(out)
        else:
            adapter.replace(out)
    return manifest.policy


def best_version(store: ObjectStore, keys: Keys) -> PolicyVersion:
    """The version that evaluations found to be the best so far. ConfigError where none has decided anything."""
    evaluated = _latest(store, keys).evaluated
    if evaluated is None or evaluated.best is None:
        remedy = "no evaluation of this run has ended ([eval]): leave it out for the newest version"
        raise ConfigError("--best", keys.run, remedy)
    return evaluated.best.policy


def _check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError("out", str(out), "is a file: name a new or empty folder")
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError("out", str(out), "is not empty: name a new or empty folder")


def _latest(store: ObjectStore, keys: Keys) -> Latest:
    try:
        return Latest.from_bytes(store.get(keys.latest).body)
    except NotStored as exc:
        raise ConfigError(
            "run.id", keys.run, "the bucket has no such run, or it has no version yet"
        ) from exc


def _manifest(store: ObjectStore, keys: Keys, version: PolicyVersion | None) -> Manifest:
    if version is None:
        serving = _latest(store, keys).serving
        body = store.get(serving.manifest).body
        if sha256_hex(body) != serving.sha256:
            raise IntegrityError(f"{serving.manifest} does not match the sha256 in {keys.latest}")
        return Manifest.from_bytes(body)
    try:
        manifest = Manifest.from_bytes(store.get(keys.manifest(version)).body)
    except NotStored as exc:
        raise ConfigError(
            "version", str(version), "is not in the bucket, or was removed by retention"
        ) from exc
    if manifest.policy != version or manifest.run != keys.run:
        raise IntegrityError(f"{keys.manifest(version)} is of {manifest.policy} of {manifest.run}")
    return manifest


def _download(store: ObjectStore, keys: Keys, manifest: Manifest, folder: Path) -> None:
    names = {entry.name for entry in manifest.files}
    missing = {ADAPTER_CONFIG, ADAPTER_WEIGHTS} - names
    if missing:
        raise IntegrityError(
            f"the manifest of {manifest.policy} lacks {', '.join(sorted(missing))}"
        )
    for entry in manifest.files:
        key = keys.version(manifest.policy, entry.name)
        try:
            store.download(key, folder / entry.name, entry.size, entry.sha256)
        except NotStored as exc:
            remedy = "was removed by retention meanwhile; try again, or set train.keep_every"
            raise ConfigError("version", str(manifest.policy), remedy) from exc


def _merge(config: ModelConfig, adapter: Path, out: Path) -> None:
    """Add the adapter's delta to the base's weights; the base is what ``config`` names."""
    try:
        from peft import PeftModel

        from spotgrpo.consumer.model import load_base, resolve_device
        from spotgrpo.shared.tokenizing import load_tokenizer
    except ImportError as exc:
        raise ConfigError(
            "merge", True, "needs torch and peft: pip install 'spotgrpo[learner]'"
        ) from exc
    base = load_base(config, resolve_device("cpu"))
    tokenizer = load_tokenizer(config)
    try:
        merged = PeftModel.from_pretrained(base, str(adapter)).merge_and_unload()
    except (ValueError, RuntimeError) as exc:
        raise ConfigError(
            "model.name", config.name, "is not the base that this adapter was trained on"
        ) from exc
    merged.save_pretrained(str(out))
    for weights in out.glob("*.safetensors"):
        weights.chmod(0o644)  # the writer makes them unreadable for a server under another user
    tokenizer.save_pretrained(str(out))
