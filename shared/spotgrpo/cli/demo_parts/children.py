"""The demo's processes: the same commands that a user types, each with a log of its own."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from spotgrpo.cli.demo_parts.folder import DemoFolder
from spotgrpo.shared.errors import SpotGRPOError
from spotgrpo.shared.services.processes import Child, FolderLock, tail
from spotgrpo.shared.stopping import Stopping

CPU_SETTINGS: Final = {
    "OMP_NUM_THREADS": "1",  # three processes share the cores
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}
STOP_GRACE_S: Final = 25.0
LOOK_S: Final = 0.2


class Process(Child):
    """A command of the demo."""

    @property
    def status(self) -> int | None:
        """Its exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def failure(self) -> SpotGRPOError:
        """What to end with when it should not have ended: its status and the end of its log."""
        return ChildFailed(self.name, self.status, self.log)


class ChildFailed(SpotGRPOError):
    """A process of the demo ended that should not have; ends with its exit code where it is one of ours."""

    def __init__(self, name: str, status: int | None, log: Path) -> None:
        super().__init__(f"{name} ended with status {status}\n{tail(log)}")
        self.exit_code = status if status in (2, 3, 4, 5) else 1  # type: ignore[misc]


class Crew:
    """Starts the demo's processes and stops them; a context manager that leaves none behind.

    They end with this process, however it ends. Start them from the main thread.
    """

    def __init__(self, folder: DemoFolder, servers: Mapping[str, str]) -> None:
        self._folder = folder
        self.env = {**os.environ, **CPU_SETTINGS, **servers}
        """Of every process: ours, with what leads to the servers."""
        self._lock = FolderLock(folder.path)
        self.processes: dict[str, Process] = {}

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(STOP_GRACE_S)
        self._lock.release()

    def start(self, name: str, module: str, *arguments: str | Path) -> Process:
        """Start ``python -m module arguments``; its output goes to ``<name>.log``."""
        command = [sys.executable, "-m", module, *map(str, arguments)]
        process = Process(name, command, self.env, self._folder.log(name), self._lock.fd)
        self.processes[name] = process
        return process

    def start_command(self, name: str, verb: str, *arguments: str | Path) -> Process:
        """Start ``spotgrpo verb run.toml arguments``."""
        return self.start(name, "spotgrpo.cli.main", verb, self._folder.toml, *arguments)

    def finish(self, process: Process, stopping: Stopping) -> None:
        """Wait until ``process`` is done.

        Raises:
            ChildFailed: it ended with another status than 0.
            Interrupted: a person wants to stop.
        """
        while process.status is None:
            if stopping.wait(LOOK_S):
                raise Interrupted(stopping.reason)
        if process.status != 0:
            raise process.failure()

    def leave(self, patience_s: float) -> None:
        """Give all ``patience_s`` to end by themselves, then stop them."""
        deadline = time.monotonic() + patience_s
        while any(p.is_running for p in self.processes.values()) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        self.stop(patience_s)

    def stop(self, grace_s: float) -> None:
        """Ask all that still run to stop, at once, and kill after ``grace_s`` those that do not."""
        running = [process for process in self.processes.values() if process.is_running]
        for process in running:
            process.send(signal.SIGTERM)
        for process in running:
            process.stop(grace_s)


class Interrupted(SpotGRPOError):
    """A person or the system asked the demo to stop."""

    exit_code = 130

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"{reason or 'told to stop'}: the demo was stopped, and everything that it had started"
        )
