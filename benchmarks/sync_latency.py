"""From the end of an optimizer step to the first token under the new version, part by part.

Real ``spotgrpo learner`` and ``spotgrpo worker`` processes with a real broker, bucket and vLLM, which train and serve a
model in float32 while requests run; the rank of the adapter makes its size. Each process writes down when it passes
what. The model has few and wide layers, so that a token of four sequences takes a CPU about as long as a GPU takes for
one of a 7B model; ``--model`` names another. Beside it, in the same run, the way over a mounted folder: save, rename,
POST to ``vllm serve``, with the same number of requests running. The last line is one JSON object; its figures at the
top are those of 20 MB and one worker.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

SIZES = (1, 5, 20, 80)
"""MB, float32, all linear layers."""
GROUP_SIZE, NEW_TOKENS, SEQUENCES = 4, 32, 4
POLL_S = 1.0
WARM_UP = 3
"""Versions left out: caches are filled, memory is mapped."""
PARTS = ("save", "upload", "commit", "notice", "download", "load", "probe", "first_token")
LIMIT_S = 900.0

TOML = """
[run]
id = "{run}"
output_dir = "runs"
[broker]
url = "amqp://none"
[bucket]
url = "s3://none"
[model]
name = "{model}"
dtype = "float32"
max_context = 128
[lora]
rank = {rank}
alpha = {rank}
[data]
path = "prompts.jsonl"
[[rewards]]
function = "rewards.py:letters"
[sampling]
group_size = {group_size}
max_new_tokens = {new_tokens}
[train]
max_steps = {steps}
groups_per_step = {groups}
max_staleness = 2
learning_rate = 1e-4
threads = 1
[sync]
encoding = "full"
[worker]
engine = "vllm"
threads = 1
max_inflight = {inflight}
poll_s = {poll_s}
drain_s = 0.0
notices = "none"
probe_every_s = 3600
[worker.vllm]
max_num_seqs = {places}
"""
REWARDS = """
def letters(completions, **_):
    return [sum(map(ord, text)) % 101 / 100 for text in completions]
"""


# ruff: noqa: SLF001 - the roles are watched from inside

# ---- inside a role's process --------------------------------------------------------------------------------------


@dataclass
class Diary:
    """What a process passed, and when (Unix seconds): written to a file as the process ends."""

    path: Path
    events: list[tuple[str, int, float]] = field(default_factory=list)
    chunks: dict[str, list[float]] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)

    def note(self, what: str, version: int) -> None:
        self.events.append((what, version, time.time()))

    def write(self) -> None:
        facts = {"events": self.events, "chunks": self.chunks, "versions": self.versions}
        self.path.write_text(json.dumps(facts))


def watch_learner(diary: Diary) -> None:
    """The learner's part: stepped, saved, uploaded, serving, durable."""
    from spotgrpo.consumer.commit import BucketWriter, NewVersion, Stored
    from spotgrpo.consumer.trainer import Trainer
    from spotgrpo.shared import steps

    step, files, store = Trainer.step, Trainer.adapter_files, BucketWriter.store_version
    current = 0

    def stepped(self: Trainer, *args: Any) -> Any:
        stats = step(self, *args)
        diary.note("stepped", self.steps_done)
        return stats

    def saved(self: Trainer) -> dict[str, bytes]:
        found = files(self)
        diary.note("saved", self.steps_done)
        return found

    def stored(self: BucketWriter, new: NewVersion) -> Stored:
        nonlocal current
        current = new.version.number
        return store(self, new)

    names = {
        steps.Step.LEARNER_UPLOADED: "uploaded",
        steps.Step.LEARNER_SERVING: "serving",
        steps.Step.LEARNER_DURABLE: "durable",
    }

    def seen(at: steps.Step) -> None:
        if at in names:
            diary.note(names[at], current)

    Trainer.step, Trainer.adapter_files = stepped, saved  # type: ignore[method-assign]
    BucketWriter.store_version = stored  # type: ignore[method-assign]
    steps.observe(seen)


def watch_worker(diary: Diary, wakes: bool) -> None:
    """The worker's part, and a request of one token that is submitted in the moment of each adoption."""
    import asyncio

    from spotgrpo.producer import run as worker_run
    from spotgrpo.producer import worker as worker_module
    from spotgrpo.producer.engines.base import Engine, EngineSpec, GenerationRequest
    from spotgrpo.producer.policy import Adopted, PolicyWatcher
    from spotgrpo.shared import steps
    from spotgrpo.shared.manifest import Serving
    from spotgrpo.shared.wire import Sampling

    load, adopt, make = PolicyWatcher._load, PolicyWatcher._adopt, worker_run.make_engine
    current = 0
    asking: set[asyncio.Task[None]] = set()

    async def loaded(self: PolicyWatcher, serving: Serving) -> Adopted:
        nonlocal current
        current = serving.version
        diary.note("noticed", current)
        return await load(self, serving)

    async def ask(engine: Engine, adopted: Adopted) -> None:
        request = GenerationRequest(
            f"first-{adopted.version}",
            (10, 20, 30),
            Sampling(max_new_tokens=1),
            seed=1,
            version=adopted.version,
        )
        async for _ in cast(Any, engine)._engine.submit(request):
            diary.note("first_token", adopted.version.number)

    async def adopted(self: PolicyWatcher, found: Adopted) -> None:
        diary.note("adopted", found.version.number)
        asked = asyncio.create_task(ask(self._engine, found))
        asking.add(asked)
        asked.add_done_callback(asking.discard)
        await adopt(self, found)

    def seen(at: steps.Step) -> None:
        if at == steps.Step.WORKER_DOWNLOADED:
            diary.note("downloaded", current)

    def made(name: str, spec: EngineSpec) -> Engine:
        return cast(Engine, TimedEngine(make(name, spec), diary))

    PolicyWatcher._load, PolicyWatcher._adopt = loaded, adopted  # type: ignore[method-assign]
    worker_run.make_engine = made
    steps.observe(seen)
    if not wakes:
        worker_module.Worker._subscribe = lambda _self: None  # type: ignore[method-assign]


class TimedEngine:
    """An engine, and when each of its tokens came."""

    def __init__(self, engine: Any, diary: Diary) -> None:
        self._engine, self._diary = engine, diary

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def load(self, version: Any, folder: Path) -> int:
        modules: int = await self._engine.load(version, folder)
        self._diary.note("loaded", version.number)
        return modules

    async def submit(self, request: Any) -> Any:
        times = self._diary.chunks.setdefault(request.request_id, [])
        async for chunk in self._engine.submit(request):
            times.append(time.time())
            yield chunk


def be_role(args: argparse.Namespace) -> None:
    """``spotgrpo learner`` or ``spotgrpo worker``, watched."""
    diary = Diary(Path(args.diary))
    atexit.register(diary.write)
    if args.role == "learner":
        watch_learner(diary)
    else:
        watch_worker(diary, wakes=not args.poll_only)
    from spotgrpo.cli.main import app

    app(args=[args.role, "run.toml"], prog_name="spotgrpo")


# ---- a cell: one size, some workers -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    mb: int
    rank: int
    workers: int
    wakes: bool

    def __str__(self) -> str:
        return f"{self.mb}mb-{self.workers}w-{'wake' if self.wakes else 'poll'}"


@dataclass
class Measured:
    """Of each adoption: seconds of every part, and what running requests felt."""

    cell: Cell
    total_s: list[float] = field(default_factory=list)
    durable_s: list[float] = field(default_factory=list)
    parts_s: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    longest_gaps_s: list[float] = field(default_factory=list)
    usual_gaps_s: list[float] = field(default_factory=list)

    def result(self) -> dict[str, Any]:
        return {
            "adoptions": len(self.total_s),
            "p50_s": percentile(self.total_s, 50),
            "p95_s": percentile(self.total_s, 95),
            "durable_p50_s": percentile(self.durable_s, 50),
            "parts_s": {part: percentile(self.parts_s[part], 50) for part in PARTS},
            "longest_token_gap_s": percentile(self.longest_gaps_s, 100),
            "median_longest_token_gap_s": percentile(self.longest_gaps_s, 50),
            "usual_token_gap_s": percentile(self.usual_gaps_s, 99),
            "usual_token_gap_p50_s": percentile(self.usual_gaps_s, 50),
        }


def percentile(values: Sequence[float], percent: float) -> float | None:
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return round(ordered[low] + (ordered[high] - ordered[low]) * (place - low), 4)


def play(cell: Cell, folder: Path, model: Path, environ: Mapping[str, str], steps: int) -> Measured:
    """One run of ``steps`` versions, from nothing to its end."""
    here = folder / str(cell)
    here.mkdir()
    groups = 2 * cell.workers
    settings = {
        "run": str(cell),
        "model": model,
        "rank": cell.rank,
        "group_size": GROUP_SIZE,
        "new_tokens": NEW_TOKENS,
        "steps": steps,
        "groups": groups,
        "inflight": SEQUENCES,
        "places": SEQUENCES + 2,  # a probe, and the benchmark's own request
        "poll_s": POLL_S,
    }
    (here / "run.toml").write_text(TOML.format(**settings))
    (here / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"The number {i} is followed by"} for i in range(200)]
    (here / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with contextlib.ExitStack() as stack:
        names = ["learner", *(f"worker-{i}" for i in range(cell.workers))]
        roles = [stack.enter_context(role(name, here, environ, cell)) for name in names]
        wait_for(roles, here)
    return measured(cell, here, steps)


@contextlib.contextmanager
def role(
    name: str, here: Path, environ: Mapping[str, str], cell: Cell
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, __file__, "--role", name.split("-", maxsplit=1)[0]]
    command += ["--diary", str(here / f"{name}.json"), *(() if cell.wakes else ("--poll-only",))]
    with (here / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, cwd=here, env=dict(environ), stdout=log, stderr=log)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_for(roles: Sequence[subprocess.Popen[bytes]], here: Path) -> None:
    """Until all have ended by themselves: the learner with its last version, the workers with the run."""
    deadline = time.monotonic() + LIMIT_S
    while any(one.poll() is None for one in roles):
        failed = [one for one in roles if one.poll()]
        if failed or time.monotonic() > deadline:
            tails = [log.read_text(errors="replace")[-1500:] for log in sorted(here.glob("*.log"))]
            raise SystemExit("a role failed, or took too long:\n" + "\n---\n".join(tails))
        time.sleep(0.2)


def measured(cell: Cell, here: Path, steps: int) -> Measured:
    """Put the diaries of all processes side by side."""
    found = Measured(cell)
    learner = times_of(json.loads((here / "learner.json").read_text())["events"])
    for path in sorted(here.glob("worker-*.json")):
        diary = json.loads(path.read_text())
        worker = times_of(diary["events"])
        windows = []
        for version in range(WARM_UP + 1, steps):
            at = learner.get(version, {}) | worker.get(version, {})
            if "noticed" in at and "adopted" in at:
                windows.append((at["noticed"], at["adopted"]))
            if "first_token" in at and "stepped" in at:
                note_adoption(found, at)
        note_gaps(found, list(diary["chunks"].values()), windows)
    for version in range(WARM_UP + 1, steps):
        at = learner.get(version, {})
        if "durable" in at and "stepped" in at:
            found.durable_s.append(at["durable"] - at["stepped"])
    return found


def times_of(events: Sequence[tuple[str, int, float]]) -> dict[int, dict[str, float]]:
    """Version -> what was passed -> when it was first."""
    found: dict[int, dict[str, float]] = defaultdict(dict)
    for what, version, at in events:
        found[version].setdefault(what, at)
    return found


def note_adoption(found: Measured, at: Mapping[str, float]) -> None:
    found.total_s.append(at["first_token"] - at["stepped"])
    marks = (
        "stepped",
        "saved",
        "uploaded",
        "serving",
        "noticed",
        "downloaded",
        "loaded",
        "adopted",
        "first_token",
    )
    for part, (begin, end) in zip(PARTS, itertools.pairwise(marks), strict=True):
        found.parts_s[part].append(at[end] - at[begin])


def note_gaps(
    found: Measured, requests: Sequence[Sequence[float]], windows: Sequence[tuple[float, float]]
) -> None:
    """The longest gap of each adoption, and all gaps that no adoption lies in."""
    gaps = [(one, two) for times in requests for one, two in itertools.pairwise(times)]
    for begin, end in windows:
        inside = [two - one for one, two in gaps if one < end and two > begin]
        if inside:
            found.longest_gaps_s.append(max(inside))
    found.usual_gaps_s += [
        two - one
        for one, two in gaps
        if not any(one < end and two > begin for begin, end in windows)
    ]


# ---- the way over a mounted folder ----------------------------------------------------------------------------------


def mounted(mb: int, rank: int, folder: Path, model: Path, adoptions: int) -> list[float]:
    """Seconds from having the weights to the first token: save, rename, POST, ask; with requests running."""
    import httpx2
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    base = AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    options = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")
    adapted = get_peft_model(base, options)
    here = folder / f"mounted-{mb}mb"
    here.mkdir()
    with vllm_serve(here, model, rank) as url, httpx2.Client(timeout=120) as http:
        found: list[float] = []
        stop = threading.Event()
        callers: list[threading.Thread] = []
        for number in range(WARM_UP + adoptions):
            with torch.no_grad():
                for name, weights in adapted.named_parameters():
                    if "lora_B" in name:
                        weights.normal_(std=0.001)
            begin = time.time()
            new, name = here / f"new-{number}", f"v{number}"
            adapted.save_pretrained(new)
            new.rename(here / name)
            body = {"lora_name": name, "lora_path": str(here / name)}
            http.post(f"{url}/v1/load_lora_adapter", json=body).raise_for_status()
            ask(http, url, name, 1)
            if number >= WARM_UP:
                found.append(time.time() - begin)
            if not callers:
                callers = [
                    threading.Thread(target=keep_asking, args=(url, name, stop), daemon=True)
                    for _ in range(SEQUENCES)
                ]
                for caller in callers:
                    caller.start()
            time.sleep(2.0)
        stop.set()
        for caller in callers:
            caller.join(60)
    return found


def ask(http: Any, url: str, name: str, tokens: int) -> None:
    body = {"model": name, "prompt": [10, 20, 30], "max_tokens": tokens, "ignore_eos": True}
    http.post(f"{url}/v1/completions", json=body).raise_for_status()


def keep_asking(url: str, name: str, stop: threading.Event) -> None:
    import httpx2

    with httpx2.Client(timeout=120) as http:
        while not stop.is_set():
            ask(http, url, name, NEW_TOKENS)


@contextlib.contextmanager
def vllm_serve(here: Path, model: Path, rank: int) -> Iterator[str]:
    """A server of the same engine, with the same settings as our worker's."""
    import httpx2

    from spotgrpo.shared.servable import vllm_rank
    from spotgrpo.shared.services.processes import free_ports

    port = free_ports(1)[0]
    environ = os.environ | {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(model), "--host", "127.0.0.1", "--port", str(port)]
    command += [
        "--dtype",
        "float32",
        "--enforce-eager",
        "--block-size",
        "32",
        "--max-model-len",
        "128",
    ]
    command += ["--kv-cache-memory-bytes", str(256 << 20), "--max-num-seqs", str(SEQUENCES + 1)]
    command += ["--enable-lora", "--max-lora-rank", str(vllm_rank(rank))]
    command += ["--max-loras", "5", "--max-cpu-loras", "5"]
    with (here / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command, env=environ, stdout=log, stderr=log, start_new_session=True
        )
        try:
            deadline = time.monotonic() + 180
            while True:
                with contextlib.suppress(httpx2.TransportError):
                    if httpx2.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                        break
                if server.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit((here / "server.log").read_text()[-2000:])
                time.sleep(0.5)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(server.pid, signal.SIGTERM)
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(server.pid, signal.SIGKILL)
                server.wait()


# ---- all of it ------------------------------------------------------------------------------------------------------


def build_wide_model(folder: Path) -> None:
    """48 M random parameters in four layers, and the character tokenizer of the tests."""
    import torch
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from tests.tools.tiny_model import build_tokenizer

    tokenizer = build_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def rank_of(mb: int, model: Path) -> int:
    """The power of two whose adapter on all linear layers but the head comes nearest to so many MB in float32.

    vLLM pads other ranks to those that it knows.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    linear = [
        module
        for name, module in network.named_modules()
        if isinstance(module, torch.nn.Linear) and not name.endswith("lm_head")
    ]
    values = sum(module.in_features + module.out_features for module in linear)
    ranks = [2**n for n in range(9)]
    return min(ranks, key=lambda rank: abs(4 * values * rank - mb * 1e6))


def cells_of(args: argparse.Namespace, ranks: Mapping[int, int]) -> list[Cell]:
    return [
        Cell(mb, ranks[mb], workers, wakes)
        for mb in args.sizes
        for workers in args.workers
        for wakes in (True, False)
        if wakes or args.polling
    ]


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from spotgrpo.cli.demo_parts.servers import start_servers

    model = Path(args.model).resolve() if args.model else folder / "model"
    if not args.model:
        build_wide_model(model)
    ranks = {mb: rank_of(mb, model) for mb in args.sizes}
    print(f"ranks of the sizes in MB: {ranks}", flush=True)
    results: dict[str, Any] = {}
    with contextlib.ExitStack() as stack:
        (folder / "services").mkdir()
        servers = start_servers(folder / "services", stack)
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith("SPOTGRPO_") or k in servers
        }
        environ = kept | servers | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        for cell in cells_of(args, ranks):
            begin = time.monotonic()
            found = play(cell, folder, model, environ, args.steps).result()
            results[str(cell)] = found
            print(f"{cell} ({time.monotonic() - begin:.0f} s): {json.dumps(found)}", flush=True)
        if not args.no_mounted:
            for mb in args.sizes:
                times = mounted(mb, ranks[mb], folder, model, args.steps - WARM_UP)
                results[f"{mb}mb-mounted"] = {
                    "p50_s": percentile(times, 50),
                    "p95_s": percentile(times, 95),
                }
                print(f"{mb}mb-mounted: {json.dumps(results[f'{mb}mb-mounted'])}", flush=True)
    return summary(results)


def summary(results: Mapping[str, Any]) -> dict[str, Any]:
    main = results.get("20mb-1w-wake") or next(iter(results.values()))
    mounted_p50 = results.get("20mb-mounted", {}).get("p50_s")
    return {**main, "mounted_p50_s": mounted_p50, "cells": dict(results)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="20 MB and one worker, few versions")
    parser.add_argument("--sizes", type=int, nargs="+", choices=SIZES, default=SIZES)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=30, help="versions of each run")
    parser.add_argument("--polling", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--no-mounted", action="store_true")
    parser.add_argument("--model", help="folder of another model, such as .demo/model")
    parser.add_argument("--keep", help="folder for all files, kept")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--diary", help=argparse.SUPPRESS)
    parser.add_argument("--poll-only", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        be_role(args)
        return
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("told to stop")
    )  # and so do all that were started
    if args.quick:
        args.sizes, args.workers, args.steps, args.polling = [20], [1], 10, False
    if args.keep:
        Path(args.keep).mkdir(parents=True)
        print(json.dumps(run(args, Path(args.keep).resolve())))
        return
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(run(args, Path(folder))))


if __name__ == "__main__":
    main()
