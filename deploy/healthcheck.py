"""Is the container of a learner or worker healthy? Exit 0 when the servers that it needs take connections.

That the process itself lives is what a container's life means already; one that lives but cannot reach broker or
bucket is what an operator wants to see. Standard library only, so that it costs nothing to run.
"""

import os
import socket
import sys
from collections.abc import Mapping
from urllib.parse import urlsplit

PORTS = {"amqp": 5672, "amqps": 5671, "http": 80, "https": 443}
TIMEOUT_S = 5.0
SERVERS = ("SPOTGRPO_BROKER__URL", "SPOTGRPO_BUCKET__ENDPOINT_URL")


def unreachable(environ: Mapping[str, str]) -> list[str]:
    """Names of the variables whose servers do not take a connection; those not set are not asked."""
    return [name for name in SERVERS if environ.get(name) and not answers(environ[name])]


def answers(url: str) -> bool:
    """True when the host and port of ``url`` take a TCP connection."""
    parts = urlsplit(url)
    try:
        address = (parts.hostname, parts.port or PORTS[parts.scheme])
        socket.create_connection(address, TIMEOUT_S).close()
    except (OSError, KeyError):
        return False
    return True


if __name__ == "__main__":
    silent = unreachable(os.environ)
    if silent:
        sys.exit(f"no connection: {', '.join(silent)}")
