"""A bucket that refuses: at the start a person must act, and later it may pass."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spotgrpo.consumer import run as learner_run
from spotgrpo.producer import run as worker_run
from spotgrpo.shared.asked_store import PatientStore
from spotgrpo.shared.config import WorkerView
from spotgrpo.shared.errors import ConfigError, IntegrityError, NotStored, StoreUnavailable
from spotgrpo.shared.memory.broker import MemoryBroker
from spotgrpo.shared.memory.store import MemoryStore
from spotgrpo.shared.ports import ObjectStore
from spotgrpo.shared.stopping import Stopping
from tests.loops.test_learner_faults import Background, has_issued, until
from tests.tools.loop_world import (
    RUN,
    BookkeepingTrainer,
    Prompts,
    ThreadWorker,
    World,
    config_of,
    document_of,
)

REFUSED = ConfigError("bucket.access_key_id", "me", "the session token has expired")


class Gate:
    """One role's way to a bucket that others use too; while it is shut, whatever is asked is refused."""

    def __init__(self, store: ObjectStore) -> None:
        self.store, self.is_shut, self.refused = store, False, 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self.is_shut:
                self.refused += 1
                raise REFUSED
            return getattr(self.store, name)(*args, **kwargs)

        return call

    def close(self) -> None:
        """As S3Store has it."""


@pytest.fixture
def gate(world: World, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """The bucket as both roles get it."""
    gate = Gate(world.store)
    for role in (learner_run, worker_run):
        monkeypatch.setattr(role.S3Store, "connect", lambda *_: gate)
        monkeypatch.setattr(role, "RabbitMQBroker", lambda *_: MemoryBroker(world.server, RUN))
    yield gate
    gate.is_shut = False


@pytest.fixture
def learn(world: World, gate: Gate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """``run_learner`` on the servers in memory, with a trainer that only keeps books."""
    config = config_of(max_steps=4)
    config = config.model_copy(
        update={"run": config.run.model_copy(update={"output_dir": tmp_path})}
    )
    monkeypatch.setattr(learner_run, "Trainer", lambda *_: BookkeepingTrainer())
    monkeypatch.setattr(learner_run, "run_document", lambda *_: document_of(config))
    return lambda: learner_run.run_learner(config, Prompts(), None, [], threading.Event())


def test_a_refusal_does_not_end_a_learner_that_was_let_in_before(
    world: World, gate: Gate, learn: Any
) -> None:
    """While it looks whether it still owns the run, waits for groups, and commits."""
    learner = Background(learn)
    until(has_issued(world))
    gate.is_shut = True
    world.server.stop()
    until(lambda: gate.refused >= 2)
    world.server.start()
    until(lambda: gate.refused >= 4)
    with ThreadWorker(world):
        assert not learner.ends(1.0), learner.error
        gate.is_shut = False
        assert learner.ends(30)
    assert learner.error is None
    assert len(world.durable_steps()) == 4
    assert world.audit().balanced


def test_a_refusal_at_the_start_ends_both_roles_at_once(gate: Gate, learn: Any) -> None:
    gate.is_shut = True
    with pytest.raises(ConfigError, match="has expired"):
        learn()
    with pytest.raises(ConfigError, match="has expired"):
        worker_run.run_worker(_view(), Path(), Stopping())


def test_a_refusal_does_not_end_a_worker_that_waits_for_its_learner(
    gate: Gate, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_run, "LOOK_AGAIN_S", 0.02)
    MemoryBroker(world.server, RUN).declare()
    stopping = Stopping()
    worker = Background(lambda: worker_run.run_worker(_view(), Path(), stopping))
    until(lambda: gate.refused == 0)
    assert not worker.ends(0.2)
    gate.is_shut = True
    until(lambda: gate.refused >= 3)
    stopping.set()
    assert worker.ends()
    assert worker.error is None


def _view() -> WorkerView:
    config = config_of()
    return WorkerView.model_validate(
        {
            "run": {"id": RUN},
            "broker": config.broker.model_dump(),
            "bucket": config.bucket.model_dump(),
            "worker": {"notices": "none"},
        }
    )


CALLS: dict[str, Callable[[ObjectStore], object]] = {
    "create": lambda store: store.create("k", b"x"),
    "get": lambda store: store.get("k"),
    "get_if_changed": lambda store: store.get_if_changed("k", None),
    "compare_and_swap": lambda store: store.compare_and_swap("k", b"x", None),
    "download": lambda store: store.download("k", Path("k"), 1, "0" * 64),
    "list": lambda store: store.list("k"),
    "delete": lambda store: store.delete(["k"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_whatever_is_refused_is_a_persons_first_and_a_trouble_that_may_pass_later(
    name: str,
) -> None:
    gate = Gate(MemoryStore())
    store = PatientStore(gate)
    gate.is_shut = True
    with pytest.raises(ConfigError):
        CALLS[name](store)
    gate.is_shut = False
    store.create("k", b"y")
    gate.is_shut = True
    with pytest.raises(StoreUnavailable, match="has expired"):
        CALLS[name](store)


def test_an_answer_that_is_an_error_is_an_answer() -> None:
    gate = Gate(MemoryStore())
    for error, ask in ((NotStored, CALLS["get"]), (IntegrityError, CALLS["create"])):
        store = PatientStore(gate)
        with pytest.raises(error):
            ask(store)
        gate.is_shut = True
        with pytest.raises(StoreUnavailable):
            ask(store)
        gate.is_shut = False
        gate.store.create("k", b"other")
