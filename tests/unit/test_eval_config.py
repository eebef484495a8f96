"""The ``[eval]`` table: where held-out rows come from, and what contradicts itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotgrpo.shared.config import Config
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.loading import load_config

TOML = """
run = { id = "r1" }
broker = { url = "amqp://user:hunter22@broker.example/vhost" }
bucket = { url = "s3://bucket/prefix" }
model = { name = "org/model" }
data = { path = "org/set", name = "main", prompt_column = "question", revision = "abc" }
rewards = [ { function = "rewards.py:exact" } ]
"""
GYM = TOML.replace(
    '{ path = "org/set", name = "main", prompt_column = "question", revision = "abc" }',
    '{ reasoning_gym = "chain_sum", reasoning_gym_options = { size = 50, seed = 1 } }',
)


def loaded(folder: Path, *sets: str, toml: str = TOML) -> Config:
    path = folder / "run.toml"
    path.write_text(toml)
    return load_config(path, sets, environ={})


def test_without_the_table_nothing_is_evaluated(tmp_path: Path) -> None:
    assert loaded(tmp_path).held_out is None


def test_another_split_is_of_the_same_data_set(tmp_path: Path) -> None:
    held_out = loaded(tmp_path, "eval.every=5", "eval.split=test").held_out
    assert held_out is not None
    assert (held_out.path, held_out.name, held_out.revision) == ("org/set", "main", "abc")
    assert (held_out.split, held_out.prompt_column) == ("test", "question")


def test_another_path_keeps_the_words_and_not_the_place(tmp_path: Path) -> None:
    """The configuration and revision of a hub data set mean nothing for a file."""
    (tmp_path / "heldout.jsonl").write_text("{}")
    held_out = loaded(tmp_path, toml=TOML + "[eval]\nevery = 5\npath = 'heldout.jsonl'\n").held_out
    assert held_out is not None
    assert held_out.path == str(tmp_path / "heldout.jsonl")
    assert (held_out.name, held_out.revision, held_out.split) == (None, None, "train")
    assert held_out.prompt_column == "question"


def test_procedural_tasks_are_held_out_by_their_seed(tmp_path: Path) -> None:
    sets = ["eval.every=5", "eval.reasoning_gym_options={seed = 2}"]
    held_out = loaded(tmp_path, *sets, toml=GYM).held_out
    assert held_out is not None
    assert held_out.reasoning_gym_options == {"size": 50, "seed": 2}
    with pytest.raises(ConfigError, match="another seed"):
        loaded(tmp_path, "eval.every=5", "eval.reasoning_gym_options={size=9}", toml=GYM)


def test_a_file_may_stand_beside_procedural_tasks(tmp_path: Path) -> None:
    held_out = loaded(tmp_path, "eval.every=5", "eval.path=heldout.jsonl", toml=GYM).held_out
    assert held_out is not None
    assert (held_out.path, held_out.reasoning_gym) == ("heldout.jsonl", None)


@pytest.mark.parametrize(
    ("sets", "part"),
    [
        (["train.target_reward=nan"], "finite number"),
        (["eval.patience=3"], "eval.patience needs eval.every"),
        (["eval.path=heldout.jsonl"], "eval.path needs eval.every"),
        (["eval.every=5"], "must not be those of training"),
        (["eval.every=5", "eval.path=org/set", "eval.name=main", "eval.revision=abc"], "those of training"),
        (["eval.every=5", "eval.split=test", "eval.name=other"], "need eval.path"),
        (["eval.every=5", "eval.split=test", "eval.group_size=4"], "greedy completions are all alike"),
        (["eval.every=0", "eval.split=test"], "greater than or equal to 1"),
        (["eval.every=5", "eval.split=test", "eval.share=0"], "greater than 0"),
        (["eval.every=5", "eval.split=test", "eval.prompts=10001"], "less than or equal to 10000"),
        (["sampling.temperature=0"], "greater than 0"),
        (["train.max_wall_s=0"], "greater than 0"),
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused_in_one_line(
    tmp_path: Path, sets: list[str], part: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path, *sets)
    assert len(str(caught.value).splitlines()) == 1
    assert part in str(caught.value)


def test_greedy_is_for_evaluations_alone(tmp_path: Path) -> None:
    config = loaded(tmp_path, "eval.every=5", "eval.split=test")
    assert (config.eval.temperature, config.sampling.temperature) == (0.0, 1.0)
