"""Where the broker is: connection parameters from the configuration, and pika's errors as ours."""

from __future__ import annotations

import logging
import re
import ssl
from urllib.parse import quote, urlsplit, urlunsplit

import pika
from pika.exceptions import ChannelClosedByBroker, IncompatibleProtocolError
from tenacity import RetryCallState, Retrying, wait_random_exponential

from spotgrpo.shared.config import BrokerConfig
from spotgrpo.shared.errors import BrokerUnavailable, ConfigError, SpotGRPOError
from spotgrpo.shared.log import redact_url
from spotgrpo.shared.rabbitmq.outage import Outage
from spotgrpo.shared.retry import FIRST_WAIT_S, LONGEST_WAIT_S

CONNECT_TIMEOUT_S = 10.0
HANDSHAKE_TIMEOUT_S = 20.0
SHORTEST_WAIT_S = 0.05

NOT_FOUND = 404
ACCESS_REFUSED = 403
RESOURCE_LOCKED = 405
PRECONDITION_FAILED = 406

# pika reports one lost connection in up to five lines and a traceback; this package says it in one of its own.
if logging.getLogger("pika").level == logging.NOTSET:
    logging.getLogger("pika").setLevel(logging.CRITICAL)


def redact(url: str) -> str:
    """``url`` without its password and query, for messages and logs."""
    return redact_url(url)


class Server:
    """The address of one broker, and what is said while it is away.

    Raises:
        ConfigError: the URL or the CA file cannot be used.
    """

    def __init__(self, config: BrokerConfig) -> None:
        url = config.url.get_secret_value()
        self.config = config
        self.shown = redact(url)
        self.outage = Outage(self.shown)
        self._scheme = url.partition(":")[0]
        if "@" in _after_authority(url):
            raise ConfigError(
                "broker.url",
                self.shown,
                "percent-encode the password (/ as %2F, ? as %3F, # as %23, @ as %40)",
            )
        if self._scheme not in {"amqp", "amqps"} or not _hostname(url):
            raise ConfigError(
                "broker.url", self.shown, "use amqp://user:password@host:5672/vhost, or amqps://"
            )
        self._url = _with_encoded_root(url)
        self._tls = self._tls_options() if self._scheme == "amqps" else None
        self.parameters("check")

    def parameters(self, name: str) -> pika.URLParameters:
        """Parameters of one connection; ``name`` is what the broker's own tools show."""
        try:
            parameters = pika.URLParameters(self._url)
        except (ValueError, TypeError) as exc:
            raise ConfigError("broker.url", self.shown, "not a URL that pika understands") from exc
        if self._tls is not None:
            parameters.ssl_options = self._tls
        parameters.heartbeat = self.config.heartbeat_s
        parameters.connection_attempts = 1
        parameters.retry_delay = 0
        parameters.socket_timeout = CONNECT_TIMEOUT_S
        parameters.stack_timeout = HANDSHAKE_TIMEOUT_S
        parameters.blocked_connection_timeout = None
        parameters.client_properties = {"connection_name": f"spotgrpo {name}"}
        return parameters

    def _tls_options(self) -> pika.SSLOptions:
        ca_file = self.config.ca_file
        try:
            context = ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
        except OSError as exc:  # ssl.SSLError is one
            raise ConfigError(
                "broker.ca_file", str(ca_file), f"not a readable CA certificate ({exc})"
            ) from exc
        return pika.SSLOptions(context, _hostname(self._url))

    def connection_error(self, exc: BaseException) -> SpotGRPOError:
        """What a failed or lost connection means: ConfigError where a person must act, else BrokerUnavailable."""
        text = "\n".join(f"{one!r} {one}" for one in _chain(exc))
        remedy = _refusal(text)
        if remedy is None and "CERTIFICATE_VERIFY_FAILED" in text:
            return ConfigError(
                "broker.ca_file", str(self.config.ca_file), "it does not vouch for the server"
            )
        if remedy is None and "WRONG_VERSION_NUMBER" in text:
            remedy = "that port does not speak TLS: use amqp://, or the broker's TLS port"
        if remedy is not None:
            return ConfigError("broker.url", self.shown, remedy)
        return BrokerUnavailable(f"{self.shown}: {_brief(exc)}")

    def refused(self, what: str, exc: ChannelClosedByBroker) -> ConfigError:
        """An operation that the user's permissions do not cover."""
        return ConfigError(
            "broker.url", self.shown, f"the user may not {what}: {exc.reply_text}"[:300]
        )


class Backoff:
    """Jittered, growing pauses in seconds, between tries that have no end."""

    def __init__(self, longest_s: float = LONGEST_WAIT_S) -> None:
        self._wait = wait_random_exponential(
            multiplier=FIRST_WAIT_S, min=SHORTEST_WAIT_S, max=longest_s
        )
        self.reset()

    def reset(self) -> None:
        """Begin again with the shortest pause."""
        self._state = RetryCallState(Retrying(), None, (), {})

    def next_s(self) -> float:
        """The next pause."""
        pause = self._wait(self._state)
        self._state.attempt_number += 1
        return pause


def _hostname(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None


def _after_authority(url: str) -> str:
    """From the first character on that ends user, password, host and port."""
    rest = url.partition("://")[2]
    return rest[len(re.split(r"[/?#]", rest, maxsplit=1)[0]) :]


def _with_encoded_root(url: str) -> str:
    """A path of ``//`` names the virtual host ``/``, which pika wants as ``/%2F``."""
    parts = urlsplit(url)
    path = "/" + quote("/", safe="") if parts.path == "//" else parts.path
    return urlunsplit((parts.scheme, parts.netloc, path, parts.query, parts.fragment))


def _refusal(text: str) -> str | None:
    """The remedy where the broker refused the connection for good.

    pika folds the broker's answer into the text of its own guess (ProbableAuthenticationError), and guesses the
    same of a line that was merely cut; only the broker's reply code tells them apart.
    """
    match = re.search(r"ConnectionClosedByBroker: \((\d+)\) ['\"](.*)", text)
    if match is None:
        return None
    code, reply = int(match[1]), match[2]
    if code == ACCESS_REFUSED:
        return "the broker refused the user or the password"
    for_good = "not found" in reply or (
        "refused for user" in reply and "limit" not in reply and "down" not in reply
    )
    if code == 530 and for_good:
        return "the broker has no such virtual host, or the user may not use it"
    return None


def _chain(exc: BaseException) -> list[BaseException]:
    """An exception, its causes, and the exceptions that pika lists inside, the outermost first."""
    found: list[BaseException] = []
    waiting: list[object] = [exc]
    while waiting:
        one = waiting.pop(0)
        if isinstance(one, BaseException) and all(one is not other for other in found):
            found.append(one)
            inside = [getattr(one, "exception", None), *getattr(one, "exceptions", ())]
            waiting += [one.__cause__, one.__context__, *one.args, *inside]
    return found


def _brief(exc: BaseException) -> str:
    """The innermost cause in a few words: pika wraps a refused connection five times."""
    chain = _chain(exc)
    for one in reversed(chain):
        if isinstance(one, OSError):
            return str(one) or type(one).__name__
    if any(isinstance(one, IncompatibleProtocolError) for one in chain):
        return "it closed the connection before it spoke AMQP"
    return f"{type(exc).__name__}: {str(exc)[:200]}" if str(exc) else type(exc).__name__
