"""A command that is told to stop before it has reached its servers: that is no failure."""

from __future__ import annotations

import os
import signal
import subprocess
import sysconfig
import time
from pathlib import Path

import pytest

from spotgrpo.shared.services import PrivateS3
from tests.tools.tiny_model import build_tiny_model

SPOTGRPO = Path(sysconfig.get_path("scripts")) / "spotgrpo"
NOBODY = "127.0.0.1:1"

TOML = """
[run]
id = "never-begun"
[broker]
url = "amqp://127.0.0.1:1/"
[bucket]
url = "s3://{bucket}/stop-at-start"
endpoint_url = "{endpoint}"
access_key_id = "{key}"
secret_access_key = "{secret}"
[model]
name = "model"
[data]
path = "prompts.jsonl"
[[rewards]]
function = "rewards.py:length"
[sampling]
max_new_tokens = 8
[worker]
engine = "transformers"
notices = "none"
"""
REWARDS = """
def length(completions, **_):
    return [float(len(completion)) for completion in completions]
"""


def begin(folder: Path, role: str, server: PrivateS3 | None) -> subprocess.Popen[bytes]:
    toml = TOML.format(
        bucket=server.bucket if server else "nobody",
        endpoint=server.endpoint_url if server else f"http://{NOBODY}",
        key=server.access_key_id if server else "someone",
        secret=server.secret_access_key if server else "something",
    )
    (folder / "run.toml").write_text(toml)
    (folder / "rewards.py").write_text(REWARDS)
    (folder / "prompts.jsonl").write_text('{"prompt": "what is it"}\n')
    build_tiny_model(folder / "model")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("SPOTGRPO_", "AWS_"))}
    environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [str(SPOTGRPO), role, "run.toml"], cwd=folder, env=environ, stdout=log, stderr=log
        )


@pytest.mark.parametrize(("role", "is_bucket_there"), [("worker", False), ("learner", True)])
def test_a_stop_while_a_server_is_not_reachable_is_a_normal_end(
    tmp_path: Path, s3_server: PrivateS3, role: str, is_bucket_there: bool
) -> None:
    process = begin(tmp_path, role, s3_server if is_bucket_there else None)
    log = tmp_path / "log"
    try:
        deadline = time.monotonic() + 90
        while "trying again" not in log.read_text():
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    last = [line for line in log.read_text().splitlines() if line.startswith("spotgrpo: ")]
    assert len(last) <= 1
    assert all("stopped while a server was not reachable" in line for line in last)
