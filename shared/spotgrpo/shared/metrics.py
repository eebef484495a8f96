"""``metrics.jsonl`` and ``summary.json``: what a run leaves for people and programs to read."""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from spotgrpo.shared.errors import ConfigError

log = logging.getLogger(__name__)

SCHEMA: Final = 1


class MetricsWriter:
    """Appends one JSON object a line, each with ``schema``, ``time`` (Unix seconds) and ``role``.

    A line is handed to the system whole and at once, so that a killed process loses none; a line that was torn
    all the same (the machine died) is cut off on the next opening. Safe to use from any thread.

    Args:
        path: the file; folders are made.
        role: ``learner``, ``worker``, …; a record may bring its own.
        clock: gives Unix seconds.

    Raises:
        ConfigError: the file cannot be opened for writing.
    """

    def __init__(
        self, path: Path, role: str = "learner", clock: Callable[[], float] = time.time
    ) -> None:
        self.path = path
        self._role, self._clock = role, clock
        self._lock = threading.Lock()
        self._complained = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
            _heal(self._file.fileno())
        except OSError as exc:
            raise _unwritable(path, exc) from exc

    def write(self, record: Mapping[str, object], *, role: str | None = None) -> None:
        """Append ``record``. Numbers that JSON has not (NaN, infinities) become null.

        A disk that refuses (full) is logged once and costs the record, not the run.
        """
        whole = {"schema": SCHEMA, "time": self._clock(), "role": role or self._role, **record}
        line = json.dumps(as_json(whole), allow_nan=False, ensure_ascii=False) + "\n"
        with self._lock:
            try:
                self._file.write(line.encode())
            except OSError as exc:
                self._complain(exc)

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            log.warning("%s: %s; records are lost until it can be written again", self.path, error)
        self._complained = True

    def close(self) -> None:
        """Close the file. Idempotent."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def write_summary(path: Path, summary: Mapping[str, object]) -> None:
    """Write ``summary`` with its ``schema`` as JSON; ``path`` appears whole or keeps what it had.

    Raises:
        ConfigError: the folder cannot be written.
    """
    body = json.dumps(as_json({"schema": SCHEMA, **summary}), indent=1, ensure_ascii=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".summary-", delete=False) as file:
            file.write(body.encode())
            file.flush()
            os.fsync(file.fileno())
        Path(file.name).chmod(0o644)
        Path(file.name).replace(path)
    except OSError as exc:
        raise _unwritable(path, exc) from exc


def as_json(value: object) -> Any:
    """``value`` with numpy scalars and arrays, paths and tuples as JSON has them; NaN and infinities as null."""
    if isinstance(value, np.generic | np.ndarray):
        return as_json(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(item) for item in value]
    return str(value)


def _heal(descriptor: int) -> None:
    """Cut what follows the last newline: a line that was never finished."""
    end = os.lseek(descriptor, 0, os.SEEK_END)
    keep = end
    while keep > 0:
        start = max(0, keep - 65_536)
        newline = os.pread(descriptor, keep - start, start).rfind(b"\n")
        if newline >= 0:
            keep = start + newline + 1
            break
        keep = start
    if keep < end:
        os.ftruncate(descriptor, keep)


def _unwritable(path: Path, error: OSError) -> ConfigError:
    reason = error.strerror or str(error)
    return ConfigError("run.output_dir", str(path), f"{reason}; give a folder that can be written")
