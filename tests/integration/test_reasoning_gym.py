"""Procedural tasks of the real library, from the learner's prompt to the worker's score."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spotgrpo.consumer.prompts import PromptRow, PromptSource
from spotgrpo.producer.rewards import Rewards
from spotgrpo.shared import gym
from spotgrpo.shared.config import DataConfig, RewardConfig
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.wire import Json, Sampling, Task, decode_task, encode_task

pytest.importorskip("reasoning_gym")
REWARD = [RewardConfig(function="reasoning_gym")]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A token a byte, so that any text has ids."""
    vocab = {
        symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    backend = Tokenizer(models.BPE(vocab, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def make(tokenizer: Any, name: str, *, seed: int = 0, **options: Any) -> PromptSource:
    config = DataConfig(reasoning_gym=name, reasoning_gym_options=options, shuffle=False)
    return PromptSource.open(config, seed, tokenizer, max_context=1 << 16, max_new_tokens=8)


def over_the_wire(found: PromptRow) -> Task:
    task = Task("r", TaskId(0), found.prompt_ids, found.prompt, found.row, Sampling(8), (1, 2))
    return decode_task(encode_task(task))


def answer_of(task: Task) -> str:
    entry = task.row["entry"]
    assert isinstance(entry, dict)
    return str(entry["answer"])


async def rewards_of(task: Task, texts: list[str]) -> list[float | None]:
    rewards = Rewards.resolve(REWARD, Path())
    rewards.try_once(task.prompt, task.row)
    scored = await rewards.score(task.prompt, texts, [[0]] * len(texts), task.row, 60.0)
    assert not rewards.failures
    return [one.reward for one in scored]


@pytest.mark.parametrize("name", ["chain_sum", "knights_knaves", "rearc", "prime_factorization"])
async def test_the_worker_scores_with_the_tasks_own_scorer(tokenizer: Any, name: str) -> None:
    found = make(tokenizer, name, size=2)[1]
    task = over_the_wire(found)
    assert tokenizer.decode(found.prompt_ids) == found.prompt
    answer = answer_of(task)
    right, wrapped, wrong = await rewards_of(
        task, [f" {answer}\n", f"I think so. <answer>{answer}</answer> Yes.", "no idea at all ("]
    )
    assert right == wrapped == 1.0
    assert wrong is not None
    assert wrong < 1.0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files left open
def test_every_data_set_scores_its_own_answers_as_before_the_wire() -> None:
    from reasoning_gym.factory import DATASETS, create_dataset

    differing = {}
    for name in sorted(set(DATASETS) - {"composite"}):
        tasks = create_dataset(name, size=1, seed=1)
        for entry in tasks:
            row: dict[str, Json] = json.loads(json.dumps(gym.entry_to_row(name, entry)))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                there = gym.score(f"<answer>{entry['answer']}</answer>", row)
                here = tasks.score_answer(str(entry["answer"]).strip(), entry)
            if there != pytest.approx(here):
                differing[name] = (here, there)
    assert not differing


def test_the_same_seed_makes_the_same_tasks_and_the_same_identity(tokenizer: Any) -> None:
    one, again, other = (make(tokenizer, "chain_sum", seed=seed, size=5) for seed in (1, 1, 2))
    assert [one[i] for i in range(10)] == [again[i] for i in range(10)]
    assert one[0] != other[0]
    assert one.identity() == again.identity() != other.identity()
    assert make(tokenizer, "chain_sum", seed=1, size=6).identity() != one.identity()
    config = DataConfig(reasoning_gym="chain_sum", reasoning_gym_options={"size": 5, "seed": 1})
    named = [PromptSource.open(config, seed, tokenizer, 1 << 16, 8) for seed in (3, 4)]
    assert sorted(named[0][i].prompt for i in range(5)) == sorted(one[i].prompt for i in range(5))


def test_the_identity_does_not_depend_on_the_hash_seed_of_the_process() -> None:
    """Some data sets make other tasks under another hash seed; a resume must not be refused for it."""
    script = """
import json
from spotgrpo.consumer.rows import load_rows
from spotgrpo.shared.config import DataConfig
config = DataConfig(reasoning_gym="word_ladder", reasoning_gym_options={"size": 5})
rows = load_rows(config, 1)
print(json.dumps([rows.fingerprint, list(rows)]))
"""
    found = [
        json.loads(
            subprocess.run(
                [sys.executable, "-c", script],
                capture_output=True,
                text=True,
                check=True,
                env={**os.environ, "PYTHONHASHSEED": seed},
            ).stdout
        )
        for seed in ("1", "2")
    ]
    assert found[0][1] != found[1][1]
    assert found[0][0] == found[1][0]


def test_an_unknown_data_set_names_near_ones(tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="did you mean chain_sum") as caught:
        make(tokenizer, "chain_sums")
    assert caught.value.key == "data.reasoning_gym"


@pytest.mark.parametrize("options", [{"sizes": 3}, {"min_terms": 0}, {"size": -1}, {"size": 0}])
def test_options_that_the_data_set_refuses_are_named(
    tokenizer: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(tokenizer, "chain_sum", **options)
    assert caught.value.key == "data.reasoning_gym_options"


def test_the_scorer_refuses_rows_of_another_data_set() -> None:
    rewards = Rewards.resolve(REWARD, Path())
    with pytest.raises(ConfigError, match=r"needs prompts of data\.reasoning_gym"):
        rewards.try_once("p", {"answer": "1"})


def test_another_version_of_the_library_is_refused() -> None:
    (identity,) = Rewards.resolve(REWARD, Path()).identities()
    assert Rewards.from_run([identity], [], Path()).identities() == [identity]
    with pytest.raises(ConfigError, match=r"reasoning-gym .* here"):
        Rewards.from_run([identity.model_copy(update={"sha256": "0" * 64})], [], Path())


def test_a_users_own_reward_can_read_the_entry(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "mine.py").write_text(
        "def f(completions, entry, **columns):\n"
        "    return [float(c == e['answer']) for c, e in zip(completions, entry)]\n"
    )
    task = over_the_wire(make(tokenizer, "gcd", size=1)[0])
    rewards = Rewards.resolve([RewardConfig(function="mine.py:f")], tmp_path)
    scored = asyncio.run(
        rewards.score(task.prompt, [answer_of(task), "x"], [[0], [0]], task.row, 9.0)
    )
    assert [one.reward for one in scored] == [1.0, 0.0]
