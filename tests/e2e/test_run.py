"""A whole run with the commands a user types: real broker, real bucket, a tiny real model, real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotgrpo.consumer.audit import audit_run
from spotgrpo.shared.config import BucketConfig
from spotgrpo.shared.errors import NotStored
from spotgrpo.shared.ids import Keys
from spotgrpo.shared.manifest import Latest
from spotgrpo.shared.s3 import S3Store
from spotgrpo.shared.services import PrivateRabbitMQ, PrivateS3
from tests.tools.tiny_model import build_tiny_model

SPOTGRPO = Path(sysconfig.get_path("scripts")) / "spotgrpo"

TOML = """
[run]
id = "{run}"
output_dir = "{folder}/runs"
[broker]
url = "{broker}"
heartbeat_s = 5
[bucket]
url = "s3://{bucket}/e2e"
endpoint_url = "{endpoint}"
access_key_id = "{key}"
secret_access_key = "{secret}"
[model]
name = "{model}"
[lora]
rank = 4
alpha = 8
target_modules = ["q_proj", "v_proj"]
[data]
path = "prompts.jsonl"
[[rewards]]
function = "rewards.py:digits"
[sampling]
group_size = 4
max_new_tokens = 6
[train]
max_steps = 6
groups_per_step = 2
learning_rate = 1e-3
threads = 1
[worker]
engine = "transformers"
threads = 1
poll_s = 0.2
drain_s = 2.0
report_s = 0.5
"""
REWARDS = """
def digits(completions, wanted, **_):
    return [sum(letter.isdigit() for letter in text) / 6 for text in completions]
"""


class Run:
    """A run's folder and its processes."""

    def __init__(self, folder: Path, store: S3Store) -> None:
        self.folder, self.store, self.id = folder, store, folder.name.replace("_", "-")[-40:]
        self.keys = Keys(self.id)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.environ = {
            **{
                name: value
                for name, value in os.environ.items()
                if not name.startswith("SPOTGRPO_")
            },
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def start(self, role: str, *args: str) -> subprocess.Popen[bytes]:
        log = (self.folder / f"{role}-{len(self.processes)}.log").open("wb")
        command = [str(SPOTGRPO), role, str(self.folder / "run.toml"), *args]
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=self.environ, cwd=self.folder
        )
        log.close()
        self.processes.append(process)
        return process

    def command(self, *args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(SPOTGRPO), *args],
            capture_output=True,
            text=True,
            env=self.environ,
            cwd=self.folder,
            check=False,
        )

    def latest(self) -> Latest | None:
        try:
            return Latest.from_bytes(self.store.get(self.keys.latest).body)
        except NotStored:
            return None

    def version(self) -> int:
        latest = self.latest()
        return latest.durable.version if latest else -1

    def wait_for(self, what: str, true: Callable[[], bool], seconds: float = 150.0) -> None:
        """Wait until ``true()``; fail at once when a process ends with an error."""
        deadline = time.monotonic() + seconds
        while not true():
            for process in self.processes:
                assert process.poll() in (None, 0, -signal.SIGKILL), self.logs()
            assert time.monotonic() < deadline, f"{what} did not happen\n{self.logs()}"
            time.sleep(0.1)

    def logs(self) -> str:
        return "\n".join(
            f"--- {path.name}\n{path.read_text()[-3000:]}"
            for path in sorted(self.folder.glob("*.log"))
        )

    def stop(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()


@pytest.fixture
def run(tmp_path: Path, rabbitmq_server: PrivateRabbitMQ, s3_server: PrivateS3) -> Iterator[Run]:
    bucket = BucketConfig.model_validate(
        {
            "url": f"s3://{s3_server.bucket}/e2e",
            "endpoint_url": s3_server.endpoint_url,
            "access_key_id": s3_server.access_key_id,
            "secret_access_key": s3_server.secret_access_key,
        }
    )
    one = Run(tmp_path, S3Store(bucket))
    build_tiny_model(tmp_path / "model")
    (tmp_path / "rewards.py").write_text(REWARDS)
    rows = [{"prompt": f"{i} plus {i} is ", "wanted": str(2 * i)} for i in range(20)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "run": one.id,
        "folder": tmp_path,
        "broker": rabbitmq_server.url,
        "bucket": s3_server.bucket,
        "endpoint": s3_server.endpoint_url,
        "key": s3_server.access_key_id,
        "secret": s3_server.secret_access_key,
        "model": tmp_path / "model",
    }
    (tmp_path / "run.toml").write_text(TOML.format(**settings))
    yield one
    one.stop()


@pytest.mark.timeout(400)
def test_a_run_outlives_a_killed_worker_and_a_killed_learner(run: Run) -> None:
    """Kill -9 a worker and the learner on the way; resume with more steps; the books balance; the adapter loads."""
    learner = run.start("learner")
    first = run.start("worker")
    run.start("worker")
    run.wait_for("version 2", lambda: run.version() >= 2)
    first.send_signal(signal.SIGKILL)
    first.wait()
    learner.send_signal(signal.SIGKILL)
    learner.wait()
    second = run.start("learner", "--set", "train.max_steps=8", "--json")
    run.wait_for("the end", lambda: second.poll() == 0)
    latest = run.latest()
    assert latest is not None
    assert (latest.durable.version, latest.epoch, latest.finished) == (8, 2, True)
    run.wait_for("the worker to leave", lambda: run.processes[2].poll() == 0, 60)

    report = audit_run(run.store, run.keys)
    assert report.balanced, report.to_dict()
    assert report.trained + report.flat >= 16
    audited = run.command("audit", "run.toml", "--json")
    assert audited.returncode == 0, audited.stderr
    assert json.loads(audited.stdout)["balanced"]

    records = [
        json.loads(line)
        for line in (run.folder / "runs" / run.id / "metrics.jsonl").read_text().splitlines()
    ]
    assert [record["version"] for record in records][-1] == 8
    assert all(record["schema"] == 1 for record in records)
    assert any(record["ratio_mean"] is not None for record in records)
    summary = json.loads((run.folder / "runs" / run.id / "summary.json").read_text())
    assert summary["ended"] == "done"
    assert "hunter" not in (run.folder / "runs" / run.id / "summary.json").read_text()

    exported = run.command("export", "run.toml", "--out", "adapter")
    assert exported.returncode == 0, exported.stderr
    expect_loads_with_peft(run.folder / "model", run.folder / "adapter")

    assert run.command("doctor", "run.toml").returncode == 0
    doubted = run.command("doctor", "run.toml", "--set", "lora.rank=8")
    assert doubted.returncode == 2
    assert "lora.rank = 8" in doubted.stdout

    other = run.command("learner", "run.toml", "--set", "lora.rank=8")
    assert other.returncode == 2, other.stderr
    assert "lora.rank" in other.stderr
    assert "Traceback" not in other.stderr


def expect_loads_with_peft(model: Path, adapter: Path) -> None:
    """The exported folder is a plain PEFT adapter, and it was trained."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model)
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        before = base(ids).logits
        after = PeftModel.from_pretrained(base, adapter)(ids).logits
    assert (before - after).abs().max() > 1e-4


@pytest.mark.timeout(300)
def test_ctrl_c_stops_a_learner_and_a_worker_cleanly(run: Run) -> None:
    learner = run.start("learner", "--set", "train.max_steps=1000")
    worker = run.start("worker")
    run.wait_for("version 1", lambda: run.version() >= 1)
    for process in (worker, learner):
        process.send_signal(signal.SIGINT)
    assert worker.wait(60) == 0, run.logs()
    assert learner.wait(60) == 0, run.logs()
    assert audit_run(run.store, run.keys).balanced
    assert "Traceback" not in run.logs()
