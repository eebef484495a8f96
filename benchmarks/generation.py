"""Tokens a second of our worker, as a ratio to bare vLLM with the same requests and the same LoRA.

Ours is ``spotgrpo worker`` as a user starts it, with its vLLM engine, a real broker and a real bucket: tasks in, groups
out, counted as they come out of the broker. Bare vLLM is ``LLM.generate`` with the same engine arguments, prompts,
seeds and sampling, without text. Both stay up, each in a process of its own, and take turns; the one whose turn it is
not waits. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

from spotgrpo.cli.demo_parts.model import is_prepared
from spotgrpo.producer.engines.base import EngineSpec
from spotgrpo.producer.engines.base_model import describe
from spotgrpo.producer.engines.vllm import engine_arguments, prepare_environment
from spotgrpo.producer.rewards import Rewards
from spotgrpo.shared.config import BrokerConfig, BucketConfig, RewardConfig
from spotgrpo.shared.fingerprint import base_fingerprint, tokenizer_fingerprint
from spotgrpo.shared.ids import Keys, PolicyVersion, TaskId
from spotgrpo.shared.manifest import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    DataIdentity,
    Durable,
    FileEntry,
    Latest,
    LoraIdentity,
    Manifest,
    ModelIdentity,
    Probe,
    RunDocument,
    SamplingDocument,
    Serving,
    sha256_hex,
)
from spotgrpo.shared.ports import Message
from spotgrpo.shared.rabbitmq import RabbitMQBroker
from spotgrpo.shared.s3 import S3Store
from spotgrpo.shared.services import PrivateRabbitMQ, PrivateS3
from spotgrpo.shared.wire import (
    OLDEST_READABLE,
    SCHEMA,
    Group,
    Sampling,
    Task,
    decode_group,
    encode_task,
)
from tests.tools.tiny_model import build_adapter, build_tiny_model

GROUP_SIZE, MAX_NEW_TOKENS, MAX_STALENESS = 8, 64, 2
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA, ADAPTER_SCALE = 16, 32.0, 0.01
STOPS = ".,!?"
"""In the varied workload any of these ends a completion, so that the lengths of a group differ."""
VERSION = PolicyVersion(1, 1)
PROBE_TOKENS = 256
WAIT_S = 300.0
SETTINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
REWARDS = """
def short(completions, **_):
    return [-float(len(text)) for text in completions]
"""
TOML = """
[run]
id = "{run}"
[broker]
url = "{broker}"
[bucket]
url = "{bucket}"
endpoint_url = "{endpoint}"
access_key_id = "{key}"
secret_access_key = "{secret}"
[worker]
engine = "vllm"
threads = 1
max_inflight = {max_inflight}
notices = "none"
"""


@dataclass(frozen=True)
class Round:
    """Tokens, seconds from the first request to the last answer, processor seconds, and the token ids by seed."""

    tokens: int
    wall_s: float
    cpu_s: float
    answers: dict[int, list[int]]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.wall_s


# ---- bare vLLM ----------------------------------------------------------------------------------------------------


def serve_bare(model: str, adapter: str, max_inflight: int) -> None:
    """Answer rounds from stdin, a JSON line each, on stdout: the process of the bare side."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not for the reader
    spec = spec_of(model, max_inflight)
    prepare_environment(spec)
    torch.set_num_threads(1)
    import vllm
    from vllm.lora.request import LoRARequest

    base = describe(spec)
    llm = vllm.LLM(**engine_arguments(spec, base))
    lora = LoRARequest("bare", 1, adapter)
    for line in sys.stdin:
        asked = json.loads(line)
        seeds = [seed for one in asked["tasks"] for seed in one["seeds"]]
        prompts: Any = [
            {"prompt_token_ids": one["prompt_ids"]} for one in asked["tasks"] for _ in one["seeds"]
        ]
        params = [
            vllm.SamplingParams(
                temperature=1.0,
                seed=seed,
                max_tokens=MAX_NEW_TOKENS,
                stop_token_ids=sorted(base.end_ids.union(asked["stop_token_ids"])),
                logprobs=0,
                detokenize=False,
            )
            for seed in seeds
        ]
        cpu, start = time.process_time(), time.perf_counter()
        outputs = llm.generate(prompts, params, lora_request=lora, use_tqdm=False)
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        answer = {"wall_s": wall, "cpu_s": cpu, "answers": dict(zip(seeds, ids, strict=True))}
        print(json.dumps(answer), file=out, flush=True)


def spec_of(model: str, max_inflight: int) -> EngineSpec:
    """What a worker of this run makes its engine of."""
    return EngineSpec(
        model=model,
        max_context=describe(EngineSpec(model, RANK, ALPHA, MODULES)).max_context,
        lora_rank=RANK,
        lora_alpha=ALPHA,
        target_modules=MODULES,
        max_versions=MAX_STALENESS + 2,
        max_inflight=max_inflight,
        threads=1,
    )


class Bare:
    """The bare side, seen from here."""

    name = "bare vLLM"

    def __init__(self, folder: Path, model: Path, adapter: Path, max_inflight: int) -> None:
        command = [sys.executable, __file__, "--serve-bare", model, adapter, str(max_inflight)]
        self._log = (folder / "bare.log").open("w")
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **SETTINGS},
        )

    def run(self, tasks: Sequence[Task]) -> Round:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = {
            "stop_token_ids": tasks[0].sampling.stop_token_ids,
            "tasks": [{"prompt_ids": one.prompt_ids, "seeds": one.seeds} for one in tasks],
        }
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"bare vLLM ended: {Path(self._log.name).read_text()[-2000:]}")
        said = json.loads(line)
        answers = {int(seed): ids for seed, ids in said["answers"].items()}
        tokens = sum(map(len, answers.values()))
        return Round(tokens, said["wall_s"], said["cpu_s"], answers)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()


# ---- ours ---------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A run with one version, without a learner: its bucket, its queues and the folder of its files."""

    folder: Path
    model: Path
    adapter: Path
    rabbitmq: PrivateRabbitMQ
    s3: PrivateS3
    id: str = field(default_factory=lambda: f"generation-{uuid.uuid4().hex[:8]}")

    def __post_init__(self) -> None:
        (self.folder / "rewards.py").write_text(REWARDS)
        self.bucket = BucketConfig(
            url=f"s3://{self.s3.bucket}/{self.id}",
            endpoint_url=self.s3.endpoint_url,
            access_key_id=self.s3.access_key_id,
            secret_access_key=self.s3.secret_access_key,
        )
        self.broker = RabbitMQBroker(BrokerConfig(url=self.rabbitmq.url), self.id)
        self.broker.declare()
        self._store_all()

    def _store_all(self) -> None:
        """``run.json``, a version with its probe, and the pointer to it."""
        store, keys = S3Store.connect(self.bucket), Keys(self.id)
        document = self._document()
        store.create(keys.run_json, document.to_bytes())
        files = {
            name: (self.adapter / name).read_bytes() for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS)
        }
        for name, body in files.items():
            store.create(keys.version(VERSION, name), body)
        probe, modules = probe_of(self.model, self.adapter)
        manifest = Manifest(
            run=self.id,
            version=VERSION.number,
            epoch=VERSION.epoch,
            files=[
                FileEntry(name=name, size=len(body), sha256=sha256_hex(body))
                for name, body in files.items()
            ],
            modules=modules,
            base_sha256=document.model.base_sha256,
            probe=probe,
        ).to_bytes()
        key, digest = keys.manifest(VERSION), sha256_hex(manifest)
        store.create(key, manifest)
        named: Any = {"version": VERSION.number, "epoch": VERSION.epoch}
        durable = Durable(
            **named, manifest=key, manifest_sha256=digest, state="none", state_sha256="0" * 64,
            ledger="none", ledger_sha256="0" * 64,
        )  # fmt: skip
        latest = Latest(
            epoch=VERSION.epoch,
            writer="benchmark",
            nonce="0" * 32,
            serving=Serving(**named, manifest=key, sha256=digest),
            durable=durable,
        )
        store.create(keys.latest, latest.to_bytes())
        store.close()

    def _document(self) -> RunDocument:
        name = str(self.model)
        tokenizer = AutoTokenizer.from_pretrained(name)
        rewards = Rewards.resolve([RewardConfig(function="rewards.py:short")], self.folder)
        max_context = describe(EngineSpec(name, RANK, ALPHA, MODULES)).max_context
        return RunDocument(
            run=self.id,
            model=ModelIdentity(
                name=name,
                base_sha256=base_fingerprint(name),
                tokenizer_sha256=tokenizer_fingerprint(tokenizer),
            ),
            lora=LoraIdentity(rank=RANK, alpha=ALPHA, target_modules=list(MODULES)),
            data=DataIdentity(source="none", sha256="0" * 64, rows=1, shuffle_seed=None),
            rewards=rewards.identities(),
            sampling=SamplingDocument(
                group_size=GROUP_SIZE, max_new_tokens=MAX_NEW_TOKENS, temperature=1.0
            ),
            max_staleness=MAX_STALENESS,
            dtype="float32",
            max_context=max_context,
            wire_schemas=(OLDEST_READABLE, SCHEMA),
            created_at=time.time(),
        )

    def toml(self, max_inflight: int) -> Path:
        path = self.folder / "run.toml"
        path.write_text(
            TOML.format(
                run=self.id,
                broker=self.rabbitmq.url,
                bucket=self.bucket.url,
                endpoint=self.s3.endpoint_url,
                key=self.s3.access_key_id,
                secret=self.s3.secret_access_key,
                max_inflight=max_inflight,
            )
        )
        return path


def probe_of(model: Path, adapter: Path) -> tuple[Probe, int]:
    """A probe as a learner makes it, and the number of modules that carry the adapter."""
    torch.set_num_threads(1)
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = PeftModel.from_pretrained(base, adapter)
    rng = random.Random(0)
    ids = [rng.randrange(10, base.config.vocab_size) for _ in range(PROBE_TOKENS)]

    def logprobs() -> list[float]:
        with torch.no_grad():
            logits = adapted(torch.tensor([ids])).logits[0, :-1].float()
        found = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        values: list[float] = found.tolist()
        return values

    version = logprobs()
    with adapted.disable_adapter():
        plain = logprobs()
    modules = sum(name.endswith("lora_A.default.weight") for name, _ in adapted.named_parameters())
    return Probe(token_ids=ids, version_logprobs=version, base_logprobs=plain), modules


class Ours:
    """``spotgrpo worker``, and the learner's ends of its queues."""

    name = "ours"

    def __init__(self, run: Run, max_inflight: int) -> None:
        self._run = run
        command = [sys.executable, "-m", "spotgrpo.cli.main", "worker", run.toml(max_inflight)]
        self._log = (run.folder / "worker.log").open("w")
        self._process = subprocess.Popen(
            command,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **SETTINGS},
            cwd=run.folder,
        )
        self._watched = psutil.Process(self._process.pid)
        self._publisher = run.broker.publisher()
        self._groups = run.broker.consumer(run.broker.queues.rollouts, 64)

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, tasks: Sequence[Task]) -> Round:
        cpu, start = self._cpu_s(), time.perf_counter()
        for task in tasks:
            message = Message(encode_task(task), str(task.task_id))
            self._publisher.publish(self._run.broker.queues.tasks, message)
        groups = [self._next_group() for _ in tasks]
        wall, cpu = time.perf_counter() - start, self._cpu_s() - cpu
        answers = {
            seed: rollout.token_ids.tolist()
            for group in groups
            for seed, rollout in zip(seeds_of(group.task_id.index), group.rollouts, strict=True)
        }
        return Round(sum(group.tokens for group in groups), wall, cpu, answers)

    def _next_group(self) -> Group:
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            delivery = self._groups.take(1.0)
            if delivery is not None:
                self._groups.ack([delivery.handle])
                return decode_group(delivery.message.body)
        raise SystemExit(f"no group came: {Path(self._log.name).read_text()[-2000:]}")

    def _cpu_s(self) -> float:
        times = self._watched.cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()


# ---- the measurement ----------------------------------------------------------------------------------------------


def seeds_of(index: int) -> tuple[int, ...]:
    return tuple(index * GROUP_SIZE + i for i in range(GROUP_SIZE))


@dataclass
class Workload:
    """Rounds of tasks, each with prompts of its own.

    Args:
        is_varied: whether completions of a group end at different lengths; else nearly all have the most tokens.
    """

    run: str
    model: Path
    tasks: int
    is_varied: bool
    first: int

    def __post_init__(self) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(self.model)
        ids = [self._tokenizer.convert_tokens_to_ids(stop) for stop in STOPS]
        self._stops = tuple(sorted(ids)) if self.is_varied else ()

    def round(self) -> list[Task]:
        """The next one."""
        found = [self._task(self.first + i) for i in range(self.tasks)]
        self.first += self.tasks
        return found

    def _task(self, index: int) -> Task:
        rng = random.Random(index)
        numbers = " ".join(str(rng.randrange(100)) for _ in range(rng.randrange(5, 15)))
        prompt = f"{numbers} are the numbers of this story, and it begins like this: once upon a time there was a"
        return Task(
            run=self.run,
            task_id=TaskId(index),
            prompt_ids=tuple(self._tokenizer(prompt).input_ids),
            prompt=prompt,
            row={},
            sampling=Sampling(MAX_NEW_TOKENS, stop_token_ids=self._stops),
            seeds=seeds_of(index),
            min_version=VERSION.number,
        )


@dataclass
class Result:
    """Pairs of rounds with one workload."""

    ours: list[Round] = field(default_factory=list)
    bare: list[Round] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        ours, bare = (
            statistics.median(r.tokens_per_s for r in rounds) for rounds in (self.ours, self.bare)
        )
        return ours / bare

    def figures(self) -> dict[str, Any]:
        """For the JSON object."""
        both = {"ours": self.ours, "bare": self.bare}
        pairs = [a.tokens_per_s / b.tokens_per_s for a, b in zip(self.ours, self.bare, strict=True)]
        return {
            "ratio": round(self.ratio, 3),
            "pairs": [round(pair, 3) for pair in pairs],
            **{
                f"{name}_tokens_per_s": round(statistics.median(r.tokens_per_s for r in rounds), 1)
                for name, rounds in both.items()
            },
            **{
                f"{name}_cpu_ms_per_token": round(
                    statistics.median(1000 * r.cpu_s / r.tokens for r in rounds), 3
                )
                for name, rounds in both.items()
            },
            "tokens": sum(r.tokens for r in self.ours),
            "same_completions": round(self._same(), 3),
        }

    def _same(self) -> float:
        """Share of completions that are the same to the last token: both sides did the same work."""
        pairs = [
            (ours.answers[seed], bare.answers[seed])
            for ours, bare in zip(self.ours, self.bare, strict=True)
            for seed in ours.answers
        ]
        return sum(a == b for a, b in pairs) / len(pairs)


def measure(
    ours: Ours, bare: Bare, workloads: Mapping[str, Workload], pairs: int
) -> dict[str, Any]:
    """One round of each for warmth, then pairs in turn, the first of a pair changing."""
    results = {name: Result() for name in workloads}
    for workload in workloads.values():
        tasks = workload.round()
        ours.run(tasks)
        bare.run(tasks)
    for turn in range(pairs):
        for name, workload in workloads.items():
            tasks, result = workload.round(), results[name]
            sides = [(ours, result.ours), (bare, result.bare)]
            for side, rounds in sides if turn % 2 else sides[::-1]:
                rounds.append(side.run(tasks))
                print(
                    f"{name} {turn + 1}: {side.name} {rounds[-1].tokens_per_s:.1f} tokens/s "
                    f"({rounds[-1].tokens} in {rounds[-1].wall_s:.1f} s)",
                    file=sys.stderr,
                    flush=True,
                )
    return {
        "ratio": min(round(result.ratio, 3) for result in results.values()),
        **{name: result.figures() for name, result in results.items()},
    }


@contextlib.contextmanager
def world(folder: Path, model: Path, max_inflight: int) -> Iterator[tuple[Ours, Bare, str]]:
    """Both sides, ready to be asked, and the id of our run."""
    adapter = folder / "adapter"
    build_adapter(
        adapter, model, rank=RANK, alpha=ALPHA, target_modules=MODULES, scale=ADAPTER_SCALE
    )
    with contextlib.ExitStack() as stack:
        rabbitmq = stack.enter_context(PrivateRabbitMQ(folder / "rabbitmq"))
        s3 = stack.enter_context(PrivateS3(folder / "s3"))
        run = Run(folder, model, adapter, rabbitmq, s3)
        stack.callback(run.broker.close)
        ours = stack.enter_context(contextlib.closing(Ours(run, max_inflight)))
        bare = stack.enter_context(contextlib.closing(Bare(folder, model, adapter, max_inflight)))
        yield ours, bare, run.id


def smollm2(folder: Path) -> Path:
    """The demo's model, made there unless it is."""
    if not is_prepared(folder):
        command = [sys.executable, "-m", "spotgrpo.cli.demo_parts.model", str(folder)]
        subprocess.run(command, check=True)
    return folder


def main() -> None:
    if sys.argv[1:2] == ["--serve-bare"]:
        serve_bare(sys.argv[2], sys.argv[3], int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tiny random model, two pairs")
    parser.add_argument("--json", action="store_true", help="print nothing but the last line")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--tasks", type=int, default=8, help=f"groups of {GROUP_SIZE} in a round")
    parser.add_argument("--max-inflight", type=int, default=16, help="sequences at a time")
    parser.add_argument("--model", type=Path, default=Path(".demo/model"), help="SmolLM2's folder")
    args = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("told to stop")
    )  # and so do all that were started
    with tempfile.TemporaryDirectory(prefix="spotgrpo-generation-") as name:
        folder = Path(name)
        if args.quick:
            args.pairs, model = 2, build_tiny_model(folder / "tiny")
        else:
            model = smollm2(args.model).resolve()
        with world(folder, model, args.max_inflight) as (ours, bare, run):
            workloads = {
                "fixed": Workload(run, model, args.tasks, is_varied=False, first=0),
                "varied": Workload(run, model, args.tasks, is_varied=True, first=1_000_000),
            }
            figures = measure(ours, bare, workloads, args.pairs)
    print(json.dumps({"model": "tiny" if args.quick else "SmolLM2-135M", **figures}))


if __name__ == "__main__":
    main()
