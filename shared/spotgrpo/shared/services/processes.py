"""What private servers have in common: a child that ends with its parent, free ports, a folder with one owner."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from spotgrpo.shared.errors import ConfigError

LAUNCHER = Path(__file__).with_name("launcher.py")
LOOPBACK = "127.0.0.1"
# Below the ports that the kernel gives to outgoing connections: a client that tries a stopped server again
# and again would otherwise be given that very port one day, and connect to itself.
PORTS = range(10_240, 32_000)
# A server that lost its owner may take this long to leave: SeaweedFS with a half-read download open needs 30 s.
LEAVING_S = 40.0
TAIL_BYTES = 4000


class ChildEnded(Exception):
    """A child ended while it was waited for; the message carries the end of its log."""


class Child:
    """A child process that gets SIGTERM when this process ends, whichever way that happens.

    Args:
        name: what messages call it.
        command: absolute path of the program, then its arguments.
        env: its whole environment.
        log: file that its output is appended to.
        keep_open: file descriptor that it inherits.

    Raises:
        RuntimeError: called outside the main thread; the kernel takes the end of the calling thread for
            the end of the parent.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        env: Mapping[str, str],
        log: Path,
        keep_open: int,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(f"start {name} from the main thread: a child ends with its thread")
        self.name = name
        self.log = log
        launcher = [sys.executable, "-I", "-S", str(LAUNCHER), str(os.getpid())]
        with log.open("ab") as out:
            self._process = subprocess.Popen(
                [*launcher, *map(str, command)],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=(keep_open,),
                start_new_session=True,  # Ctrl-C is for the parent, which stops its children in order
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def wait_until(self, is_ready: Callable[[], bool], deadline_s: float) -> bool:
        """Ask `is_ready` every 50 ms; False when it was not ready within `deadline_s` seconds.

        Raises:
            ChildEnded: it ended first.
        """
        deadline = time.monotonic() + deadline_s
        while time.monotonic() < deadline:
            if not self.is_running:
                raise ChildEnded(
                    f"{self.name} ended with status {self._process.returncode}\n{tail(self.log)}"
                )
            if is_ready():
                return self.is_running
            time.sleep(0.05)
        return False

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL after `grace_s` seconds; return when the process is gone."""
        if self.is_running:
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                self.kill()

    def kill(self) -> None:
        """Send SIGKILL and return when the process is gone."""
        if self.is_running:
            self._process.kill()
        self._process.wait()

    def send(self, signum: signal.Signals) -> None:
        """Send a signal, such as SIGSTOP and SIGCONT for a server that hangs."""
        self._process.send_signal(signum)


class FolderLock:
    """One owner at a time for a folder, also across processes.

    Children inherit the locked descriptor, so that the folder stays taken until the last of them is gone, even
    when their parent was killed.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "owner.lock"
        self._fd: int | None = None

    @property
    def fd(self) -> int:
        if self._fd is None:
            raise RuntimeError("the folder is not locked")
        return self._fd

    @property
    def is_held(self) -> bool:
        return self._fd is not None

    def acquire(self, leaving_s: float = LEAVING_S) -> None:
        """Take the folder; wait up to `leaving_s` seconds for servers whose owner is gone already.

        Raises:
            ConfigError: a live process owns the folder, or servers of a dead one do not leave.
        """
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + leaving_s
        while not _try_lock(fd):
            owner = _read_pid(fd)
            if owner is not None and _is_alive(owner):
                os.close(fd)
                raise ConfigError(
                    "services folder",
                    str(self._path.parent),
                    f"process {owner} runs servers there; stop it or use another folder",
                )
            if time.monotonic() > deadline:
                os.close(fd)
                raise ConfigError(
                    "services folder",
                    str(self._path.parent),
                    f"servers of process {owner}, which is gone, still run there; stop them",
                )
            time.sleep(0.1)
        os.ftruncate(fd, 0)
        os.pwrite(fd, str(os.getpid()).encode(), 0)
        self._fd = fd

    def release(self) -> None:
        """Give the folder back. Call it when the children are gone."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def free_ports(count: int) -> list[int]:
    """Draw `count` different ports of the loopback interface that any server can bind now.

    A port on which closed connections linger (TIME_WAIT) is not drawn: only a server that sets SO_REUSEADDR could
    bind it.
    """
    ports: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind((LOOPBACK, port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise ConfigError("ports", f"{PORTS.start} to {PORTS.stop}", f"{count} free ports are needed")


def tail(log: Path) -> str:
    """Return the end of a log file; empty where there is none."""
    try:
        text = log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip()
    except OSError:
        return ""
    return f"--- end of {log}\n{text}" if text else ""


def kept_secrets(path: Path, draw: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Return the secrets kept in `path`; draw and keep them, for the owner's eyes only, the first time."""
    if path.exists():
        kept: dict[str, str] = json.loads(path.read_text())
        return kept
    drawn = draw()
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(drawn, file)
    partial.replace(path)
    return drawn


def find_program(name: str, *folders: Path) -> Path | None:
    """Look for a program in `folders`, then on PATH."""
    for folder in folders:
        if os.access(folder / name, os.X_OK):
            return folder / name
    found = shutil.which(name)
    return Path(found) if found else None


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_pid(fd: int) -> int | None:
    text = os.pread(fd, 32, 0)
    return int(text) if text.isdigit() else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
