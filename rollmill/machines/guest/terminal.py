"""Terminals (pty) for processes that are used as a person would, in pid 1: python -i, less, an editor.

The process has one end as its input, output and controlling terminal. Pid 1 holds the other end.
"""

from __future__ import annotations

import fcntl
import os
import struct
import termios

_GET_PEER = 0x5441  # TIOCGPTPEER: open the other end without its name
_UNLOCK = 0x40045431  # TIOCSPTLCK
_SIZE = struct.Struct("HHHH")  # rows, columns, and two numbers that nobody uses
_CHUNK = 1 << 16


def open_pair(rows: int, columns: int) -> tuple[int, int]:
    """A new terminal: our end, which does not block, and that of a process. As os.openpty, which wants to be its
    owner's real user."""
    ours = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.ioctl(ours, _UNLOCK, struct.pack("i", 0))
        resize(ours, rows, columns)
        return ours, fcntl.ioctl(ours, _GET_PEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
    except BaseException:
        os.close(ours)
        raise


def resize(terminal: int, rows: int, columns: int) -> None:
    """Programs learn of it by SIGWINCH."""
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, _SIZE.pack(rows, columns, 0, 0))


def control(terminal: int) -> None:
    """Make it the controlling terminal of this process, which leads its session."""
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def read(terminal: int) -> bytes | None:
    """What the process has written; b"" at its end, None if there is nothing now."""
    try:
        return os.read(terminal, _CHUNK)
    except BlockingIOError:
        return None
    except OSError:  # nobody has the other end open any more
        return b""


def write(terminal: int, data: bytes) -> int:
    """How many bytes were taken. Those that are left must wait until the process has read."""
    try:
        return os.write(terminal, data)
    except BlockingIOError:
        return 0
