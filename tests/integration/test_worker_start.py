"""A worker that comes to a run: it refuses what has to be the run's own and is not, and hears a stop at once."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from spotgrpo.producer import run as worker_run
from spotgrpo.producer.engines import server_pool
from spotgrpo.producer.run import run_worker
from spotgrpo.shared.config import WorkerView
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.fingerprint import base_fingerprint, tokenizer_fingerprint
from spotgrpo.shared.manifest import LoraIdentity, ModelIdentity
from spotgrpo.shared.memory.broker import MemoryBroker
from spotgrpo.shared.stopping import Stopping
from tests.tools.loop_world import RUN, World, config_of, document_of
from tests.tools.tiny_model import build_tiny_model, build_tokenizer

pytestmark = pytest.mark.engine

NOBODY = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def world(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    """A run of the tiny model that a learner has begun."""
    world = World(tmp_path)
    MemoryBroker(world.server, RUN).declare()
    document = document_of(config_of()).model_copy(
        update={
            "model": ModelIdentity(
                name=str(model),
                base_sha256=base_fingerprint(str(model), None),
                tokenizer_sha256=tokenizer_fingerprint(build_tokenizer()),
            ),
            "lora": LoraIdentity(rank=4, alpha=8.0, target_modules=["q_proj", "v_proj"]),
            "max_context": 512,
        }
    )
    world.store.create(world.keys.run_json, document.to_bytes())
    monkeypatch.setattr(worker_run.S3Store, "connect", lambda *_: Bucket(world))
    monkeypatch.setattr(worker_run, "RabbitMQBroker", lambda *_: MemoryBroker(world.server, RUN))
    return world


class Bucket:
    """The world's store, which needs no closing."""

    def __init__(self, world: World) -> None:
        self._store = world.store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def close(self) -> None:
        """As S3Store has it."""


def view(**changes: Any) -> WorkerView:
    config = config_of()
    tables: dict[str, Any] = {
        "run": {"id": RUN},
        "broker": config.broker.model_dump(),
        "bucket": config.bucket.model_dump(),
        "worker": {
            "notices": "none", "engine": "vllm-server", "servers": [NOBODY], "server_timeout_s": 600,
        },
    }  # fmt: skip
    return WorkerView.model_validate(tables | changes)


def other_weights(model: Path, folder: Path) -> None:
    build_tiny_model(folder, seed=1)


def other_tokenizer(model: Path, folder: Path) -> None:
    build_tiny_model(folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(tokenizer))


@pytest.mark.parametrize(
    ("change", "said"),
    [(other_weights, "its weights hash to"), (other_tokenizer, "its tokenizer hashes to")],
)
def test_another_base_or_tokenizer_than_the_runs_is_refused_with_both_digests(
    world: World,
    model: Path,
    tmp_path: Path,
    change: Callable[[Path, Path], None],
    said: str,
) -> None:
    change(model, tmp_path / "model")
    with pytest.raises(ConfigError, match=said) as caught:
        run_worker(view(model={"name": str(tmp_path / "model")}), tmp_path, Stopping())
    assert caught.value.key == "model.name"
    assert caught.value.remedy.count("…") == 2
    assert "give the same model and revision" in caught.value.remedy


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 8}, "lora.rank = 8: run.json of loop has 4: give that, or another run.id"),
        ({"alpha": 16}, "lora.alpha = 16.0: run.json of loop has 8.0"),
        ({"use_rslora": True}, "lora.use_rslora = True: run.json of loop has False"),
        (
            {"target_modules": ["self_attn.q_proj"]},
            "lora.target_modules = ['q_proj']: run.json of loop has ['q_proj', 'v_proj']",
        ),
    ],
)
def test_another_adapter_than_the_runs_is_refused_with_both_values(
    world: World, tmp_path: Path, lora: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        run_worker(view(lora=lora), tmp_path, Stopping())
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    "lora",
    [None, {"rank": 4, "target_modules": ["v_proj", "q_proj"]}, {"target_modules": "all-linear"}],
)
def test_a_stop_while_servers_are_waited_for_ends_the_worker_at_once(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: dict[str, Any] | None
) -> None:
    """And a lora table that says what run.json says, or less, is none of its troubles."""
    stopping, waits = Stopping(), threading.Event()
    real = server_pool.Server.say

    def say(server: server_pool.Server, level: int, text: str) -> None:
        real(server, level, text)
        waits.set()

    monkeypatch.setattr(server_pool.Server, "say", say)
    told = threading.Thread(target=lambda: (waits.wait(60), stopping.ask("SIGTERM")))
    told.start()
    run_worker(view(lora=lora), tmp_path, stopping)
    told.join()
    assert waits.is_set()
