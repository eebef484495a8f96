"""Export from a bucket: adapters as they are stored, and merged into a real tiny model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from spotgrpo.consumer.export import export_version
from spotgrpo.shared.config import ModelConfig
from spotgrpo.shared.errors import ConfigError, IntegrityError
from spotgrpo.shared.ids import Keys, PolicyVersion
from spotgrpo.shared.manifest import Durable, FileEntry, Latest, Manifest, Serving, sha256_hex
from spotgrpo.shared.memory.store import MemoryStore

KEYS = Keys("r")
MODEL = ModelConfig(name="unused")
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights"}


def put(
    store: MemoryStore,
    number: int,
    files: dict[str, bytes] = FILES,
    *,
    listed: dict[str, bytes] | None = None,
) -> PolicyVersion:
    """Store a version whose manifest lists ``listed`` (default: what is stored)."""
    version = PolicyVersion(epoch=1, number=number)
    for name, body in files.items():
        store.create(KEYS.version(version, name), body)
    entries = [
        FileEntry(name=name, size=len(body), sha256=sha256_hex(body))
        for name, body in (files if listed is None else listed).items()
    ]
    manifest = Manifest(
        run="r", version=number, epoch=1, files=entries, modules=1, base_sha256="0" * 64
    )
    store.create(KEYS.manifest(version), manifest.to_bytes())
    return version


def serve(store: MemoryStore, version: PolicyVersion, sha256: str | None = None) -> None:
    key = KEYS.manifest(version)
    digest = sha256 or sha256_hex(store.get(key).body)
    names = {"version": version.number, "epoch": version.epoch, "manifest": key}
    durable = Durable(
        **names,
        manifest_sha256=digest,
        state="s",
        state_sha256="0" * 64,
        ledger="l",
        ledger_sha256="0" * 64,
    )
    latest = Latest(
        epoch=1, writer="w", nonce="n", serving=Serving(**names, sha256=digest), durable=durable
    )
    assert store.compare_and_swap(KEYS.latest, latest.to_bytes(), None)


def export(store: MemoryStore, out: Path, version: PolicyVersion | None = None) -> PolicyVersion:
    return export_version(store, KEYS, version, out, merge=False, model_config=MODEL)


def test_the_newest_served_version_is_the_default(tmp_path: Path) -> None:
    store = MemoryStore()
    put(store, 1)
    served = put(store, 2, FILES | {"adapter_model.safetensors": b"newer"})
    put(store, 3)
    serve(store, served)
    out = tmp_path / "new" / "out"
    assert export(store, out) == served
    assert {path.name: path.read_bytes() for path in out.iterdir()} == FILES | {
        "adapter_model.safetensors": b"newer"
    }
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_version_can_be_named_and_the_folder_may_be_there_if_empty(tmp_path: Path) -> None:
    store = MemoryStore()
    first = put(store, 1)
    assert export(store, tmp_path, first) == first
    assert {path.name for path in tmp_path.iterdir()} == set(FILES)


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    store = MemoryStore()
    version = put(store, 1)
    (tmp_path / "mine").write_text("keep")
    for out in (tmp_path, tmp_path / "mine"):
        with pytest.raises(ConfigError, match="new or empty folder"):
            export(store, out, version)
    assert (tmp_path / "mine").read_text() == "keep"


def test_bytes_that_differ_from_the_manifest_leave_no_folder_behind(tmp_path: Path) -> None:
    store = MemoryStore()
    version = put(store, 1, listed=FILES | {"adapter_model.safetensors": b"Weights"})
    with pytest.raises(IntegrityError):
        export(store, tmp_path / "out", version)
    assert not list(tmp_path.iterdir())


def test_a_manifest_that_is_not_the_one_latest_names_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    serve(store, put(store, 1), sha256="f" * 64)
    with pytest.raises(IntegrityError, match="sha256"):
        export(store, tmp_path / "out")


def test_a_manifest_without_adapter_files_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    version = put(store, 1, listed={})
    with pytest.raises(IntegrityError, match="adapter_config"):
        export(store, tmp_path / "out", version)


def test_a_run_or_version_that_is_not_there_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run"):
        export(MemoryStore(), tmp_path / "out")
    with pytest.raises(ConfigError, match="retention"):
        export(MemoryStore(), tmp_path / "out", PolicyVersion(1, 7))


def test_a_file_that_retention_took_meanwhile_is_a_config_error(tmp_path: Path) -> None:
    store = MemoryStore()
    version = put(store, 1)
    store.delete([KEYS.version(version, "adapter_config.json")])
    with pytest.raises(ConfigError, match="meanwhile"):
        export(store, tmp_path / "out", version)


def test_plain_export_imports_no_torch() -> None:
    code = (
        "import sys, spotgrpo.consumer.export; print('torch' in sys.modules, 'peft' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.engine
def test_a_merged_model_has_the_logits_of_the_adapter(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("peft")
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from tests.tools.tiny_model import build_adapter, build_tiny_model

    model = build_tiny_model(tmp_path / "model")
    adapter = build_adapter(tmp_path / "adapter", model)
    names = ("adapter_config.json", "adapter_model.safetensors")
    store = MemoryStore()
    version = put(store, 1, {name: (adapter / name).read_bytes() for name in names})
    config = ModelConfig(name=str(model))
    export_version(store, KEYS, version, tmp_path / "out", merge=True, model_config=config)
    ids = torch.arange(5, 25)[None]
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(adapter))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        expected, base = adapted(input_ids=ids).logits, None
        with adapted.disable_adapter():
            base = adapted(input_ids=ids).logits
        found = merged(input_ids=ids).logits
    assert (found - expected).abs().max() < 1e-4
    assert (found - base).abs().max() > 0.1
    assert AutoTokenizer.from_pretrained(tmp_path / "out").decode([20]) == (
        AutoTokenizer.from_pretrained(model).decode([20])
    )
