"""boto3 clients as this package needs them: every request goes over the wire exactly once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeAlias, cast
from urllib.parse import urlsplit

import boto3
from botocore.config import Config

from spotgrpo.shared.errors import ConfigError
from spotgrpo.shared.s3.errors import translated

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

    from spotgrpo.shared.config import BucketConfig

Checksums: TypeAlias = Literal["when_supported", "when_required"]
CONNECTIONS = 32
"""Threads that can talk to the server at once without waiting for each other."""


def bucket_and_prefix(url: str) -> tuple[str, str]:
    """Bucket name and key prefix (without slashes around it) of ``s3://bucket/prefix``."""
    parts = urlsplit(url)
    return parts.netloc, parts.path.strip("/")


def make_clients(config: BucketConfig) -> tuple[S3Client, S3Client]:
    """Two thread-safe clients without retries of their own.

    A retry below us could turn a compare-and-swap that succeeded into a refusal, so there is one layer of
    retries, and it is ours (``spotgrpo.shared.retry``).

    Returns:
        One that checks the bodies it reads against their stored checksum, and one that does not: it is for reading
        parts of objects, for which there is none, where the caller has a digest of the whole.

    Raises:
        ConfigError: the endpoint, the region or the profile in the environment cannot be used.
    """
    try:
        with translated(config, "preparing to use the bucket"):
            session = boto3.session.Session()
            return (
                _client(session, config, validation=config.checksums),
                _client(session, config, validation="when_required"),
            )
    except ValueError as exc:
        remedy = f"give an address such as https://host:port ({exc})"
        raise ConfigError("bucket.endpoint_url", config.endpoint_url, remedy) from exc


def _client(
    session: boto3.session.Session, config: BucketConfig, validation: Checksums
) -> S3Client:
    secret = config.secret_access_key
    options = Config(
        signature_version="s3v4",
        s3={"addressing_style": "path" if config.path_style else "virtual"},
        connect_timeout=config.timeout_s,
        read_timeout=config.timeout_s,
        retries={"total_max_attempts": 1, "mode": "standard"},
        request_checksum_calculation=config.checksums,
        response_checksum_validation=validation,
        max_pool_connections=CONNECTIONS,
        tcp_keepalive=True,
    )
    client = session.client(
        "s3",
        endpoint_url=config.endpoint_url,
        region_name=config.region,
        aws_access_key_id=config.access_key_id,
        aws_secret_access_key=secret.get_secret_value() if secret else None,
        config=options,
    )
    return cast("S3Client", client)
