"""What private servers have in common: a folder that is theirs, ports drawn once, and an end with their owner."""

from __future__ import annotations

import os
import signal
from abc import ABC, abstractmethod
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

from spotgrpo.shared.errors import TransientError
from spotgrpo.shared.services.processes import (
    Child,
    ChildEnded,
    FolderLock,
    free_ports,
    kept_secrets,
)


class PrivateServer(ABC):
    """A server that this process owns: on loopback only, with secrets of its own.

    A stopped or killed server starts again with the same data, and, from the same object, on the same port.
    Not safe to use from several threads; `start` and `restart` need the main thread.

    Args:
        folder: its data, logs and secrets; made if missing, reused if not.
    """

    _stop_grace_s: ClassVar[float]
    _port_count: ClassVar[int]
    _secrets_file: ClassVar[str]
    _unavailable: ClassVar[type[TransientError]]

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        self._lock = FolderLock(self.folder)
        self._ports: list[int] = []
        self._secrets: dict[str, str] = {}
        self._program: Path | None = None
        self._server: Child | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def port(self) -> int:
        return self._ports[0]

    @property
    def pid(self) -> int:
        """Process id of the server itself."""
        return self._child.pid

    @property
    def is_running(self) -> bool:
        return self._server is not None and self._server.is_running

    def start(self) -> None:
        """Start, and return when it can be used; nothing to do when it runs.

        Raises:
            ConfigError: it is not installed, or a live process runs a server over this folder.
            BrokerUnavailable, StoreUnavailable: it did not come up; the message carries the end of its log.
        """
        if self.is_running:
            return
        self._program = self._find()
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self._lock.is_held:
            self._lock.acquire()
        try:
            self._secrets = kept_secrets(self.folder / self._secrets_file, self._draw_secrets)
            self._start_on_free_ports()
        except BaseException:
            self.stop()
            raise

    def restart(self) -> None:
        """Stop in good order and start again on the same port."""
        self._child.stop(self._stop_grace_s)
        self.start()

    def stop(self) -> None:
        """Stop the server and give the folder back. Nothing to do when stopped."""
        if self._server is not None:
            self._server.stop(self._stop_grace_s)
        self._server = None
        self._tidy()
        self._lock.release()

    def kill(self) -> None:
        """End the server with SIGKILL, as a crash would; `start` brings it back on the same port."""
        self._child.kill()

    def pause(self) -> None:
        """Freeze the server, and return when it is: connections stay open and nothing answers."""
        self._child.send(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let a frozen server go on."""
        self._child.send(signal.SIGCONT)

    @property
    def _child(self) -> Child:
        if self._server is None:
            raise RuntimeError("the server was not started")
        return self._server

    @property
    def _installed(self) -> Path:
        if self._program is None:
            raise RuntimeError("the server was never started")
        return self._program

    def _start_on_free_ports(self) -> None:
        """Start on the ports of before; draw them, and draw again if another was faster, the first time."""
        is_first = not self._ports
        for last_try in (False, False, True):
            self._ports = self._ports or free_ports(self._port_count)
            try:
                self._launch()
            except ChildEnded as exc:
                if last_try or not is_first:
                    raise self._unavailable(self._why(exc)) from exc
                self._ports = []
            else:
                return

    def _why(self, error: ChildEnded) -> str:
        return str(error)

    @abstractmethod
    def _find(self) -> Path:
        """The program, or ConfigError."""

    @staticmethod
    @abstractmethod
    def _draw_secrets() -> dict[str, str]:
        """New secrets, for a new folder."""

    @abstractmethod
    def _launch(self) -> None:
        """Start the children on ``_ports`` and wait until they can be used. Raises ChildEnded."""

    @abstractmethod
    def _tidy(self) -> None:
        """Let go of what helps the server, once it has stopped."""
