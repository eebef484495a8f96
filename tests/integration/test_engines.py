"""All engines for real, held against a plain transformers and peft forward pass on the same weights.

The model's own ``generation_config.json`` asks for a low temperature and top_k 3 throughout, as many hub models
do: an engine that listened to it would fail every comparison of logprobs.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import socket
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from spotgrpo.producer.engines.base import Engine, EngineSpec, GenerationRequest, ServersSpec
from spotgrpo.producer.engines.decoding import sample
from spotgrpo.producer.engines.registry import make_engine, resolve_engine
from spotgrpo.producer.engines.threaded import Running
from spotgrpo.shared.errors import ConfigError, IntegrityError, SpotGRPOError
from spotgrpo.shared.ids import PolicyVersion
from spotgrpo.shared.wire import Sampling
from tests.tools.tiny_model import (
    build_adapter,
    build_tiny_model,
    build_tokenizer,
    set_generation_defaults,
)
from tests.tools.vllm_process import API_KEY, VLLMProcess

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterable, Iterator

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(300),
]

TOLERANCE = {"transformers": 1e-4, "vllm": 1e-3, "vllm-server": 1e-3}
TARGETS = ("q_proj", "v_proj")
PROMPTS = ("max(12, 45) = ", "Say", "The quick brown fox jumps over the lazy dog, twice: ")
END_IDS = {1, 2}
IN_FLIGHT = 32
TOKENIZER = build_tokenizer()
FIRST, SECOND = PolicyVersion(1, 1), PolicyVersion(1, 2)


@dataclass
class Answer:
    """What an iterator gave in all."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish: str | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def text(self) -> str:
        return TOKENIZER.decode(self.token_ids, skip_special_tokens=True)


def encode(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER(text)["input_ids"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def children() -> set[int]:
    """Child processes of this one, whichever of its threads started them."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(pid) for path in lists for pid in path.read_text().split()}


class Names:
    """Request ids and versions that no test used before."""

    def __init__(self) -> None:
        self.requests, self.versions = 0, 100

    def request(self) -> str:
        self.requests += 1
        return f"request-{self.requests}"

    def version(self) -> PolicyVersion:
        self.versions += 1
        return PolicyVersion(1, self.versions)


NAMES = Names()


def request(
    prompt: str = PROMPTS[0],
    *,
    seed: int = 0,
    version: PolicyVersion = FIRST,
    prefix: Iterable[int] = (),
    request_id: str | None = None,
    max_new_tokens: int = 24,
    **sampling: Any,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=request_id or NAMES.request(),
        prompt_ids=encode(prompt),
        sampling=Sampling(max_new_tokens, **sampling),
        seed=seed,
        version=version,
        prefix_ids=tuple(prefix),
    )


async def listen(engine: Engine, asked: GenerationRequest, got: Answer) -> None:
    async for chunk in engine.submit(asked):
        assert len(chunk.token_ids) == len(chunk.logprobs)
        got.token_ids += chunk.token_ids
        got.logprobs += chunk.logprobs
        got.finish = chunk.finish
        got.begun.set()


async def answer(engine: Engine, asked: GenerationRequest) -> Answer:
    got = Answer()
    await listen(engine, asked, got)
    return got


async def answers(engine: Engine, asked: list[GenerationRequest]) -> list[Answer]:
    return list(await asyncio.gather(*(answer(engine, each) for each in asked)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = build_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
    set_generation_defaults(folder, temperature=0.1, top_k=3, top_p=0.5, repetition_penalty=1.5)
    return folder


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[PolicyVersion, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        version: build_adapter(root / str(version), model, seed=version.number)
        for version in (FIRST, SECOND)
    }


class Reference:
    """Logprobs of a plain forward pass: one sequence, no cache, no batch."""

    def __init__(self, model: Path, adapters: dict[PolicyVersion, Path]) -> None:
        base = LlamaForCausalLM.from_pretrained(model)
        self._model = PeftModel.from_pretrained(base, adapters[FIRST], adapter_name="1").eval()
        self._model.load_adapter(adapters[SECOND], adapter_name="2")

    def logprobs(
        self, version: PolicyVersion | None, ids: Iterable[int], temperature: float = 1.0
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Of ``ids[1:]``, each given what stands before it."""
        tensor = torch.tensor([list(ids)])
        with torch.no_grad():
            if version is None:
                with self._model.disable_adapter():
                    logits = self._model(tensor).logits[0, :-1]
            else:
                self._model.set_adapter(str(version.number))
                logits = self._model(tensor).logits[0, :-1]
        table = torch.log_softmax(logits.float() / temperature, dim=-1)
        return table.gather(1, tensor[0, 1:, None])[:, 0].numpy()

    def error(self, asked: GenerationRequest, got: Answer) -> float:
        """Largest difference between an answer's logprobs and the plain ones."""
        given = len(asked.prompt_ids) + len(asked.prefix_ids)
        ids = [*asked.prompt_ids, *asked.prefix_ids, *got.token_ids]
        plain = self.logprobs(asked.version, ids, asked.sampling.temperature or 1.0)
        return float(np.abs(plain[given - 1 :] - np.array(got.logprobs)).max())


@pytest.fixture(scope="module")
def reference(model: Path, adapters: dict[PolicyVersion, Path]) -> Reference:
    return Reference(model, adapters)


def spec_for(folder: Path, /, **changes: Any) -> EngineSpec:
    settings: dict[str, Any] = {
        "model": str(folder),
        "lora_rank": 4,
        "lora_alpha": 8.0,
        "target_modules": TARGETS,
        "max_inflight": IN_FLIGHT,
        "threads": 1,
    }
    return EngineSpec(**(settings | changes))


NEEDS_VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]
VLLM = pytest.param("vllm", marks=NEEDS_VLLM)
VLLM_SERVER = pytest.param("vllm-server", marks=NEEDS_VLLM)


@pytest.fixture(scope="module")
def vllm_process(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMProcess]:
    process = VLLMProcess(model, tmp_path_factory.mktemp("server"), free_port())
    process.start()
    yield process
    process.kill()


def spec_of(name: str, model: Path, request: pytest.FixtureRequest) -> EngineSpec:
    if name != "vllm-server":
        return spec_for(model)
    url = request.getfixturevalue("vllm_process").url
    return spec_for(model, servers=ServersSpec((url,), API_KEY))


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["transformers", VLLM, VLLM_SERVER]
)
async def engine(
    request: pytest.FixtureRequest, model: Path, adapters: dict[PolicyVersion, Path]
) -> AsyncIterator[Engine]:
    spec = spec_of(request.param, model, request)
    processes = children()
    made = make_engine(request.param, spec)
    await made.start()
    for version, folder in adapters.items():
        assert await made.load(version, folder) == 4  # two modules in each of two layers
    yield made
    if made.name != "vllm-server":  # a child would go on after a SIGKILL of the worker
        assert children() <= processes
    await made.close()
    assert f"{made.name}-engine" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture
def tolerance(engine: Engine) -> float:
    return TOLERANCE[engine.name]


# ---- logprobs --------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_behaviour_logprobs_equal_recomputed_ones(
    engine: Engine, reference: Reference, tolerance: float, temperature: float
) -> None:
    asked = [
        request(prompt, seed=seed, temperature=temperature, version=version)
        for prompt in PROMPTS
        for seed in range(4)
        for version in (FIRST, SECOND)
    ]
    got = await answers(engine, asked)
    errors = [reference.error(*pair) for pair in zip(asked, got, strict=True)]
    assert max(errors) < tolerance


async def test_the_models_own_generation_settings_do_not_limit_sampling(
    engine: Engine,
) -> None:
    got = await answers(engine, [request(seed=seed, max_new_tokens=1) for seed in range(64)])
    # Under top_k 3 there would be three first tokens at most.
    assert len({each.token_ids[0] for each in got}) > 8


async def test_greedy_takes_the_likeliest_token_and_reports_it_at_temperature_one(
    engine: Engine, reference: Reference, tolerance: float
) -> None:
    asked = request(temperature=0.0)
    got = await answer(engine, asked)
    assert reference.error(asked, got) < tolerance
    others = await answers(engine, [request(seed=seed, temperature=0.0) for seed in range(1, 4)])
    assert all(other.token_ids == got.token_ids for other in others)


async def test_scores_are_those_of_the_version_and_of_the_base(
    engine: Engine, reference: Reference, tolerance: float
) -> None:
    ids = encode(PROMPTS[2])
    for version in (FIRST, SECOND, None):
        scores = await engine.score(version, ids)
        assert scores.dtype == np.float32
        assert scores.shape == (len(ids) - 1,)
        assert np.abs(scores - reference.logprobs(version, ids)).max() < tolerance


async def test_scoring_goes_on_beside_running_requests(
    engine: Engine, reference: Reference, tolerance: float
) -> None:
    asked = [request(seed=seed, max_new_tokens=60) for seed in range(4)]
    running = [asyncio.create_task(answer(engine, each)) for each in asked]
    ids = encode(PROMPTS[1])
    scores = await engine.score(SECOND, ids)
    assert np.abs(scores - reference.logprobs(SECOND, ids)).max() < tolerance
    for each, task in zip(asked, running, strict=True):
        assert reference.error(each, await task) < tolerance


async def test_scoring_does_not_wait_for_a_sequence_to_end_where_all_places_are_taken(
    engine: Engine,
) -> None:
    if engine.name == "vllm-server":
        pytest.skip("how many sequences a server takes is its own affair")
    tried = [request("Say", seed=seed, max_new_tokens=60) for seed in range(3 * IN_FLIGHT)]
    lengths = [len(each.token_ids) for each in await answers(engine, tried)]
    longest = sorted(range(len(tried)), key=lambda seed: -lengths[seed])[:IN_FLIGHT]
    asked = [request("Say", seed=seed, max_new_tokens=60) for seed in longest]
    heard = [Answer() for _ in asked]
    running = [
        asyncio.create_task(listen(engine, each, into))
        for each, into in zip(asked, heard, strict=True)
    ]
    await asyncio.gather(*(into.begun.wait() for into in heard))
    await engine.score(SECOND, encode(PROMPTS[1]))
    assert not any(into.finish for into in heard)
    await asyncio.gather(*running)
    assert all(into.finish for into in heard)


async def test_more_prompt_tokens_than_a_step_takes_end_no_engine(
    engine: Engine, reference: Reference, tolerance: float
) -> None:
    """vLLM splits prompts between steps then, and on a CPU dies of a request with a seed that it split."""
    asked = [request(f"{number} {'Say it again. ' * 34}", seed=number) for number in range(6)]
    for each, got in zip(asked, await answers(engine, asked), strict=True):
        assert reference.error(each, got) < tolerance


# ---- randomness ------------------------------------------------------------------------------------


async def test_the_same_seed_gives_the_same_completion_whatever_it_is_batched_with(
    engine: Engine,
) -> None:
    alone = await answer(engine, request(seed=7))
    crowd = await answers(engine, [request(PROMPTS[i % 3], seed=i) for i in range(16)])
    again = await answers(
        engine, [request(seed=7), *(request(PROMPTS[2], seed=i) for i in range(9))]
    )
    assert again[0].token_ids == alone.token_ids
    assert len({tuple(each.token_ids) for each in crowd}) == len(crowd)


async def test_sampling_follows_the_distribution() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0, -30.0])
    rows: list[Running | None] = [
        Running(request(seed=seed, temperature=0.5)) for seed in range(6000)
    ]
    tokens, logprobs = sample(logits.repeat(len(rows), 1), rows)
    probabilities = torch.softmax(logits / 0.5, dim=0)
    counts = torch.bincount(tokens, minlength=5) / len(rows)
    assert (counts - probabilities).abs().max() < 0.02
    assert torch.allclose(logprobs, probabilities.log()[tokens])


# ---- versions --------------------------------------------------------------------------------------


async def test_two_versions_at_once_answer_with_their_own_weights(
    engine: Engine, reference: Reference, tolerance: float
) -> None:
    asked = [request(seed=seed, version=v) for seed in range(4) for v in (FIRST, SECOND)]
    got = await answers(engine, asked)
    for each, its in zip(asked, got, strict=True):
        assert reference.error(each, its) < tolerance
        other = FIRST if each.version == SECOND else SECOND
        ids = [*each.prompt_ids, *its.token_ids]
        foreign = reference.logprobs(other, ids)[len(each.prompt_ids) - 1 :]
        assert np.abs(foreign - np.array(its.logprobs)).max() > 0.1


async def test_adoption_in_mid_generation_leaves_running_requests_on_their_version(
    engine: Engine, reference: Reference, tolerance: float, adapters: dict[PolicyVersion, Path]
) -> None:
    asked = [request(seed=seed, max_new_tokens=200) for seed in range(8)]
    streams = [engine.submit(each) for each in asked]
    got = [Answer() for _ in asked]
    for stream, its in zip(streams, got, strict=True):
        async for chunk in stream:
            its.token_ids += chunk.token_ids
            its.logprobs += chunk.logprobs
            its.finish = chunk.finish
            if len(its.token_ids) >= 3:
                break
    newest = NAMES.version()
    await engine.load(newest, adapters[SECOND])
    fresh = request(seed=1, version=newest)
    its_answer = await answer(engine, fresh)
    after = 0
    for stream, its in zip(streams, got, strict=True):
        async for chunk in stream:
            its.token_ids += chunk.token_ids
            its.logprobs += chunk.logprobs
            after += len(chunk.token_ids)
    await engine.unload(newest)
    assert after > 100
    assert max(reference.error(*pair) for pair in zip(asked, got, strict=True)) < tolerance
    as_second = GenerationRequest(**(vars(fresh) | {"version": SECOND}))
    assert reference.error(as_second, its_answer) < tolerance


async def test_versions_come_and_go_thirty_times(
    engine: Engine, reference: Reference, tolerance: float, adapters: dict[PolicyVersion, Path]
) -> None:
    held = [NAMES.version()]
    await engine.load(held[0], adapters[FIRST])
    for turn in range(30):
        held.append(NAMES.version())
        await engine.load(held[-1], adapters[SECOND if turn % 2 else FIRST])
        await engine.unload(held.pop(0))
        got = await answer(engine, request(version=held[0], max_new_tokens=2))
        assert got.token_ids
    asked = request(version=held[0], seed=3)
    got = await answer(engine, asked)
    as_second = GenerationRequest(**(vars(asked) | {"version": SECOND}))
    assert reference.error(as_second, got) < tolerance
    await engine.unload(held[0])


async def test_a_version_that_is_in_use_cannot_go(
    engine: Engine, adapters: dict[PolicyVersion, Path]
) -> None:
    version = NAMES.version()
    await engine.load(version, adapters[FIRST])
    asked = request(version=version, max_new_tokens=300, temperature=0.0)
    stream = engine.submit(asked)
    await anext(stream)
    with pytest.raises(SpotGRPOError, match="1 requests run on it"):
        await engine.unload(version)
    await engine.abort(asked.request_id)
    async for _ in stream:
        pass
    await engine.unload(version)
    with pytest.raises(SpotGRPOError, match="is not loaded"):
        await answer(engine, request(version=version))


async def test_more_versions_than_agreed_are_refused(
    engine: Engine, adapters: dict[PolicyVersion, Path]
) -> None:
    extra = [
        NAMES.version() for _ in range(3)
    ]  # two are loaded, max_versions is 4, one may be over
    for version in extra:
        await engine.load(version, adapters[FIRST])
    with pytest.raises(SpotGRPOError, match="unload one first"):
        await engine.load(NAMES.version(), adapters[FIRST])
    with pytest.raises(SpotGRPOError, match="loaded already"):
        await engine.load(extra[0], adapters[FIRST])
    for version in extra:
        await engine.unload(version)


async def test_a_long_prompt_is_not_answered_from_the_cache_of_another_version(
    engine: Engine, reference: Reference, tolerance: float, adapters: dict[PolicyVersion, Path]
) -> None:
    prompt = PROMPTS[2] * 3  # several blocks of vLLM's prefix cache
    again = NAMES.version()
    await engine.score(None, encode(prompt))
    for version in (FIRST, SECOND, FIRST):
        asked = request(prompt, version=version)
        assert reference.error(asked, await answer(engine, asked)) < tolerance
    await engine.load(again, adapters[SECOND])
    asked = request(prompt, version=again)
    as_second = GenerationRequest(**(vars(asked) | {"version": SECOND}))
    assert reference.error(as_second, await answer(engine, asked)) < tolerance
    await engine.unload(again)


def spoil_names(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = {key.replace("layers", "blocks"): value for key, value in load_file(path).items()}
    save_file(tensors, path)


def spoil_shapes(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({key: value[..., :2].contiguous() for key, value in load_file(path).items()}, path)


def spoil_by_losing_a_module(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    kept = {
        key: value for key, value in load_file(path).items() if "layers.1.self_attn.v" not in key
    }
    save_file(kept, path)


def spoil_by_losing_a_half(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors.pop(next(iter(tensors)))
    save_file(tensors, path)


def spoil_with_a_leftover(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    save_file(load_file(path) | {"base_model.model.lm_head.weight": torch.zeros(2, 2)}, path)


def spoil_by_cutting(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def spoil_kind(folder: Path) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"peft_type": "IA3"}))


@pytest.mark.parametrize(
    "spoil",
    [
        spoil_names,
        spoil_shapes,
        spoil_by_losing_a_module,
        spoil_by_losing_a_half,
        spoil_with_a_leftover,
        spoil_by_cutting,
        spoil_kind,
    ],
)
async def test_an_adapter_that_does_not_fit_is_refused_and_leaves_nothing_behind(
    engine: Engine, model: Path, adapters: dict[PolicyVersion, Path], tmp_path: Path, spoil: Any
) -> None:
    version = NAMES.version()
    spoiled = build_adapter(tmp_path / "spoiled", model)
    spoil(spoiled)
    with pytest.raises(IntegrityError, match="adapter spoiled"):
        await engine.load(version, spoiled)
    with pytest.raises(SpotGRPOError, match="is not loaded"):
        await answer(engine, request(version=version))
    assert await engine.load(version, adapters[FIRST]) == 4
    await engine.unload(version)


@pytest.mark.parametrize(
    ("targets", "rank"), [(("q_proj", "v_proj"), 8), (("q_proj", "v_proj", "o_proj"), 4)]
)
async def test_a_higher_rank_or_other_modules_than_the_runs_are_refused(
    engine: Engine, model: Path, tmp_path: Path, targets: tuple[str, ...], rank: int
) -> None:
    folder = build_adapter(tmp_path / "other", model, rank=rank, target_modules=targets)
    with pytest.raises(IntegrityError, match="adapter other"):
        await engine.load(NAMES.version(), folder)


def keep_as_bfloat16(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = {key: one.to(torch.bfloat16) for key, one in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


def scale_by(**config: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))

    return change


@pytest.mark.parametrize(
    "change",
    [
        keep_as_bfloat16,
        scale_by(use_rslora=True),
        scale_by(lora_alpha=6.5),
        scale_by(alpha_pattern={"v_proj": 3}),
    ],
    ids=["bfloat16", "rslora", "alpha", "alpha_pattern"],
)
async def test_an_adapter_is_served_as_what_it_is(
    engine: Engine, model: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    """In its own precision and at its own scale, as transformers and peft apply it."""
    version = NAMES.version()
    folder = build_adapter(tmp_path / "adapter", model, seed=5)
    ids = encode(PROMPTS[2])
    unchanged = Reference(model, {FIRST: folder, SECOND: folder}).logprobs(FIRST, ids)
    change(folder)
    expected = Reference(model, {FIRST: folder, SECOND: folder}).logprobs(FIRST, ids)
    assert np.abs(unchanged - expected).max() > 1e-3  # or the change could be passed over
    assert await engine.load(version, folder) == 4
    scores = await engine.score(version, ids)
    await engine.unload(version)
    assert np.abs(scores - expected).max() < 1e-4


# ---- requests --------------------------------------------------------------------------------------


async def test_an_abort_keeps_what_it_has(engine: Engine) -> None:
    asked = request(temperature=0.0, max_new_tokens=300)
    whole = await answer(engine, request(temperature=0.0, max_new_tokens=300))
    assert len(whole.token_ids) > 20
    got = Answer()
    async for chunk in engine.submit(asked):
        got.token_ids += chunk.token_ids
        got.finish = chunk.finish
        if len(got.token_ids) >= 5:  # a chunk may hold several; a second abort is of nobody
            await engine.abort(asked.request_id)
    assert got.finish == "abort"
    assert 5 <= len(got.token_ids) < len(whole.token_ids)
    assert whole.token_ids[: len(got.token_ids)] == got.token_ids
    await engine.abort("nobody")


async def test_leaving_the_iterator_aborts_the_request(
    engine: Engine, adapters: dict[PolicyVersion, Path]
) -> None:
    version = NAMES.version()
    await engine.load(version, adapters[FIRST])
    stream: Any = engine.submit(request(version=version, max_new_tokens=300, temperature=0.0))
    await anext(stream)
    await stream.aclose()
    await engine.unload(version)  # refused while the request runs


@pytest.mark.parametrize("cut", [1, 9])
async def test_a_prefix_goes_on_where_it_stopped(
    engine: Engine, reference: Reference, tolerance: float, cut: int
) -> None:
    whole = await answer(engine, request(temperature=0.0, max_new_tokens=20))
    asked = request(temperature=0.0, max_new_tokens=20, prefix=whole.token_ids[:cut])
    rest = await answer(engine, asked)
    assert rest.token_ids == whole.token_ids[cut:]
    assert rest.finish == whole.finish
    assert reference.error(asked, rest) < tolerance
    sampled = await answer(engine, request(seed=5, max_new_tokens=20))
    asked = request(seed=5, max_new_tokens=20, prefix=sampled.token_ids[:cut])
    rest = await answer(engine, asked)
    assert reference.error(asked, rest) < tolerance
    if engine.name == "transformers":  # its random stream is a function of seed and position
        assert rest.token_ids == sampled.token_ids[cut:]


async def test_a_prefix_that_is_whole_already_needs_no_token(engine: Engine) -> None:
    ended = await answer(engine, request(prefix=[40, 41, 1]))
    assert (ended.token_ids, ended.finish) == ([], "stop")
    full = await answer(engine, request(prefix=[40, 41, 42], max_new_tokens=3))
    assert (full.token_ids, full.finish) == ([], "length")


async def test_stop_strings_end_with_the_token_that_completes_them(engine: Engine) -> None:
    whole = await answer(engine, request(seed=11, max_new_tokens=60))
    stop = whole.text[6:8]
    asked = request(seed=11, max_new_tokens=60, stop=("never seen", stop))
    got = await answer(engine, asked)
    end = whole.text.index(stop) + 2
    assert got.finish == "stop"
    assert got.text == whole.text[:end]
    assert got.token_ids == whole.token_ids[: len(got.token_ids)]


async def test_a_stop_string_may_begin_in_the_prefix(engine: Engine) -> None:
    whole = await answer(engine, request(temperature=0.0, max_new_tokens=30))
    stop = whole.text[6:8]
    end = whole.text.index(stop) + 2
    prefix = whole.token_ids[: end - 1]
    asked = request(temperature=0.0, max_new_tokens=30, prefix=prefix, stop=(stop,))
    got = await answer(engine, asked)
    assert got.finish == "stop"
    assert prefix + got.token_ids == whole.token_ids[:end]


async def test_stop_token_ids_end_a_completion_and_are_kept(engine: Engine) -> None:
    whole = await answer(engine, request(seed=11, max_new_tokens=60))
    stop = whole.token_ids[5]
    got = await answer(engine, request(seed=11, max_new_tokens=60, stop_token_ids=(stop,)))
    assert got.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert got.finish == "stop"


async def test_every_end_token_of_the_model_ends_a_completion(engine: Engine) -> None:
    got = await answers(engine, [request(seed=seed, max_new_tokens=80) for seed in range(60)])
    ends = Counter(each.token_ids[-1] for each in got if each.finish == "stop")
    assert set(ends) == END_IDS
    for each in got:
        assert not END_IDS.intersection(each.token_ids[:-1])
        assert each.finish == "stop" or len(each.token_ids) == 80


async def test_the_token_limit_and_the_context_cut_a_completion(engine: Engine) -> None:
    short = await answer(engine, request(temperature=0.0, max_new_tokens=3))
    assert (len(short.token_ids), short.finish) == (3, "length")
    long = await answers(engine, [request("x" * 508, seed=s, max_new_tokens=99) for s in range(8)])
    assert max(len(each.token_ids) for each in long) == 4
    with pytest.raises(ConfigError, match="a prompt must have 1 to 511 tokens"):
        await answer(engine, request("x" * 512))


async def test_tokens_that_the_model_does_not_have_end_the_request_and_not_the_engine(
    engine: Engine,
) -> None:
    asked = GenerationRequest(NAMES.request(), (5, 100_000), Sampling(4), seed=0, version=FIRST)
    with pytest.raises(SpotGRPOError, match="not one of the model's"):
        await answer(engine, asked)
    with pytest.raises(SpotGRPOError, match="not one of the model's"):
        await engine.score(None, (5, -1))
    with pytest.raises(SpotGRPOError, match="512 tokens are not 1 to 511"):
        await engine.score(None, [7] * 512)
    assert (await answer(engine, request())).token_ids


async def test_requests_that_come_one_by_one_join_those_that_run(
    engine: Engine, reference: Reference, tolerance: float
) -> None:
    asked = [
        request(PROMPTS[i % 3], seed=i, max_new_tokens=40, temperature=(1.0, 0.7, 0.0)[i % 3])
        for i in range(40)  # more than max_inflight
    ]
    tasks = []
    for each in asked:
        tasks.append(asyncio.create_task(answer(engine, each)))
        await asyncio.sleep(0.003)
    got = await asyncio.gather(*tasks)
    assert max(reference.error(*pair) for pair in zip(asked, got, strict=True)) < tolerance


@pytest.mark.parametrize("engine", [VLLM_SERVER], indirect=True, scope="module")
async def test_a_killed_server_is_loaded_again_before_it_serves_and_requests_go_on(
    engine: Engine, reference: Reference, tolerance: float, vllm_process: VLLMProcess
) -> None:
    asked = [
        request(seed=seed, version=version, max_new_tokens=200)
        for seed in range(4)
        for version in (FIRST, SECOND)
    ]
    running = [asyncio.create_task(answer(engine, each)) for each in asked]
    await asyncio.sleep(0.5)
    await asyncio.to_thread(vllm_process.kill)
    assert not all(task.done() for task in running)
    await asyncio.to_thread(vllm_process.start)
    got = await asyncio.gather(*running)
    assert max(reference.error(*pair) for pair in zip(asked, got, strict=True)) < tolerance


# ---- life and death --------------------------------------------------------------------------------


async def test_closing_ends_running_requests_with_abort(
    model: Path, adapters: dict[PolicyVersion, Path]
) -> None:
    engine = make_engine("transformers", spec_for(model))
    await engine.start()
    await engine.load(FIRST, adapters[FIRST])
    stream = engine.submit(request(max_new_tokens=400, temperature=0.0))
    await anext(stream)
    await engine.close()
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].finish == "abort"
    await engine.close()
    with pytest.raises(SpotGRPOError, match="is closed"):
        await engine.score(None, (5, 6, 7))
    with pytest.raises(SpotGRPOError, match="is closed"):
        await answer(engine, request())


async def test_the_death_of_an_engine_reaches_everyone_who_waits(
    model: Path, adapters: dict[PolicyVersion, Path]
) -> None:
    engine: Any = make_engine("transformers", spec_for(model))
    await engine.start()
    await engine.load(FIRST, adapters[FIRST])
    stream = engine.submit(request(max_new_tokens=400, temperature=0.0))
    await anext(stream)
    del engine._model.config.vocab_size, engine._decoder
    with pytest.raises(SpotGRPOError, match="the transformers engine died: AttributeError"):
        async for _ in stream:
            pass
    with pytest.raises(SpotGRPOError, match="died"):
        await answer(engine, request())
    with pytest.raises(SpotGRPOError, match="died"):
        await engine.score(None, (5, 6, 7))
    await engine.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "/no/such/model"}, "model.name = '/no/such/model'"),
        ({"target_modules": ("q_proj", "qq_proj")}, "lora.target_modules = 'qq_proj'"),
        ({"max_context": 4096}, "model.max_context = 4096"),
    ],
)
@pytest.mark.parametrize("name", ["transformers", VLLM])
async def test_a_spec_that_does_not_fit_is_a_config_error(
    model: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    engine = make_engine(name, spec_for(model, **changes))
    with pytest.raises(ConfigError, match=message):
        await engine.start()
    await engine.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_modules": ("q_proj", "lm_head")}, "lora.target_modules = 'lm_head': leave the"),
        ({"target_modules": ("qkv_proj",)}, "lora.target_modules = 'qkv_proj': the model has"),
        ({"lora_rank": 1024}, "lora.rank = 1024: vLLM serves ranks up to 512"),
        ({"vllm": {"logprobs_mode": "raw_logprobs"}}, "worker.vllm.logprobs_mode = 'raw_logprobs'"),
        ({"vllm": {"generation_config": "auto"}}, "worker.vllm.generation_config = 'auto': leave"),
        (
            {"vllm": {"override_generation_config": {"top_p": 0.9}}},
            "worker.vllm.override_generation_config = {'top_p': 0.9}: leave it out: behaviour",
        ),
        ({"vllm": {"dtype": "bfloat16"}}, "worker.vllm.dtype = 'bfloat16': set model.dtype"),
        ({"vllm": {"lora_target_modules": ["q_proj"]}}, "worker.vllm.lora_target_modules = "),
    ],
)
@pytest.mark.parametrize("name", [VLLM])
async def test_what_vllm_would_serve_otherwise_than_it_is_trained_is_a_config_error(
    model: Path, name: str, changes: dict[str, Any], message: str
) -> None:
    engine = make_engine(name, spec_for(model, **changes))
    with pytest.raises(ConfigError) as caught:
        await engine.start()
    assert str(caught.value).startswith(message)
    await engine.close()


@pytest.mark.parametrize("name", [VLLM])
async def test_a_module_that_vllm_puts_no_adapter_on_is_named_at_the_start(
    model: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault put in: a vLLM that has a place for q_proj alone. It would serve half an adapter without a word."""
    from spotgrpo.producer.engines import vllm

    whole = vllm.engine_arguments

    def without_o(*args: Any) -> dict[str, Any]:
        return whole(*args) | {"lora_target_modules": ["q_proj"]}

    monkeypatch.setattr(vllm, "engine_arguments", without_o)
    engine = make_engine(name, spec_for(model, target_modules=("q_proj", "o_proj")))
    with pytest.raises(ConfigError, match="vLLM puts no adapter on o_proj of this model") as caught:
        await engine.start()
    assert caught.value.key == "lora.target_modules"
    await engine.close()


async def test_auto_is_vllm_where_it_is_installed() -> None:
    installed = importlib.util.find_spec("vllm") is not None
    assert resolve_engine("auto") == ("vllm" if installed else "transformers")
    with pytest.raises(ConfigError, match=r"worker\.engine = 'llama'"):
        resolve_engine("llama")


@pytest.mark.vllm
async def test_the_users_environment_wins(monkeypatch: pytest.MonkeyPatch, model: Path) -> None:
    from spotgrpo.producer.engines.vllm import prepare_environment

    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    prepare_environment(spec_for(model))
    assert os.environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"
    monkeypatch.delenv("VLLM_NO_USAGE_STATS")
