"""Become another program that is told to stop when its parent ends.

Run as a script, ``python launcher.py PARENT_PID PROGRAM ARGUMENT...``, and not with ``preexec_fn``: Python code
between fork and exec can deadlock in a parent that has threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel for SIGTERM at the parent's end (Linux only), then exec."""
    parent, program = int(sys.argv[1]), sys.argv[2]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before the kernel knew
        sys.exit(1)
    os.execv(program, sys.argv[2:])  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main()
