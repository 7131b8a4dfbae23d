"""A directory of a machine as a tar, which nobody has checked (file_trees.py does)."""

from __future__ import annotations

import errno
import os

from rollmill.machines.machine import ExecResult, Machine

_NO_DIRECTORY, _NO_PROGRAM = 66, 127
_INCOMPLETE = 2  # `tar` could not read a file
# what tar says about files that it cannot read must not be mixed with the archive
_PACK = f'cd -- "$0" 2> /dev/null || exit {_NO_DIRECTORY}; exec tar -cf - . 2> /dev/null'


async def pack_tree(machine: Machine, source: str, *, max_bytes: int, timeout_s: float, whole: bool = True) -> bytes:
    """A tar of a directory, if not `whole` without what cannot be read. Nobody has checked it.

    OSError: there is no such directory (FileNotFoundError), not all can be read, it has more than `max_bytes` (EFBIG),
    or it cannot be packed; ENOSYS: the machine has no `tar`, and needs it. MachineError as with `exec`.
    """
    if (pack := getattr(machine, "pack", None)) is not None:
        data: bytes = await pack(source, max_bytes=max_bytes, timeout_s=timeout_s, whole=whole)
        return data
    result = await machine.exec(["sh", "-c", _PACK, source], timeout_s=timeout_s, max_output=max_bytes)
    if result.truncated:
        raise OSError(errno.EFBIG, f"the tree has more than {max_bytes} bytes", source)
    if result.exit_code == _NO_PROGRAM:
        raise OSError(errno.ENOSYS, "the machine has no `tar`", source)
    if result.stopped is not None or result.exit_code not in ((0,) if whole else (0, _INCOMPLETE)):
        check_tree(result, source)
    return result.output


def check_tree(result: ExecResult, path: str) -> None:
    """Raises OSError for a command that moved a tree and failed."""
    if result.stopped == "machine" or result.exit_code == _NO_DIRECTORY:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
    if result.exit_code != 0:
        why = result.output.decode("utf-8", "replace")[-300:] if len(result.output) < 4096 else ""
        raise OSError(errno.EIO, f"exit code {result.exit_code}, stopped: {result.stopped}. {why}", path)
