"""Digests of base models and tokenizers: what must change them, and what must not."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from spotgrpo.shared.config import ModelConfig
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.fingerprint import base_fingerprint, tokenizer_fingerprint
from spotgrpo.shared.tokenizing import load_tokenizer, stop_ids

CONFIG = {"model_type": "llama", "hidden_size": 8, "eos_token_id": 1, "rope": {"theta": 1e4}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with two shards and a config, as save_pretrained leaves it."""
    folder = tmp_path / "model"
    folder.mkdir()
    for shard in (1, 2):
        name = f"model-0000{shard}-of-00002.safetensors"
        save_file({f"w{shard}": np.full(64, shard, np.float32)}, folder / name)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer("abab abab abc")


def make_tokenizer(corpus: str, **options: Any) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(unk_token="?u"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = BpeTrainer(special_tokens=["?u", "</s>", "<pad>"], vocab_size=40, show_progress=False)
    backend.train_from_iterator([corpus], trainer)
    options = {"eos_token": "</s>", "unk_token": "?u", **options}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **options)


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks a hub: a name that is no folder has to be refused from the cache alone."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


# ---- base models ------------------------------------------------------------------------------------


def test_a_copy_has_the_same_fingerprint_and_nothing_is_written(
    model: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "elsewhere" / "copy"
    shutil.copytree(model, copy)
    before = sorted(model.iterdir())
    assert base_fingerprint(str(model)) == base_fingerprint(str(copy))
    assert sorted(model.iterdir()) == before


def test_what_only_says_where_a_copy_came_from_does_not_count(model: Path) -> None:
    before = base_fingerprint(str(model))
    other = {
        "transformers_version": "9",
        "_name_or_path": "/x",
        "dtype": "bfloat16",
        "use_cache": False,
    }
    (model / "config.json").write_text(
        json.dumps(dict(reversed((CONFIG | other).items())), indent=4)
    )
    (model / "pytorch_model.bin").write_bytes(b"another format of the same weights")
    (model / "adapter_model.safetensors").write_bytes(b"not of the base")
    (model / "README.md").write_text("x")
    assert base_fingerprint(str(model)) == before


@pytest.mark.parametrize("key", ["hidden_size", "rope"])
def test_another_configuration_is_another_model(model: Path, key: str) -> None:
    before = base_fingerprint(str(model))
    (model / "config.json").write_text(json.dumps(CONFIG | {key: {"theta": 2e4}}))
    assert base_fingerprint(str(model)) != before


@pytest.mark.parametrize("shard", [1, 2])
def test_one_flipped_bit_of_any_shard_is_another_model(model: Path, shard: int) -> None:
    before = base_fingerprint(str(model))
    path = model / f"model-0000{shard}-of-00002.safetensors"
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    assert base_fingerprint(str(model)) != before


def test_a_missing_shard_or_exchanged_shards_are_another_model(model: Path) -> None:
    before = base_fingerprint(str(model))
    one, other = sorted(model.glob("*.safetensors"))
    contents = one.read_bytes(), other.read_bytes()
    one.write_bytes(contents[1])
    other.write_bytes(contents[0])
    exchanged = base_fingerprint(str(model))
    other.unlink()
    assert len({before, exchanged, base_fingerprint(str(model))}) == 3


@pytest.mark.parametrize("name", ["pytorch_model.bin", "q4.gguf", "weights.safetensors"])
def test_other_kinds_of_weights_are_digested_too(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"1")
    one = base_fingerprint(str(tmp_path))
    (tmp_path / name).write_bytes(b"2")
    assert base_fingerprint(str(tmp_path)) != one


def test_a_hub_model_in_the_local_cache_needs_no_network(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    repo = tmp_path / "cache" / "models--some--model"
    shutil.copytree(model, repo / "snapshots" / ("a" * 40))
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    assert base_fingerprint("some/model") == base_fingerprint(str(model))
    with pytest.raises(ConfigError, match="at revision v2"):
        base_fingerprint("some/model", "v2")


@pytest.mark.parametrize(
    "name", ["nobody/has-this", "/nowhere/at/all", "./nowhere", "a/b/c", "no name"]
)
def test_a_model_that_is_not_found_is_refused_everywhere(name: str, tokenizer: Any) -> None:
    for call in (
        lambda: base_fingerprint(name),
        lambda: load_tokenizer(ModelConfig(name=name)),
        lambda: stop_ids(name, None, tokenizer),
    ):
        with pytest.raises(ConfigError) as caught:
            call()
        assert caught.value.key == "model.name"
        assert "\n" not in str(caught.value)


def test_a_folder_without_weights_or_with_a_broken_config_is_refused(
    model: Path, tmp_path: Path
) -> None:
    (model / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json"):
        base_fingerprint(str(model))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no weights"):
        base_fingerprint(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match="tokenizer cannot be loaded"):
        load_tokenizer(ModelConfig(name=str(tmp_path / "empty")))


# ---- tokenizers -------------------------------------------------------------------------------------


def test_a_saved_and_loaded_tokenizer_has_the_same_fingerprint(
    tokenizer: Any, tmp_path: Path
) -> None:
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelConfig(name=str(tmp_path)))
    assert tokenizer_fingerprint(loaded) == tokenizer_fingerprint(tokenizer)


def test_use_padding_and_truncation_do_not_change_the_fingerprint(tokenizer: Any) -> None:
    before = tokenizer_fingerprint(tokenizer)
    tokenizer.pad_token = "</s>"
    tokenizer(["ab", "abc abc"], padding=True, truncation=True, max_length=2)
    assert tokenizer.backend_tokenizer.padding is not None
    assert tokenizer_fingerprint(tokenizer) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda one: setattr(one, "chat_template", "x"),
        lambda one: setattr(one, "eos_token", "?u"),
        lambda one: one.add_tokens(["new"]),
        lambda one: setattr(one.backend_tokenizer, "pre_tokenizer", pre_tokenizers.ByteLevel()),
    ],
    ids=["chat template", "special token", "added token", "rules"],
)
def test_what_decides_token_ids_changes_the_fingerprint(tokenizer: Any, change: Any) -> None:
    before = tokenizer_fingerprint(tokenizer)
    change(tokenizer)
    assert tokenizer_fingerprint(tokenizer) != before


def test_the_same_vocabulary_with_other_merges_is_another_tokenizer() -> None:
    vocab = {"?u": 0, "a": 1, "b": 2, "ab": 3, "ba": 4, "aba": 5}
    one, other = (
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE(vocab, merges)))
        for merges in ([("a", "b"), ("ab", "a")], [("b", "a"), ("a", "ba")])
    )
    assert one.get_vocab() == other.get_vocab()
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(other)


# ---- end tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "config", "ids"),
    [
        (None, {}, (1,)),
        ({"eos_token_id": [2, 7]}, {"eos_token_id": 5}, (1, 2, 5, 7)),
        ({"eos_token_id": 7}, {"eos_token_id": None}, (1, 7)),
        ({}, {"text_config": {"eos_token_id": [4]}, "eos_token_id": True}, (1, 4)),
    ],
)
def test_every_end_token_that_the_models_files_name_counts(
    tmp_path: Path, tokenizer: Any, generation: Any, config: Any, ids: tuple[int, ...]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert tokenizer.eos_token_id == 1
    assert stop_ids(str(tmp_path), None, tokenizer) == ids


def test_a_model_without_an_end_token_has_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert stop_ids(str(tmp_path), None, make_tokenizer("ab", eos_token=None)) == ()


def test_a_tokenizer_that_runs_code_of_its_own_needs_permission(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit('this code must not run')\n")
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}})
    )
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}})
    )
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(ModelConfig(name=str(tmp_path)))
    assert caught.value.key == "model.trust_remote_code"


def test_neither_module_imports_torch_or_transformers() -> None:
    script = (
        "import sys, spotgrpo.shared.fingerprint, spotgrpo.shared.tokenizing, spotgrpo.shared.gym;"
        "print({'torch', 'transformers', 'huggingface_hub', 'reasoning_gym'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
