"""What a delta to the parent saves: its size and its own cost, and the way of a version over links of several speeds.

Versions are of real GRPO steps: the trainer and the transformers engine on SmolLM2-135M, the demo's task. The rank of
the adapter makes its size; it is published in bfloat16. Uploads and downloads go through a real S3 server and, but for
the loopback, a proxy that passes so many bits a second. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import zstandard

from spotgrpo.cli.demo_parts.model import prepare
from spotgrpo.consumer.commit import BucketWriter, NewVersion
from spotgrpo.producer.deltas import Deltas
from spotgrpo.shared.config import BucketConfig, LoraConfig, ModelConfig, TrainConfig
from spotgrpo.shared.delta import apply_delta, encode_delta
from spotgrpo.shared.ids import Keys, PolicyVersion, TaskId
from spotgrpo.shared.manifest import ADAPTER_WEIGHTS, FileEntry, Manifest, sha256_hex
from spotgrpo.shared.s3 import S3Store
from spotgrpo.shared.services import PrivateS3
from spotgrpo.shared.wire import Group, Rollout, Sampling, VersionRun

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
RANKS = {1: 2, 5: 8, 20: 32, 80: 128}
"""Size in MB (bfloat16, all linear layers of SmolLM2-135M) -> rank."""
RATES = (3e-4, 1e-6)
STEPS, QUICK_STEPS = 8, 3
SETTLED = 2
"""Versions after which deltas count: in version 1 B leaves zero, which happens once in a run."""
PROMPTS, GROUP_SIZE = 8, 8
LINKS = {"20 Mbit/s": 20e6, "100 Mbit/s": 100e6, "1 Gbit/s": 1e9, "loopback": None}
TIMES = 5
FEWER = {(80, "20 Mbit/s"): 1, (20, "20 Mbit/s"): 2, (80, "100 Mbit/s"): 3}
"""Repetitions of what takes long and scatters little: the link is the clock there."""


# ---- versions of a real run ---------------------------------------------------------------------------------------


def make_versions(folder: Path, rank: int, rate: float, steps: int) -> None:
    """Write the weights of versions 0 to ``steps`` of a run into ``folder``, float32; about 6 s a step."""
    import torch

    from spotgrpo.consumer.trainer import Trainer

    torch.set_num_threads(1)
    model = str(ROOT / ".demo" / "model")
    trainer = Trainer(
        ModelConfig(name=model, max_context=64),
        LoraConfig(rank=rank, alpha=rank / 4),  # 135M parameters forget how to answer with more
        TrainConfig(learning_rate=rate, threads=1, device="cpu", token_budget=2048),
        temperature=1.0,
        seed=0,
    )
    with asyncio.Runner() as runner:
        course = Course(trainer, model, rank, folder)
        runner.run(course.engine.start())
        for step in range(steps):
            course.save(step)
            stats = trainer.step(runner.run(course.sample(step)))
            print(
                f"rank {rank}, rate {rate:g}, step {step + 1}: reward {stats.reward_mean:.2f}, "
                f"{stats.groups} groups with a signal, {stats.seconds:.1f} s",
                flush=True,
            )
        course.save(steps)
        runner.run(course.engine.close())


class Course:
    """Prompts, the engine that answers them with each version in turn, and the reward."""

    def __init__(self, trainer: Any, model: str, rank: int, folder: Path) -> None:
        from transformers import AutoTokenizer

        from spotgrpo.producer.engines.base import EngineSpec
        from spotgrpo.producer.engines.transformers import TransformersEngine

        self.trainer, self.folder = trainer, folder
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        lines = (ROOT / "deploy/examples/max/train.jsonl").read_text().splitlines()
        self.rows = [json.loads(line) for line in lines]
        targets = tuple(trainer.target_modules)
        self.engine = TransformersEngine(
            EngineSpec(model, rank, rank / 4, targets, max_context=64, threads=1, device="cpu")
        )

    def save(self, number: int) -> None:
        for name, body in self.trainer.adapter_files().items():
            path = self.folder / str(number) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(body)

    async def sample(self, number: int) -> list[Group]:
        """Groups of the version that was saved last."""
        version = PolicyVersion(1, number)
        await self.engine.load(version, self.folder / str(number))
        rows = self.rows[number * PROMPTS : (number + 1) * PROMPTS]
        groups = [self._group(version, index, row) for index, row in enumerate(rows)]
        found = await asyncio.gather(*groups)
        await self.engine.unload(version)
        return list(found)

    async def _group(self, version: PolicyVersion, index: int, row: dict[str, str]) -> Group:
        prompt = tuple(self.tokenizer(row["prompt"])["input_ids"])
        task = TaskId(version.number * PROMPTS + index)
        rollouts = [self._rollout(version, task, seed, prompt, row) for seed in range(GROUP_SIZE)]
        return Group(
            run="r",
            task_id=task,
            worker="w",
            engine="transformers",
            engine_version="1",
            manifest_sha256="0" * 64,
            prompt_ids=np.array(prompt, np.int32),
            row={},
            sampling=Sampling(5, 1.0, ("\n",)),
            rollouts=tuple(await asyncio.gather(*rollouts)),
        )

    async def _rollout(
        self,
        version: PolicyVersion,
        task: TaskId,
        number: int,
        prompt: tuple[int, ...],
        row: dict[str, str],
    ) -> Rollout:
        from spotgrpo.producer.engines.base import GenerationRequest

        seed = task.index * GROUP_SIZE + number
        request = GenerationRequest(f"{seed}", prompt, Sampling(5, 1.0, ("\n",)), seed, version)
        ids: list[int] = []
        logprobs: list[float] = []
        async for chunk in self.engine.submit(request):
            ids += chunk.token_ids
            logprobs += chunk.logprobs
        answer = self.tokenizer.decode(ids, skip_special_tokens=True).split("\n")[0].strip()
        return Rollout(
            token_ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            loss_mask=np.ones(len(ids), np.bool_),
            versions=(VersionRun(version, len(ids)),),
            reward=float(answer == row["answer"]),
            reward_parts={},
            finish="stop",
        )


def in_bfloat16(file: bytes) -> bytes:
    """The same weights as a version of a bfloat16 base has them: the trainer's are float32 either way."""
    import torch
    from safetensors.torch import load, save

    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in sorted(load(file).items())}
    return save(tensors, {"format": "pt"})


@dataclass(frozen=True)
class Run:
    """Weights of consecutive versions, as they are published."""

    size_mb: int
    rate: float
    float32: list[bytes]
    bfloat16: list[bytes]


def runs(folder: Path, sizes: Sequence[int], rates: Sequence[float], steps: int) -> Iterator[Run]:
    """The runs that are asked for; those that lie in ``folder`` are not made again."""
    prepare(ROOT / ".demo" / "model")
    for size in sizes:
        for rate in rates:
            place = folder / f"rank{RANKS[size]}-{rate:g}"
            if not (place / str(steps)).is_dir():
                make_versions(place, RANKS[size], rate, steps)
            files = [(place / f"{n}" / ADAPTER_WEIGHTS).read_bytes() for n in range(steps + 1)]
            yield Run(size, rate, files, [in_bfloat16(file) for file in files])


# ---- the codec ----------------------------------------------------------------------------------------------------


def timed(call: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    found = call()
    return time.perf_counter() - start, found


def codec(versions: Sequence[bytes]) -> dict[str, float]:
    """Of the deltas between consecutive versions, medians; encoding and decoding on one core."""
    ratios, encoding, decoding = [], [], []
    for parent, new in zip(versions[SETTLED:], versions[SETTLED + 1 :], strict=False):
        for _ in range(3):
            took, delta = timed(lambda p=parent, n=new: encode_delta(p, n))
            encoding.append(took)
            body = delta if delta is not None else new
            if delta is not None:
                took, found = timed(lambda p=parent, d=delta, n=new: apply_delta(p, d, len(n)))
                decoding.append(took)
                assert found == new
        ratios.append(len(body) / len(new))
    return {
        "ratio": round(statistics.median(ratios), 3),
        "encode_ms": round(1e3 * statistics.median(encoding), 1),
        "decode_ms": round(1e3 * statistics.median(decoding), 1) if decoding else 0.0,
        "file_mb": round(len(versions[0]) / 1e6, 2),
    }


def ways(parent: bytes, new: bytes) -> dict[str, tuple[float, float]]:
    """Size (of the file) and milliseconds of other ways to write a change of 16-bit values, zstandard in all."""
    start = 8 + int.from_bytes(new[:8], "little")
    old, now = (np.frombuffer(file, "<u2", offset=start) for file in (parent, new))
    change = (now - old).view("<i2")
    inputs = {
        "no parent": now,
        "XOR": now ^ old,
        "difference": ((change << 1) ^ (change >> 15)).view("<u2"),
    }
    found = {}
    for level in (-1, 1, 3):
        compress = zstandard.ZstdCompressor(level=level).compress
        for name, values in inputs.items():
            planes = [np.ascontiguousarray(p) for p in values.view(np.uint8).reshape(-1, 2).T]
            for how, parts in (("whole", [values.view(np.uint8)]), ("planes", planes)):
                took, bodies = timed(lambda ps=parts, c=compress: [c(p.data) for p in ps])
                size = sum(map(len, bodies)) / len(new)
                found[f"{name}, {how}, level {level}"] = (round(size, 3), round(1e3 * took, 1))
    return found


# ---- links --------------------------------------------------------------------------------------------------------


@dataclass
class Lane:
    """One direction of a link, shared by all connections."""

    bits_per_s: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    free_at: float = 0.0

    def occupy(self, count: int) -> None:
        """Wait until ``count`` bytes are through."""
        with self.lock:
            self.free_at = max(time.perf_counter(), self.free_at) + 8 * count / self.bits_per_s
            free_at = self.free_at
        wait = free_at - time.perf_counter()
        if wait > 0:
            time.sleep(wait)


class Link:
    """A TCP proxy on loopback that passes so many bits a second each way. It adds no delay of its own."""

    def __init__(self, port: int, bits_per_s: float) -> None:
        self._upstream = ("127.0.0.1", port)
        self._lanes = Lane(bits_per_s), Lane(bits_per_s)
        self._piece = 1 << 14 if bits_per_s < 1e9 else 1 << 18
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._upstream)
            for ends in ((client, server, self._lanes[0]), (server, client, self._lanes[1])):
                threading.Thread(target=self._forward, args=ends, daemon=True).start()

    def _forward(self, source: socket.socket, target: socket.socket, lane: Lane) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(self._piece):
                lane.occupy(len(data))
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def bucket_over(server: PrivateS3, bits_per_s: float | None) -> Iterator[S3Store]:
    with contextlib.ExitStack() as stack:
        port = server.port
        if bits_per_s is not None:
            port = stack.enter_context(Link(server.port, bits_per_s)).port
        config = BucketConfig.model_validate(
            {
                "url": f"s3://{server.bucket}/delta",
                "endpoint_url": f"http://127.0.0.1:{port}",
                "access_key_id": server.access_key_id,
                "secret_access_key": server.secret_access_key,
                "timeout_s": 120.0,
            }
        )
        yield stack.enter_context(contextlib.closing(S3Store(config)))


# ---- the way of a version -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """Seconds of one version: from its weights in the learner to its manifest, and from there to the worker's disk."""

    store_s: float
    fetch_s: float


@dataclass
class Uploads:
    """What a learner's writer needs of a bucket, over a link that can be changed."""

    store: S3Store

    def create(self, key: str, body: bytes) -> None:
        self.store.create(key, body)


def travel(
    near: S3Store, store: S3Store, run: Run, folder: Path, name: str, *, deltas: bool
) -> Way:
    """Bring the last version of ``run`` to a worker that has the one before it, with the roles' own code.

    The one before it is stored over ``near``: it is not measured.
    """
    keys = Keys(name)
    uploads = Uploads(near)
    writer = BucketWriter(uploads, keys, threading.Event(), deltas=deltas)  # type: ignore[arg-type]
    fetcher = Deltas(store, keys)
    parent, new = run.bfloat16[-2:]
    writer.store_version(_version(0, parent))
    uploads.store = store
    stored_s, stored = timed(lambda: writer.store_version(_version(1, new)))
    before = folder / name
    before.write_bytes(parent)
    held = FileEntry(name=ADAPTER_WEIGHTS, size=len(parent), sha256=sha256_hex(parent))
    fetcher.keep(held, before)
    path = folder / f"{name}.new"

    def fetch() -> None:
        manifest = Manifest.from_bytes(store.get(stored.manifest).body)
        entry = manifest.files[0]
        came = fetcher.rebuild(manifest, entry, path)
        assert came == deltas
        if not came:
            key = keys.version(manifest.policy, entry.name)
            store.download(key, path, entry.size, entry.sha256)

    fetched_s, _ = timed(fetch)
    assert sha256_hex(path.read_bytes()) == sha256_hex(new)
    for file in (before, path):
        file.unlink()
    near.delete([info.key for info in near.list(name)])
    return Way(stored_s, fetched_s)


def _version(number: int, weights: bytes) -> NewVersion:
    version = PolicyVersion(1, number)
    parent = PolicyVersion(1, number - 1) if number else None
    return NewVersion(version, parent, {ADAPTER_WEIGHTS: weights}, 1, "0" * 64, lambda: None)


def over_links(
    server: PrivateS3, run: Run, links: Sequence[str], times: int | None
) -> dict[str, dict[str, float]]:
    """Medians of interleaved pairs, by link; ``whole_ratio`` is where learner and worker have the same one."""
    found = {}
    for link in links:
        with contextlib.ExitStack() as stack:
            near = stack.enter_context(bucket_over(server, None))
            store = stack.enter_context(bucket_over(server, LINKS[link]))
            place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            pairs = []
            for n in range(times or FEWER.get((run.size_mb, link), TIMES)):
                name = f"{run.size_mb}-{run.rate:g}-{link.split()[0]}-{n}".replace(".", "-")
                full = travel(near, store, run, place, f"{name}f", deltas=False)
                pairs.append((full, travel(near, store, run, place, f"{name}d", deltas=True)))
        figures = {
            "full_store_s": [full.store_s for full, _ in pairs],
            "delta_store_s": [delta.store_s for _, delta in pairs],
            "full_fetch_s": [full.fetch_s for full, _ in pairs],
            "delta_fetch_s": [delta.fetch_s for _, delta in pairs],
            "fetch_ratio": [delta.fetch_s / full.fetch_s for full, delta in pairs],
            "whole_ratio": [
                (delta.store_s + delta.fetch_s) / (full.store_s + full.fetch_s)
                for full, delta in pairs
            ],
        }
        found[link] = {name: round(statistics.median(v), 3) for name, v in figures.items()}
        print(f"{run.size_mb} MB, rate {run.rate:g}, {link}: {found[link]}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sizes", type=lambda text: [int(size) for size in text.split(",")])
    parser.add_argument("--rates", type=lambda text: [float(rate) for rate in text.split(",")])
    parser.add_argument("--links", type=lambda text: text.split(","), help=",".join(LINKS))
    parser.add_argument("--steps", type=int)
    parser.add_argument("--times", type=int, help="repetitions on every link")
    parser.add_argument("--keep", type=Path, help="folder for versions, which are made once")
    args = parser.parse_args()
    sizes = args.sizes or ([5] if args.quick else list(RANKS))
    rates = args.rates or (RATES[:1] if args.quick else RATES)
    links = args.links or (["100 Mbit/s", "loopback"] if args.quick else list(LINKS))
    steps = args.steps or (QUICK_STEPS if args.quick else STEPS)
    times = args.times or (2 if args.quick else None)
    with tempfile.TemporaryDirectory() as scratch:
        server = PrivateS3(Path(scratch) / "s3")
        server.start()
        try:
            figures = {}
            for run in runs(args.keep or Path(scratch) / "versions", sizes, rates, steps):
                name = f"{run.size_mb} MB, rate {run.rate:g}"
                figures[name] = {
                    "bfloat16": codec(run.bfloat16),
                    "float32": codec(run.float32),
                    "links": over_links(server, run, links, times),
                }
                print(f"{name}: {figures[name]['bfloat16']} {figures[name]['float32']}", flush=True)
                if run.size_mb == max(sizes, key=lambda size: (size == 20, size)):
                    for way, (size, ms) in ways(*run.bfloat16[-2:]).items():
                        print(f"{name}, {way}: {size:.3f} of the file, {ms} ms", flush=True)
        finally:
            server.stop()
    print(json.dumps(figures))


if __name__ == "__main__":
    sys.exit(main())
