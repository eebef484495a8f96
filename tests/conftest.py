"""Fixtures of the whole suite: one private RabbitMQ and one private S3 server for the session."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.services import PrivateRabbitMQ, PrivateS3


def pytest_configure() -> None:
    """Forget the settings of the person who runs the suite: a test must not touch their broker or bucket."""
    for name in [name for name in os.environ if name.startswith("SPOTGRPO_")]:
        del os.environ[name]


def start_or_skip(server: PrivateRabbitMQ | PrivateS3) -> None:
    """Start a server; where it is not installed, skip on a person's machine and fail in CI."""
    try:
        server.start()
    except ConfigError as exc:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(exc))


@pytest.fixture(scope="session")
def rabbitmq_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateRabbitMQ]:
    """A running RabbitMQ for the session; use names of your own, and leave it running."""
    server = PrivateRabbitMQ(tmp_path_factory.mktemp("rabbitmq"))
    start_or_skip(server)
    yield server
    server.stop()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateS3]:
    """A running S3 server with a bucket for the session; use a prefix of your own, and leave it running."""
    server = PrivateS3(tmp_path_factory.mktemp("s3"))
    start_or_skip(server)
    yield server
    server.stop()
