"""What a role process of the chaos runs does beside its work: it dies where it is told to, and writes down what it did.

The role itself is the command that a user types. Put around it are the paced engine in place of one that needs a
GPU; an observer of ``shared.steps`` that carries out what is armed; a record of every group that the trainer was
stepped on and of every version's weights; a line for every group that the broker confirmed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgpack

from spotgrpo.consumer import learner as learner_module
from spotgrpo.consumer import run as learner_run
from spotgrpo.consumer.commit import BucketWriter, NewVersion, Stored
from spotgrpo.producer import run as worker_run
from spotgrpo.producer.engines.base import Engine, EngineSpec
from spotgrpo.shared import steps
from spotgrpo.shared.manifest import ADAPTER_WEIGHTS, sha256_hex
from spotgrpo.shared.ports import Message
from spotgrpo.shared.rabbitmq.publisher import RabbitMQPublisher
from spotgrpo.shared.wire import Group, encode_group
from tests.chaos import mutants
from tests.chaos.engine import PacedEngine


def run(order: dict[str, Any]) -> int:
    """Be a role until it ends; returns its exit code.

    ``order`` holds ``args`` (of the command), ``folder`` (of the world), ``token_s``, ``is_target`` (whether armed
    faults may hit this process) and ``mutant`` (the rule that is broken on purpose, or none).
    """
    folder = Path(order["folder"])
    role = order["args"][0]
    os.chdir(folder)
    if order["is_target"]:
        steps.observe(Executioner(folder, role))
    _put_engine(folder, order["token_s"])
    _record_confirms(folder / "confirmed" / f"{os.getpid()}.log")
    _record_steps(folder / "records" / f"{os.getpid()}.msgpack")
    _record_adapters(folder / "adapters" / f"stored.{os.getpid()}")
    if order["mutant"]:
        install = mutants.MUTANTS[order["mutant"]].install
        assert install is not None
        install()
    from spotgrpo.cli.main import app

    try:
        app(args=order["args"], prog_name="spotgrpo")
    except SystemExit as exc:
        return exc.code if isinstance(exc.code, int) else 1
    finally:
        sys.stdout.flush()
    return 0


class Executioner:
    """Sends this process the signal that is armed for its role, at the step and visit that are armed.

    Several processes of a role may come to the step at once: who renames the order away is hit, and leaves a
    witness of it before the signal.
    """

    def __init__(self, folder: Path, role: str) -> None:
        self._armed = folder / "armed" / f"{role}.json"
        self._witness = folder / "witness"
        self._order: dict[str, Any] = {}
        self._visits = 0

    def __call__(self, step: steps.Step) -> None:
        try:
            order = json.loads(self._armed.read_text())
        except FileNotFoundError:
            return
        if order["step"] != step:
            return
        self._visits = self._visits + 1 if order["id"] == self._order.get("id") else 1
        self._order = order
        if self._visits < order["visit"]:
            return
        try:
            self._armed.rename(self._witness / f"{order['id']}.order")
        except FileNotFoundError:
            return
        leave_witness(self._witness / f"{order['id']}.json", step=step, **order["then"])
        os.kill(os.getpid(), signal.Signals[order["signal"]])


def leave_witness(path: Path, **facts: object) -> None:
    """A file that is there whole or not at all, and outlives the process."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"pid": os.getpid(), "at": time.time(), **facts}))
    part.rename(path)


def _put_engine(folder: Path, token_s: float) -> None:
    def make(_name: str, spec: EngineSpec) -> Engine:
        return PacedEngine(spec, token_s, folder)

    worker_run.make_engine = make


def _record_confirms(path: Path) -> None:
    plain = RabbitMQPublisher.publish

    def publish(self: RabbitMQPublisher, queue: str, message: Message) -> Future[None]:
        confirmed = plain(self, queue, message)
        if message.headers.get("kind") in ("group", "group_ref"):
            line = f"{message.headers['task']} {message.message_id}\n".encode()
            confirmed.add_done_callback(lambda done: _append(path, line, done))
        return confirmed

    RabbitMQPublisher.publish = publish  # type: ignore[method-assign]


def _append(path: Path, line: bytes, done: Future[None]) -> None:
    if done.exception() is None:
        with path.open("ab", buffering=0) as file:
            file.write(line)


def _record_adapters(path: Path) -> None:
    """The digest of every version's weights as the learner means to store them."""
    plain = BucketWriter.store_version

    def store_version(self: BucketWriter, new: NewVersion) -> Stored:
        with path.open("a") as file:
            file.write(f"{new.version} {sha256_hex(new.files[ADAPTER_WEIGHTS])}\n")
        return plain(self, new)

    BucketWriter.store_version = store_version  # type: ignore[method-assign]


def _record_steps(path: Path) -> None:
    """Every group that the trainer is stepped on, with the epoch of the learner that does it."""
    epoch = 0
    plain_take_over, plain_step = learner_module.take_over, learner_run.Trainer.step

    def take_over(*args: Any, **kwargs: Any) -> Any:
        nonlocal epoch
        taken = plain_take_over(*args, **kwargs)
        epoch = taken.latest.epoch
        return taken

    def step(self: Any, groups: Sequence[Group]) -> Any:
        record = {"epoch": epoch, "version": self.steps_done}
        bodies = [{**record, "task": str(g.task_id), "body": encode_group(g)} for g in groups]
        with path.open("ab", buffering=0) as file:
            file.write(b"".join(map(msgpack.packb, bodies)))
        return plain_step(self, groups)

    learner_module.take_over = take_over
    learner_run.Trainer.step = step  # type: ignore[method-assign]
