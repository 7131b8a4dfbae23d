"""What the trainer sets for its whole process: repeatable bits, and what SIGTERM does."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

import torch


def fix_bits(deterministic: bool) -> None:
    """Make a re-run of the same steps give the same bits, for the whole process."""
    # the same switch as use_deterministic_algorithms, which would import the compiler first (a second or two)
    torch.set_deterministic_debug_mode("error" if deterministic else "default")
    # the switch also fills all new memory, which finds bugs and costs time
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if deterministic:  # a workspace for each stream; cuBLAS reads this when it starts
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@contextlib.contextmanager
def on_sigterm(stop: Callable[[], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; in another thread the caller calls stop()
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
