"""Every error that crosses a module boundary. A class says what the caller should do.

    SpotGRPOError
    ├── ConfigError         exit 2, before anything starts: names the key, the value and the remedy
    ├── WireError           the delivery is dead-lettered with the reason
    ├── TransientError      retried with jittered backoff; at start up to a deadline (exit 3), later for ever
    │   ├── BrokerUnavailable
    │   └── StoreUnavailable
    ├── IntegrityError      keep serving the old version and alarm (exit 5 at start, or where what is served turned)
    ├── NotStored           an object is not in the bucket: superseded, so read latest.json again
    └── Fenced              another learner took the run over (exit 4)

Add a class only where a caller has to do something that none of these says. Adapters translate foreign
exceptions in one place each, always ``from exc``. Stale, flat and duplicate groups are counts, not errors.
"""

from __future__ import annotations

from typing import ClassVar

MAX_SHOWN = 200


class SpotGRPOError(Exception):
    """Root of all errors of this package; ``exit_code`` is what a command ends with."""

    exit_code: ClassVar[int] = 1


class ConfigError(SpotGRPOError):
    """A person has to change an input.

    Args:
        key: dotted name of the setting, as in the TOML (``model.name``).
        value: what was given; secrets must be redacted by the caller.
        remedy: what would be right, as one sentence.
    """

    exit_code = 2

    def __init__(self, key: str, value: object, remedy: str) -> None:
        shown = repr(value)
        if len(shown) > MAX_SHOWN:
            shown = shown[:MAX_SHOWN] + "…"
        super().__init__(f"{key} = {shown}: {remedy}")
        self.key, self.value, self.remedy = key, value, remedy


class WireError(SpotGRPOError):
    """A message body or bucket object does not have the shape its schema promises."""


class TransientError(SpotGRPOError):
    """A server did not answer, or answered that it cannot now; trying again may help."""

    exit_code = 3


class BrokerUnavailable(TransientError):
    """RabbitMQ is not reachable, closed the connection, or did not confirm."""


class StoreUnavailable(TransientError):
    """The S3 server is not reachable or answered with a fault of its own."""


class IntegrityError(SpotGRPOError):
    """Stored bytes differ from their digest, or an engine does not serve what it should."""

    exit_code = 5


class Fenced(SpotGRPOError):
    """``latest.json`` belongs to another learner now; this one must stop and change nothing."""

    exit_code = 4


class NotStored(SpotGRPOError):
    """The bucket has no object of that key: never written, or superseded. Read ``latest.json`` again."""
