"""Deleting many objects, also on servers that cannot delete them in batches."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from botocore.exceptions import ClientError

from spotgrpo.shared.errors import NotStored
from spotgrpo.shared.s3.errors import code_of, from_answer, translated

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import DeleteTypeDef, ErrorTypeDef

    from spotgrpo.shared.config import BucketConfig

log = logging.getLogger(__name__)

BATCH: Final = 1000
NO_BATCHES: Final = frozenset(
    {
        "400", "405", "501",
        "BadDigest", "InvalidDigest", "InvalidRequest", "MethodNotAllowed", "MissingContentMD5", "NotImplemented",
    }
)  # fmt: skip
"""What servers answer that lack DeleteObjects, or want its older checksum (Content-MD5)."""
GONE: Final = frozenset({"NoSuchKey", "404", "NotFound"})


class Deleter:
    """Deletes in batches until the server shows that it has none, one by one from then on."""

    def __init__(self, client: S3Client, config: BucketConfig, bucket: str) -> None:
        self._client, self._config, self._bucket = client, config, bucket
        self._has_batches = True

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects by their full keys; missing ones are fine."""
        for start in range(0, len(keys), BATCH):
            batch = keys[start : start + BATCH]
            if not (self._has_batches and self._delete_batch(batch)):
                self._delete_each(batch)

    def _delete_batch(self, keys: Sequence[str]) -> bool:
        """True once all are gone; False where the server has no batches."""
        request: DeleteTypeDef = {"Objects": [{"Key": key} for key in keys], "Quiet": True}
        with translated(self._config, f"deleting {len(keys)} objects"):
            try:
                answer = self._client.delete_objects(Bucket=self._bucket, Delete=request)
            except ClientError as exc:
                if code_of(exc) not in NO_BATCHES:
                    raise
                log.info(
                    "the bucket's server does not delete in batches (%s): one by one", code_of(exc)
                )
                self._has_batches = False
                return False
            for error in answer.get("Errors", []):
                self._raise_unless_gone(error)
        return True

    def _delete_each(self, keys: Sequence[str]) -> None:
        for key in keys:
            try:
                with translated(self._config, f"deleting {key}"):
                    self._client.delete_object(Bucket=self._bucket, Key=key)
            except NotStored:
                continue

    def _raise_unless_gone(self, error: ErrorTypeDef) -> None:
        if error.get("Code") in GONE:
            return
        as_answer = ClientError(
            {"Error": {"Code": error.get("Code", ""), "Message": error.get("Message", "")}},
            "DeleteObjects",
        )
        raise from_answer(as_answer, self._config, f"deleting {error.get('Key', '')}")
