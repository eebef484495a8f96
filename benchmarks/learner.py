"""Trained tokens a second of our learner's step, as a ratio to that of TRL's GRPO trainer with the same work.

Same model, LoRA with the same first weights, completions, rewards, token budget of a forward pass, dtype and threads.
TRL runs its own ``train()``: only generation is replaced, through its ``rollout_func``, by the completions that are
given. Both sides stay up, each in a process of its own, and take turns; the one whose turn it is not waits. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spotgrpo.cli.demo_parts.model import is_prepared
from spotgrpo.shared.config import LoraConfig, ModelConfig, TrainConfig
from spotgrpo.shared.ids import PolicyVersion, TaskId
from spotgrpo.shared.loss_config import LossConfig
from spotgrpo.shared.wire import Group, Rollout, Sampling, VersionRun

GROUP_SIZE = 8
RANK, ALPHA = 16, 32
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
BUDGET = 4096
"""Tokens of a forward pass, padding included: the default of ``train.token_budget``."""
VOCABULARY = (100, 49_000)
"""Ids that completions are drawn from: ordinary tokens of SmolLM2."""
RATE = 1e-6
SAME_GRADIENT = 1e-3
"""How far the norms of both sides' first gradients may be apart, as a share."""
RAGGED = (16, 512)
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "TRL_EXPERIMENTAL_SILENCE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
CELLS = ("16/64", "16/ragged", "256/64", "256/ragged")
GOALS = {"16/64": 1.2, "16/ragged": 1.5, "256/64": 2.5, "256/ragged": 1.5}
WAIT_S = 600.0


@dataclass(frozen=True)
class Turn:
    """One optimizer step of one side.

    Attributes:
        seconds: from the completions to the end of the optimizer's step; ``cpu_s`` of the processor.
        tokens: trained; ``forwarded`` went through the model, padding included.
        grad_norm: before clipping.
        peak_mb: the most that the process had resident in this cell, in 10⁶ bytes; None where that cannot be asked.
        passes: forward and backward passes.
    """

    seconds: float
    cpu_s: float
    tokens: int
    forwarded: int
    grad_norm: float
    peak_mb: float | None
    passes: int


# ---- the work -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """A step's groups as token ids: one prompt and GROUP_SIZE completions each; rewards alternate."""

    prompts: tuple[tuple[int, ...], ...]
    completions: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its completion."""
        both = zip(self.prompts, self.completions, strict=True)
        return max(len(prompt) + max(map(len, group)) for prompt, group in both)

    @property
    def tokens(self) -> int:
        return sum(len(one) for group in self.completions for one in group)


def work_of(cell: str, groups: int, seed: int) -> Work:
    """Uniformly drawn ids: completions of a group have no more than the prompt in common."""
    before, after = cell.split("/")
    random = np.random.default_rng([seed, CELLS.index(cell)])

    def ids(count: int) -> tuple[int, ...]:
        return tuple(random.integers(*VOCABULARY, count).tolist())

    def length() -> int:
        return int(random.integers(RAGGED[0], RAGGED[1] + 1)) if after == "ragged" else int(after)

    return Work(
        tuple(ids(int(before)) for _ in range(groups)),
        tuple(tuple(ids(length()) for _ in range(GROUP_SIZE)) for _ in range(groups)),
    )


def reward(index: int) -> float:
    return float(index % 2)


class Meter:
    """Time, processor time and the peak of resident memory since it was made."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def turn(self, tokens: int, forwarded: int, grad_norm: float, passes: int) -> Turn:
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        return Turn(wall, cpu, tokens, forwarded, grad_norm, peak_mb(), passes)


def forget_peak() -> None:
    """Let the peak of resident memory begin again from what is resident now (Linux alone)."""
    path = Path("/proc/self/clear_refs")
    if path.exists():
        path.write_text("5")


def peak_mb() -> float | None:
    path = Path("/proc/self/status")
    if not path.exists():
        return None
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    return int(lines["VmHWM"].split()[0]) * 1024 / 1e6


# ---- our side -------------------------------------------------------------------------------------------------


def serve_ours(options: argparse.Namespace, answer: Callable[[Turn], None]) -> None:
    """One ``Trainer`` for all cells; each line of stdin is a step of the cell that it names."""
    from spotgrpo.consumer.losses.objective import Objective
    from spotgrpo.consumer.trainer import Trainer

    train = TrainConfig(
        learning_rate=RATE, token_budget=BUDGET, device="cpu", threads=options.threads
    )
    trainer = Trainer(
        ModelConfig(name=str(options.model)),
        LoraConfig(rank=RANK, alpha=float(ALPHA), target_modules=list(MODULES)),
        train,
        1.0,
        options.seed,
        Objective(LossConfig(advantage_scale="none"), RAGGED[1], options.groups * GROUP_SIZE),
    )
    for name, body in trainer.adapter_files().items():
        (options.adapter / name).write_bytes(body)
    start, before, groups = trainer.state(), "", []
    answer(Turn(0.0, 0.0, 0, 0, 0.0, None, 0))
    for line in iter(sys.stdin.readline, ""):
        cell = line.strip()
        if cell != before:
            trainer.restore(start)
            groups = [with_logprobs(trainer, g) for g in groups_of(cell, options)]
            forget_peak()
            before = cell
        meter = Meter()
        stats = trainer.step(groups)
        answer(meter.turn(stats.tokens, stats.input_tokens, stats.grad_norm, stats.batches))


def groups_of(cell: str, options: argparse.Namespace) -> list[Group]:
    work = work_of(cell, options.groups, options.seed)
    return [
        Group(
            run="bench",
            task_id=TaskId(index),
            worker="w",
            engine="none",
            engine_version="0",
            manifest_sha256="0" * 64,
            prompt_ids=np.array(prompt, dtype=np.int32),
            row={},
            sampling=Sampling(RAGGED[1]),
            rollouts=tuple(rollout(*pair) for pair in enumerate(completions)),
        )
        for index, (prompt, completions) in enumerate(
            zip(work.prompts, work.completions, strict=True)
        )
    ]


def rollout(index: int, ids: Sequence[int]) -> Rollout:
    return Rollout(
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=np.zeros(len(ids), dtype=np.float32),
        loss_mask=np.ones(len(ids), dtype=np.bool_),
        versions=(VersionRun(PolicyVersion(1, 0), len(ids)),),
        reward=reward(index),
        reward_parts={},
        finish="stop",
    )


def with_logprobs(trainer: Any, group: Group) -> Group:
    """``group`` as if the first version had sampled it: the ratio is 1 in the first step, as it always is for TRL."""
    from dataclasses import replace

    pairs = zip(group.rollouts, trainer.logprobs(group), strict=True)
    return replace(group, rollouts=tuple(replace(one, logprobs=found) for one, found in pairs))


# ---- TRL's side -----------------------------------------------------------------------------------------------


def serve_trl(options: argparse.Namespace, answer: Callable[[Turn], None]) -> None:
    """A ``GRPOTrainer`` for each cell and arrangement that stdin asks for, in ``train()`` until another is."""
    import torch

    torch.set_num_threads(options.threads)
    lines = iter(sys.stdin.readline, "")
    asked = next(lines, "").strip()
    while asked:
        asked = TrlRun(asked, options, lines, answer).run()


class TrlRun:
    """Steps of one cell with so many completions in a forward pass: ``256/64 8``."""

    def __init__(
        self,
        asked: str,
        options: argparse.Namespace,
        lines: Iterator[str],
        answer: Callable[[Turn], None],
    ) -> None:
        self._asked, self._options, self._lines, self._answer = asked, options, lines, answer
        cell, rows = asked.split()
        self._rows = int(rows)
        self._work = work_of(cell, options.groups, options.seed)
        self._meter: Meter | None = None
        self._next = asked
        """The line that is to be done: this run's own, or the one that ends it."""

    def run(self) -> str:
        """Take steps until stdin asks for something else; returns that, empty at its end."""
        trainer = self._trainer()
        forget_peak()
        trainer.train()
        return self._next

    def rollouts(self, prompts: Sequence[Any], trainer: Any) -> dict[str, Any]:
        """TRL's place for generation, called at the start of a step: hand over what is given, and start the clock."""
        del trainer
        groups = zip(self._work.prompts, self._work.completions, strict=True)
        pairs = [(list(prompt), list(one)) for prompt, group in groups for one in group]
        assert len(prompts) == len(pairs)
        self._meter = Meter()
        return {
            "prompt_ids": [prompt for prompt, _ in pairs],
            "completion_ids": [one for _, one in pairs],
            "logprobs": None,
        }

    def stepped(self, grad_norm: float) -> bool:
        """Answer, and wait for what comes next; True where that is another step of this run."""
        assert self._meter is not None
        rows = len(self._work.prompts) * GROUP_SIZE
        longest = max(map(len, self._work.prompts))
        longest += max(len(one) for group in self._work.completions for one in group)
        passes = rows // self._rows
        self._answer(self._meter.turn(self._work.tokens, rows * longest, grad_norm, passes))
        self._next = next(self._lines, "").strip()
        return self._next == self._asked

    def _arguments(self, completions: int) -> Any:
        """TRL's settings for what our step does; ``completions`` are those of a step."""
        from trl.trainer import grpo_config

        return grpo_config.GRPOConfig(
            output_dir=str(self._options.adapter / "trl"),
            per_device_train_batch_size=self._rows,
            gradient_accumulation_steps=completions // self._rows,
            num_generations=GROUP_SIZE,
            max_completion_length=RAGGED[1],
            max_steps=10_000,
            learning_rate=RATE,
            lr_scheduler_type="constant",
            max_grad_norm=1.0,
            temperature=1.0,
            beta=0.0,
            epsilon=0.2,
            epsilon_high=0.28,
            loss_type="dapo",
            scale_rewards="none",
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            dataloader_num_workers=0,
            model_init_kwargs={"dtype": "float32"},
            report_to="none",
            save_strategy="no",
            logging_steps=10_000,
            disable_tqdm=True,
            seed=self._options.seed,
        )

    def _trainer(self) -> Any:
        from datasets import Dataset
        from peft import LoraConfig as PeftLora
        from peft import set_peft_model_state_dict
        from safetensors.torch import load_file
        from transformers import AutoTokenizer, TrainerCallback
        from trl.trainer import grpo_trainer

        run = self

        class AfterStep(TrainerCallback):  # type: ignore[misc]
            """Says what a step took once the optimizer has stepped, and stops a run that is over."""

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
                del args, state
                control.should_training_stop = not run.stepped(float(trainer.last_norm))
                return control

        class Normed(grpo_trainer.GRPOTrainer):  # type: ignore[misc]
            """Keeps the norm that ``train()`` computes for its log."""

            last_norm: Any = 0.0

            def _clip_grad_norm(self, model: Any) -> Any:
                self.last_norm = super()._clip_grad_norm(model)
                return self.last_norm

        completions = self._options.groups * GROUP_SIZE
        trainer = Normed(
            model=str(self._options.model),
            reward_funcs=lambda completions, **_: [reward(i) for i in range(len(completions))],
            args=self._arguments(completions),
            train_dataset=Dataset.from_dict({"prompt": ["-"] * max(64, completions)}),
            processing_class=AutoTokenizer.from_pretrained(self._options.model),
            peft_config=PeftLora(
                r=RANK, lora_alpha=ALPHA, target_modules=list(MODULES), task_type="CAUSAL_LM"
            ),
            rollout_func=self.rollouts,
            callbacks=[AfterStep()],
        )
        weights = load_file(self._options.adapter / "adapter_model.safetensors")
        set_peft_model_state_dict(trainer.model, weights)
        return trainer


# ---- both -----------------------------------------------------------------------------------------------------


class Side:
    """A side's process: answers each line with a step."""

    def __init__(self, name: str, options: argparse.Namespace, folder: Path) -> None:
        self._name = name
        self._log = (folder / f"{name}.log").open("w+")
        command = [sys.executable, __file__, "--side", name, "--model", options.model]
        command += ["--adapter", folder, "--threads", options.threads, "--seed", options.seed]
        command += ["--groups", options.groups]
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=os.environ
            | SETTINGS
            | dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(options.threads)),
        )

    def step(self, asked: str) -> Turn:
        assert self._process.stdin is not None
        print(asked, file=self._process.stdin, flush=True)
        return self.wait()

    def wait(self) -> Turn:
        """For the next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._log.seek(0)
            sys.exit(f"{self._name} ended:\n{self._log.read()[-3000:]}")
        return Turn(**json.loads(line))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(WAIT_S)
        self._log.close()


def arrangements(work: Work) -> list[int]:
    """Completions in a forward pass that TRL can be given: divisors of the step's that fit into the budget."""
    completions = len(work.completions) * GROUP_SIZE
    fit = BUDGET // work.longest
    return [n for n in range(1, completions + 1) if completions % n == 0 and n <= fit]


@dataclass(frozen=True)
class Arrangement:
    """How TRL runs a cell: completions in a forward pass, its first step so, and that of each tried (seconds)."""

    rows: int
    first: Turn
    tried: Mapping[int, float]


def arranged(trl: Side, cell: str, options: argparse.Namespace) -> Arrangement:
    """The arrangement with which TRL's first step is fastest, of those that are to be tried."""
    fitting = arrangements(work_of(cell, options.groups, options.seed))
    tried = {"all": fitting, "ends": [fitting[0], fitting[-1]], "largest": fitting[-1:]}
    first = {rows: trl.step(f"{cell} {rows}") for rows in tried[options.arrangements]}
    best = min(first, key=lambda rows: first[rows].seconds)
    if best != list(first)[-1]:
        trl.step(f"{cell} {best}")  # to warm up again
    return Arrangement(best, first[best], {n: round(one.seconds, 2) for n, one in first.items()})


def measure(cell: str, ours: Side, trl: Side, options: argparse.Namespace) -> dict[str, Any]:
    """Interleaved steps of both sides, after one to warm up each, in which both must have found one gradient."""
    found = arranged(trl, cell, options)
    first = ours.step(cell)
    if abs(first.grad_norm / found.first.grad_norm - 1.0) > SAME_GRADIENT:
        sys.exit(f"{cell}: gradients of norm {first.grad_norm} and {found.first.grad_norm}")
    turns: dict[str, list[Turn]] = {"ours": [], "trl": []}
    for number in range(options.rounds):
        order = [("ours", ours, cell), ("trl", trl, f"{cell} {found.rows}")]
        for name, side, line in order if number % 2 == 0 else reversed(order):
            turns[name].append(side.step(line))
    return figures(turns, found) | {"grad_norm": [first.grad_norm, found.first.grad_norm]}


def figures(turns: Mapping[str, Sequence[Turn]], arrangement: Arrangement) -> dict[str, Any]:
    """Of a cell, for the JSON object; the ratio is that of the medians."""
    found: dict[str, Any] = {}
    for name, mine in turns.items():
        seconds = statistics.median(turn.seconds for turn in mine)
        found[name] = {
            "tokens_per_s": round(mine[0].tokens / seconds, 1),
            "seconds": [round(turn.seconds, 3) for turn in mine],
            "cpu_share": round(sum(t.cpu_s for t in mine) / sum(t.seconds for t in mine), 2),
            "forwarded": mine[0].forwarded,
            "passes": mine[0].passes,
            "peak_mb": max((round(t.peak_mb) for t in mine if t.peak_mb), default=None),
        }
    ratio = found["ours"]["tokens_per_s"] / found["trl"]["tokens_per_s"]
    return {
        "ratio": round(ratio, 2),
        "trl_rows": arrangement.rows,
        "trl_tried": dict(arrangement.tried),
        **found,
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--quick", action="store_true", help="one round of the cells with completions of 64"
    )
    parser.add_argument("--rounds", type=int, default=3, help="steps that are timed, each side")
    parser.add_argument("--groups", type=int, default=1, help="of 8 completions, a step")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument(
        "--arrangements",
        choices=("all", "ends", "largest"),
        default="ends",
        help="numbers of completions in TRL's forward pass to try, of which the fastest is taken: all that fit, "
        "one and as many as fit, or only the latter",
    )
    parser.add_argument("--model", type=Path, default=Path(".demo/model"))
    parser.add_argument("--side", choices=("ours", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--adapter", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.cells, options.arrangements = 1, ",".join(CELLS[::2]), "largest"
    return options


def serve(options: argparse.Namespace) -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    side = serve_ours if options.side == "ours" else serve_trl
    side(options, lambda turn: print(json.dumps(asdict(turn)), file=out, flush=True))


def prepare(model: Path) -> None:
    if not is_prepared(model):
        command = [sys.executable, "-m", "spotgrpo.cli.demo_parts.model", str(model)]
        subprocess.run(command, check=True)


def line_of(cell: str, found: Mapping[str, Any]) -> str:
    """For people."""
    sides = ", ".join(
        f"{name} {found[name]['tokens_per_s']} tokens/s, peak {found[name]['peak_mb']} MB"
        for name in ("ours", "trl")
    )
    return f"{cell}: {sides}; ratio {found['ratio']}, goal {GOALS[cell]}"


def main() -> None:
    options = parse()
    if options.side:
        serve(options)
        return
    prepare(options.model)
    cells = options.cells.split(",")
    found = {}
    with tempfile.TemporaryDirectory() as name:
        ours, trl = (Side(side, options, Path(name)) for side in ("ours", "trl"))
        ours.wait()  # for the first weights, which both have
        for cell in cells:
            found[cell] = measure(cell, ours, trl, options)
            print(line_of(cell, found[cell]), flush=True)
        for side in (ours, trl):
            side.close()
    ratios = {cell: one["ratio"] for cell, one in found.items()}
    summary = {"ratio_min": min(ratios.values()), "ratio_long_prompt": ratios.get("256/64")}
    print(json.dumps({**summary, "threads": options.threads, "cells": found}))


if __name__ == "__main__":
    main()
