"""A process that ends when its parent does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

SUPERVISOR = "ROLLMILL_SUPERVISOR"  # environment variable: pid of the process whose death ends this one
PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies: nobody would restart or stop it any more."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.get(SUPERVISOR, os.getppid())):  # the parent died before the call
        sys.exit(1)
