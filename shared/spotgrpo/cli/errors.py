"""How a command ends: one message on stderr and an exit code, whatever went wrong."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Final

import typer

from spotgrpo.shared.errors import SpotGRPOError, TransientError
from spotgrpo.shared.log import redact
from spotgrpo.shared.stopping import EXIT_INTERRUPTED

log = logging.getLogger(__name__)

EXIT_ERROR: Final = 1


@contextlib.contextmanager
def exit_on_errors() -> Iterator[None]:
    """Turn an error of the block into its message and exit code.

    Ours need no traceback (``log.level = "debug"`` shows it all the same); any other is a fault of this
    program and shows one.
    """
    try:
        yield
    except typer.Exit:
        raise
    except SpotGRPOError as exc:
        if logging.getLogger().isEnabledFor(logging.DEBUG):
            log.debug("traceback", exc_info=exc)
        complain(str(exc) or type(exc).__name__)
        raise typer.Exit(exc.exit_code) from exc
    except KeyboardInterrupt as exc:
        complain("stopped at once")
        raise typer.Exit(EXIT_INTERRUPTED) from exc
    except BrokenPipeError as exc:  # whoever read our stdout left
        sys.stderr.close()
        raise typer.Exit(EXIT_ERROR) from exc
    except Exception as exc:  # the edge of the process
        log.critical("a fault of this program", exc_info=exc)
        raise typer.Exit(EXIT_ERROR) from exc


@contextlib.contextmanager
def stop_is_a_normal_end(stopping: threading.Event) -> Iterator[None]:
    """End the command well where ``stopping`` is set while a server is not reachable: that ends the tries."""
    try:
        yield
    except TransientError as exc:
        if not stopping.is_set():
            raise
        complain(f"stopped while a server was not reachable ({exc})")
        raise typer.Exit from exc


def complain(message: str) -> None:
    """Print ``message`` to stderr, passwords of URLs blacked out."""
    for line in message.splitlines():
        print(f"spotgrpo: {redact(line)}", file=sys.stderr)
    sys.stderr.flush()
