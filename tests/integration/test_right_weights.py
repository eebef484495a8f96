"""A worker serves the weights it says it serves: a policy watcher on real engines, one fault a test.

Each guard is tried alone too: where the faults that go before it are let through, it has to catch what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.util
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import pytest_asyncio

pytest.importorskip("torch")
pytest.importorskip("peft")

from safetensors.torch import load_file, save_file

from spotgrpo.producer.engines.adapter import Adapter
from spotgrpo.producer.engines.base import Engine, EngineSpec, GenerationRequest
from spotgrpo.producer.engines.registry import make_engine
from spotgrpo.producer.policy import PolicyWatcher
from spotgrpo.shared.ids import PolicyVersion
from spotgrpo.shared.manifest import Probe
from spotgrpo.shared.wire import Sampling
from tests.tools.loop_world import config_of, document_of
from tests.tools.tiny_model import build_adapter, build_tiny_model, plain_logprobs
from tests.tools.version_bucket import BASE, VersionBucket, files_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(120),
]

KEEP = 3
RANK = 64
TOLERANCE = 1e-3
WEIGHTS = "adapter_model.safetensors"
PROMPT = tuple(range(10, 60))
"""Longer than a block of vLLM's prefix cache."""
VLLM = pytest.param(
    "vllm",
    marks=[
        pytest.mark.vllm,
        pytest.mark.skipif(
            importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
        ),
    ],
)


@dataclass
class Folders:
    """A base model, two adapters of it, and another base of the same shape with an adapter of its own."""

    model: Path
    one: Path
    two: Path
    other_model: Path
    of_other: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("weights")
    model = build_tiny_model(root / "model")
    other = build_tiny_model(root / "other", seed=1)
    return Folders(
        model,
        build_adapter(root / "one", model, seed=1),
        build_adapter(root / "two", model, seed=2),
        other,
        build_adapter(root / "of-other", other, seed=1),
    )


@dataclass
class Bucket(VersionBucket):
    """Folders go in as they are."""

    def put(
        self, version: PolicyVersion, adapter: Path, probe: Probe | None, base_sha256: str = BASE
    ) -> None:
        self.commit(version, files_of(adapter), probe, base_sha256=base_sha256)


def probe_of(model: Path, adapter: Path) -> Probe:
    """As a learner on ``model`` makes it."""
    return Probe(
        token_ids=list(PROMPT),
        version_logprobs=plain_logprobs(model, adapter, PROMPT).tolist(),
        base_logprobs=plain_logprobs(model, None, PROMPT).tolist(),
    )


class Epochs:
    """A new epoch for every test: the engine lives on, and no version may come twice."""

    last = 0

    @classmethod
    def next(cls) -> Callable[[int], PolicyVersion]:
        cls.last += 1
        epoch = cls.last
        return lambda number: PolicyVersion(epoch, number)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["transformers", VLLM])
async def engine(request: pytest.FixtureRequest, folders: Folders) -> AsyncIterator[Engine]:
    spec = EngineSpec(
        model=str(folders.model),
        lora_rank=RANK,
        lora_alpha=8.0,
        target_modules=("q_proj", "v_proj"),
        max_versions=KEEP,
        max_inflight=16,
        threads=1,
    )
    made = make_engine(request.param, spec)
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@contextlib.asynccontextmanager
async def watching(engine: Engine, bucket: Bucket, cache: Path) -> AsyncIterator[PolicyWatcher]:
    """A policy watcher at work; what it loaded is unloaded afterwards."""
    watcher = PolicyWatcher(
        bucket.store,
        bucket.keys,
        engine,
        document_of(config_of(), base=BASE),
        cache_dir=cache,
        poll_s=0.01,
        keep=KEEP,
    )
    task = asyncio.create_task(watcher.run())
    try:
        yield watcher
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        for version in list(watcher._loaded):
            await engine.unload(version)


async def until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not claim():  # noqa: ASYNC110  what is claimed happens in the engine's thread
            await asyncio.sleep(0.005)


async def serves(watcher: PolicyWatcher, version: PolicyVersion) -> None:
    await until(lambda: watcher.current is not None and watcher.current.version == version)


async def refuses(watcher: PolicyWatcher, why: str) -> None:
    """Wait until one version was refused, for that reason."""
    await until(lambda: watcher.counts.refused > 0)
    assert why in watcher.refused_why


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


NUMBERS = iter(range(10**6))


def request(version: PolicyVersion, tokens: int = 24) -> GenerationRequest:
    number = next(NUMBERS)
    return GenerationRequest(f"weights-{number}", PROMPT, Sampling(tokens), number, version)


async def listen(stream: Any, got: Answer, *, tokens: int = 10**6) -> None:
    """Take chunks until the end, or until ``tokens`` are there."""
    async for chunk in stream:
        got.token_ids += chunk.token_ids
        got.logprobs += chunk.logprobs
        if len(got.token_ids) >= tokens:
            return


async def error_of(engine: Engine, version: PolicyVersion, model: Path, adapter: Path) -> float:
    """How far a completion's logprobs are from those of ``adapter``."""
    got = Answer()
    await listen(engine.submit(request(version)), got)
    return error(got, model, adapter)


def error(got: Answer, model: Path, adapter: Path) -> float:
    expected = plain_logprobs(model, adapter, [*PROMPT, *got.token_ids])[len(PROMPT) - 1 :]
    return float(np.abs(expected - np.array(got.logprobs)).max())


def with_other_names(adapter: Path, folder: Path) -> Path:
    """A copy whose tensors are named for modules that no model has; its config is as it was."""
    shutil.copytree(adapter, folder)
    path = folder / WEIGHTS
    tensors = {key.replace(".layers.", ".blocks."): one for key, one in load_file(path).items()}
    save_file(tensors, path)
    return folder


# ---- what is right -------------------------------------------------------------------------------------------


async def test_a_version_is_proven_and_answers_with_its_weights(
    engine: Engine, bucket: Bucket, folders: Folders, tmp_path: Path
) -> None:
    version = Epochs.next()
    async with watching(engine, bucket, tmp_path) as watcher:
        bucket.put(version(1), folders.one, probe_of(folders.model, folders.one))
        await serves(watcher, version(1))
        assert watcher.counts.probes == {"pass": 1}
        assert await error_of(engine, version(1), folders.model, folders.one) < TOLERANCE
        assert await error_of(engine, version(1), folders.model, folders.two) > 100 * TOLERANCE


async def test_requests_keep_their_version_while_others_are_adopted_and_it_goes_after_them(
    engine: Engine, bucket: Bucket, folders: Folders, tmp_path: Path
) -> None:
    version = Epochs.next()
    got = [Answer() for _ in range(8)]
    async with watching(engine, bucket, tmp_path) as watcher:
        bucket.put(version(1), folders.one, None)
        await serves(watcher, version(1))
        first = watcher.current
        assert first is not None
        watcher.hold(first)
        streams = [engine.submit(request(version(1), tokens=400)) for _ in got]
        for stream, its in zip(streams, got, strict=True):
            await listen(stream, its, tokens=3)
        for number in range(2, 2 + KEEP):
            bucket.put(version(number), folders.two, None)
            await serves(watcher, version(number))
        assert watcher.loaded(version(1)) is first
        assert watcher.loaded(version(2)) is None
        for stream, its in zip(streams, got, strict=True):
            await listen(stream, its)
        assert sum(len(its.token_ids) for its in got) > 200
        for its in got:
            assert error(its, folders.model, folders.one) < TOLERANCE
        newest = version(1 + KEEP)
        assert await error_of(engine, newest, folders.model, folders.two) < TOLERANCE
        watcher.release(first)
        bucket.put(version(9), folders.one, None)
        await until(lambda: watcher.loaded(version(1)) is None)
        await serves(watcher, version(9))


async def test_a_name_that_comes_again_with_other_weights_answers_with_those(
    engine: Engine, folders: Folders, tmp_path: Path
) -> None:
    """Same version, same folder: whatever an engine remembers of a name or a path, it is not served."""
    version = Epochs.next()(1)
    folder = tmp_path / "adapter"
    for adapter in (folders.one, folders.two):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(adapter, folder)
        await engine.load(version, folder)
        assert await error_of(engine, version, folders.model, adapter) < TOLERANCE
        await engine.unload(version)


# ---- what is wrong -------------------------------------------------------------------------------------------


async def test_an_adapter_whose_names_do_not_match_is_refused_and_the_one_before_stays(
    engine: Engine, bucket: Bucket, folders: Folders, tmp_path: Path
) -> None:
    version = Epochs.next()
    misnamed = with_other_names(folders.two, tmp_path / "misnamed")
    async with watching(engine, bucket, tmp_path / "cache") as watcher:
        bucket.put(version(1), folders.one, None)
        await serves(watcher, version(1))
        bucket.put(version(2), misnamed, probe_of(folders.model, folders.two))
        await refuses(watcher, "has no linear module model.blocks.0")
        assert await error_of(engine, version(1), folders.model, folders.one) < TOLERANCE
        bucket.put(version(3), folders.two, probe_of(folders.model, folders.two))
        await serves(watcher, version(3))
        assert watcher.counts.probes == {"pass": 1}


@pytest.mark.parametrize("engine", [VLLM], indirect=True, scope="module")
@pytest.mark.parametrize("blind", [(), ("count",)])
async def test_an_adapter_that_the_engine_passes_over_is_caught_by_its_count_and_by_the_probe(
    engine: Any,
    bucket: Bucket,
    folders: Folders,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    blind: tuple[str, ...],
) -> None:
    """vLLM loads it without a word and serves the base: that nobody looked at its names is the fault put in."""
    version = Epochs.next()
    misnamed = with_other_names(folders.two, tmp_path / "misnamed")
    monkeypatch.setattr(Adapter, "check", lambda *_: None)
    if "count" in blind:
        monkeypatch.setattr(engine, "_census", lambda _: 4)
    async with watching(engine, bucket, tmp_path / "cache") as watcher:
        bucket.put(version(1), folders.one, None)
        await serves(watcher, version(1))
        bucket.put(version(2), misnamed, probe_of(folders.model, folders.two))
        why = "it serves the base, or another model" if blind else "0 of 4 modules took it"
        await refuses(watcher, why)
        assert watcher.current is not None
        assert watcher.current.version == version(1)
        assert watcher.loaded(version(2)) is None


async def test_a_download_with_a_flipped_byte_is_refused(
    engine: Engine, bucket: Bucket, folders: Folders, tmp_path: Path
) -> None:
    version = Epochs.next()
    async with watching(engine, bucket, tmp_path) as watcher:
        bucket.put(version(1), folders.one, None)
        await serves(watcher, version(1))
        bucket.store.flipped = bucket.keys.version(version(2), WEIGHTS)
        bucket.put(version(2), folders.two, None)
        await refuses(watcher, "its bytes are not those of the gi")
        assert await error_of(engine, version(1), folders.model, folders.one) < TOLERANCE
        bucket.store.flipped = ""
        bucket.put(version(3), folders.two, None)
        await serves(watcher, version(3))


async def test_a_file_with_the_right_digest_and_foreign_shapes_is_refused(
    engine: Engine, bucket: Bucket, folders: Folders, tmp_path: Path
) -> None:
    version = Epochs.next()
    narrow = tmp_path / "narrow"
    shutil.copytree(folders.two, narrow)
    tensors = load_file(narrow / WEIGHTS)
    save_file({key: one[..., :2].contiguous() for key, one in tensors.items()}, narrow / WEIGHTS)
    async with watching(engine, bucket, tmp_path / "cache") as watcher:
        bucket.put(version(1), folders.one, None)
        await serves(watcher, version(1))
        bucket.put(version(2), narrow, None)
        await refuses(watcher, "has shapes A")
        assert await error_of(engine, version(1), folders.model, folders.one) < TOLERANCE


async def test_an_adapter_of_another_base_is_refused_by_its_digest_and_by_its_probe(
    engine: Engine, bucket: Bucket, folders: Folders, tmp_path: Path
) -> None:
    version = Epochs.next()
    probe = probe_of(folders.other_model, folders.of_other)
    async with watching(engine, bucket, tmp_path) as watcher:
        bucket.put(version(1), folders.one, None)
        await serves(watcher, version(1))
        bucket.put(version(2), folders.of_other, probe, base_sha256="f" * 64)
        await refuses(watcher, "is for another base model")
        bucket.put(version(3), folders.of_other, probe)
        await until(lambda: watcher.counts.refused == 2)
        assert "it serves the base, or another model" in watcher.refused_why
        assert watcher.counts.probes == {"fail": 1}
        assert await error_of(engine, version(1), folders.model, folders.one) < TOLERANCE


async def test_weights_of_another_version_under_the_right_names_are_refused_by_the_probe(
    engine: Engine, bucket: Bucket, folders: Folders, tmp_path: Path
) -> None:
    """Every digest is right, every module takes it: it is the learner who mixed up two files."""
    version = Epochs.next()
    async with watching(engine, bucket, tmp_path) as watcher:
        bucket.put(version(1), folders.one, None)
        await serves(watcher, version(1))
        bucket.put(version(2), folders.one, probe_of(folders.model, folders.two))
        await refuses(watcher, "it serves the base, or another model")


# ---- many ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What a process and its engine hold."""

    adapters: int
    folders: int
    files: int
    rss_mb: float

    @classmethod
    def now(cls, engine: Any, cache: Path) -> Held:
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            adapters=len(engine._engine.list_loras())
            if engine.name == "vllm"
            else len(engine._model.peft_config) - 1,  # one is always there, and empty
            folders=len(list(cache.iterdir())),
            files=len(list(Path("/proc/self/fd").iterdir())),
            rss_mb=pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        )


async def test_many_adoptions_leave_nothing_behind(
    engine: Engine, bucket: Bucket, folders: Folders, tmp_path: Path
) -> None:
    """500 of them: benchmarks/adoptions.py. What 50 would leave of these adapters is 11 MB."""
    version = Epochs.next()
    files = files_of(build_adapter(tmp_path / "big", folders.model, rank=RANK))
    cache = tmp_path / "cache"
    for left in list(engine._versions):  # type: ignore[attr-defined]  # by other tests of this engine
        await engine.unload(left)
    points = []
    async with watching(engine, bucket, cache) as watcher:
        for number in range(1, 71):
            bucket.commit(version(number), files)
            await serves(watcher, version(number))
            await listen(engine.submit(request(version(number), tokens=2)), Answer())
            bucket.forget(version(max(0, number - KEEP)))
            if number in (20, 70):
                # The oldest goes once the newest serves: there is room for the next.
                await until(lambda: len(list(cache.iterdir())) < KEEP)
                points.append(await asyncio.to_thread(Held.now, engine, cache))
    early, late = points
    assert late.adapters == late.folders == KEEP - 1
    assert late.files == early.files
    assert late.rss_mb - early.rss_mb < 5
