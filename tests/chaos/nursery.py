"""Starts roles as real processes in a fraction of a second: torch and the rest are imported once, then forked from.

Run as ``python -m tests.chaos.nursery`` it reads one order a line (JSON) and answers each with one line. A child is a
process of its own that a signal can hit; it ends with the nursery, and the nursery with whoever started it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PR_SET_PDEATHSIG = 1
PRELOADED = (
    "spotgrpo.cli.main",
    "spotgrpo.cli.inputs",
    "spotgrpo.consumer.run",
    "spotgrpo.producer.run",
    "spotgrpo.producer.engines.transformers",
    "tests.chaos.roles",
)


class Nursery:
    """The side of whoever starts roles. Not for several threads at once."""

    def __init__(self, log: Path) -> None:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("SPOTGRPO_")}
        environ = kept | {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.nursery"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environ,
                cwd=ROOT,
                text=True,
            )
        self._ask({"order": "hello"})

    @property
    def pid(self) -> int:
        """Process id of the parent of all roles."""
        return self._process.pid

    def start(self, log: Path, order: dict[str, Any]) -> int:
        """The process id of a new role; see ``roles.run`` for what an order holds.

        ``prepare`` (``module:function``), where it is there, is called with the order before the role begins.
        """
        return int(self._ask({"order": "start", "log": str(log), **order})["pid"])

    def exit_code(self, pid: int) -> int | None:
        """None while it runs; negative for a signal, as in ``subprocess``."""
        code: int | None = self._ask({"order": "poll", "pid": pid})["code"]
        return code

    def close(self) -> None:
        """End it, and with it every role that still runs."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"the nursery ended with {self._process.wait(10)}")
        found: dict[str, Any] = json.loads(answer)
        return found


def main() -> int:
    """Serve orders until stdin ends. In a child, returns the role's exit code."""
    for name in PRELOADED:
        importlib.import_module(name)
    parent = os.getpid()
    codes: dict[int, int] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if order["order"] == "start":
            pid = os.fork()
            if not pid:
                return _child(parent, order)
            answer: dict[str, object] = {"pid": pid}
        elif order["order"] == "poll":
            answer = {"code": _poll(order["pid"], codes)}
        else:
            answer = {}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    return 0


def _poll(pid: int, codes: dict[int, int]) -> int | None:
    if pid not in codes:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            codes[pid] = os.waitstatus_to_exitcode(status)
    return codes.get(pid)


def _child(parent: int, order: dict[str, Any]) -> int:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.close(nothing)
    from tests.chaos import roles

    if "prepare" in order:
        module, _, function = order["prepare"].partition(":")
        getattr(importlib.import_module(module), function)(order)
    return roles.run(order)


if __name__ == "__main__":
    sys.exit(main())
