"""The demo's broker and bucket: private ones, or the user's own where the environment names them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from spotgrpo.shared.services import PrivateRabbitMQ, PrivateS3

BROKER_URL: Final = "SPOTGRPO_BROKER__URL"
BUCKET_URL: Final = "SPOTGRPO_BUCKET__URL"


def start_servers(
    folder: Path, stack: ExitStack, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Start what the user has not brought, stopped by ``stack``; returns variables that lead to it.

    The layout is that of ``spotgrpo services``, which can bring the same servers back later.

    Raises:
        ConfigError, BrokerUnavailable, StoreUnavailable: a server is not installed or does not come up.
    """
    found: dict[str, str] = {}
    if not environ.get(BROKER_URL):
        broker = stack.enter_context(PrivateRabbitMQ(folder / "rabbitmq"))
        found[BROKER_URL] = broker.url
    if not environ.get(BUCKET_URL):
        bucket = stack.enter_context(PrivateS3(folder / "s3"))
        found |= {
            BUCKET_URL: f"s3://{bucket.bucket}/runs",
            "SPOTGRPO_BUCKET__ENDPOINT_URL": bucket.endpoint_url,
            "SPOTGRPO_BUCKET__REGION": bucket.region,
            "SPOTGRPO_BUCKET__ACCESS_KEY_ID": bucket.access_key_id,
            "SPOTGRPO_BUCKET__SECRET_ACCESS_KEY": bucket.secret_access_key,
        }
    return found
