"""What an adapter is worth: greedy answers to held-out prompts, of the base and of the adapter.

    python -m spotgrpo.producer.evaluate run.toml --heldout FILE.jsonl --adapter FOLDER --out FILE.json

Model, sampling and rewards are those of the run's TOML, the engine is the workers'. The base is asked as version
0 is: through the adapter with its B matrices set to zero, so that both take the same path.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from spotgrpo.producer.cache import cache_folder
from spotgrpo.producer.engines.base import Engine, EngineSpec, GenerationRequest, ServersSpec
from spotgrpo.producer.engines.registry import make_engine
from spotgrpo.producer.rewards import Rewards
from spotgrpo.shared.config import Config
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.ids import PolicyVersion
from spotgrpo.shared.loading import load_config
from spotgrpo.shared.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from spotgrpo.shared.metrics import write_summary
from spotgrpo.shared.tokenizing import load_tokenizer
from spotgrpo.shared.wire import Row, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BASE: Final = PolicyVersion(epoch=1, number=0)
ADAPTER: Final = PolicyVersion(epoch=1, number=1)
HEADER_BYTES: Final = 8
"""A safetensors file begins with the length of its header, as a little-endian 64-bit number."""
EXAMPLES: Final = 5


@dataclass(frozen=True)
class Question:
    """A held-out prompt as text and as tokens; ``row`` goes to the rewards."""

    prompt: str
    prompt_ids: tuple[int, ...]
    row: Row


@dataclass(frozen=True)
class Answer:
    """A greedy completion, and the reward that it got; None where it got none."""

    text: str
    token_ids: tuple[int, ...]
    reward: float | None


def read_questions(
    path: Path, prompt_column: str, tokenizer: PreTrainedTokenizerBase
) -> list[Question]:
    """The prompts of a JSONL file.

    Raises:
        ConfigError: the file is missing or empty, or a line is not an object with a text prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line.strip()]
    except (OSError, ValueError) as exc:
        raise ConfigError("--heldout", str(path), f"give a readable JSONL file ({exc})") from exc
    if not rows or not all(isinstance(row.get(prompt_column), str) for row in rows):
        remedy = (
            f"every line must be an object with {prompt_column!r} as text, and one must be there"
        )
        raise ConfigError("--heldout", str(path), remedy)
    return [_question(row, prompt_column, tokenizer) for row in rows]


def _question(row: Row, prompt_column: str, tokenizer: PreTrainedTokenizerBase) -> Question:
    prompt = str(row[prompt_column])
    others = {name: value for name, value in row.items() if name != prompt_column}
    token_ids: list[int] = tokenizer(prompt)["input_ids"]
    if (
        token_ids[-1] == tokenizer.eos_token_id
    ):  # some tokenizers end every text; here the answer follows
        token_ids = token_ids[:-1]
    return Question(prompt, tuple(token_ids), others)


async def answer_all(
    engine: Engine,
    version: PolicyVersion,
    questions: Sequence[Question],
    sampling: Sampling,
) -> list[tuple[int, ...]]:
    """Greedy completions of all ``questions`` under a loaded ``version``, in their order."""
    greedy = replace(sampling, temperature=0.0)

    async def answer(number: int, question: Question) -> tuple[int, ...]:
        request = GenerationRequest(
            f"{version}.{number}", question.prompt_ids, greedy, seed=0, version=version
        )
        return tuple([token async for chunk in engine.submit(request) for token in chunk.token_ids])

    return await asyncio.gather(*(answer(number, one) for number, one in enumerate(questions)))


def accuracy(answers: Sequence[Answer]) -> float:
    """Mean reward; an answer without one counts as 0."""
    return sum(answer.reward or 0.0 for answer in answers) / len(answers)


def write_zeroed(adapter: Path, folder: Path) -> None:
    """Copy a PEFT folder with its B matrices zeroed: the base model in an adapter's clothes, whatever its dtype."""
    folder.mkdir()
    shutil.copyfile(adapter / ADAPTER_CONFIG, folder / ADAPTER_CONFIG)
    weights = bytearray((adapter / ADAPTER_WEIGHTS).read_bytes())
    start = HEADER_BYTES + int.from_bytes(weights[:HEADER_BYTES], "little")
    header: dict[str, Any] = json.loads(weights[HEADER_BYTES:start])
    for name, entry in header.items():
        if ".lora_B." in name:
            begin, end = entry["data_offsets"]
            weights[start + begin : start + end] = bytes(end - begin)
    (folder / ADAPTER_WEIGHTS).write_bytes(weights)


def engine_spec(config: Config, adapter: Path) -> EngineSpec:
    """The workers' engine, for the two versions that are compared.

    Raises:
        ConfigError: ``adapter`` is no PEFT folder.
    """
    try:
        shape = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise ConfigError("--adapter", str(adapter), f"give a PEFT folder ({exc})") from exc
    return EngineSpec(
        model=config.model.name,
        lora_rank=shape["r"],
        lora_alpha=shape["lora_alpha"],
        target_modules=tuple(shape["target_modules"]),
        revision=config.model.revision,
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
        attn_implementation=config.model.attn_implementation,
        max_context=config.model.max_context,
        max_versions=2,
        max_inflight=config.worker.max_inflight,
        device=config.worker.device,
        threads=config.worker.threads,
        vllm=config.worker.vllm,
        servers=ServersSpec.of(config.worker),
    )


class Evaluation:
    """Base and adapter on the same questions."""

    def __init__(self, config: Config, folder: Path, adapter: Path) -> None:
        self._config, self._adapter = config, adapter
        self._tokenizer = load_tokenizer(config.model)
        self._rewards = Rewards.resolve(config.rewards, folder)
        self._engine = make_engine(config.worker.engine, engine_spec(config, adapter))

    async def run(self, heldout: Path) -> dict[str, object]:
        """Ask both, and return what ``--out`` gets; accuracies between 0 and 1."""
        column = self._config.data.prompt_column
        questions = read_questions(heldout, column, self._tokenizer)
        await self._engine.start()
        try:
            with cache_folder(self._config.worker.cache_dir) as scratch:
                scratch.chmod(0o755)  # servers may be another user's, and see no folder but this
                zeroed, adapter = scratch / "base", scratch / "adapter"
                write_zeroed(self._adapter, zeroed)
                adapter.mkdir()
                for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
                    shutil.copyfile(self._adapter / name, adapter / name)
                before = await self._ask(BASE, zeroed, questions)
                after = await self._ask(ADAPTER, adapter, questions)
        finally:
            await self._engine.close()
        return self._document(questions, before, after)

    async def _ask(
        self, version: PolicyVersion, folder: Path, questions: Sequence[Question]
    ) -> list[Answer]:
        await self._engine.load(version, folder)
        sampling = self._config.sampling
        completions = await answer_all(
            self._engine,
            version,
            questions,
            Sampling(
                sampling.max_new_tokens,
                stop=tuple(sampling.stop),
                stop_token_ids=tuple(sampling.stop_token_ids),
            ),
        )
        pairs = zip(questions, completions, strict=True)
        return [await self._score(question, token_ids) for question, token_ids in pairs]

    async def _score(self, question: Question, token_ids: tuple[int, ...]) -> Answer:
        text = cast(str, self._tokenizer.decode(token_ids, skip_special_tokens=True))
        timeout_s = self._config.worker.reward_timeout_s
        scored = await self._rewards.score(
            question.prompt, [text], [list(token_ids)], question.row, timeout_s
        )
        return Answer(text, token_ids, scored[0].reward)

    def _document(
        self, questions: Sequence[Question], before: Sequence[Answer], after: Sequence[Answer]
    ) -> dict[str, object]:
        return {
            "engine": self._engine.name,
            "engine_version": self._engine.engine_version,
            "prompts": len(questions),
            "base": {"accuracy": accuracy(before)},
            "adapter": {"accuracy": accuracy(after)},
            "examples": _examples(questions, before, after),
        }


def _examples(
    questions: Sequence[Question], before: Sequence[Answer], after: Sequence[Answer]
) -> list[dict[str, str]]:
    """A few questions, those first that the adapter gets better than the base."""
    gained = [
        (one.reward or 0.0) - (other.reward or 0.0)
        for one, other in zip(after, before, strict=True)
    ]
    order = sorted(range(len(questions)), key=lambda number: -gained[number])[:EXAMPLES]
    return [
        {
            "prompt": questions[number].prompt,
            "before": before[number].text.strip(),
            "after": after[number].text.strip(),
        }
        for number in order
    ]


def main() -> None:
    """Evaluate as the command line says. A process edge: errors end it with their exit code."""
    parser = argparse.ArgumentParser(prog="spotgrpo.producer.evaluate")
    parser.add_argument("config", type=Path, help="the run's TOML")
    parser.add_argument("--heldout", type=Path, required=True, help="JSONL with the run's columns")
    parser.add_argument("--adapter", type=Path, required=True, help="PEFT folder")
    parser.add_argument("--out", type=Path, required=True, help="JSON to write")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="sets")
    options = parser.parse_args()
    try:
        config = load_config(options.config, options.sets)
        evaluation = Evaluation(config, options.config.parent.resolve(), options.adapter)
        write_summary(options.out, asyncio.run(evaluation.run(options.heldout)))
    except ConfigError as exc:
        parser.error(str(exc))


if __name__ == "__main__":
    main()
