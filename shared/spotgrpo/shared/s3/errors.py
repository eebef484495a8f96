"""What a failed S3 call means for the caller. The one place where boto's exceptions become ours."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    InvalidRegionError,
    NoCredentialsError,
    NoRegionError,
    ParamValidationError,
    PartialCredentialsError,
    ProfileNotFound,
    SSOError,
)
from urllib3.exceptions import HTTPError

from spotgrpo.shared.errors import ConfigError, NotStored, SpotGRPOError, StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from spotgrpo.shared.config import BucketConfig

REFUSED_CREDENTIALS: Final = {
    "AllAccessDisabled": "the server has disabled this account",
    "ExpiredToken": "the session token has expired: get a new one",
    "InvalidAccessKeyId": "the server does not know this access key",
    "InvalidClientTokenId": "the server does not know this access key",
    "InvalidToken": "the server does not accept the session token",
    "SignatureDoesNotMatch": "the secret key does not belong to this access key (bucket.secret_access_key)",
    "TokenRefreshRequired": "the session token has expired: get a new one",
}
DENIED: Final = frozenset({"AccessDenied", "403", "Forbidden"})
WRONG_REGION: Final = frozenset(
    {
        "AuthorizationHeaderMalformed",
        "PermanentRedirect",
        "301",
        "IllegalLocationConstraintException",
    }
)


def code_of(error: ClientError) -> str:
    """S3's error code (``NoSuchKey``), or the HTTP status as text where the answer had no body."""
    return str(error.response.get("Error", {}).get("Code", ""))


def status_of(error: ClientError) -> int:
    """HTTP status of the answer, 0 where there is none."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


@contextmanager
def translated(config: BucketConfig, doing: str, *answers: int) -> Iterator[None]:
    """Raise our errors in place of boto's; ``doing`` ("reading r/latest.json") begins their messages.

    A ClientError whose HTTP status is among ``answers`` passes: there the caller asked a question. Put nothing but
    calls of boto inside: a full disk is not the server's fault.
    """
    try:
        yield
    except ClientError as exc:
        if status_of(exc) in answers and code_of(exc) != "NoSuchBucket":
            raise
        raise from_answer(exc, config, doing) from exc
    except (NoCredentialsError, PartialCredentialsError, SSOError) as exc:
        remedy = f"give bucket.access_key_id and bucket.secret_access_key, or AWS_ACCESS_KEY_ID and so on ({exc})"
        raise ConfigError("bucket.access_key_id", config.access_key_id, remedy) from exc
    except ProfileNotFound as exc:
        raise ConfigError(
            "bucket.access_key_id", config.access_key_id, f"AWS_PROFILE: {exc}"
        ) from exc
    except (NoRegionError, InvalidRegionError) as exc:
        raise ConfigError(
            "bucket.region", config.region, f"name the bucket's region ({exc})"
        ) from exc
    except ParamValidationError as exc:
        raise ConfigError(
            "bucket.url", config.url, f"not a usable bucket and prefix ({_line(exc)})"
        ) from exc
    except (BotoCoreError, HTTPError, OSError) as exc:
        raise _from_transport(exc, config, doing) from exc


def _from_transport(exc: Exception, config: BucketConfig, doing: str) -> SpotGRPOError:
    """No answer, or one that broke off or did not match its checksum."""
    if "CERTIFICATE_VERIFY_FAILED" in str(exc):
        remedy = (
            "its certificate is not trusted here: set AWS_CA_BUNDLE to the file of its authority"
        )
        return ConfigError("bucket.endpoint_url", config.endpoint_url, remedy)
    return StoreUnavailable(f"{doing}: {type(exc).__name__}: {_line(exc)}")


def from_answer(error: ClientError, config: BucketConfig, doing: str) -> SpotGRPOError:
    """The error that an S3 error answer stands for.

    409 (a conditional write met another one) is StoreUnavailable: nothing is known, so read back.
    """
    code, status = code_of(error), status_of(error)
    if code == "NoSuchBucket":
        return ConfigError(
            "bucket.url", config.url, "there is no such bucket: create it, or correct the name"
        )
    if code == "InvalidBucketName":
        return ConfigError(
            "bucket.url", config.url, "the server does not take this name of a bucket"
        )
    if code in REFUSED_CREDENTIALS:
        return ConfigError("bucket.access_key_id", config.access_key_id, REFUSED_CREDENTIALS[code])
    if code in DENIED:
        return ConfigError("bucket.access_key_id", config.access_key_id, _denied(doing))
    if code == "RequestTimeTooSkewed":
        return ConfigError(
            "bucket.endpoint_url",
            config.endpoint_url,
            "its clock and ours differ: set this machine's clock",
        )
    if code in WRONG_REGION:
        remedy = f"the bucket is in another region, or behind another endpoint ({code})"
        return ConfigError("bucket.region", config.region, remedy)
    if code == "NotImplemented" or status == 501:
        remedy = f"this server lacks what is needed for {doing}; use one with conditional writes"
        return ConfigError("bucket.endpoint_url", config.endpoint_url, remedy)
    if status == 404:
        return NotStored(f"{doing}: the bucket has no such object")
    return StoreUnavailable(f"{doing}: the server answered {_shown(error)}{_hint(status)}")


def _line(exc: Exception) -> str:
    return " ".join(str(exc).split())[:300]


def _denied(doing: str) -> str:
    return (
        f"the server does not allow {doing}; without the right to list (s3:ListBucket) that is also its answer "
        "for an object that does not exist, so grant that right too"
    )


def _shown(error: ClientError) -> str:
    message = str(error.response.get("Error", {}).get("Message", ""))[:200]
    return f"{status_of(error)} {code_of(error)} {message}".rstrip()


def _hint(status: int) -> str:
    return " (an older server may need bucket.checksums = 'when_required')" if status == 400 else ""
