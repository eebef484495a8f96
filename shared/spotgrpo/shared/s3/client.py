"""boto3 clients as this package needs them: every request goes over the wire exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast
from urllib.parse import urlsplit

import boto3
from botocore.config import Config

from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.s3.errors import translated

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

    from spotgrpo.shared.config import BucketConfig

CONNECTIONS = 32
"""Threads that can talk to the server at once without waiting for each other."""


def bucket_and_prefix(url: str) -> tuple[str, str]:
    """Bucket name and key prefix (without slashes around it) of ``s3://bucket/prefix``."""
    parts = urlsplit(url)
    return parts.netloc, parts.path.strip("/")


def make_client(config: BucketConfig, *, check_bodies: bool) -> S3Client:
    """A thread-safe client without retries of its own.

    A retry below us could turn a compare-and-swap that succeeded into a refusal, so there is one layer of
    retries, and it is ours (``spotgrpo.shared.retry``).

    Args:
        config: the bucket.
        check_bodies: let boto3 check whole bodies it reads against the stored checksum; off where parts of an
            object are read and the caller has a sha256.

    Raises:
        ConfigError: the endpoint, the region or the profile in the environment cannot be used.
    """
    secret = config.secret_access_key
    options = Config(
        signature_version="s3v4",
        s3={"addressing_style": "path" if config.path_style else "virtual"},
        connect_timeout=config.timeout_s,
        read_timeout=config.timeout_s,
        retries={"total_max_attempts": 1, "mode": "standard"},
        request_checksum_calculation=config.checksums,
        response_checksum_validation=config.checksums if check_bodies else "when_required",
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
    )
    try:
        with translated(config, "preparing to use the bucket"):
            client = boto3.session.Session().client(
                "s3",
                endpoint_url=config.endpoint_url,
                region_name=config.region,
                aws_access_key_id=config.access_key_id,
                aws_secret_access_key=secret.get_secret_value() if secret else None,
                config=options,
            )
            return cast("S3Client", client)
    except ValueError as exc:
        remedy = f"give an address such as https://host:port ({exc})"
        raise ConfigError("bucket.endpoint_url", config.endpoint_url, remedy) from exc
