"""``spotgrpo worker`` as a process that is told to go before a learner has begun its run."""

from __future__ import annotations

import os
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from spotgrpo.shared.services import PrivateRabbitMQ, PrivateS3
from tests.tools.metadata_servers import (
    AwsMetadata,
    AzureMetadata,
    GcpMetadata,
    MetadataServer,
    serving,
)

SPOTGRPO = Path(sysconfig.get_path("scripts")) / "spotgrpo"

Told = Callable[[subprocess.Popen[bytes], MetadataServer], None]


def interrupted(_process: subprocess.Popen[bytes], server: MetadataServer) -> None:
    assert isinstance(server, AwsMetadata)
    server.interrupt(in_s=110)


def preempted(_process: subprocess.Popen[bytes], server: MetadataServer) -> None:
    assert isinstance(server, GcpMetadata)
    server.preempted = "TRUE"


def evicted(_process: subprocess.Popen[bytes], server: MetadataServer) -> None:
    assert isinstance(server, AzureMetadata)
    server.schedule("Preempt", in_s=40)


def terminated(process: subprocess.Popen[bytes], _server: MetadataServer) -> None:
    process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("kind", "told", "said"),
    [
        (AwsMetadata, interrupted, "AWS takes this machine back in 1"),
        (GcpMetadata, preempted, "GCP takes this machine back in 30 s: draining"),
        (AzureMetadata, evicted, "Azure takes this machine back (Preempt) in "),
        (GcpMetadata, terminated, "SIGTERM: stopping"),
    ],
)
def test_a_worker_that_is_told_to_go_leaves_with_exit_code_0(
    kind: type[MetadataServer],
    told: Told,
    said: str,
    rabbitmq_server: PrivateRabbitMQ,
    s3_server: PrivateS3,
    tmp_path: Path,
) -> None:
    log = tmp_path / "worker.log"
    with serving(kind()) as server, log.open("wb") as stream:
        environ = {
            **os.environ,
            "SPOTGRPO_RUN__ID": "never-begun",
            "SPOTGRPO_BROKER__URL": rabbitmq_server.url,
            "SPOTGRPO_BUCKET__URL": f"s3://{s3_server.bucket}/leaves",
            "SPOTGRPO_BUCKET__ENDPOINT_URL": s3_server.endpoint_url,
            "SPOTGRPO_BUCKET__ACCESS_KEY_ID": s3_server.access_key_id,
            "SPOTGRPO_BUCKET__SECRET_ACCESS_KEY": s3_server.secret_access_key,
            "SPOTGRPO_WORKER__ENGINE": "transformers",
            "SPOTGRPO_WORKER__NOTICE_URL": server.url,
        }
        process = subprocess.Popen(
            [str(SPOTGRPO), "worker"], stdout=stream, stderr=stream, env=environ, cwd=tmp_path
        )
        try:
            deadline = time.monotonic() + 60
            while len(server.requests) < 3:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            told(process, server)
            assert process.wait(30) == 0, log.read_text()
        finally:
            process.kill()
            process.wait()
    assert said in log.read_text()
