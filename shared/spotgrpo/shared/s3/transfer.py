"""One object out of the bucket in pieces, going on where a cut connection stopped."""

from __future__ import annotations

import hashlib
import logging
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from botocore.exceptions import ClientError

from spotgrpo.shared.errors import IntegrityError, SpotGRPOError, StoreUnavailable
from spotgrpo.shared.retry import retry
from spotgrpo.shared.s3.errors import from_answer, status_of, translated

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

    from botocore.response import StreamingBody
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef

    from spotgrpo.shared.config import BucketConfig

PIECE_BYTES: Final = 1 << 20
PATIENCE_S: Final = 5.0
"""Seconds without progress for which the store tries again by itself; then StoreUnavailable."""
LONGEST_PAUSE_S: Final = 1.0


@dataclass(frozen=True)
class Source:
    """Where an object is read from. ``client`` must not check bodies: parts of one have no checksum."""

    client: S3Client
    config: BucketConfig
    bucket: str
    key: str


class Sink(Protocol):
    """What takes the pieces. Raises IntegrityError where they cannot be right."""

    def write(self, piece: bytes) -> None:
        """The next piece."""


class Transfer:
    """Copies an object of ``size`` bytes into ``sink``, each byte once and in order.

    Every connection after the first asks for the rest of the same ETag, so that two states of an object are never
    mixed. Only time without progress counts against the patience.
    """

    def __init__(self, source: Source, size: int, sink: Sink) -> None:
        self._source, self._size, self._sink = source, size, sink
        self._doing = f"downloading {source.key}"
        self._received = 0
        self._etag: str | None = None

    def run(self) -> None:
        """Copy it all. Raises NotStored, StoreUnavailable, or IntegrityError where the size is another."""
        while self._etag is None or self._received < self._size:
            retry(
                self._doing,
                self._advance,
                deadline_s=PATIENCE_S,
                longest_wait_s=LONGEST_PAUSE_S,
                level=logging.DEBUG,
            )

    def _advance(self) -> None:
        before = self._received
        try:
            with closing(self._open()) as body:
                self._copy(body)
        except StoreUnavailable:
            if self._received == before:
                raise

    def _copy(self, body: StreamingBody) -> None:
        while self._received < self._size:
            with translated(self._source.config, self._doing):
                piece = body.read(PIECE_BYTES)
            if not piece:
                raise StoreUnavailable(f"{self._doing}: it broke off after {self._received} bytes")
            self._received += len(piece)
            self._sink.write(piece)

    def _open(self) -> StreamingBody:
        answer = self._request()
        try:
            self._check(answer)
        except SpotGRPOError:
            answer["Body"].close()
            raise
        self._etag = answer["ETag"]
        return answer["Body"]

    def _check(self, answer: GetObjectOutputTypeDef) -> None:
        if _whole_size(answer) != self._size:
            raise IntegrityError(
                f"{self._doing}: it has {_whole_size(answer)} bytes in place of {self._size}"
            )
        if _first_byte(answer) != self._received:
            raise StoreUnavailable(
                f"{self._doing}: the server does not go on at byte {self._received}"
            )

    def _request(self) -> GetObjectOutputTypeDef:
        source = self._source
        with translated(source.config, self._doing):
            if self._etag is None or not self._received:
                return source.client.get_object(Bucket=source.bucket, Key=source.key)
            try:
                return source.client.get_object(
                    Bucket=source.bucket,
                    Key=source.key,
                    Range=f"bytes={self._received}-",
                    IfMatch=self._etag,
                )
            except ClientError as exc:
                if status_of(exc) == 412:
                    raise IntegrityError(f"{self._doing}: it was replaced meanwhile") from exc
                raise from_answer(exc, source.config, self._doing) from exc


def _whole_size(answer: GetObjectOutputTypeDef) -> int:
    """Size of the whole object, also where the answer is a part: ``bytes 5-9/10``."""
    _, slash, size = answer.get("ContentRange", "").rpartition("/")
    return int(size) if slash and size.isdecimal() else answer["ContentLength"]


def _first_byte(answer: GetObjectOutputTypeDef) -> int:
    first = answer.get("ContentRange", "").removeprefix("bytes ").partition("-")[0]
    return int(first) if first.isdecimal() else 0


# ---- sinks ------------------------------------------------------------------------------------------------------


class HashingFile:
    """Writes pieces to a file and knows their sha256."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()

    def write(self, piece: bytes) -> None:
        """Append ``piece``."""
        self._file.write(piece)
        self._digest.update(piece)

    @property
    def sha256(self) -> str:
        """Of everything written, in hex."""
        return self._digest.hexdigest()


class Comparison:
    """Raises IntegrityError at the first piece that differs from ``body``."""

    def __init__(self, body: bytes, doing: str) -> None:
        self._left = memoryview(body)
        self._doing = doing

    def write(self, piece: bytes) -> None:
        """Compare ``piece`` with what comes next in the body."""
        if self._left[: len(piece)] != piece:
            raise IntegrityError(f"{self._doing}: other bytes are stored")
        self._left = self._left[len(piece) :]


def once_more_if_damaged(transfer: Callable[[], None]) -> None:
    """Do a transfer again where its bytes are wrong: damaged on the way comes right, damaged in store does not."""
    try:
        transfer()
    except IntegrityError:
        transfer()
