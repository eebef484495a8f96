"""Making room: what former demos left that nobody uses any more."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

from spotgrpo.cli.demo_parts.folder import DemoFolder


def remove_old_servers(current: DemoFolder) -> list[str]:
    """Remove the servers' data of former demos under the same root; returns the run ids.

    The newest former one is kept, so that its bucket can still be looked into. One that still runs, or whose
    servers do, is left alone: they hold a lock in their folders.
    """
    former = sorted(
        (path for path in current.root.glob("demo-*/services") if path != current.services),
        key=lambda path: path.stat().st_mtime,
    )
    gone = [path for path in former[:-1] if not _is_in_use(path.parent)]
    for path in gone:
        shutil.rmtree(path, ignore_errors=True)
    return [path.parent.name for path in gone]


def _is_in_use(folder: Path) -> bool:
    return any(_is_locked(path) for path in folder.rglob("owner.lock"))


def _is_locked(path: Path) -> bool:
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
