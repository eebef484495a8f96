"""Held-out prompts: which rows they are, how they are asked, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spotgrpo.consumer.held_out import HeldOut, open_held_out
from spotgrpo.consumer.prompts import PromptSource
from spotgrpo.shared.config import Config
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.ids import PolicyVersion, TaskId, held_out_prompt, held_out_task
from spotgrpo.shared.wire import Sampling, decode_task, encode_task
from tests.tools.loop_world import config_of
from tests.unit.test_prompts import NUMBERS, tokenizer, write

__all__ = ["tokenizer"]

CONTEXT = 100
OTHERS = [{"prompt": f"m{i}", "answer": str(i)} for i in range(9)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "train.jsonl", NUMBERS)
    write(tmp_path / "heldout.jsonl", OTHERS)
    return tmp_path


def configured(folder: Path, path: str = "heldout.jsonl", **given: object) -> Config:
    plain = config_of().model_dump(mode="json")
    plain["broker"]["url"] = "amqp://memory"
    plain["data"] = {"path": str(folder / "train.jsonl"), "shuffle": False}
    plain["eval"] = {"every": 5, "path": str(folder / path), **given}
    return Config.model_validate(plain)


def opened(config: Config, tokenizer: Any) -> HeldOut:
    training = PromptSource.open(config.data, 0, tokenizer, CONTEXT, 4)
    found = open_held_out(config, tokenizer, CONTEXT, training)
    assert found is not None
    return found


def test_as_many_prompts_as_are_wanted_are_asked_in_their_order(
    folder: Path, tokenizer: Any
) -> None:
    found = opened(configured(folder, prompts=3), tokenizer)
    assert [row.prompt for row in found.asked] == ["m0", "m1", "m2"]
    assert len(opened(configured(folder), tokenizer)) == len(OTHERS)


def test_a_run_without_the_table_opens_nothing(folder: Path, tokenizer: Any) -> None:
    config = config_of()
    training = PromptSource.open(configured(folder).data, 0, tokenizer, CONTEXT, 4)
    assert open_held_out(config, tokenizer, CONTEXT, training) is None


def test_a_task_is_pinned_to_its_version_and_survives_the_wire(
    folder: Path, tokenizer: Any
) -> None:
    given = {"temperature": 0.5, "group_size": 2, "max_new_tokens": 7}
    found, version = opened(configured(folder, **given), tokenizer), PolicyVersion(3, 40)
    task = found.task(held_out_task(version, 8), version)
    assert decode_task(encode_task(task)) == task
    assert (task.kind, task.pinned, task.min_version) == ("eval", version, 40)
    assert task.sampling == Sampling(7, 0.5)
    assert (task.prompt, task.row) == ("m8", {"answer": "8"})
    assert task.group_size == len(set(task.seeds)) == 2
    later = found.task(held_out_task(PolicyVersion(4, 50), 8), PolicyVersion(4, 50))
    assert later.seeds == task.seeds
    assert later.task_id != task.task_id
    assert held_out_prompt(task.task_id) == 8
    assert not TaskId(10**10).is_held_out


@pytest.mark.parametrize(
    "given",
    [
        {"prompts": 3},
        {"temperature": 0.5},
        {"temperature": 0.5, "group_size": 2},
        {"max_new_tokens": 3},
        {"path": "other.jsonl"},
    ],
)
def test_what_is_asked_otherwise_has_another_name(
    folder: Path, tokenizer: Any, given: dict[str, Any]
) -> None:
    write(folder / "other.jsonl", OTHERS[::-1])
    before = opened(configured(folder), tokenizer).asked_sha256
    assert before == opened(configured(folder), tokenizer).asked_sha256
    assert before != opened(configured(folder, **given), tokenizer).asked_sha256


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"path": "missing.jsonl"}, ["eval.path", "no such file"]),
        ({"split": "train[:0]"}, ["eval.", "held-out"]),
        ({"max_new_tokens": 200}, ["eval.max_new_tokens = 200", "leaves no room"]),
        ({"path": "copy.jsonl"}, ["copy.jsonl", "the rows of training"]),
        ({"path": "bare.jsonl"}, ["data.prompt_column", "held-out", "it has question"]),
    ],
)
def test_what_is_wrong_with_held_out_rows_is_said_of_them(
    folder: Path, tokenizer: Any, given: dict[str, Any], parts: list[str]
) -> None:
    write(folder / "copy.jsonl", NUMBERS)
    write(folder / "bare.jsonl", [{"question": "1"}])
    with pytest.raises(ConfigError) as caught:
        opened(configured(folder, **given), tokenizer)
    for part in parts:
        assert part in str(caught.value)
