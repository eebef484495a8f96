"""Time to a target accuracy on the demo's task: asynchronous (lag <= 4), strictly synchronous (lag 0), and TRL.

All arms train the demo's model on its data with as many groups. Accuracy is that of greedy answers to the held-out
prompts, as the demo finds it, of the versions that an arm left, asked once it is over. The time to the target is that
of the first version that reaches it, counted from when a worker could begin (TRL: ``train()``), its model loaded.

(a) ``shared``: on this machine's two cores. ``async`` is the demo's arrangement: two vLLM workers and a learner, one
thread each. ``sync`` has ``max_staleness`` 0: workers wait while the learner steps, and it waits while they generate,
each phase with the threads that were fastest in short runs before (``--sync`` names them); commits and adoptions of
versions are in its turns. ``trl`` is GRPOTrainer with two threads, which generates with transformers. It has the same
float32 weights, LoRA with its first weights, prompts in order, sampling with its ends, reward, optimizer and DAPO loss.
Not alike: random numbers; it does all by turns in one process, without broker, bucket and behaviour logprobs; flat
groups count in its mean over tokens; a batch that is flat as a whole is a step of its optimizer, and no version here.

(b) ``own``: as if learner and workers had hardware of their own. Samples and steps are real, and each is held back by a
clock that is slower than the work takes here: a token is handed on ``--token-s`` after the one before, a step ends
after ``--step-s``, and the rest is slept. Four tokens, as most answers have, take as long as a step, as with a fleet
that is as large as the learner needs. One worker stands for it, with the transformers engine, which takes less of a
core. How late tokens and steps came, as a share of what they should take, is printed: where it is not next to nothing,
cores were shared after all.

The last line is one JSON object.
"""

# ruff: noqa: N803, N806  (B prompts, T tokens)

from __future__ import annotations

import argparse
import asyncio
import atexit
import contextlib
import itertools
import json
import math
import os
import runpy
import shutil
import signal
import statistics
import sys
import tempfile
import time
import tomllib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from learner import SETTINGS, prepare

from spotgrpo.cli.demo_parts.children import CPU_SETTINGS, Process
from spotgrpo.cli.demo_parts.feed import Feed
from spotgrpo.cli.demo_parts.folder import DemoFolder, find_example, write_run_toml
from spotgrpo.cli.demo_parts.servers import start_servers
from spotgrpo.shared.config import Config
from spotgrpo.shared.errors import SpotGRPOError
from spotgrpo.shared.ids import Keys, Queues
from spotgrpo.shared.loading import load_config
from spotgrpo.shared.services.processes import FolderLock
from spotgrpo.shared.wire import Report

ARMS = ("async-shared", "sync-shared", "trl", "async-own", "sync-own")
CORES = 2
BOTH = (CORES, 1, CORES)
"""Workers, threads of each and threads of the learner."""
LAG = 4
TOKENS = 4
"""Of most answers: a space, two digits and the newline that ends them."""
SEQUENCES = 64
"""In all workers together: the groups of a step."""
REPORT_S = 0.5
LOOK_S = 0.2
STOP_S = 30.0
LIMIT_S = 1800.0
PROBE_BATCHES = 5
STEP_S = 5.0
ROWS = 40
"""Held-out prompts that are answered at a time."""
BASE = "0000"
"""Folder of version 0, which nothing was trained for."""
IOMP = Path(sys.prefix) / "lib" / "libiomp5.so"
"""What vLLM's threads are faster with, when a worker has several."""
IDLE = ("rollout/no_task_s", "rollout/blocked_s", "rollout/no_version_s", "rollout/too_slow_s")
WAITS = ("perf/rollout_wait_s", "perf/commit_wait_s")


@dataclass(frozen=True)
class Pace:
    """Clocks of (b), in seconds."""

    step_s: float
    token_s: float


@dataclass(frozen=True)
class Arm:
    """A way to run the task.

    Attributes:
        lag: ``train.max_staleness``.
        workers: processes, each with ``threads``.
        learner_threads: of the learner, or of TRL, which has no workers.
        pace: None: as fast as they can.
    """

    name: str
    lag: int = 0
    workers: int = 2
    threads: int = 1
    learner_threads: int = 1
    engine: str = "vllm"
    pace: Pace | None = None

    def changes(self, seed: int, model: Path, batches: int) -> dict[str, dict[str, object]]:
        """What is set in the demo's TOML."""
        return {
            "run": {"seed": seed},
            "model": {"name": str(model)},
            "train": {
                "max_steps": batches,
                "max_staleness": self.lag,
                "threads": self.learner_threads,
                "keep_every": 1,
            },
            "worker": {
                "engine": self.engine,
                "threads": self.threads,
                "max_inflight": SEQUENCES // self.workers,
                "report_s": REPORT_S,
                "drain_s": 0.0,
                "notices": "none",
            },
        }


@dataclass
class Result:
    """What came of an arm with one seed.

    Attributes:
        reached: the first version with the target accuracy; None: none has it.
        to_target_s: until that was made.
        whole_s: until all groups were trained.
        accuracy: then.
        learner_waits, workers_idle: shares of the time after the first step; of TRL, that of generation.
        late: of (b), seconds late as a share of those that a clock gave, by role.
    """

    arm: str
    seed: int
    whole_s: float
    learner_waits: float
    workers_idle: float | None
    adapters: Path
    versions: dict[int, float]
    """Seconds from the start to each version."""
    late: dict[str, float] = field(default_factory=dict)
    reached: int | None = None
    to_target_s: float | None = None
    accuracy: float = 0.0


def example() -> dict[str, Any]:
    """The demo's TOML."""
    return tomllib.loads((find_example() / "run.toml").read_text())


def reward() -> Callable[..., list[float]]:
    """The demo's reward function."""
    names = runpy.run_path(str(find_example() / "rewards.py"))
    function: Callable[..., list[float]] = names["exact_match"]
    return function


# ---- inside the processes of (b) ------------------------------------------------------------------------------


@dataclass
class Punctuality:
    """Seconds that a role's clock gave, and those by which its work was late: written as the process ends."""

    path: Path
    given_s: float = 0.0
    late_s: float = 0.0

    def note(self, given_s: float, late_s: float) -> None:
        self.given_s += given_s
        self.late_s += max(0.0, late_s)

    def write(self) -> None:
        self.path.write_text(json.dumps([self.given_s, self.late_s]))


class PacedEngine:
    """An engine whose tokens are handed on when they are due."""

    def __init__(self, engine: Any, token_s: float, punctuality: Punctuality) -> None:
        self._engine, self._token_s, self._punctuality = engine, token_s, punctuality

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def submit(self, request: Any) -> AsyncIterator[Any]:
        begun = due = time.monotonic()
        async with contextlib.aclosing(self._engine.submit(request)) as chunks:
            async for chunk in chunks:
                due += self._token_s * len(chunk.token_ids)
                late_s = time.monotonic() - due
                if chunk.finish:
                    self._punctuality.note(due - begun, late_s)
                await asyncio.sleep(max(0.0, -late_s))
                yield chunk


def pace_worker(token_s: float, punctuality: Punctuality) -> None:
    from spotgrpo.producer import run as worker_run

    make = worker_run.make_engine

    def made(name: str, spec: Any) -> Any:
        return PacedEngine(make(name, spec), token_s, punctuality)

    worker_run.make_engine = made


def pace_learner(step_s: float, punctuality: Punctuality) -> None:
    from spotgrpo.consumer.trainer import Trainer

    step = Trainer.step

    def paced(self: Trainer, groups: Any) -> Any:
        due = time.monotonic() + step_s
        stats = step(self, groups)
        late_s = time.monotonic() - due
        punctuality.note(step_s, late_s)
        time.sleep(max(0.0, -late_s))
        return stats

    Trainer.step = paced  # type: ignore[method-assign]


def be_paced(order: Mapping[str, Any]) -> None:
    """``spotgrpo learner`` or ``spotgrpo worker``, by a clock."""
    punctuality = Punctuality(Path(order["punctuality"]))
    atexit.register(punctuality.write)
    if order["role"] == "learner":
        pace_learner(order["step_s"], punctuality)
    else:
        pace_worker(order["token_s"], punctuality)
    from spotgrpo.cli.main import app

    app(args=[order["role"], order["toml"]], prog_name="spotgrpo")


# ---- inside TRL's process -------------------------------------------------------------------------------------


def be_trl(order: Mapping[str, Any]) -> None:
    """``GRPOTrainer.train()``; leaves a folder for each step's adapter, and when it was there."""
    import torch

    torch.set_num_threads(order["threads"])
    from transformers import TrainerCallback
    from trl.trainer import grpo_trainer

    adapters, times = Path(order["folder"]) / "adapters", {}
    began = 0.0

    class Keeper(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            nonlocal began
            began = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            del args, control
            times[state.global_step] = time.perf_counter() - began
            folder = adapters / f"{state.global_step:04d}"
            trainer.model.save_pretrained(folder, save_embedding_layers=False)

    class Timed(grpo_trainer.GRPOTrainer):  # type: ignore[misc]
        generating_s = 0.0

        def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            found = super()._generate_single_turn(*args, **kwargs)
            self.generating_s += time.perf_counter() - start
            return found

    trainer = Timed(**trl_parts(order), callbacks=[Keeper()])
    if order["first"]:
        set_adapter(trainer.model, Path(order["first"]))
    trainer.train()
    found = {"versions": times, "generating_s": trainer.generating_s}
    Path(order["out"]).write_text(json.dumps(found))


def trl_parts(order: Mapping[str, Any]) -> dict[str, Any]:
    """Model, prompts in the run's order, reward and LoRA, as a GRPOTrainer takes them."""
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from spotgrpo.consumer.prompts import pass_order

    tables = example()
    lora, sampling = tables["lora"], tables["sampling"]
    tokenizer = AutoTokenizer.from_pretrained(order["model"])
    model = AutoModelForCausalLM.from_pretrained(order["model"], dtype="float32")
    # A completion ends with a token whose text has the stop string in it, as it does for ours.
    texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
    stops = [n for n, text in enumerate(texts) if any(stop in text for stop in sampling["stop"])]
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *stops]
    lines = (find_example() / tables["data"]["path"]).read_text().splitlines()
    rows = [json.loads(lines[i]) for i in pass_order(range(len(lines)), order["seed"], 0)]
    return {
        "model": model,
        "processing_class": tokenizer,
        "reward_funcs": reward(),
        "args": trl_settings(order, tables),
        "train_dataset": Dataset.from_list(rows),
        "peft_config": LoraConfig(
            r=lora["rank"],
            lora_alpha=lora["alpha"],
            target_modules=lora["target_modules"],
            task_type="CAUSAL_LM",
        ),
    }


def trl_settings(order: Mapping[str, Any], tables: Mapping[str, Any]) -> Any:
    """TRL's settings for what the demo's TOML says."""
    from trl.trainer import grpo_config

    sampling, train = tables["sampling"], tables["train"]
    completions = train["groups_per_step"] * sampling["group_size"]
    return grpo_config.GRPOConfig(
        output_dir=str(Path(order["folder"]) / "trl"),
        per_device_train_batch_size=order["rows"],
        gradient_accumulation_steps=completions // order["rows"],
        num_generations=sampling["group_size"],
        max_completion_length=sampling["max_new_tokens"],
        temperature=sampling["temperature"],
        shuffle_dataset=False,
        max_steps=order["batches"],
        learning_rate=train["learning_rate"],
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        scale_rewards="group",
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        dataloader_num_workers=0,
        report_to="none",
        save_strategy="no",
        logging_steps=10_000,
        disable_tqdm=True,
        seed=order["seed"],
    )


def set_adapter(model: Any, folder: Path) -> None:
    from peft import set_peft_model_state_dict
    from safetensors.torch import load_file

    set_peft_model_state_dict(model, load_file(folder / "adapter_model.safetensors"))


# ---- held-out accuracy ----------------------------------------------------------------------------------------


class Judge:
    """Greedy answers to the demo's held-out prompts; what all prompts begin with is computed once an adapter."""

    def __init__(self, order: Mapping[str, Any], adapter: Path) -> None:
        import torch
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from spotgrpo.producer.evaluate import read_questions

        torch.set_num_threads(1)
        self._tokenizer = AutoTokenizer.from_pretrained(order["model"])
        base = AutoModelForCausalLM.from_pretrained(order["model"], dtype="float32")
        self._model = PeftModel.from_pretrained(base, str(adapter)).eval()
        questions = read_questions(find_example() / "heldout.jsonl", "prompt", self._tokenizer)
        self._questions = questions[: order["prompts"]]
        self._new_tokens = example()["sampling"]["max_new_tokens"]
        self._reward = reward()

    def accuracy(self, adapter: Path, least: float = 0.0) -> float | None:
        """Mean reward of all answers under the adapter of this folder; None once it cannot be ``least`` any more."""
        import torch

        set_adapter(self._model, adapter)
        may_miss = (1.0 - least) * len(self._questions)
        rewards: list[float] = []
        for first in range(0, len(self._questions), ROWS):
            some = self._questions[first : first + ROWS]
            with torch.inference_mode():
                ids_BT = self._complete(torch.tensor([one.prompt_ids for one in some]))
            answers = [self._text(ids) for ids in ids_BT.tolist()]
            right = [one.row["answer"] for one in some]
            rewards += self._reward(completions=answers, answer=right)
            if len(rewards) - sum(rewards) > may_miss + 1e-9:
                return None
        return statistics.mean(rewards)

    def _complete(self, prompts_BT: Any) -> Any:
        """Greedy token ids after each prompt, all of one length [B, new tokens]."""
        import torch
        from transformers import DynamicCache

        is_common_T = (prompts_BT == prompts_BT[:1]).all(dim=0)
        common = min(int(is_common_T.long().cumprod(0).sum()), prompts_BT.shape[1] - 1)
        cache = DynamicCache(config=self._model.config)
        self._model(input_ids=prompts_BT[:1, :common], past_key_values=cache, logits_to_keep=1)
        cache.batch_repeat_interleave(len(prompts_BT))
        ids_BT, found = prompts_BT[:, common:], []
        for _ in range(self._new_tokens):
            output = self._model(input_ids=ids_BT, past_key_values=cache, logits_to_keep=1)
            ids_BT = output.logits[:, -1].argmax(dim=-1, keepdim=True)
            found.append(ids_BT)
        return torch.cat(found, dim=1)

    def _text(self, ids: Sequence[int]) -> str:
        """Up to the end token; the reward itself looks at the first line alone."""
        kept = itertools.takewhile(lambda token: token != self._tokenizer.eos_token_id, ids)
        text: str = self._tokenizer.decode(list(kept), skip_special_tokens=True)
        return text


def be_judge(order: Mapping[str, Any]) -> None:
    """Of each folder of versions: the first one that reaches the target, if any does, and the last one's accuracy."""
    found = []
    judge: Judge | None = None
    for name in order["folders"]:
        versions = [one for one in sorted(Path(name).iterdir()) if one.name != BASE]
        judge = judge or Judge(order, versions[-1])
        reached = (one for one in versions if judge.accuracy(one, order["target"]) is not None)
        first = next(reached, None)
        found.append([int(first.name) if first else None, judge.accuracy(versions[-1])])
    Path(order["out"]).write_text(json.dumps(found))


CHILDREN = {"learner": be_paced, "worker": be_paced, "trl": be_trl, "judge": be_judge}


# ---- one arm --------------------------------------------------------------------------------------------------


class Cast:
    """Processes of one run, each with a log in ``folder``; they are stopped in the end, the last one first."""

    def __init__(self, folder: Path, servers: Mapping[str, str]) -> None:
        folder.mkdir()
        self._folder, self._servers = folder, servers
        self._lock = FolderLock(folder)
        self.processes: list[Process] = []

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes):
            process.stop(STOP_S)
        self._lock.release()

    def environ(self, threads: int = 1) -> dict[str, str]:
        counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
        return {**os.environ, **CPU_SETTINGS, **SETTINGS, **self._servers, **counts}

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str]) -> Process:
        log = self._folder / f"{name}.log"
        self.processes.append(Process(name, [*command], env, log, self._lock.fd))
        return self.processes[-1]

    def finish(self, orders: Sequence[Mapping[str, Any]], threads: int) -> list[Any]:
        """Let children of this script do what ``orders`` say, side by side; returns what each found."""
        outs = [self._folder / f"found-{number}.json" for number in range(len(orders))]
        for order, out in zip(orders, outs, strict=True):
            command = child({**order, "out": str(out)})
            self.start(f"{order['role']}-{out.stem}", command, self.environ(threads))
        deadline = time.monotonic() + LIMIT_S
        while any(process.status is None for process in self.processes):
            if failed := [one for one in self.processes if one.status]:
                raise failed[0].failure()
            if time.monotonic() > deadline:
                raise SystemExit(f"{orders[0]['role']} takes too long; see {self._folder}")
            time.sleep(LOOK_S)
        if failed := [one for one in self.processes if one.status]:
            raise failed[0].failure()
        return [json.loads(out.read_text()) for out in outs]


def child(order: Mapping[str, Any]) -> list[str]:
    """The command for a process of this script that does what ``order`` says."""
    return [sys.executable, str(Path(__file__).resolve()), "--child", json.dumps(order)]


def role_command(role: str, arm: Arm, home: DemoFolder) -> list[str]:
    """``spotgrpo learner`` or ``spotgrpo worker``, by a clock where the arm has one."""
    if arm.pace is None:
        return [sys.executable, "-m", "spotgrpo.cli.main", role, str(home.toml)]
    files = {"toml": str(home.toml), "punctuality": str(home.path / f"{role}.late")}
    return child({"role": role, **files, **asdict(arm.pace)})


@dataclass
class Seen:
    """What was said in a run: when the first worker served a version (Unix seconds), and a record for each batch."""

    began: float = 0.0
    records: list[Mapping[str, Any]] = field(default_factory=list)

    def take(self, reports: Sequence[Report]) -> None:
        for report in reports:
            if report.source == "metrics.jsonl":
                self.records.append(report.values)
            elif report.role == "worker" and report.values.get("version") and not self.began:
                self.began = report.at


def watch(feed: Feed, roles: Sequence[Process], batches: int) -> Seen:
    """Until the last batch is done. Nobody ends in another way than well."""
    seen, deadline = Seen(), time.monotonic() + LIMIT_S
    while len(seen.records) < batches:
        if failed := [role for role in roles if role.status]:
            raise failed[0].failure()
        is_over = roles[0].status is not None
        seen.take(feed.poll(LOOK_S))
        if (is_over and len(seen.records) < batches) or time.monotonic() > deadline:
            raise SystemExit(f"{len(seen.records)} of {batches} batches; see {roles[0].log}")
    return seen


@dataclass(frozen=True)
class Bench:
    """What all arms have in common.

    Attributes:
        batches: of groups, after which a run is over, whether each made a version or was flat as a whole.
        prompts: held-out ones that are asked.
        rows: completions of TRL's forward pass.
    """

    folder: Path
    servers: Mapping[str, str]
    model: Path
    batches: int
    target: float
    prompts: int
    rows: int

    def home(self, name: str) -> DemoFolder:
        """A folder, and a run id, that nobody had before."""
        return DemoFolder(self.folder, f"{name}-{time.time_ns() // 10**6}")

    def run(self, arm: Arm, seed: int) -> tuple[Config, DemoFolder, Seen]:
        """Learner and workers up to the last batch."""
        home = self.home(f"{arm.name}-{seed}")
        with Cast(home.path, self.servers) as cast:
            write_run_toml(home, find_example(), arm.changes(seed, self.model, self.batches))
            config = load_config(home.toml, environ=cast.environ())
            with feed_of(config, home) as feed:
                command = role_command("learner", arm, home)
                learner = cast.start("learner", command, cast.environ(arm.learner_threads))
                environ = cast.environ(arm.threads)
                if arm.threads > 1 and arm.engine == "vllm" and IOMP.exists():
                    environ |= {"LD_PRELOAD": str(IOMP), "KMP_BLOCKTIME": "1"}
                for number in range(arm.workers):
                    cast.start(f"worker-{number + 1}", role_command("worker", arm, home), environ)
                seen = watch(feed, cast.processes, self.batches)
            learner.stop(STOP_S)  # before the workers, so that its last commit finds all in order
            if learner.status:
                raise learner.failure()
        if not seen.began:
            raise SystemExit(f"{arm.name}: no worker said that it served a version")
        return config, home, replace(seen, records=seen.records[: self.batches])

    def play(self, arm: Arm, seed: int) -> Result:
        """One run of ours."""
        config, home, seen = self.run(arm, seed)
        last = seen.records[-1]
        adapters = home.path / "adapters"
        created = collect(config, adapters, last["version"])
        return Result(
            arm=arm.name,
            seed=seed,
            whole_s=last["time"] - seen.began,
            learner_waits=share(seen.records, WAITS, ("perf/step_s",)),
            workers_idle=share(seen.records, IDLE, (*IDLE, "rollout/busy_s")),
            adapters=adapters,
            versions={number: at - seen.began for number, at in created.items()},
            late={path.stem: late_share(path) for path in sorted(home.path.glob("*.late"))},
        )

    def play_trl(self, arm: Arm, seed: int, first: Path | None) -> Result:
        """One run of TRL, from the adapter in ``first``."""
        home = self.home(f"{arm.name}-{seed}").path
        order = {
            "role": "trl",
            "folder": str(home),
            "model": str(self.model),
            "seed": seed,
            "batches": self.batches,
            "rows": self.rows,
            "threads": arm.learner_threads,
            "first": str(first) if first else None,
        }
        with Cast(home, self.servers) as cast:
            (found,) = cast.finish([order], arm.learner_threads)
        versions = {int(number): at for number, at in found["versions"].items()}
        whole_s = max(versions.values())
        return Result(
            arm=arm.name,
            seed=seed,
            whole_s=whole_s,
            learner_waits=found["generating_s"] / whole_s,
            workers_idle=None,
            adapters=home / "adapters",
            versions=versions,
        )

    def judge(self, results: Sequence[Result]) -> None:
        """Find which versions reached the target, and the accuracy of the last; forget the adapters. A judge a core."""
        shares = [one for first in range(CORES) if (one := results[first::CORES])]
        common = {"role": "judge", "model": str(self.model), "target": self.target}
        common["prompts"] = self.prompts
        orders = [common | {"folders": [str(one.adapters) for one in some]} for some in shares]
        with Cast(self.home("judge").path, self.servers) as cast:
            found = cast.finish(orders, 1)
        for some, answers in zip(shares, found, strict=True):
            for result, (version, accuracy) in zip(some, answers, strict=True):
                result.reached, result.accuracy = version, accuracy
                result.to_target_s = None if version is None else result.versions[version]
                shutil.rmtree(result.adapters)


@contextlib.contextmanager
def feed_of(config: Config, home: DemoFolder) -> Iterator[Feed]:
    from spotgrpo.shared.rabbitmq import RabbitMQBroker

    broker = RabbitMQBroker(config.broker, config.run.id)
    try:
        yield Feed(broker, Queues(config.run.id), home.metrics)
    finally:
        broker.close()


def collect(config: Config, out: Path, last: int) -> dict[int, float]:
    """Export all versions up to ``last``; returns when each was made, in Unix seconds."""
    from spotgrpo.consumer.export import export_version
    from spotgrpo.shared.manifest import Manifest
    from spotgrpo.shared.s3 import S3Store

    keys, found = Keys(config.run.id), {}
    with contextlib.closing(S3Store.connect(config.bucket)) as store:
        names = [one.key for one in store.list(keys.versions)]
        for name in names:
            if not name.endswith("/manifest.json"):
                continue
            made = Manifest.from_bytes(store.get(name).body)
            if made.version <= last:
                folder = out / f"{made.version:04d}"
                export_version(
                    store, keys, made.policy, folder, merge=False, model_config=config.model
                )
                found[made.version] = made.created_at
    return found


def share(records: Sequence[Mapping[str, Any]], some: Sequence[str], whole: Sequence[str]) -> float:
    """Of the time after the first step, which has the workers' start in it."""
    part, all_of_it = (
        sum(record[name] for record in records[1:] for name in names) for names in (some, whole)
    )
    return part / all_of_it if all_of_it else 0.0


def late_share(path: Path) -> float:
    given_s, late_s = json.loads(path.read_text())
    return late_s / given_s if given_s else 0.0


# ---- all of them ----------------------------------------------------------------------------------------------


def fastest_turns(bench: Bench, engine: str) -> tuple[int, int, int]:
    """Workers, threads of each and threads of the learner with which the phases of a synchronous run are shortest.

    The length of a phase does not depend on the other's threads: each run tries one arrangement of both.
    """
    short = replace(bench, batches=PROBE_BATCHES)
    phases: dict[tuple[int, int], float] = {}
    groups: dict[int, float] = {}
    for workers, threads, learner_threads in ((CORES, 1, CORES), (1, CORES, 1)):
        arm = Arm("probe", 0, workers, threads, learner_threads, engine)
        records = short.run(arm, 0)[2].records[1:]  # the first one has the workers' start in it
        phases[workers, threads] = statistics.median(one["perf/rollout_wait_s"] for one in records)
        trained = [one["groups"] * (1.0 - one["frac_reward_zero_std"]) for one in records]
        seconds = [one["perf/train_s"] for one in records]
        pairs = zip(seconds, trained, strict=True)
        groups[learner_threads] = statistics.median(s / max(1.0, count) for s, count in pairs)
    workers, threads = min(phases, key=phases.__getitem__)
    learner_threads = min(groups, key=groups.__getitem__)
    shown = ", ".join(f"{w} x {t} threads {s:.2f} s" for (w, t), s in phases.items())
    print(f"sync: the learner waits for a step's groups: workers {shown}")
    shown = ", ".join(f"{t} threads {s:.2f} s" for t, s in groups.items())
    print(f"sync: a group takes the learner: {shown}", flush=True)
    return workers, threads, learner_threads


def arms_of(args: argparse.Namespace, turns: tuple[int, int, int]) -> list[Arm]:
    pace = Pace(args.step_s, args.token_s)
    own = Arm("async-own", LAG, 1, 1, 1, "transformers", pace)
    arms = [
        Arm("async-shared", LAG, *args.asynchronous, args.engine),
        Arm("sync-shared", 0, *turns, args.engine),
        Arm("trl", 0, 0, 0, CORES, "transformers"),
        own,
        replace(own, name="sync-own", lag=0),
    ]
    return [arm for arm in arms if arm.name in args.arms]


def play_all(bench: Bench, arms: Sequence[Arm], seeds: Sequence[int]) -> list[Result]:
    """All arms with one seed after the other. Who is first takes turns, but TRL begins with the weights of another."""
    results: list[Result] = []
    for turn, seed in enumerate(seeds):
        ours = [arm for arm in arms if arm.workers]
        theirs = [arm for arm in arms if not arm.workers]
        mine = [bench.play(arm, seed) for arm in (ours if turn % 2 == 0 else ours[::-1])]
        first = mine[0].adapters / BASE if mine else None
        mine += [bench.play_trl(arm, seed, first) for arm in theirs]
        bench.judge(mine)
        for result in mine:
            print(line_of(result), flush=True)
        results += mine
    return results


def median_of(results: Sequence[Result], arm: str, name: str) -> float | None:
    """None where the arm was not played, or half of its runs or more did not reach the target."""
    values = [getattr(result, name) for result in results if result.arm == arm]
    if not values:
        return None
    middle = statistics.median(math.inf if value is None else value for value in values)
    return middle if math.isfinite(middle) else None


def ratio(results: Sequence[Result], slow: str, fast: str, name: str) -> float | None:
    """How many times longer the arm ``slow`` took, by medians."""
    above, below = (median_of(results, arm, name) for arm in (slow, fast))
    return round(above / below, 3) if above and below else None


def line_of(result: Result) -> str:
    """For people."""
    shown = [f"{result.arm:13} {result.seed!s:>6}"]
    reached = result.to_target_s
    shown.append(f"{'never' if reached is None else f'{reached:.1f} s':>10}")
    shown.append(f"{result.whole_s:8.1f} s {result.accuracy:9.1%} {result.learner_waits:9.0%}")
    shown.append("        –" if result.workers_idle is None else f"{result.workers_idle:9.0%}")
    shown += [f"  {role} late {late:.2%}" for role, late in result.late.items()]
    return " ".join(shown)


def table(results: Sequence[Result], target: float) -> str:
    """Every run, and the medians of each arm."""
    head = f"{'arm':13} {'seed':>6} {f'to {target:.0%}':>10} {'all':>10} {'accuracy':>9} {'waits':>9} {'idle':>9}"
    lines = [head]
    for arm in dict.fromkeys(result.arm for result in results):
        runs = [result for result in results if result.arm == arm]
        lines += map(line_of, runs)
        names = ("to_target_s", "whole_s", "accuracy", "learner_waits", "workers_idle")
        middle = {name: median_of(runs, arm, name) for name in names}
        lines.append(line_of(replace(runs[0], seed="median", late={}, **middle)))  # type: ignore[arg-type]
    return "\n".join(lines)


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Speedups are those of the asynchronous arms, by medians."""
    accuracies = {
        f"accuracy_{arm.removesuffix('-shared').replace('-', '_')}": median_of(
            results, arm, "accuracy"
        )
        for arm in ("async-shared", "sync-shared", "trl", "async-own", "sync-own")
    }
    return {
        "speedup_shared": ratio(results, "sync-shared", "async-shared", "to_target_s"),
        "speedup_own": ratio(results, "sync-own", "async-own", "to_target_s"),
        **accuracies,
        "speedup_trl": ratio(results, "trl", "async-shared", "to_target_s"),
        "speedup_shared_groups": ratio(results, "sync-shared", "async-shared", "whole_s"),
        "speedup_own_groups": ratio(results, "sync-own", "async-own", "whole_s"),
        "speedup_trl_groups": ratio(results, "trl", "async-shared", "whole_s"),
    }


def details(result: Result) -> dict[str, Any]:
    """Of a run, for the JSON object."""
    left_out = ("adapters", "versions")
    found = {name: value for name, value in asdict(result).items() if name not in left_out}
    return json.loads(json.dumps(found), parse_float=lambda text: round(float(text), 4))


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        (folder / "services").mkdir()
        servers = start_servers(folder / "services", stack)
        model = Path(args.model).resolve()
        bench = Bench(
            folder, servers, model, args.batches, args.target, args.prompts, args.trl_rows
        )
        is_known = args.sync or "sync-shared" not in args.arms
        turns = tuple(args.sync or BOTH) if is_known else fastest_turns(bench, args.engine)
        results = play_all(bench, arms_of(args, turns), args.seeds)
    print(table(results, args.target), flush=True)
    given = {"target": args.target, "batches": args.batches, "sync": turns}
    pace = {"step_s": args.step_s, "token_s": args.token_s}
    return {**summary(results), **given, **pace, "runs": [details(result) for result in results]}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--quick", action="store_true", help="one seed, few groups and prompts, a low target"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, default=30, help="of groups, in each run")
    parser.add_argument("--target", type=float, default=0.85, help="held-out accuracy")
    parser.add_argument("--prompts", type=int, default=320, help="held-out ones that are asked")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("--engine", default="vllm", help="of the workers in (a)")
    shown = ("WORKERS", "THREADS", "LEARNER_THREADS")
    for name, dest, default in (("async", "asynchronous", [2, 1, 1]), ("sync", "sync", None)):
        of_it = f"arrangement of the {name} arm in (a); default: {default or 'the fastest, tried'}"
        parser.add_argument(
            f"--{name}", dest=dest, type=int, nargs=3, metavar=shown, default=default, help=of_it
        )
    parser.add_argument("--trl-rows", type=int, default=8, help="completions in a forward pass")
    parser.add_argument("--step-s", type=float, default=STEP_S, help="of an optimizer step in (b)")
    parser.add_argument("--token-s", type=float, default=STEP_S / TOKENS, help="of a token in (b)")
    parser.add_argument("--model", default=".demo/model")
    parser.add_argument("--keep", type=Path, help="folder for all files, kept")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.batches, args.target, args.prompts = [0], 4, 0.4, 80
        args.sync = args.sync or BOTH
    return args


def main() -> None:
    args = parse()
    if args.child:
        order = json.loads(args.child)
        CHILDREN[order["role"]](order)
        return
    prepare(Path(args.model))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to stop"))
    with contextlib.ExitStack() as stack:
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            found = measure(args, folder.resolve())
        except SpotGRPOError as exc:
            sys.exit(str(exc))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
