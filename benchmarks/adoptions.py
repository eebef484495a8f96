"""Memory, open files and adapters of a worker's engine over many adoptions, with requests in flight.

The policy watcher of a worker, on a tiny model and a bucket in memory, adopts version after version: fetched, checked,
loaded, proven, served, and the oldest unloaded. Each version answers requests that go on while the next is adopted.
Every engine has a process of its own. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from spotgrpo.producer.engines.base import Engine, EngineSpec, GenerationRequest
from spotgrpo.producer.engines.registry import make_engine
from spotgrpo.producer.policy import PolicyWatcher
from spotgrpo.shared.ids import PolicyVersion
from spotgrpo.shared.manifest import Probe
from spotgrpo.shared.wire import Sampling
from tests.tools.loop_world import config_of, document_of
from tests.tools.tiny_model import build_adapter, build_tiny_model, plain_logprobs
from tests.tools.version_bucket import BASE, VersionBucket, files_of

ADOPTIONS, QUICK_ADOPTIONS = 500, 60
WARM_UP = 0.2
"""Share of the adoptions after which memory is compared with the end."""
POINTS = 10
KEEP = 4
RANK = 64
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODULES = 2 * len(TARGETS)
PROMPT = tuple(range(10, 50))
REQUESTS, TOKENS = 4, 16


@dataclass(frozen=True)
class Point:
    """What is held after so many adoptions."""

    adoptions: int
    rss_mb: float
    files: int
    threads: int
    adapters: int
    folders: int


def point(adoptions: int, engine: Any, cache: Path) -> Point:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Point(
        adoptions=adoptions,
        rss_mb=round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 1),
        files=len(list(Path("/proc/self/fd").iterdir())),
        threads=len(list(Path("/proc/self/task").iterdir())),
        adapters=adapters_of(engine),
        folders=len(list(cache.iterdir())),
    )


def adapters_of(engine: Any) -> int:
    """Adapters in the library's own hands; peft always has an empty one."""
    if engine.name == "vllm":
        return len(engine._engine.list_loras())  # noqa: SLF001
    return len(engine._model.peft_config) - 1  # noqa: SLF001


def probe_of(model: Path, adapter: Path) -> Probe:
    """As a learner makes it."""
    return Probe(
        token_ids=list(PROMPT),
        version_logprobs=plain_logprobs(model, adapter, PROMPT).tolist(),
        base_logprobs=plain_logprobs(model, None, PROMPT).tolist(),
    )


async def sample(engine: Engine, version: PolicyVersion) -> int:
    """Answer a group of requests; the tokens that came."""

    async def answer(number: int) -> int:
        request = GenerationRequest(
            f"{version}-{number}", PROMPT, Sampling(TOKENS), number, version
        )
        return sum([len(chunk.token_ids) async for chunk in engine.submit(request)])

    return sum(await asyncio.gather(*(answer(number) for number in range(REQUESTS))))


async def adopt(watcher: PolicyWatcher, number: int) -> float:
    """Seconds until ``number`` is served."""
    begun = time.perf_counter()
    watcher.wake()
    async with asyncio.timeout(60):
        await watcher.at_least(number)
    return time.perf_counter() - begun


async def run(name: str, adoptions: int, folder: Path) -> dict[str, Any]:
    model = build_tiny_model(folder / "model")
    folders = [
        build_adapter(folder / str(seed), model, seed=seed, rank=RANK, target_modules=TARGETS)
        for seed in (1, 2)
    ]
    versions = [(files_of(one), probe_of(model, one)) for one in folders]
    engine = make_engine(
        name,
        EngineSpec(
            model=str(model),
            lora_rank=RANK,
            lora_alpha=8.0,
            target_modules=TARGETS,
            max_versions=KEEP,
            max_inflight=2 * REQUESTS,
            threads=1,
        ),
    )
    await engine.start()
    cache = folder / "cache"
    cache.mkdir()
    bucket = VersionBucket()
    document = document_of(config_of(), base=BASE)
    watcher = PolicyWatcher(
        bucket.store, bucket.keys, engine, document, cache_dir=cache, poll_s=5.0, keep=KEEP
    )
    watching = asyncio.create_task(watcher.run())
    try:
        return await _adopt_all(watcher, bucket, engine, versions, adoptions, cache)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        await engine.close()


async def _adopt_all(
    watcher: PolicyWatcher,
    bucket: VersionBucket,
    engine: Engine,
    versions: list[tuple[Mapping[str, bytes], Probe]],
    adoptions: int,
    cache: Path,
) -> dict[str, Any]:
    seconds: list[float] = []
    points: list[Point] = []
    tokens, running = 0, None
    for number in range(1, adoptions + 1):
        version = PolicyVersion(1, number)
        files, probe = versions[number % 2]
        bucket.commit(version, files, probe, modules=MODULES)
        seconds.append(await adopt(watcher, number))
        if running is not None:
            tokens += await running
        served = watcher.current
        assert served is not None
        assert served.version == version
        running = asyncio.create_task(_held(watcher, engine, served))
        if number > KEEP:
            bucket.forget(PolicyVersion(1, number - KEEP))
        if number % max(1, adoptions // POINTS) == 0:
            points.append(await asyncio.to_thread(point, number, engine, cache))
    if running is not None:
        tokens += await running
    return _figures(points, seconds, tokens)


async def _held(watcher: PolicyWatcher, engine: Engine, served: Any) -> int:
    with watcher.using(served) as version:
        return await sample(engine, version)


def _figures(points: list[Point], seconds: list[float], tokens: int) -> dict[str, Any]:
    warm = points[max(0, round(WARM_UP * len(points)) - 1)]
    last = points[-1]
    tenth = max(1, len(seconds) // 10)
    return {
        "rss_grown_mb": round(last.rss_mb - warm.rss_mb, 1),
        "files_grown": last.files - warm.files,
        "adapters_held": last.adapters,
        "adopt_ms_first_tenth": round(1000 * statistics.median(seconds[:tenth]), 1),
        "adopt_ms_last_tenth": round(1000 * statistics.median(seconds[-tenth:]), 1),
        "tokens": tokens,
        "points": [asdict(one) for one in points],
    }


def in_a_process(name: str, adoptions: int) -> dict[str, Any]:
    """The figures of one engine."""
    command = [sys.executable, __file__, "--engine", name, "--adoptions", str(adoptions)]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    begun = time.monotonic()
    result = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found | {"seconds": round(time.monotonic() - begun, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ADOPTIONS} adoptions")
    parser.add_argument("--adoptions", type=int)
    parser.add_argument("--engine", choices=["vllm", "transformers"], help="in this process")
    options = parser.parse_args()
    adoptions = options.adoptions or (QUICK_ADOPTIONS if options.quick else ADOPTIONS)
    if options.engine:
        with tempfile.TemporaryDirectory(prefix="spotgrpo-adoptions-") as folder:
            print(json.dumps(asyncio.run(run(options.engine, adoptions, Path(folder)))))
        return
    names = ["transformers", *(["vllm"] if importlib.util.find_spec("vllm") else [])]
    found = {name: in_a_process(name, adoptions) for name in names}
    for name, figures in found.items():
        print(f"{name}: {adoptions} adoptions in {figures['seconds']} s")
        for one in figures.pop("points"):
            print("  " + "  ".join(f"{key} {value}" for key, value in one.items()))
    print(json.dumps({"adoptions": adoptions, **found}))


if __name__ == "__main__":
    main()
