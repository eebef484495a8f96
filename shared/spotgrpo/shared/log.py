"""Logging of every command: to stderr, pretty on a terminal, plain elsewhere, secrets blacked out."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Iterable
from typing import Final, TextIO

PLAIN_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
HIDDEN: Final = "***"
SHORTEST_SECRET: Final = 4
"""Shorter ones are not searched for in texts: they would black out parts of words."""

# Up to the last @: a password that was not percent-encoded may hold any of / ? # @.
_URL_PASSWORD = re.compile(r"(?P<head>[a-zA-Z][a-zA-Z0-9+.-]*://[^\s:/@]*:)\S+@")
_CHATTY = (
    "boto3",
    "botocore",
    "urllib3",
    "s3transfer",
    "httpx",
    "httpx2",
    "httpcore",
    "httpcore2",
    "filelock",
    "asyncio",
)


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """``text`` without ``secrets`` and without the passwords of URLs."""
    for secret in secrets:
        if len(secret) >= SHORTEST_SECRET:
            text = text.replace(secret, HIDDEN)
    return _URL_PASSWORD.sub(rf"\g<head>{HIDDEN}@", text)


def redact_url(url: str) -> str:
    """``url`` without its password, query and fragment, also where it is not a proper one."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        scheme, rest = "", url
    credentials, at, place = rest.rpartition("@")
    user = re.split(r"[:/?#@]", credentials, maxsplit=1)[0]
    shown = re.split(r"[?#]", place, maxsplit=1)[0]
    return f"{scheme}{separator}{f'{user}:{HIDDEN}@' if at else ''}{shown}"


def password_of(url: str) -> str:
    """What stands between the user and the last @, as it is written; empty where there is none."""
    return url.partition("://")[2].rpartition("@")[0].partition(":")[2]


class SecretsFilter(logging.Filter):
    """Blacks secrets out of messages and tracebacks, whoever logged them."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        super().__init__()
        self._secrets = tuple(sorted({*secrets}, key=len, reverse=True))

    def filter(self, record: logging.LogRecord) -> bool:
        """Rewrite ``record`` in place; it always passes."""
        record.msg, record.args = redact(record.getMessage(), self._secrets), ()
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = redact(record.exc_text, self._secrets)
        return True


def configure_logging(
    level: str = "info", secrets: Iterable[str] = (), stream: TextIO | None = None
) -> None:
    """Set the root logger up, replacing what was set up before.

    Args:
        level: least level shown, as in ``log.level``; libraries stay at warning above debug.
        secrets: texts that must never appear.
        stream: where to; stderr by default, so that stdout stays free for results.
    """
    stream = stream or sys.stderr
    handler = _rich_handler(stream) if stream.isatty() else logging.StreamHandler(stream)
    if not stream.isatty():
        handler.setFormatter(logging.Formatter(PLAIN_FORMAT))
    handler.addFilter(SecretsFilter(secrets))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    lowest = logging.getLogger().level
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, lowest))
    # pika logs every failed try as a handful of errors with tracebacks; our own line says it once.
    logging.getLogger("pika").setLevel(logging.CRITICAL if lowest > logging.DEBUG else lowest)
    logging.captureWarnings(capture=True)


def _rich_handler(stream: TextIO) -> logging.Handler:
    from rich.console import Console
    from rich.logging import RichHandler

    handler = RichHandler(
        console=Console(file=stream), show_path=False, markup=False, log_time_format="%H:%M:%S"
    )
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler
