"""Which loss learns best from rollouts that are 0, 2, 4 or 8 versions old: what the default of ``[loss]`` is chosen by.

The trainer, its losses and its packing are the learner's, and the decoding loop is that of the engine ``transformers``.
Broker and bucket are left out, so that the lag of every group is what is asked for: a step at version v trains what
version v − lag sampled, and version 0 where that would be before it.

The task is to sort digits upwards, rewarded with 1 where all of the answer is right and with 0 elsewhere; the longer
the list, the harder. A random model of two layers is trained on answers, most of them sorted downwards, until it
samples a fixed share of right ones. Every candidate goes on from there, with the same prompts and the same random
stream. All of it is a function of the seed.

A run is measured twice: by the mean reward of what its versions sampled, all steps alike, and by the share of held-out
prompts that its last version answers right, greedily; its score is the mean of both. It has collapsed where steps were
not finite, or where the rewards of some tenth of its steps are under half of those of a tenth before. The last line is
one JSON object.

Shape suffixes: I input size, O output size, R rank.
"""

# ruff: noqa: N806  (shape suffixes: the legend is above)

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from safetensors.torch import load
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils.logging import disable_progress_bar

from spotgrpo.consumer.losses.objective import Objective
from spotgrpo.consumer.trainer import Trainer
from spotgrpo.producer.engines.base import GenerationRequest
from spotgrpo.producer.engines.decoding import Decoder
from spotgrpo.producer.engines.ends import Ends
from spotgrpo.producer.engines.threaded import Running
from spotgrpo.shared.config import LoraConfig, ModelConfig, TrainConfig
from spotgrpo.shared.ids import PolicyVersion, TaskId
from spotgrpo.shared.loss_config import PRESETS, LossConfig
from spotgrpo.shared.manifest import ADAPTER_WEIGHTS
from spotgrpo.shared.wire import Group, Rollout, Sampling, VersionRun

EXTRAS: dict[str, dict[str, Any]] = {
    "tis": {"anchor": "current", "corrections": ["truncate"]},
    "icepop": {"anchor": "current", "corrections": ["mask"]},
    "dapo+reject": {"corrections": ["reject"]},
    "decoupled_ppo+truncate": {"preset": "decoupled_ppo", "corrections": ["truncate"]},
    "no_clip": {"clip": "none"},
}
"""Corrections on top of a preset, ``dapo`` where none is named. ``no_clip`` shows what the others are for."""
QUICK = ("dapo", "no_clip")
LAGS, QUICK_LAGS = (0, 2, 4, 8), (0, 4)
SEEDS, JOBS = 3, 2
STEPS, QUICK_STEPS = 48, 12
RATES = (1e-3, 2e-3)
"""At the first most losses learn in spite of the lag; at the second the lag sets them apart."""

DIGITS, END, ASK, VOCABULARY = 10, 10, 11, 32
SHORTEST, LONGEST = 3, 8
CONTEXT = 2 * (LONGEST + 1)
RANK = 8
GROUPS, GROUP_SIZE = 8, 8
HELD_OUT, FIRST_HELD_OUT = 512, 10**6
WARM, WARM_PROMPTS, DOWNWARDS = 0.3, 2 * 10**6, 0.6
"""Share of answers that are sampled right at the start; the first prompt that is trained on until then; share of
answers to these that are sorted the wrong way, so that a policy has much to learn in a few steps."""
WARM_BATCH, WARM_RATE, WARM_EVERY, WARM_MOST = 64, 2e-3, 20, 3000


# ---- the task -----------------------------------------------------------------------------------------------------


def prompt_of(seed: int, number: int) -> tuple[int, ...]:
    random = np.random.default_rng([seed, number])
    digits = random.integers(0, DIGITS, random.integers(SHORTEST, LONGEST + 1))
    return (*digits.tolist(), ASK)


def answer_to(prompt: Sequence[int]) -> tuple[int, ...]:
    return (*sorted(prompt[:-1]), END)


def warm_start(seed: int, folder: Path) -> tuple[int, float]:
    """Train a random model on answers and write it into ``folder``; the steps it took, and its share of right ones."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    model = random_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_RATE, weight_decay=0.0)
    share = step = 0
    while share < WARM:
        if step == WARM_MOST:
            raise SystemExit(f"seed {seed}: {share:.2f} of the answers right after {step} steps")
        for _ in range(WARM_EVERY):
            model(**demonstrations(seed, step)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
        share = Sampler(model.eval(), seed).share_right(temperature=1.0)
    disable_progress_bar()
    model.save_pretrained(folder)
    return step, share


def random_model() -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=None,
    )
    return LlamaForCausalLM(config).to(torch.float32)


def demonstrations(seed: int, step: int) -> dict[str, torch.Tensor]:
    """Prompts with answers, padded on the right; only answers have labels."""
    random = np.random.default_rng([seed, WARM_PROMPTS, step])
    ids = torch.zeros(WARM_BATCH, CONTEXT, dtype=torch.int64)
    labels = torch.full_like(ids, -100)
    for row in range(WARM_BATCH):
        prompt = prompt_of(seed, WARM_PROMPTS + step * WARM_BATCH + row)
        *digits, end = answer_to(prompt)
        shown = digits[::-1] if random.random() < DOWNWARDS else digits
        start, stop = len(prompt), len(prompt) + len(digits) + 1
        ids[row, :start] = torch.tensor(prompt)
        ids[row, start:stop] = labels[row, start:stop] = torch.tensor([*shown, end])
    return {"input_ids": ids, "labels": labels}


# ---- sampling -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Completion:
    ids: list[int]
    logprobs: list[float]
    finish: str


class Sampler:
    """The engine's decoding loop on a model of its own, with one version's adapter merged into the weights."""

    def __init__(self, model: Any, seed: int) -> None:
        self._seed, self._tasks = seed, 0
        ends = Ends(None, frozenset({END}), CONTEXT, VOCABULARY)
        self._decoder = Decoder(model, ends, CONTEXT)
        self._weights = {
            name: (module.weight, module.weight.detach().clone())
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        self._version = PolicyVersion(1, 0)

    @torch.no_grad()
    def adopt(self, number: int, files: Mapping[str, bytes], scale: float) -> None:
        """Take the weights of a version: W + scale B A for every module of its PEFT folder."""
        tensors = load(files[ADAPTER_WEIGHTS])
        for key, a_RI in tensors.items():
            name, _, rest = key.removeprefix("base_model.model.").partition(".lora_A")
            if rest:
                weight, base = self._weights[name]
                weight.copy_(base + scale * tensors[key.replace("lora_A", "lora_B")] @ a_RI)
        self._version = PolicyVersion(1, number)

    def groups(self) -> list[Group]:
        """Groups of the next prompts: what a step is given."""
        tasks = range(self._tasks, self._tasks + GROUPS)
        self._tasks += GROUPS
        prompts = [prompt_of(self._seed, task) for task in tasks]
        found = self._complete([prompt for prompt in prompts for _ in range(GROUP_SIZE)], 1.0)
        return [
            self._group(task, prompt, found[n * GROUP_SIZE : (n + 1) * GROUP_SIZE])
            for n, (task, prompt) in enumerate(zip(tasks, prompts, strict=True))
        ]

    def share_right(self, temperature: float = 0.0) -> float:
        """Of the held-out prompts."""
        prompts = [prompt_of(self._seed, FIRST_HELD_OUT + n) for n in range(HELD_OUT)]
        found = self._complete(prompts, temperature)
        pairs = zip(prompts, found, strict=True)
        return statistics.fmean(tuple(one.ids) == answer_to(prompt) for prompt, one in pairs)

    @torch.inference_mode()
    def _complete(self, prompts: Sequence[tuple[int, ...]], temperature: float) -> list[Completion]:
        """One completion each, with logprobs of the distribution they were drawn from."""
        sampling = Sampling(LONGEST + 1, temperature)
        first = (self._seed << 32) + self._tasks * GROUP_SIZE
        rows = [
            Running(GenerationRequest(f"{n}", prompt, sampling, first + n, self._version))
            for n, prompt in enumerate(prompts)
        ]
        logprobs: dict[int, list[float]] = {id(row): [] for row in rows}
        finish = {}
        batch = self._decoder.start(rows)
        while batch.has_live_rows:
            for sampled in self._decoder.advance(batch):
                logprobs[id(sampled.row)].append(sampled.logprob)
                finish[id(sampled.row)] = sampled.finish
        return [Completion(row.completion, logprobs[id(row)], finish[id(row)]) for row in rows]

    def _group(self, task: int, prompt: tuple[int, ...], found: Sequence[Completion]) -> Group:
        return Group(
            run="losses",
            task_id=TaskId(task),
            worker="w",
            engine="transformers",
            engine_version="1",
            manifest_sha256="0" * 64,
            prompt_ids=np.array(prompt, np.int32),
            row={},
            sampling=Sampling(LONGEST + 1),
            rollouts=tuple(self._rollout(prompt, one) for one in found),
        )

    def _rollout(self, prompt: tuple[int, ...], one: Completion) -> Rollout:
        return Rollout(
            token_ids=np.array(one.ids, np.int32),
            logprobs=np.array(one.logprobs, np.float32),
            loss_mask=np.ones(len(one.ids), np.bool_),
            versions=(VersionRun(self._version, len(one.ids)),),
            reward=float(tuple(one.ids) == answer_to(prompt)),
            reward_parts={},
            finish=one.finish,
        )


# ---- one run ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Cell:
    """One run: a candidate's name and its ``[loss]``, and what it is tried with."""

    name: str
    parts: Mapping[str, Any]
    lag: int
    seed: int
    steps: int
    rate: float


@dataclass(frozen=True)
class Outcome:
    """What a run gave.

    Attributes:
        mean_reward: of what its versions sampled, all steps alike.
        final: share of the held-out prompts that its last version answers right, greedily.
        not_finite: steps that were skipped for their loss or gradient.
        has_collapsed: see the head of the file.
        kl: mean of the steps' estimates of KL(μ‖π): how far apart the lag sets sampler and trainer.
        unused: mean share of trained tokens that a clip held or a correction left out.
    """

    mean_reward: float
    final: float
    not_finite: int
    has_collapsed: bool
    kl: float
    unused: float
    seconds: float

    @property
    def score(self) -> float:
        return (self.mean_reward + self.final) / 2


def train(cell: Cell, folder: Path) -> Outcome:
    """Train from the warm start in ``folder``; every step on groups of the version ``cell.lag`` before."""
    logging.disable(logging.WARNING)
    started = time.monotonic()
    lora = LoraConfig(rank=RANK, alpha=2.0 * RANK)
    trainer = Trainer(
        ModelConfig(name=str(folder), max_context=CONTEXT),
        lora,
        TrainConfig(learning_rate=cell.rate, threads=1, device="cpu"),
        temperature=1.0,
        seed=cell.seed,
        objective=Objective(LossConfig(**cell.parts), LONGEST + 1, GROUPS * GROUP_SIZE),
    )
    sampler = Sampler(LlamaForCausalLM.from_pretrained(folder).eval(), cell.seed)
    scale = lora.alpha / lora.rank
    waiting = deque(sampler.groups() for _ in range(cell.lag))
    rewards, steps = [], []
    for _ in range(cell.steps):
        waiting.append(sampler.groups())
        rewards.append(reward_of(waiting[-1]))
        steps.append(trainer.step(waiting.popleft()))
        sampler.adopt(trainer.steps_done, trainer.adapter_files(), scale)
    not_finite = sum(stats.skipped and stats.groups > 0 for stats in steps)
    unused = [stats.clipped_fraction + stats.masked_fraction for stats in steps]
    return Outcome(
        mean_reward=statistics.fmean(rewards),
        final=sampler.share_right(),
        not_finite=not_finite,
        has_collapsed=not_finite > 0 or is_collapsed(rewards),
        kl=statistics.fmean(stats.mismatch_kl for stats in steps),
        unused=statistics.fmean(unused),
        seconds=time.monotonic() - started,
    )


def reward_of(groups: Sequence[Group]) -> float:
    return statistics.fmean(one.reward or 0.0 for group in groups for one in group.rollouts)


def is_collapsed(rewards: Sequence[float]) -> bool:
    tenth = max(len(rewards) // 10, 1)
    starts = range(0, len(rewards) - tenth + 1, tenth)
    windows = [statistics.fmean(rewards[start : start + tenth]) for start in starts]
    return any(now < best / 2 for now, best in zip(windows, accumulate(windows, max), strict=True))


# ---- all runs -----------------------------------------------------------------------------------------------------


Results = Mapping[Cell, Outcome]


def candidates() -> dict[str, dict[str, Any]]:
    """``[loss]`` tables by name: all presets, :data:`EXTRAS`, and the default where it is none of them."""
    found: dict[str, dict[str, Any]] = {name: {"preset": name} for name in PRESETS} | EXTRAS
    if default_among(found) is None:
        found["default"] = {}
    return found


def default_among(tables: Mapping[str, Mapping[str, Any]]) -> str | None:
    wanted = LossConfig().model_dump(exclude={"preset"})
    same = (
        name
        for name, parts in tables.items()
        if LossConfig(**parts).model_dump(exclude={"preset"}) == wanted
    )
    return next(same, None)


def run_all(cells: Sequence[Cell], jobs: int, scratch: Path) -> dict[Cell, Outcome]:
    """Every cell, ``jobs`` at a time, each in one thread; the outcome depends on neither."""
    folders = {seed: scratch / f"{seed}" for seed in sorted({cell.seed for cell in cells})}
    found = {}
    with executor(jobs) as pool:
        starts = pool.map(warm_start, folders.keys(), folders.values())
        for seed, (steps, share) in zip(folders, starts, strict=True):
            print(
                f"seed {seed}: {share:.2f} sampled right after {steps} steps on answers", flush=True
            )
        futures = {pool.submit(train, cell, folders[cell.seed]): cell for cell in cells}
        for future in as_completed(futures):
            cell, outcome = futures[future], future.result()
            found[cell] = outcome
            print(line_of(cell, outcome), flush=True)
    return found


def executor(jobs: int) -> Executor:
    """A single job stays in this process: importing torch once more takes longer than a run."""
    if jobs == 1:
        return ThreadPoolExecutor(1)
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"))


def line_of(cell: Cell, outcome: Outcome) -> str:
    return (
        f"{cell.name}, lag {cell.lag}, seed {cell.seed}, rate {cell.rate:g}: mean reward {outcome.mean_reward:.3f}, "
        f"final {outcome.final:.3f}, KL {outcome.kl:.4f}, unused {outcome.unused:.3f}"
        f"{', collapsed' if outcome.has_collapsed else ''}, {outcome.seconds:.1f} s"
    )


def scores_by(results: Results, key: Callable[[Cell], int]) -> dict[str, dict[int, list[float]]]:
    """Candidate -> what ``key`` gives of a cell -> scores."""
    found: dict[str, dict[int, list[float]]] = {}
    for cell, outcome in results.items():
        found.setdefault(cell.name, {}).setdefault(key(cell), []).append(outcome.score)
    return found


def scores_by_seed(results: Results) -> dict[str, dict[int, float]]:
    """Candidate -> seed -> mean score over lags and rates: what candidates are compared by."""
    found = scores_by(results, lambda cell: cell.seed)
    return {
        name: {seed: statistics.fmean(values) for seed, values in seeds.items()}
        for name, seeds in found.items()
    }


def scores_by_lag(results: Results) -> dict[str, dict[int, float]]:
    """Candidate -> lag -> median score over seeds and rates."""
    found = scores_by(results, lambda cell: cell.lag)
    return {
        name: {lag: statistics.median(values) for lag, values in sorted(lags.items())}
        for name, lags in found.items()
    }


def mean_ranks(results: Results) -> dict[str, float]:
    """Candidate -> its rank by score, 1 the best, among all at one lag, seed and rate; the mean over these."""
    ranks: dict[str, list[float]] = {}
    for cell, outcome in results.items():
        rivals = [
            other.score
            for key, other in results.items()
            if (key.lag, key.seed, key.rate) == (cell.lag, cell.seed, cell.rate)
        ]
        better = sum(score > outcome.score for score in rivals)
        equal = sum(score == outcome.score for score in rivals)
        ranks.setdefault(cell.name, []).append(better + (equal + 1) / 2)
    return {name: statistics.fmean(values) for name, values in ranks.items()}


@dataclass(frozen=True)
class Lead:
    """Of one candidate over another, in scores of the same seeds: median, and greatest less smallest."""

    median: float
    spread: float
    seeds: int

    @classmethod
    def of(cls, one: Mapping[int, float], other: Mapping[int, float]) -> Lead:
        gaps = [one[seed] - other[seed] for seed in one]
        return cls(statistics.median(gaps), max(gaps) - min(gaps), len(gaps))

    @property
    def is_clear(self) -> bool:
        return self.seeds > 2 and self.median > self.spread

    def __str__(self) -> str:
        size = "larger" if self.is_clear else "not larger"
        return (
            f"{self.median:+.4f}, {size} than its spread over {self.seeds} seeds, {self.spread:.4f}"
        )


# ---- what is printed ----------------------------------------------------------------------------------------------


FIELDS = {"final": "held-out accuracy at the end", "mean_reward": "mean reward"}


def tables(results: Results) -> Iterator[str]:
    lags = sorted({cell.lag for cell in results})
    names = list(dict.fromkeys(cell.name for cell in results))
    width = max(map(len, names))
    for rate in sorted({cell.rate for cell in results}):
        for field, title in FIELDS.items():
            yield f"\n{title}, rate {rate:g}: median (lowest to highest seed)"
            yield f"{'':{width}}  " + "  ".join(f"{f'lag {lag}':>22}" for lag in lags)
            for name in names:
                cells = [(name, lag, rate) for lag in lags]
                row = [spread_text(values_of(results, cell, field)) for cell in cells]
                yield f"{name:{width}}  " + "  ".join(f"{text:>22}" for text in row)
    yield from ranking(results, names, lags, width)


def ranking(
    results: Results, names: Sequence[str], lags: Sequence[int], width: int
) -> Iterator[str]:
    """Candidates, the best first, with what it is that makes them so."""
    ranks, scores, by_lag = mean_ranks(results), scores_by_seed(results), scores_by_lag(results)
    yield "\nscore over all lags and rates: median (lowest to highest seed); medians at each lag"
    heads = ["score", *(f"lag {lag}" for lag in lags), "worst", "rank", "collapsed", "not finite"]
    yield f"{'':{width}}  {heads[0]:>22}  " + "  ".join(f"{head:>10}" for head in heads[1:])
    for name in sorted(names, key=lambda name: -statistics.median(scores[name].values())):
        runs = [outcome for cell, outcome in results.items() if cell.name == name]
        collapsed = f"{sum(one.has_collapsed for one in runs)} of {len(runs)}"
        figures = [f"{score:.3f}" for score in by_lag[name].values()]
        figures += [f"{min(by_lag[name].values()):.3f}", f"{ranks[name]:.2f}", collapsed]
        figures.append(f"{sum(one.not_finite for one in runs)}")
        text = spread_text(list(scores[name].values()))
        yield f"{name:{width}}  {text:>22}  " + "  ".join(f"{one:>10}" for one in figures)


def values_of(results: Results, cell: tuple[str, int, float], field: str) -> list[float]:
    """One a seed, of a candidate at a lag and a rate."""
    return [
        getattr(outcome, field)
        for key, outcome in results.items()
        if (key.name, key.lag, key.rate) == cell
    ]


def spread_text(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def verdict(results: Results) -> dict[str, Any]:
    """The last line, said in words as well."""
    scores = scores_by_seed(results)
    medians = {name: statistics.median(seeds.values()) for name, seeds in scores.items()}
    best, *others = sorted(medians, key=lambda name: -medians[name])
    default = default_among(candidates()) or "default"
    leads = {name: Lead.of(scores[best], scores[name]) for name in others}
    print(f"\nbest: {best}")
    for name in dict.fromkeys([*others[:1], default]):
        if name in leads:
            print(f"lead over {name}{' (the default)' if name == default else ''}: {leads[name]}")
    return {
        "default": default,
        "best": best,
        "is_clear": all(lead.is_clear for lead in leads.values()),
        "beats_default_clearly": default in leads and leads[default].is_clear,
        "scores": {name: round(medians[name], 4) for name in [best, *others]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--names", type=lambda text: text.split(","), help="of candidates, by ','")
    parser.add_argument("--lags", type=lambda text: [int(lag) for lag in text.split(",")])
    parser.add_argument("--seeds", type=int, help="how many")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--rates", type=lambda text: [float(rate) for rate in text.split(",")])
    parser.add_argument("--jobs", type=int, help="processes of one thread each")
    args = parser.parse_args()
    tried = candidates()
    names = args.names or (QUICK if args.quick else list(tried))
    lags = args.lags or (QUICK_LAGS if args.quick else LAGS)
    seeds = args.seeds or (1 if args.quick else SEEDS)
    rates = args.rates or (RATES[-1:] if args.quick else RATES)
    steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
    cells = [
        Cell(name, tried[name], lag, seed, steps, rate)
        for seed in range(seeds)
        for rate in rates
        for lag in lags
        for name in names
    ]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        found = run_all(cells, args.jobs or (1 if args.quick else JOBS), Path(scratch))
    results = {cell: found[cell] for cell in cells}
    for line in tables(results):
        print(line)
    print(f"\n{len(cells)} runs of {steps} steps in {time.monotonic() - started:.0f} s")
    print(json.dumps(verdict(results)))


if __name__ == "__main__":
    sys.exit(main())
