"""A worker serves the weights it says it serves: a policy watcher on real engines, one fault a test.

Each guard is tried alone too: where the faults that go before it are let through, it has to catch what is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from peft import PeftModel  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

from spotgrpo.producer.engines.adapter import Adapter  # noqa: E402
from spotgrpo.producer.engines.base import Engine, EngineSpec, GenerationRequest  # noqa: E402
from spotgrpo.producer.engines.registry import make_engine  # noqa: E402
from spotgrpo.producer.policy import PolicyWatcher  # noqa: E402
from spotgrpo.shared.ids import Keys, PolicyVersion  # noqa: E402
from spotgrpo.shared.manifest import (  # noqa: E402
    Durable,
    FileEntry,
    Latest,
    Manifest,
    Probe,
    Serving,
    sha256_hex,
)
from spotgrpo.shared.memory.store import MemoryStore  # noqa: E402
from spotgrpo.shared.wire import Sampling  # noqa: E402
from tests.tools.loop_world import RUN, config_of, document_of  # noqa: E402
from tests.tools.tiny_model import build_adapter, build_tiny_model  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(120),
]

BASE = "0" * 64
"""The base model's digest in run.json."""
KEEP = 3
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


def plain(model: Path, adapter: Path | None, ids: Sequence[int]) -> np.ndarray[Any, Any]:
    """Logprobs of ``ids[1:]`` by transformers and peft alone."""
    network: Any = LlamaForCausalLM.from_pretrained(model)
    if adapter is not None:
        network = PeftModel.from_pretrained(network, adapter)
    tokens = torch.tensor([list(ids)])
    with torch.no_grad():
        table = torch.log_softmax(network.eval()(tokens).logits[0, :-1].float(), dim=-1)
    found: np.ndarray[Any, Any] = table.gather(1, tokens[0, 1:, None])[:, 0].numpy()
    return found


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


class FaultyStore(MemoryStore):
    """Flips a byte of one object on its way down."""

    flipped = ""

    def get(self, key: str) -> Any:
        stored = super().get(key)
        if key != self.flipped:
            return stored
        middle = len(stored.body) // 2
        body = stored.body[:middle] + bytes([stored.body[middle] ^ 1]) + stored.body[middle + 1 :]
        return type(stored)(body, stored.etag)


@dataclass
class Bucket:
    """What a learner has written, as far as a worker's policy watcher looks."""

    folders: Folders
    store: FaultyStore = field(default_factory=FaultyStore)
    keys: Keys = field(default_factory=lambda: Keys(RUN))
    etag: str | None = None

    def probe(self, adapter: Path, model: Path | None = None) -> Probe:
        """As a learner on ``model`` makes it, which is the run's unless another is given."""
        of = model or self.folders.model
        return Probe(
            token_ids=list(PROMPT),
            version_logprobs=plain(of, adapter, PROMPT).tolist(),
            base_logprobs=plain(of, None, PROMPT).tolist(),
        )

    def commit(
        self, version: PolicyVersion, adapter: Path, probe: Probe | None, base_sha256: str = BASE
    ) -> None:
        """Store a version and let ``latest.json`` serve it."""
        files = {path.name: path.read_bytes() for path in adapter.iterdir() if path.suffix != ".md"}
        for name, body in files.items():
            self.store.create(self.keys.version(version, name), body)
        manifest = Manifest(
            run=RUN,
            version=version.number,
            epoch=version.epoch,
            files=[
                FileEntry(name=name, size=len(body), sha256=sha256_hex(body))
                for name, body in files.items()
            ],
            modules=4,
            base_sha256=base_sha256,
            probe=probe,
        ).to_bytes()
        key = self.keys.manifest(version)
        self.store.create(key, manifest)
        named = {"version": version.number, "epoch": version.epoch}
        serving = Serving(manifest=key, sha256=sha256_hex(manifest), **named)
        durable = Durable(
            manifest=key, manifest_sha256=serving.sha256, state="s", state_sha256=BASE, ledger="l",
            ledger_sha256=BASE, **named,
        )  # fmt: skip
        latest = Latest(
            epoch=version.epoch, writer="w", nonce=str(version), serving=serving, durable=durable
        )
        self.etag = self.store.compare_and_swap(self.keys.latest, latest.to_bytes(), self.etag)


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
        lora_rank=4,
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
def bucket(folders: Folders) -> Bucket:
    return Bucket(folders)


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
    expected = plain(model, adapter, [*PROMPT, *got.token_ids])[len(PROMPT) - 1 :]
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
        bucket.commit(version(1), folders.one, bucket.probe(folders.one))
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
        bucket.commit(version(1), folders.one, None)
        await serves(watcher, version(1))
        first = watcher.current
        assert first is not None
        watcher.hold(first)
        streams = [engine.submit(request(version(1), tokens=400)) for _ in got]
        for stream, its in zip(streams, got, strict=True):
            await listen(stream, its, tokens=3)
        for number in range(2, 2 + KEEP):
            bucket.commit(version(number), folders.two, None)
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
        bucket.commit(version(9), folders.one, None)
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
        bucket.commit(version(1), folders.one, None)
        await serves(watcher, version(1))
        bucket.commit(version(2), misnamed, bucket.probe(folders.two))
        await refuses(watcher, "has no linear module model.blocks.0")
        assert await error_of(engine, version(1), folders.model, folders.one) < TOLERANCE
        bucket.commit(version(3), folders.two, bucket.probe(folders.two))
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
        bucket.commit(version(1), folders.one, None)
        await serves(watcher, version(1))
        bucket.commit(version(2), misnamed, bucket.probe(folders.two))
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
        bucket.commit(version(1), folders.one, None)
        await serves(watcher, version(1))
        bucket.store.flipped = bucket.keys.version(version(2), WEIGHTS)
        bucket.commit(version(2), folders.two, None)
        await refuses(watcher, "its bytes are not those of the gi")
        assert await error_of(engine, version(1), folders.model, folders.one) < TOLERANCE
        bucket.store.flipped = ""
        bucket.commit(version(3), folders.two, None)
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
        bucket.commit(version(1), folders.one, None)
        await serves(watcher, version(1))
        bucket.commit(version(2), narrow, None)
        await refuses(watcher, "has shapes A")
        assert await error_of(engine, version(1), folders.model, folders.one) < TOLERANCE


async def test_an_adapter_of_another_base_is_refused_by_its_digest_and_by_its_probe(
    engine: Engine, bucket: Bucket, folders: Folders, tmp_path: Path
) -> None:
    version = Epochs.next()
    probe = bucket.probe(folders.of_other, folders.other_model)
    async with watching(engine, bucket, tmp_path) as watcher:
        bucket.commit(version(1), folders.one, None)
        await serves(watcher, version(1))
        bucket.commit(version(2), folders.of_other, probe, base_sha256="f" * 64)
        await refuses(watcher, "is for another base model")
        bucket.commit(version(3), folders.of_other, probe)
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
        bucket.commit(version(1), folders.one, None)
        await serves(watcher, version(1))
        bucket.commit(version(2), folders.one, bucket.probe(folders.two))
        await refuses(watcher, "it serves the base, or another model")
