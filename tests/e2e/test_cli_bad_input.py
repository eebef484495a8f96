"""Bad input ends a command before anything starts: exit code, key, value and remedy, and no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from spotgrpo.shared.services import PrivateS3

SPOTGRPO = Path(sysconfig.get_path("scripts")) / "spotgrpo"

TOML = """
[run]
id = "bad-input"
[broker]
url = "amqp://user:hunter22@127.0.0.1:1/"
start_deadline_s = 1.0
[bucket]
url = "s3://bucket/prefix"
endpoint_url = "http://127.0.0.1:1"
access_key_id = "someone"
secret_access_key = "topsecret"
start_deadline_s = 1.0
[model]
name = "model"
[data]
path = "prompts.jsonl"
[[rewards]]
function = "rewards.py:length"
[sampling]
max_new_tokens = 8
"""
REWARDS = """
def length(completions, **_):
    return [float(len(completion)) for completion in completions]

def one_too_many(completions, **_):
    return [0.0] * (len(completions) + 1)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder as far as the start looks at it: config and tokenizer, no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("model")
    words = {word: index for index, word in enumerate(["<unk>", "<end>", "what", "is", "it"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"model_type": "llama", "max_position_embeddings": 16}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass
class Folder:
    """A run's folder, right in all but what a test spoils."""

    path: Path

    def write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text)

    def change(self, old: str, new: str) -> None:
        assert old in TOML
        self.write("run.toml", (self.path / "run.toml").read_text().replace(old, new))

    def run(self, *args: str) -> subprocess.CompletedProcess[str]:
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("SPOTGRPO_", "AWS_"))}
        environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        command = [str(SPOTGRPO), *args]
        return subprocess.run(
            command, cwd=self.path, env=environ, capture_output=True, text=True, check=False
        )


@pytest.fixture
def folder(tmp_path: Path, model: Path) -> Folder:
    folder = Folder(tmp_path)
    (tmp_path / "model").symlink_to(model)
    folder.write("run.toml", TOML)
    folder.write("rewards.py", REWARDS)
    folder.write("prompts.jsonl", '{"prompt": "what is it", "answer": "it"}\n')
    return folder


def assert_refused(
    result: subprocess.CompletedProcess[str], code: int, parts: Sequence[str]
) -> None:
    assert result.returncode == code, result.stderr
    for part in parts:
        assert part in result.stderr
    for never in ("Traceback", "hunter22", "topsecret"):
        assert never not in result.stderr + result.stdout
    assert result.stdout == ""


Spoil = Callable[[Folder], None]


def no_change(_: Folder) -> None: ...


CHEAP: dict[str, tuple[Spoil, Sequence[str], Sequence[str]]] = {
    "an unknown key": (
        lambda f: f.change("max_new_tokens", "temprature = 0.5\nmax_new_tokens"),
        [],
        ["sampling.temprature = 0.5: unknown", "did you mean sampling.temperature?"],
    ),
    "a misspelt --set": (
        no_change,
        ["--set", "trian.max_steps=3"],
        ["trian.max_steps = 3: unknown", "did you mean train.max_steps?"],
    ),
    "a --set without a value": (no_change, ["--set", "train"], ["--set", "'train'", "a.b=value"]),
    "a group size of one": (
        no_change,
        ["--set", "sampling.group_size=1"],
        ["sampling.group_size = 1:", "greater than or equal to 2"],
    ),
    "broken TOML": (lambda f: f.write("run.toml", "[run\n"), [], ["run.toml", "line 1"]),
    "no TOML": (
        lambda f: (f.path / "run.toml").unlink(),
        [],
        ["CONFIG = 'run.toml'", "no such file"],
    ),
    "a missing model": (
        no_change,
        ["--set", "model.name=./nowhere"],
        ["model.name = './nowhere'", "no such folder", "give a folder"],
    ),
    "a missing reward file": (
        no_change,
        ["--set", "rewards.0.function=nowhere.py:f"],
        ["rewards[0].function = 'nowhere.py:f'"],
    ),
    "a reward file without the function": (
        no_change,
        ["--set", "rewards.0.function=rewards.py:lenght"],
        ["rewards[0].function = 'rewards.py:lenght'", "length"],
    ),
    "a reward file that does not import": (
        lambda f: f.write("rewards.py", "\nimport no_such_module\n"),
        [],
        ["rewards[0].function", "no_such_module", "line 2"],
    ),
}


@pytest.mark.parametrize("name", CHEAP)
def test_a_learner_refuses(folder: Folder, name: str) -> None:
    spoil, args, parts = CHEAP[name]
    spoil(folder)
    assert_refused(folder.run("learner", "run.toml", *args), 2, parts)


WITH_TOKENIZER: dict[str, tuple[Spoil, Sequence[str]]] = {
    "an empty data set": (lambda f: f.write("prompts.jsonl", ""), ["data.path", "prompts.jsonl"]),
    "a data set without prompts": (
        lambda f: f.write("prompts.jsonl", '{"question": "what is it", "answer": "it"}\n'),
        ["data.prompt_column = 'prompt'", "question", "answer"],
    ),
    "a prompt longer than the context": (
        lambda f: f.write("prompts.jsonl", json.dumps({"prompt": "it " * 9})),
        ["data.overlong", "9 tokens", "limit of 8"],
    ),
    "a reward of the wrong length": (
        lambda f: f.change("rewards.py:length", "rewards.py:one_too_many"),
        ["rewards[0].function = 'rewards.py:one_too_many'"],
    ),
}


@pytest.mark.parametrize("name", WITH_TOKENIZER)
def test_a_learner_refuses_after_a_look_at_every_prompt(folder: Folder, name: str) -> None:
    spoil, parts = WITH_TOKENIZER[name]
    spoil(folder)
    assert_refused(folder.run("learner", "run.toml"), 2, parts)


# ---- servers --------------------------------------------------------------------------------------------------


def bucket_of(server: PrivateS3) -> list[str]:
    settings = {
        "url": f"s3://{server.bucket}/bad-input",
        "endpoint_url": server.endpoint_url,
        "access_key_id": server.access_key_id,
        "secret_access_key": server.secret_access_key,
    }
    return [part for key, value in settings.items() for part in ("--set", f"bucket.{key}={value}")]


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("bucket.access_key_id=nobody", ["bucket.access_key_id = 'nobody'"]),
        ("bucket.secret_access_key=topsecret", ["bucket.access_key_id", "secret"]),
        ("bucket.url=s3://no-such-bucket/x", ["bucket.url = 's3://no-such-bucket/x'", "create"]),
    ],
)
def test_a_bucket_that_refuses_ends_a_worker_at_once(
    folder: Folder, s3_server: PrivateS3, setting: str, parts: Sequence[str]
) -> None:
    args = [*bucket_of(s3_server), "--set", setting, "--set", "bucket.start_deadline_s=600"]
    assert_refused(folder.run("worker", "run.toml", *args), 2, parts)


def test_a_bucket_that_does_not_answer_is_tried_until_the_deadline(folder: Folder) -> None:
    started = time.monotonic()
    assert_refused(folder.run("worker", "run.toml"), 3, ["http://127.0.0.1:1"])
    assert time.monotonic() - started >= 1.0


def test_a_broker_that_does_not_answer_is_tried_until_the_deadline(
    folder: Folder, s3_server: PrivateS3
) -> None:
    result = folder.run("learner", "run.toml", *bucket_of(s3_server))
    assert_refused(result, 3, ["127.0.0.1:1"])
    assert s3_server.secret_access_key not in result.stderr


def test_an_audit_of_a_run_that_is_not_there_says_so(folder: Folder, s3_server: PrivateS3) -> None:
    result = folder.run("audit", "run.toml", "--json", *bucket_of(s3_server))
    assert_refused(result, 2, ["run.id = 'bad-input'"])


def test_an_export_of_a_run_that_is_not_there_leaves_no_folder(
    folder: Folder, s3_server: PrivateS3
) -> None:
    args = ["export", "run.toml", "--out", "out", *bucket_of(s3_server)]
    assert_refused(folder.run(*args), 2, ["run.id = 'bad-input'"])
    assert_refused(folder.run(*args, "--version", "3"), 2, ["run.id = 'bad-input'"])
    assert_refused(folder.run(*args, "--best"), 2, ["run.id = 'bad-input'"])
    assert_refused(folder.run(*args, "--best", "--version", "3"), 2, ["--version = 3", "not both"])
    assert not (folder.path / "out").exists()


def test_usage_errors_exit_with_2(folder: Folder) -> None:
    for args in (
        ["lerner"],
        ["learner"],
        ["learner", "run.toml", "--jsno"],
        ["export", "run.toml"],
    ):
        result = folder.run(*args)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr
