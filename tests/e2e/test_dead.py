"""``spotgrpo dead`` as a user types it, on a real bucket: a task dies, is listed, tried again, and its body dropped."""

from __future__ import annotations

import json
import os
import subprocess
import sysconfig
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from spotgrpo.shared.config import BucketConfig
from spotgrpo.shared.ids import TaskId
from spotgrpo.shared.s3 import S3Store
from spotgrpo.shared.services import PrivateS3
from spotgrpo.shared.wire import Group, Task
from tests.tools.loop_world import (
    RUN,
    BookkeepingTrainer,
    ThreadWorker,
    World,
    answer,
    config_of,
    flatten,
)

SPOTGRPO = Path(sysconfig.get_path("scripts")) / "spotgrpo"
FIRST, AGAIN = str(TaskId(1)), str(TaskId(1, 2))
OTHER = str(TaskId(2))


def spotgrpo(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("SPOTGRPO_")}
    command = [str(SPOTGRPO), "dead", args[0], "run.toml", *args[1:]]
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, check=False
    )


def listed(folder: Path) -> dict[str, str]:
    """How each dead task stands."""
    result = spotgrpo(folder, "list", "--json")
    assert result.returncode == 0, result.stderr
    return {one["task"]: one["stands"] for one in json.loads(result.stdout)["tasks"]}


def poison(worker: ThreadWorker, task: Task) -> Sequence[Group]:
    group = answer(task, worker.serving())
    if str(task.task_id) in (FIRST, OTHER):
        group = replace(group, sampling=replace(group.sampling, temperature=0.5))
    return [group]


@pytest.fixture
def world(tmp_path: Path, s3_server: PrivateS3) -> World:
    """A run that was stopped with two dead tasks; queues in memory, the bucket real."""
    settings = {
        "url": f"s3://{s3_server.bucket}/{tmp_path.name}",
        "endpoint_url": s3_server.endpoint_url,
        "access_key_id": s3_server.access_key_id,
        "secret_access_key": s3_server.secret_access_key,
    }
    bucket = "\n".join(f"{name} = {json.dumps(value)}" for name, value in settings.items())
    (tmp_path / "run.toml").write_text(
        f'[run]\nid = "{RUN}"\n[broker]\nurl = "amqp://me:x@127.0.0.1:1/"\n[bucket]\n{bucket}\n'
    )
    world = World(tmp_path, store=S3Store(BucketConfig.model_validate(settings)))
    stopping = threading.Event()
    trainer = BookkeepingTrainer(lambda: stopping.set() if len(trainer.steps) == 2 else None)
    with ThreadWorker(world, poison):
        world.learner(config_of(max_attempts=1), trainer, stopping).run()
    return world


@pytest.mark.timeout(120)
def test_a_dead_task_is_listed_tried_again_once_and_dropped(world: World) -> None:
    folder = world.folder
    assert listed(folder) == {FIRST: "can be requeued", OTHER: "can be requeued"}
    assert "can be read: it does not fit the run" in spotgrpo(folder, "list").stdout

    refused = spotgrpo(folder, "requeue", FIRST, str(TaskId(0)))
    assert refused.returncode == 2
    assert f"TASK = '{TaskId(0)}'" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert listed(folder)[FIRST] == "can be requeued"

    for _ in range(2):
        assert spotgrpo(folder, "requeue", FIRST).returncode == 0
    assert listed(folder)[FIRST] == "requeue asked for"
    with ThreadWorker(world):
        world.learner(config_of(max_attempts=1, max_steps=8)).run()
    assert flatten(world.durable_steps()).count(AGAIN) == 1
    assert world.audit().balanced
    assert listed(folder) == {OTHER: "can be requeued"}

    finished = spotgrpo(folder, "requeue", "--all")
    assert "higher train.max_steps" in finished.stdout
    assert spotgrpo(folder, "drop", "--all").stdout == f"1 dropped {OTHER}\n"
    assert listed(folder) == {}
    world.close()
