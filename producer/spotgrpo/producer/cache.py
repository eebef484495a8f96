"""Where a worker keeps downloaded versions: a folder of its own, which a later worker removes if this one is killed."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from spotgrpo.shared.errors import ConfigError

log = logging.getLogger(__name__)

PREFIX: Final = "spotgrpo-versions-"
LOCK: Final = ".lock"


@contextlib.contextmanager
def cache_folder(parent: Path | None) -> Iterator[Path]:
    """An empty folder under ``parent`` (None: the system's for temporary files), removed at the end of the block.

    A lock file beside it is held while this process lives. Folders whose lock nobody holds were left by workers that
    were killed: they are removed first, or a supervised worker that dies again and again would fill the disk.

    Raises:
        ConfigError: ``parent`` cannot be written.
    """
    where = parent or Path(tempfile.gettempdir())
    folder = where / f"{PREFIX}{secrets.token_hex(8)}"
    try:
        where.mkdir(parents=True, exist_ok=True)
        _sweep(where)
        lock = _locked(_lock_of(folder))
        folder.mkdir(0o700)
    except OSError as exc:
        raise ConfigError(
            "worker.cache_dir", str(where), f"{exc.strerror}; give a folder that can be written"
        ) from exc
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(folder.name + LOCK)


def _locked(path: Path) -> int:
    """Make a lock file that is held from the moment in which it has its name, so that no sweep finds it free."""
    unnamed = path.with_suffix(".new")
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    unnamed.rename(path)
    return lock


def _sweep(where: Path) -> None:
    """Remove what killed workers left; what other users left is theirs."""
    for path in where.glob(f"{PREFIX}*{LOCK}"):
        folder = path.with_name(path.name.removesuffix(LOCK))
        try:
            lock = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:  # its worker lives
            continue
        else:
            log.info("removing %s, which a killed worker left", folder)
            _remove(folder)
        finally:
            os.close(lock)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        _lock_of(folder).unlink()
