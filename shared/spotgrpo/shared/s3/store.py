"""The bucket: ``ports.ObjectStore`` over boto3."""

from __future__ import annotations

import logging
import secrets
from contextlib import closing
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

from botocore.exceptions import ClientError

from spotgrpo.shared.errors import IntegrityError, StoreUnavailable
from spotgrpo.shared.ports import ObjectInfo, Stored
from spotgrpo.shared.retry import retry
from spotgrpo.shared.s3.client import bucket_and_prefix, make_clients
from spotgrpo.shared.s3.delete import Deleter
from spotgrpo.shared.s3.errors import status_of, translated
from spotgrpo.shared.s3.transfer import (
    LONGEST_PAUSE_S,
    PATIENCE_S,
    Comparison,
    HashingFile,
    Source,
    Transfer,
    once_more_if_damaged,
)

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef

    from spotgrpo.shared.config import BucketConfig

T = TypeVar("T")

NOT_MODIFIED: Final = 304
NOT_FOUND: Final = 404
PRECONDITION_FAILED: Final = 412


class S3Store:
    """A bucket under a prefix. Safe to use from any thread.

    Making one contacts nobody; ``connect`` waits for the server and checks bucket and credentials.
    """

    def __init__(self, config: BucketConfig) -> None:
        self._config = config
        self._bucket, prefix = bucket_and_prefix(config.url)
        self._prefix = f"{prefix}/" if prefix else ""
        self._client, self._download_client = make_clients(config)
        self._deleter = Deleter(self._client, config, self._bucket)

    @classmethod
    def connect(cls, config: BucketConfig, stopping: threading.Event | None = None) -> S3Store:
        """A store whose server has answered; one line is logged when it has to wait, and one when it is over.

        Raises:
            ConfigError: no such bucket, or the credentials or the listing are refused; at once.
            StoreUnavailable: no answer within ``config.start_deadline_s`` seconds, or ``stopping`` was set.
        """
        store = cls(config)
        what = f"first contact with {config.endpoint_url or 'S3'}"
        try:
            retry(
                what,
                store.probe,
                deadline_s=config.start_deadline_s,
                stopping=stopping,
                longest_wait_s=LONGEST_PAUSE_S,
            )
        except StoreUnavailable as exc:
            if stopping is not None and stopping.is_set():
                raise
            raise StoreUnavailable(
                f"bucket.endpoint_url = {config.endpoint_url!r}: no answer within bucket.start_deadline_s = "
                f"{config.start_deadline_s:g}: check the address, the network and that the server runs ({exc})"
            ) from exc
        return store

    @property
    def config(self) -> BucketConfig:
        """What this store was made from."""
        return self._config

    def probe(self) -> float | None:
        """List one object, once; the server's time in Unix seconds where its answer tells.

        Raises:
            ConfigError: no such bucket, or the credentials or the listing are refused.
            StoreUnavailable: no answer.
        """
        with translated(self._config, f"listing {self._config.url}"):
            answer = self._client.list_objects_v2(
                Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1
            )
        return _server_time(answer["ResponseMetadata"]["HTTPHeaders"].get("date"))

    def close(self) -> None:
        """Close the idle connections. Calls that come later open new ones."""
        self._client.close()
        self._download_client.close()

    # ---- objects ------------------------------------------------------------------------------------------------

    def create(self, key: str, body: bytes) -> None:
        """Store an immutable object; the same bytes again are fine, other bytes raise IntegrityError."""
        _patiently(f"creating {key}", lambda: self._create(key, body))

    def _create(self, key: str, body: bytes) -> None:
        if self._put_if(f"creating {key}", key, body, None) is not None:
            return

        # Refused: it is stored, perhaps by a try of ours whose answer was lost. Only other bytes are a fault.
        def compare() -> None:
            Transfer(self._source(key), len(body), Comparison(body, f"creating {key}")).run()

        once_more_if_damaged(compare)

    def get(self, key: str) -> Stored:
        """The object, whole, its transfer checked. Raises NotStored."""
        return _patiently(f"reading {key}", lambda: self._read(f"reading {key}", key))

    def get_if_changed(self, key: str, etag: str | None) -> Stored | None:
        """The object, or None while its ETag is still ``etag``. Raises NotStored."""
        if etag is None:
            return self.get(key)
        return _patiently(f"polling {key}", lambda: self._poll(f"polling {key}", key, etag))

    def _poll(self, doing: str, key: str, etag: str) -> Stored | None:
        try:
            found = self._read(doing, key, IfNoneMatch=etag)
        except ClientError as exc:
            if status_of(exc) == NOT_MODIFIED:
                return None
            raise
        # A server without 304 sends it all again: slow, but not a change.
        return None if found.etag == etag else found

    def polls_cheaply(self, key: str, etag: str) -> bool:
        """True where the server answers 304 in place of the object that has ``etag``. Raises NotStored."""
        doing = f"polling {key}"

        def ask() -> bool:
            try:
                self._read(doing, key, IfNoneMatch=etag)
            except ClientError:
                return True
            return False

        return _patiently(doing, ask)

    def _read(self, doing: str, key: str, **conditions: Any) -> Stored:
        with translated(self._config, doing, NOT_MODIFIED):
            answer = self._client.get_object(
                Bucket=self._bucket, Key=self._prefix + key, **conditions
            )
            # Not ``with answer["Body"]``: that enters the stream below the one that checks.
            with closing(answer["Body"]) as stream:
                body = stream.read()
        if len(body) != answer["ContentLength"]:
            raise StoreUnavailable(f"{doing}: it broke off after {len(body)} bytes")
        return Stored(body, answer["ETag"])

    def compare_and_swap(self, key: str, body: bytes, expected: str | None) -> str | None:
        """Replace the object whose ETag is ``expected`` (None: create it where none is), once on the wire.

        Returns the new ETag, or None where the condition was refused. After StoreUnavailable the outcome is unknown.
        """
        return self._put_if(f"moving {key}", key, body, expected)

    def _put_if(self, doing: str, key: str, body: bytes, expected: str | None) -> str | None:
        condition: dict[str, Any] = (
            {"IfNoneMatch": "*"} if expected is None else {"IfMatch": expected}
        )
        # 404: there is nothing that could have the expected ETag.
        refusals = (
            (PRECONDITION_FAILED, NOT_FOUND) if expected is not None else (PRECONDITION_FAILED,)
        )
        try:
            with translated(self._config, doing, *refusals):
                answer = self._client.put_object(
                    Bucket=self._bucket, Key=self._prefix + key, Body=body, **condition
                )
        except ClientError:
            return None
        if not answer.get("ETag"):
            raise StoreUnavailable(f"{doing}: the server answered without an ETag")
        return answer["ETag"]

    def download(self, key: str, path: Path, size: int, sha256: str) -> None:
        """Write the object to ``path``, going on where a cut transfer stopped; whole or not at all.

        Raises NotStored, and IntegrityError where the bytes are not those of ``size`` and ``sha256`` (hex).
        """
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")

        def fetch() -> None:
            with part.open("wb") as file:
                sink = HashingFile(file)
                Transfer(self._source(key), size, sink).run()
            if sink.sha256 != sha256:
                raise IntegrityError(
                    f"downloading {key}: its sha256 is {sink.sha256} in place of {sha256}"
                )

        try:
            once_more_if_damaged(fetch)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def _source(self, key: str) -> Source:
        return Source(self._download_client, self._config, self._bucket, self._prefix + key)

    # ---- listing and deleting -----------------------------------------------------------------------------------

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose keys start with ``prefix``, in key order."""
        found: list[ObjectInfo] = []
        token: str | None = None
        while True:
            page = self._page(prefix, token)
            for entry in page.get("Contents", []):
                key = entry["Key"].removeprefix(self._prefix)
                found.append(ObjectInfo(key, entry["Size"], entry["LastModified"].timestamp()))
            token = page.get("NextContinuationToken")
            if not token:
                break
        # Not every server lists in the order of the keys' bytes.
        return iter(sorted(found, key=lambda info: info.key.encode()))

    def _page(self, prefix: str, token: str | None) -> ListObjectsV2OutputTypeDef:
        after: dict[str, Any] = {"ContinuationToken": token} if token else {}

        def ask() -> ListObjectsV2OutputTypeDef:
            with translated(self._config, f"listing {prefix}"):
                return self._client.list_objects_v2(
                    Bucket=self._bucket, Prefix=self._prefix + prefix, **after
                )

        return _patiently(f"listing {prefix}", ask)

    def delete(self, keys: Sequence[str]) -> None:
        """Delete objects; missing ones are fine."""
        full = [self._prefix + key for key in keys]
        _patiently(f"deleting {len(full)} objects", lambda: self._deleter.delete(full))


def _patiently(what: str, call: Callable[[], T]) -> T:
    # The caller retries above this, and says so; a line from here each time would be one a try.
    return retry(
        what, call, deadline_s=PATIENCE_S, longest_wait_s=LONGEST_PAUSE_S, level=logging.DEBUG
    )


def _server_time(date: str | None) -> float | None:
    try:
        return parsedate_to_datetime(date).timestamp() if date else None
    except ValueError:
        return None
