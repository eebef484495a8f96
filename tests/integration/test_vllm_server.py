"""Faults of vLLM servers, played by servers without a model. That a real one gives the right numbers: test_engines."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from spotgrpo.cli.vllm_servers import look_at_servers
from spotgrpo.producer.engines import server_api, server_pool, vllm_server
from spotgrpo.producer.engines.base import (
    EngineSpec,
    GenerationRequest,
    RequestRefused,
    ServersSpec,
)
from spotgrpo.producer.engines.registry import make_engine
from spotgrpo.producer.engines.server_check import Demands
from spotgrpo.producer.engines.vllm_server import VLLMServerEngine
from spotgrpo.producer.evaluate import Evaluation
from spotgrpo.producer.policy import PolicyWatcher
from spotgrpo.shared.config import Config, WorkerView
from spotgrpo.shared.errors import ConfigError, IntegrityError, SpotGRPOError, TransientError
from spotgrpo.shared.ids import Keys, PolicyVersion
from spotgrpo.shared.manifest import Probe
from spotgrpo.shared.memory.store import MemoryStore
from spotgrpo.shared.wire import Sampling
from tests.tools.fake_vllm import MOVED, FakeVLLM, logprob_of, token_after
from tests.tools.loop_world import RUN, config_of, document_of
from tests.tools.tiny_model import build_adapter, build_tiny_model

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]

FIRST, SECOND = PolicyVersion(1, 1), PolicyVersion(1, 2)
PROMPT = (20, 30, 40)
IDS = (20, 30, 40, 50)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_adapter(tmp_path_factory.mktemp("adapters") / "adapter", model)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_pool, "CHECK_S", 0.1)
    monkeypatch.setattr(server_pool, "FIRST_PAUSE_S", 0.05)
    monkeypatch.setattr(server_pool, "LONGEST_PAUSE_S", 0.1)
    monkeypatch.setattr(vllm_server, "SETTLE_S", 0.05)


@pytest_asyncio.fixture
async def servers(model: Path) -> AsyncIterator[list[FakeVLLM]]:
    """Two that run, with ports of their own."""
    made = [FakeVLLM(str(model)) for _ in range(2)]
    for server in made:
        await server.start()
    yield made
    for server in made:
        await server.kill()


@pytest_asyncio.fixture
async def start(model: Path) -> AsyncIterator[Callable[..., Any]]:
    """Start an engine on servers; it is closed after the test."""
    made: list[VLLMServerEngine] = []

    async def begin(*servers: FakeVLLM, dtype: str = "float32", **options: Any) -> VLLMServerEngine:
        spec = EngineSpec(
            model=str(model),
            dtype=dtype,
            lora_rank=4,
            lora_alpha=8.0,
            target_modules=("q_proj", "v_proj"),
            servers=ServersSpec(
                tuple(server.url for server in servers), **({"timeout_s": 5.0} | options)
            ),
        )
        engine = make_engine("vllm-server", spec)
        assert isinstance(engine, VLLMServerEngine)
        made.append(engine)
        await engine.start()
        return engine

    yield begin
    for engine in made:
        await engine.close()


def request(number: int = 0, tokens: int = 40, version: PolicyVersion = FIRST) -> GenerationRequest:
    return GenerationRequest(
        f"request-{number}", (*PROMPT, 10 + number), Sampling(tokens, 0.7), number, version
    )


async def answer(engine: VLLMServerEngine, asked: GenerationRequest) -> list[int]:
    """The tokens of a whole completion, each the one that had to come there."""
    token_ids: list[int] = []
    logprobs: list[float] = []
    finish = None
    async for chunk in engine.submit(asked):
        token_ids += chunk.token_ids
        logprobs += chunk.logprobs
        finish = chunk.finish
    sequence = list(asked.prompt_ids)
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        assert token_id == token_after(sequence)
        assert logprob == logprob_of(token_id, asked.sampling.temperature)
        sequence.append(token_id)
    assert (len(token_ids), finish) == (asked.sampling.max_new_tokens, "length")
    return token_ids


def streams(server: FakeVLLM) -> list[dict[str, Any]]:
    return [asked for asked in server.requests if asked.get("stream")]


def policy_on(engine: VLLMServerEngine, cache: Path, dtype: str) -> PolicyWatcher:
    """What judges an engine's versions."""
    document = document_of(config_of())
    return PolicyWatcher(
        MemoryStore(),
        Keys(RUN),
        engine,
        document,
        cache_dir=cache,
        poll_s=1.0,
        keep=3,
        dtype=dtype,
    )


async def until(claim: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not claim():  # noqa: ASYNC110  what is claimed happens in a server
            await asyncio.sleep(0.01)


# ---- requests and deaths ---------------------------------------------------------------------------


async def test_requests_are_spread_over_the_servers_by_what_each_is_doing(
    servers: list[FakeVLLM], start: Any, adapter: Path
) -> None:
    engine = await start(*servers)
    assert await engine.load(FIRST, adapter) == 4
    await asyncio.gather(*(answer(engine, request(n)) for n in range(8)))
    assert [len(streams(server)) for server in servers] == [4, 4]


async def test_the_death_of_one_server_costs_only_its_requests_and_no_token_of_them(
    servers: list[FakeVLLM], start: Any, adapter: Path
) -> None:
    engine = await start(*servers)
    await engine.load(FIRST, adapter)
    running = [asyncio.create_task(answer(engine, request(n, tokens=60))) for n in range(8)]
    await until(lambda: len(streams(servers[0])) == 4)
    await asyncio.sleep(0.05)
    await servers[0].kill()
    await asyncio.gather(*running)
    moved = streams(servers[1])[4:]
    assert len(moved) == 4
    assert all(len(asked["prompt"]) > len(PROMPT) + 1 for asked in moved)  # they went on
    assert all(len(asked["prompt"]) + asked["max_tokens"] == 64 for asked in moved)


async def test_a_server_that_restarts_is_loaded_again_before_it_serves(
    servers: list[FakeVLLM], start: Any, adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="spotgrpo")
    server = servers[0]
    engine = await start(server)
    await engine.load(FIRST, adapter)
    await engine.load(SECOND, adapter)
    before = set(server.loaded)
    running = asyncio.create_task(answer(engine, request(tokens=60)))
    await until(lambda: len(streams(server)) == 1)
    await server.kill()
    await asyncio.sleep(0.5)
    assert not running.done()  # it waits
    await server.start()
    await running
    assert len(server.loaded) == 2
    assert not before & set(server.loaded)  # names are never reused
    assert streams(server)[1]["model"] in server.loaded
    said = [line for line in caplog.messages if server.url in line]
    assert [line.split()[-1] for line in said if "serves, with" in line] == ["loaded", "loaded"]
    assert sum("a server is away" in line for line in said) == 1


async def test_a_restart_that_nobody_saw_is_noticed_by_the_first_request(
    servers: list[FakeVLLM], start: Any, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_pool, "CHECK_S", 60.0)
    engine = await start(servers[0])
    await engine.load(FIRST, adapter)
    servers[0].loaded.clear()
    await answer(engine, request())
    assert len(servers[0].loaded) == 1


async def test_a_restart_of_an_idle_server_is_noticed_without_a_request(
    servers: list[FakeVLLM], start: Any, adapter: Path
) -> None:
    engine = await start(servers[0])
    await engine.load(FIRST, adapter)
    servers[0].loaded.clear()
    await until(lambda: len(servers[0].loaded) == 1)


async def test_a_server_that_sends_nothing_any_more_loses_its_requests_to_another(
    servers: list[FakeVLLM], start: Any, adapter: Path
) -> None:
    engine = await start(*servers, timeout_s=0.5)
    await engine.load(FIRST, adapter)
    servers[0].hangs_after = 7
    await asyncio.gather(*(answer(engine, request(n)) for n in range(4)))
    assert streams(servers[0]), "the server that hangs was asked for nothing"


async def test_a_request_that_every_server_dies_of_is_refused(
    servers: list[FakeVLLM], start: Any, adapter: Path
) -> None:
    engine = await start(*servers)
    await engine.load(FIRST, adapter)
    for server in servers:
        server.dies_after = 0
    with pytest.raises(RequestRefused, match="3 servers in a row were lost with it"):
        await answer(engine, request())
    for server in servers:
        server.dies_after = None
    await answer(engine, request(1))


async def test_a_request_that_loses_its_server_again_and_again_still_comes_to_its_end(
    servers: list[FakeVLLM], start: Any, adapter: Path
) -> None:
    engine = await start(*servers)
    await engine.load(FIRST, adapter)
    for server in servers:
        server.dies_after = 9
    await answer(engine, request(tokens=60))
    assert sum(len(streams(server)) for server in servers) > 3, "it lost no server"


async def test_what_a_server_says_of_a_request_is_that_requests_alone(
    servers: list[FakeVLLM], start: Any, adapter: Path
) -> None:
    engine = await start(servers[0])
    await engine.load(FIRST, adapter)
    servers[0].refuses_with = (400, "no such thing")
    with pytest.raises(RequestRefused, match="answers 400: no such thing"):
        await answer(engine, request())
    servers[0].refuses_with = None
    await answer(engine, request(1))


async def test_a_version_goes_from_every_server_and_closing_takes_the_rest_along(
    servers: list[FakeVLLM], start: Any, adapter: Path
) -> None:
    engine = await start(*servers)
    await engine.load(FIRST, adapter)
    await engine.load(SECOND, adapter)
    stream = engine.submit(request())
    await anext(stream)
    with pytest.raises(SpotGRPOError, match="1 requests run on it"):
        await engine.unload(FIRST)
    await engine.abort("request-0")
    await engine.unload(FIRST)
    assert [len(server.loaded) for server in servers] == [1, 1]
    await engine.close()
    assert [len(server.loaded) for server in servers] == [0, 0]
    with pytest.raises(SpotGRPOError, match="is closed"):
        await engine.score(SECOND, IDS)


# ---- versions --------------------------------------------------------------------------------------


async def test_a_server_that_comes_late_gets_every_version_before_it_serves(
    servers: list[FakeVLLM], start: Any, adapter: Path
) -> None:
    await servers[1].kill()
    engine = await start(*servers)
    await engine.load(FIRST, adapter)
    await servers[1].start()
    await until(lambda: len(servers[1].loaded) == 1)
    await asyncio.sleep(0.1)
    await asyncio.gather(*(answer(engine, request(n)) for n in range(4)))
    assert [len(streams(server)) for server in servers] == [2, 2]


async def test_a_server_that_comes_back_with_other_weights_serves_nothing(
    servers: list[FakeVLLM], start: Any, adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await start(*servers)
    await engine.load(FIRST, adapter)
    await engine.score(FIRST, IDS)
    await servers[1].kill()
    servers[1].shift = 0.3
    await servers[1].start()
    await until(lambda: "gives other logprobs than other servers did" in caplog.text)
    await asyncio.gather(*(answer(engine, request(n)) for n in range(4)))
    assert not streams(servers[1])
    servers[1].shift = 0.0
    await until(lambda: len(engine._pool._up()) == 2)


async def test_a_restarted_server_that_serves_the_base_serves_nothing_also_where_rounding_hides_much(
    servers: list[FakeVLLM], start: Any, adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In bfloat16 the mean over the probe is what rounding may do; the one token that the adapter moved is not."""
    servers[0].effect = servers[1].effect = 0.5
    engine = await start(*servers, dtype="bfloat16")
    await engine.load(FIRST, adapter)
    await engine.score(FIRST, IDS)
    await servers[1].kill()
    servers[1].effect = 0.0
    await servers[1].start()
    await until(lambda: f"answers for {FIRST} as for its base model" in caplog.text)
    await asyncio.gather(*(answer(engine, request(n)) for n in range(4)))
    assert not streams(servers[1])
    servers[1].effect = 0.5
    await until(lambda: len(engine._pool._up()) == 2)


async def test_a_server_that_hangs_does_not_hold_an_adoption_up_and_is_caught_up_later(
    servers: list[FakeVLLM], start: Any, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_api, "CONNECT_S", 0.3)
    engine = await start(*servers, timeout_s=600.0)
    await engine.load(FIRST, adapter)
    await engine.score(FIRST, IDS)
    servers[1].hangs = True
    async with asyncio.timeout(20):
        await engine.load(SECOND, adapter)
        await engine.score(SECOND, IDS)
        await engine.unload(FIRST)
        await asyncio.gather(*(answer(engine, request(n, version=SECOND)) for n in range(4)))
    servers[1].hangs = False
    await until(lambda: len(engine._pool._up()) == 2)
    assert [len(server.loaded) for server in servers] == [1, 1], "only what is held"
    await asyncio.gather(*(answer(engine, request(n, version=SECOND)) for n in range(4)))
    assert streams(servers[1])


async def test_what_fails_its_proof_on_a_server_again_and_again_does_not_pile_up_there(
    servers: list[FakeVLLM], start: Any, adapter: Path
) -> None:
    engine = await start(*servers)
    await engine.load(FIRST, adapter)
    await engine.score(FIRST, IDS)
    await servers[1].kill()
    servers[1].shift = 0.3
    servers[1].ever_loaded.clear()
    await servers[1].start()
    await until(lambda: len(servers[1].ever_loaded) > 4)
    assert len(servers[1].loaded) <= 1
    servers[1].shift = 0.0
    await until(lambda: len(engine._pool._up()) == 2)
    assert [len(server.loaded) for server in servers] == [1, 1]


async def test_a_server_that_comes_while_the_first_is_scored_serves_only_once_it_is_proven(
    servers: list[FakeVLLM], start: Any, adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await servers[1].kill()
    engine = await start(*servers)
    await engine.load(FIRST, adapter)
    servers[0].hangs = True
    scoring = asyncio.create_task(engine.score(FIRST, IDS))
    servers[1].shift = 0.3
    await servers[1].start()
    await until(lambda: len(engine._pool._up()) == 2)
    servers[0].hangs = False
    await scoring
    await asyncio.gather(*(answer(engine, request(n)) for n in range(4)))
    await until(lambda: "gives other logprobs than other servers did" in caplog.text)
    assert not streams(servers[1])
    servers[1].shift = 0.0
    await until(lambda: len(engine._pool._up()) == 2)
    await asyncio.gather(*(answer(engine, request(n)) for n in range(4)))
    assert len(streams(servers[1])) == 2


EFFECT = 0.5
PROBE = Probe(
    token_ids=[*IDS],
    base_logprobs=[logprob_of(token_id, 1.0) - 1.0 for token_id in IDS[1:]],
    version_logprobs=[
        logprob_of(token_id, 1.0) - 1.0 + EFFECT * (token_id == MOVED) for token_id in IDS[1:]
    ],
)


@pytest.mark.parametrize(
    ("dtype", "wrong"),
    [("float32", {"shift": 0.3}), ("float32", {"effect": 0.0}), ("bfloat16", {"effect": 0.0})],
)
async def test_one_server_that_is_wrong_costs_only_itself(
    servers: list[FakeVLLM],
    start: Any,
    adapter: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    dtype: str,
    wrong: dict[str, float],
) -> None:
    """From the start, and where it turns while it serves: its requests go on elsewhere."""
    right = {"shift": 0.0, "effect": EFFECT}
    for server in servers:
        vars(server).update(right)
    vars(servers[0]).update(wrong)
    engine = await start(*servers, dtype=dtype)
    policy = policy_on(engine, tmp_path, dtype)
    await engine.load(FIRST, adapter)
    assert await policy.prove(FIRST, PROBE) == "pass"
    assert f"a server is away: {servers[0].url}" in caplog.text
    await asyncio.gather(*(answer(engine, request(n)) for n in range(4)))
    assert not streams(servers[0])

    vars(servers[0]).update(right)
    await until(lambda: len(engine._pool._up()) == 2)
    running = [asyncio.create_task(answer(engine, request(n, tokens=200))) for n in range(4)]
    await until(lambda: len(streams(servers[0])) == 2)
    vars(servers[1]).update(wrong)
    assert await policy.prove(FIRST, PROBE) == "pass"
    await asyncio.gather(*running)
    assert len(streams(servers[0])) == 4
    assert policy.counts.probes == {"pass": 2}


async def test_where_no_server_is_right_a_version_is_not_proven_and_none_is_left_out(
    servers: list[FakeVLLM], start: Any, adapter: Path, tmp_path: Path
) -> None:
    engine = await start(*servers)
    policy = policy_on(engine, tmp_path, "float32")
    await engine.load(FIRST, adapter)
    with pytest.raises(IntegrityError, match="it serves the base, or another model"):
        await policy.prove(FIRST, PROBE)
    assert len(engine._pool._up()) == 2


async def test_an_adapter_that_one_server_refuses_is_served_by_the_others(
    servers: list[FakeVLLM], start: Any, adapter: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = await start(*servers)
    takes, servers[0]._load = servers[0]._load, lambda *_: (400, {"error": "size mismatch"})
    await engine.load(FIRST, adapter)
    assert "size mismatch" in caplog.text
    await asyncio.gather(*(answer(engine, request(n)) for n in range(4)))
    assert len(streams(servers[1])) == 4
    servers[1]._load = servers[0]._load
    with pytest.raises(IntegrityError, match="size mismatch"):
        await engine.load(SECOND, adapter)
    servers[0]._load = servers[1]._load = takes
    await until(lambda: len(engine._pool._up()) == 2)


async def test_servers_that_disagree_prove_nothing(
    servers: list[FakeVLLM], start: Any, adapter: Path
) -> None:
    engine = await start(*servers)
    await engine.load(FIRST, adapter)
    servers[1].shift = 0.3
    with pytest.raises(IntegrityError, match=r"0\.3 nats apart.*same model, dtype and flags"):
        await engine.score(FIRST, IDS)
    assert (await engine.score(None, IDS[:1])).shape == (0,)


async def test_without_any_server_a_version_can_be_had_later_and_leaves_nothing_behind(
    servers: list[FakeVLLM], start: Any, adapter: Path
) -> None:
    engine = await start(servers[0])
    await servers[0].kill()
    with pytest.raises(TransientError, match=r"no server of worker\.servers"):
        await engine.load(FIRST, adapter)
    await servers[0].start()
    await until(lambda: bool(engine._pool._up()))
    await engine.load(FIRST, adapter)
    await answer(engine, request())


async def test_a_folder_is_named_as_the_servers_see_it(
    servers: list[FakeVLLM], start: Any, adapter: Path
) -> None:
    shared = adapter.parent
    engine = await start(servers[0], shared_dir=shared, server_dir="/mnt/adapters")
    await engine.load(FIRST, adapter)
    assert list(servers[0].loaded.values()) == ["/mnt/adapters/adapter"]


async def test_a_folder_that_a_server_cannot_see_is_a_config_error(
    servers: list[FakeVLLM], start: Any, adapter: Path
) -> None:
    engine = await start(*servers)
    servers[1].sees_adapters = False
    with pytest.raises(ConfigError, match=r"share worker\.cache_dir with it") as caught:
        await engine.load(FIRST, adapter)
    assert caught.value.key == "worker.server_adapter_dir"
    assert str(adapter) in str(caught.value)
    assert servers[1].url in str(caught.value)
    assert not servers[0].loaded


# ---- the start -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"api_key": "right"}, r"worker\.server_api_key.*give the key that"),
        ({"model": "/models/other"}, r"it serves /models/other: start it with --model"),
        ({"max_context": 256}, r"it takes 256 tokens: start it with --max-model-len 512"),
        ({"can_load": False}, r"VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora"),
        ({"has_lora": False}, "with --enable-lora --max-lora-rank 4 --max-loras 5 "),
        ({"is_raw": True}, r"ignore the temperature: start it with --logprobs-mode processed"),
        ({"gives_logits": True}, r"gives logits for logprobs: start it with --logprobs-mode proc"),
        ({"knows_token_ids": False}, r"give a vLLM server, 0\.32 or newer"),
    ],
)
async def test_a_server_that_was_started_for_something_else_is_refused_with_what_to_do(
    servers: list[FakeVLLM], start: Any, changes: dict[str, Any], message: str
) -> None:
    vars(servers[1]).update(changes)
    with pytest.raises(ConfigError, match=message):
        await start(*servers, api_key=None if "api_key" not in changes else "wrong")


async def test_the_same_model_may_lie_elsewhere_and_a_key_opens_the_server(
    servers: list[FakeVLLM], start: Any, adapter: Path
) -> None:
    servers[0].model, servers[0].api_key = "/srv/models--org--model/snapshots/0123", "right"
    engine = await start(servers[0], api_key="right")
    await engine.load(FIRST, adapter)
    await answer(engine, request())
    assert engine.engine_version == "0.0.1"
    assert "right" not in repr(engine._spec)


async def test_a_worker_waits_for_its_first_server_and_not_for_ever(
    servers: list[FakeVLLM], start: Any
) -> None:
    await servers[0].kill()
    with pytest.raises(TransientError, match=r"no server of worker\.servers answers"):
        await start(servers[0], timeout_s=0.3)
    starting = asyncio.create_task(start(servers[0]))
    await asyncio.sleep(0.2)
    await servers[0].start()
    await starting


async def test_something_that_is_no_vllm_server_is_refused(start: Any, model: Path) -> None:
    server = FakeVLLM(str(model))
    server._cards = list
    await server.start()
    with pytest.raises(ConfigError, match="lists no base model"):
        await start(server)
    await server.kill()


# ---- what is not a worker --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "key", "state", "said"),
    [
        ({}, None, "ok", "vLLM 0.0.1 with "),
        ({"api_key": "right"}, "right", "ok", "loads adapters, logprobs at the sampling"),
        ({"api_key": "right"}, "wrong", "fail", "give the key that"),
        ({"has_lora": False}, None, "fail", "--enable-lora --max-lora-rank 4 --max-loras 4"),
        ({"can_load": False}, None, "fail", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
        ({"model": "/models/other"}, None, "fail", "it serves /models/other: start it with"),
        ({"is_raw": True}, None, "fail", "--logprobs-mode processed_logprobs"),
        ({"port": 1}, None, "unreached", "http://127.0.0.1:1: "),
    ],
)
async def test_the_doctor_says_what_is_wrong_with_each_server(
    servers: list[FakeVLLM], model: Path, changes: dict[str, Any], key: str, state: str, said: str
) -> None:
    vars(servers[1]).update(changes)
    view = WorkerView.model_validate(
        {
            "run": {"id": "r"},
            "broker": {"url": "amqp://nobody"},
            "bucket": {"url": "s3://nothing"},
            "worker": {
                "engine": "vllm-server",
                "servers": [server.url for server in servers],
                "server_api_key": key,
            },
        }
    )
    demands = Demands(str(model), max_context=512, vocabulary=90, lora_rank=4, versions=4)
    sound, checked = await look_at_servers(view, demands)
    assert (sound.state, checked.state) == ("ok", state)
    assert said in f"{checked.detail} {checked.remedy}"
    assert not servers[1].loaded
    assert key is None or key not in f"{checked.detail} {checked.remedy}"
    if state == "ok":
        (_, unknown) = await look_at_servers(view, None)
        assert unknown.state == "warn"
        assert "neither the model nor run.json" in unknown.remedy


async def test_an_evaluation_asks_the_servers_and_shares_its_adapters_with_them(
    servers: list[FakeVLLM], model: Path, adapter: Path, tmp_path: Path
) -> None:
    (tmp_path / "questions.jsonl").write_text('{"prompt": "1 + 1 = "}\n{"prompt": "2 + 2 = "}\n')
    (tmp_path / "rewards.py").write_text(
        "def one(completions, **_):\n    return [1.0] * len(completions)\n"
    )
    config = Config.model_validate(
        {
            "run": {"id": "r"},
            "broker": {"url": "amqp://nobody"},
            "bucket": {"url": "s3://nothing"},
            "model": {"name": str(model)},
            "data": {"path": "questions.jsonl"},
            "rewards": [{"function": "rewards.py:one"}],
            "sampling": {"max_new_tokens": 4},
            "worker": {
                "engine": "vllm-server",
                "servers": [servers[0].url],
                "cache_dir": tmp_path / "cache",
                "server_adapter_dir": "/mnt/cache",
            },
        }
    )
    found = await Evaluation(config, tmp_path, adapter).run(tmp_path / "questions.jsonl")
    assert found["engine"] == "vllm-server"
    assert len(streams(servers[0])) == 4  # two questions, to the base and to the adapter
    assert len({asked["model"] for asked in streams(servers[0])}) == 2
    assert [path.rpartition("/")[2] for path in servers[0].ever_loaded] == ["base", "adapter"]
    assert all(path.startswith("/mnt/cache/") for path in servers[0].ever_loaded)
