"""Partials with real engines: what a drain cut at token k and another worker carried on is what it says it is."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import pytest_asyncio

torch = pytest.importorskip("torch")
pytest.importorskip("peft")

from spotgrpo.consumer.trainer import Trainer  # noqa: E402
from spotgrpo.producer.engines.base import EngineSpec  # noqa: E402
from spotgrpo.producer.engines.registry import make_engine  # noqa: E402
from spotgrpo.shared.config import LoraConfig, ModelConfig, TrainConfig  # noqa: E402
from spotgrpo.shared.ids import PolicyVersion, TaskId  # noqa: E402
from spotgrpo.shared.wire import (  # noqa: E402
    Group,
    Partial,
    Rollout,
    Sampling,
    VersionRun,
    decode_partial,
)
from tests.loops.test_worker_loop import Bench, until, working  # noqa: E402
from tests.tools.tiny_model import build_tiny_model, build_tokenizer  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

LIMIT = 1e-4
TEMPERATURE = 0.7
PROMPT = tuple(build_tokenizer()("max(12, 45) = ")["input_ids"])
FIRST, SECOND = PolicyVersion(1, 1), PolicyVersion(1, 2)
GROUP_SIZE, TOKENS, TOKEN_S = 6, 48, 0.01


# ---- two versions and the trainer that made them ----------------------------------------------------------------


def rollout(ids: Sequence[int], reward: float) -> Rollout:
    return Rollout(
        token_ids=np.array(ids, dtype=np.int32),
        logprobs=np.full(len(ids), -3.0, dtype=np.float32),
        loss_mask=np.ones(len(ids), dtype=np.bool_),
        versions=(VersionRun(PolicyVersion(1, 0), len(ids)),),
        reward=reward,
        reward_parts={},
        finish="length",
    )


def group_to_train(index: int) -> Group:
    random = np.random.default_rng(index)
    return Group(
        run="r",
        task_id=TaskId(index),
        worker="w",
        engine="test",
        engine_version="1",
        manifest_sha256="0" * 64,
        prompt_ids=np.array(PROMPT, dtype=np.int32),
        row={},
        sampling=Sampling(8),
        rollouts=tuple(
            rollout(random.integers(5, 90, 12).tolist(), float(reward)) for reward in (0, 1, 0, 1)
        ),
    )


@dataclass
class Trained:
    """A trainer with the adapters and the states of the versions that it made."""

    trainer: Trainer
    model: Path
    files: dict[PolicyVersion, dict[str, bytes]]
    states: dict[PolicyVersion, bytes]

    def logprobs(self, version: PolicyVersion, group: Group) -> list[np.ndarray[Any, Any]]:
        """What the trainer recomputes for ``group`` under ``version``."""
        self.trainer.restore(self.states[version])
        return list(self.trainer.logprobs(group))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    threads = torch.get_num_threads()
    model = build_tiny_model(tmp_path_factory.mktemp("partials") / "model")
    options = TrainConfig(learning_rate=1e-2, threads=1, device="cpu")
    lora = LoraConfig(rank=4, alpha=8.0)
    trainer = Trainer(ModelConfig(name=str(model)), lora, options, TEMPERATURE, 0)
    found = Trained(trainer, model, {}, {})
    for version in (FIRST, SECOND):
        for index in range(3):
            trainer.step([group_to_train(10 * version.number + index)])
        found.files[version], found.states[version] = trainer.adapter_files(), trainer.state()
    yield found
    torch.set_num_threads(threads)


# ---- an engine that two workers use after each other ------------------------------------------------------------


class Lent:
    """A real engine that outlives its workers, slowed down so that a stop comes in the middle of a group.

    Attributes:
        sampled: tokens that left the model, whoever heard of them.
    """

    max_versions = 4

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._loaded: set[PolicyVersion] = set()
        self._sample = engine._sample
        self.sampled = 0
        engine._sample = self._slowly

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def _slowly(self) -> Any:
        time.sleep(TOKEN_S)
        news = self._sample()
        self.sampled += sum(len(chunk.token_ids) for _, chunk in news)
        return news

    async def load(self, version: PolicyVersion, folder: Path) -> int:
        taken: int = await self._engine.load(version, folder)
        self._loaded.add(version)
        return taken

    async def unload(self, version: PolicyVersion) -> None:
        await self._engine.unload(version)
        self._loaded.discard(version)

    async def close(self) -> None:
        for version in list(self._loaded):
            await self.unload(version)


VLLM = pytest.param(
    "vllm",
    marks=[
        pytest.mark.vllm,
        pytest.mark.skipif(
            importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"
        ),
    ],
)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["transformers", VLLM])
async def engine(request: pytest.FixtureRequest, trained: Trained) -> AsyncIterator[Any]:
    spec = EngineSpec(
        model=str(trained.model),
        lora_rank=4,
        lora_alpha=8.0,
        target_modules=tuple(trained.trainer.target_modules),
        max_inflight=16,
        threads=1,
    )
    made = make_engine(request.param, spec)
    await made.start()
    yield Lent(made)
    await made.close()


@pytest.fixture
def bench(tmp_path: Path, trained: Trained) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    bench.open()
    bench.commit(1, modules=trained.trainer.modules, files=trained.files[FIRST])
    yield bench
    bench.broker.close()


async def cut(bench: Bench, engine: Any, *, after: int) -> Partial:
    """Drain a worker that has ``after`` tokens of the task in the queue; what it leaves."""
    async with working(bench, engine, drain_s=0.0) as (worker, stopping, running):
        await until(lambda: worker._tokens >= after)
        stopping.set()
        await running
    (info,) = bench.store.list(bench.keys.partials)
    return decode_partial(bench.store.get(info.key).body)


async def carried_on(bench: Bench, engine: Any) -> Group:
    """What the next worker makes of it."""
    async with working(bench, engine, worker_id="next"):
        (group,) = await bench.answers(1)
    return group


def expect_prefix(group: Group, partial: Partial) -> None:
    """The partial's tokens and logprobs are the group's first ones, to the byte."""
    for whole, part in zip(group.rollouts, partial.rollouts, strict=True):
        k = len(part.token_ids)
        assert whole.token_ids[:k].tobytes() == part.token_ids.tobytes()
        assert whole.logprobs[:k].tobytes() == part.logprobs.tobytes()
        assert part.finish is None or len(whole.token_ids) == k


async def test_a_greedy_group_cut_and_carried_on_is_that_of_an_uninterrupted_run(
    bench: Bench, engine: Any
) -> None:
    bench.ask(0, tokens=TOKENS, prompt_ids=PROMPT, temperature=0.0)
    async with working(bench, engine, worker_id="whole"):
        (whole,) = await bench.answers(1)
    before = engine.sampled
    bench.ask(1, tokens=TOKENS, prompt_ids=PROMPT, temperature=0.0)
    partial = await cut(bench, engine, after=whole.tokens // 3)
    assert 0 < partial.tokens < whole.tokens
    group = await carried_on(bench, engine)
    expect_prefix(group, partial)
    for ours, uninterrupted in zip(group.rollouts, whole.rollouts, strict=True):
        assert ours.token_ids.tolist() == uninterrupted.token_ids.tolist()
        assert ours.finish == uninterrupted.finish
        assert ours.versions == (VersionRun(FIRST, len(ours.token_ids)),)
        np.testing.assert_allclose(ours.logprobs, uninterrupted.logprobs, atol=LIMIT)
    assert engine.sampled - before == group.tokens == whole.tokens  # none twice, none lost


async def test_a_sampled_group_of_two_versions_has_the_logprobs_of_each_of_them(
    bench: Bench, engine: Any, trained: Trained
) -> None:
    before = engine.sampled
    bench.ask(0, tokens=TOKENS, prompt_ids=PROMPT, temperature=TEMPERATURE, group_size=GROUP_SIZE)
    partial = await cut(bench, engine, after=GROUP_SIZE * 8)
    bench.commit(2, modules=trained.trainer.modules, files=trained.files[SECOND])
    group = await carried_on(bench, engine)
    expect_prefix(group, partial)
    assert engine.sampled - before == group.tokens
    tables = {version: trained.logprobs(version, group) for version in (FIRST, SECOND)}
    continued = 0
    for index, (ours, part) in enumerate(zip(group.rollouts, partial.rollouts, strict=True)):
        k = len(part.token_ids)
        for version, of in ((FIRST, slice(0, k)), (SECOND, slice(k, None))):
            errors = np.abs(tables[version][index][of] - ours.logprobs[of])
            assert errors.max(initial=0.0) < LIMIT
        rest = len(ours.token_ids) - k
        runs = (VersionRun(FIRST, k), VersionRun(SECOND, rest))
        assert ours.versions == tuple(run for run in runs if run.tokens)
        if rest:
            continued += 1
            foreign = np.abs(tables[FIRST][index][k:] - ours.logprobs[k:])
            assert foreign.max() > 0.05, "the versions are told apart"
    assert continued


# ---- segments ---------------------------------------------------------------------------------------------------


async def whole_and_in_segments(
    bench: Bench, engine: Any, temperature: float
) -> tuple[Group, Group]:
    """The same question as one request a rollout, and in segments."""
    found = []
    for index, options in enumerate(({}, {"segment_tokens": 7})):
        bench.ask(index, tokens=TOKENS, prompt_ids=PROMPT, temperature=temperature)
        async with working(bench, engine, worker_id=f"w{index}", **options):
            found += await bench.answers(1)
    return found[0], found[1]


async def test_a_greedy_group_in_segments_is_that_of_one_request_a_rollout(
    bench: Bench, engine: Any
) -> None:
    before = engine.sampled
    whole, segmented = await whole_and_in_segments(bench, engine, temperature=0.0)
    assert engine.sampled - before == whole.tokens + segmented.tokens
    for one, other in zip(whole.rollouts, segmented.rollouts, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert (one.finish, one.versions) == (other.finish, other.versions)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=LIMIT)


async def test_a_sampled_group_in_segments_is_the_same_one_with_the_transformers_engine(
    bench: Bench, engine: Any, trained: Trained
) -> None:
    whole, segmented = await whole_and_in_segments(bench, engine, TEMPERATURE)
    for plain, ours in zip(trained.logprobs(FIRST, segmented), segmented.rollouts, strict=True):
        np.testing.assert_allclose(plain, ours.logprobs, atol=LIMIT)
    if engine.name == "transformers":  # vLLM begins a stream of its own with each request
        for one, other in zip(whole.rollouts, segmented.rollouts, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()


async def test_a_group_that_switches_has_the_logprobs_of_the_versions_that_it_names(
    bench: Bench, engine: Any, trained: Trained
) -> None:
    bench.ask(0, tokens=TOKENS, prompt_ids=PROMPT, temperature=TEMPERATURE, group_size=GROUP_SIZE)
    async with working(bench, engine, segment_tokens=5, inflight="switch") as (worker, _, _):
        await until(lambda: worker._tokens >= GROUP_SIZE * 4)
        bench.commit(2, modules=trained.trainer.modules, files=trained.files[SECOND])
        (group,) = await bench.answers(1)
    tables = {version: trained.logprobs(version, group) for version in (FIRST, SECOND)}
    switched = 0
    for index, ours in enumerate(group.rollouts):
        start = 0
        for ran in ours.versions:
            of = slice(start, start + ran.tokens)
            errors = np.abs(tables[ran.version][index][of] - ours.logprobs[of])
            assert errors.max() < LIMIT
            start += ran.tokens
        if len(ours.versions) == 2:
            switched += 1
            assert ours.versions[0].version == FIRST
            assert ours.versions[0].tokens % 5 == 0
            foreign = np.abs(tables[FIRST][index][of] - ours.logprobs[of])
            assert foreign.max() > 0.05, "the versions are told apart"
    assert switched
