"""Runs a module as a process that dies with the process that started it.

    python -m tandem.guarded_exec PARENT_PID MODULE [ARGUMENT]...

The kernel kills the child when the parent's thread that started it ends, so that even a parent
killed with SIGKILL leaves no orphan. This is a program of its own, not a `preexec_fn`, because
running Python between fork and exec can deadlock a parent that has threads. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Arms the signal and becomes the module; returns only by exception."""
    parent_pid, module, *rest = arguments
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    # The parent may have died before the signal was armed.
    if os.getppid() != int(parent_pid):
        raise SystemExit(f"{module}: the launcher is gone")
    os.execv(sys.executable, [sys.executable, "-m", module, *rest])


if __name__ == "__main__":
    main(sys.argv[1:])
