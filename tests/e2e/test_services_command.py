"""``spotgrpo services`` as a person uses it: start, copy the lines, Ctrl-C."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sysconfig
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from spotgrpo.shared.config import BrokerConfig, BucketConfig
from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.s3 import S3Store
from spotgrpo.shared.services.rabbitmq import find_server
from spotgrpo.shared.services.seaweedfs import find_weed

SPOTGRPO = Path(sysconfig.get_path("scripts")) / "spotgrpo"


def listens(url: str) -> bool:
    parts = urlsplit(url)
    with socket.socket() as probe:
        return probe.connect_ex((parts.hostname or "", parts.port or 0)) == 0


def test_the_printed_lines_lead_to_servers_that_end_with_ctrl_c(tmp_path: Path) -> None:
    try:
        find_server(), find_weed()
    except ConfigError as exc:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(exc))
    command = [str(SPOTGRPO), "services", "--dir", str(tmp_path / "services")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        exported: dict[str, str] = {}
        for line in process.stdout:
            if line.startswith("#"):
                break
            name, _, value = shlex.split(line)[1].partition("=")
            exported[name.removeprefix("SPOTGRPO_").lower()] = value
        try:
            tables = {"broker": {}, "bucket": {}}  # type: dict[str, dict[str, str]]
            for name, value in exported.items():
                table, _, key = name.partition("__")
                tables[table][key] = value
            bucket = BucketConfig.model_validate(tables["bucket"])
            S3Store.connect(bucket).create("hello", b"world")
            url = BrokerConfig.model_validate(tables["broker"]).url.get_secret_value()
            assert listens(url)
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        assert "stopping" in process.stderr.read()
    assert not listens(url)
    assert not listens(bucket.endpoint_url or "")
