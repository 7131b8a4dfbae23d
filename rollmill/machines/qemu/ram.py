"""Guest memory in anonymous files, and the memory of a running QEMU.

A machine maps the memory file of its template privately: what the guest changes are pages of the QEMU process, and
all others are the template's. A copy of the machine's memory is a copy of that file with these pages over it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re

_PAGE = mmap.PAGESIZE
_PRESENT, _SWAPPED, _OF_FILE = 0x80, 0x40, 0x20  # bits in the last byte of a page's entry in /proc/PID/pagemap
_IS_OWN = bytes(bool(byte & (_PRESENT | _SWAPPED)) and not byte & _OF_FILE for byte in range(256))
_OWN_PAGES = re.compile(b"\x01+")
NAME = "guest-ram"


def create(size: int, name: str = NAME) -> int:
    """An open memory file of `size` bytes, all zero. `name` shows in /proc/PID/fd."""
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.truncate(file, size)
    return file


def seal(file: int, *, content: bool = True) -> None:
    """From now on nobody can change the size of a memory file, nor its content."""
    seals = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | (fcntl.F_SEAL_WRITE if content else 0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)


def copy(file: int) -> int:
    """A copy of a memory file. Holes stay holes."""
    target = create(os.fstat(file).st_size)
    try:
        copy_data(file, target)
    except BaseException:
        os.close(target)
        raise
    return target


def copy_data(file: int, target: int) -> None:
    """Copy what a sparse file has to an empty one. `sendfile` and not `copy_file_range`: it copies between all kinds of
    file systems."""
    size, end = os.fstat(file).st_size, 0
    while (start := _seek(file, end, os.SEEK_DATA)) < size:
        end = _seek(file, start, os.SEEK_HOLE)
        os.lseek(target, start, os.SEEK_SET)
        while start < end:
            start += os.sendfile(target, file, start, end - start)


def _seek(file: int, start: int, what: int) -> int:
    try:
        return os.lseek(file, start, what)
    except OSError:  # there is no data after it
        return os.fstat(file).st_size


def copy_changes(pid: int, target: int) -> int:
    """Write the pages that a stopped QEMU has changed in its guest's memory over `target`. Returns how many."""
    size = os.fstat(target).st_size
    address = _find(pid, size)
    own = _own_pages(pid, address, size)
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        with mmap.mmap(target, size) as mapped, memoryview(mapped) as view:
            for run in _OWN_PAGES.finditer(own):
                start, end = run.start() * _PAGE, run.end() * _PAGE
                while start < end:
                    with view[start:end] as part:
                        copied = os.preadv(memory, [part], address + start)
                    if copied == 0:  # the process has ended: its memory is gone
                        raise OSError(errno.ESRCH, f"process {pid} ended while its memory was copied")
                    start += copied
    finally:
        os.close(memory)
    return own.count(1)


def _own_pages(pid: int, address: int, size: int) -> bytes:
    """One byte per page: 1 if the page is the process's own, 0 if it is the file's or was never touched."""
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
        pagemap.seek(address // _PAGE * 8)
        return _read_fully(pagemap.fileno(), size // _PAGE * 8)[7::8].translate(_IS_OWN)


def _find(pid: int, size: int) -> int:
    """The address of the guest's memory in a QEMU process."""
    with open(f"/proc/{pid}/maps") as maps:
        for line in maps:
            span, _, offset, *_ = line.split(maxsplit=5)
            start, end = (int(number, 16) for number in span.split("-"))
            if f"/memfd:{NAME}" in line and int(offset, 16) == 0 and end - start == size:
                return start
    raise OSError(f"process {pid} has no guest memory of {size} bytes in one piece")


def _read_fully(file: int, count: int) -> bytes:
    parts = []
    while count > 0 and (part := os.read(file, count)):
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
