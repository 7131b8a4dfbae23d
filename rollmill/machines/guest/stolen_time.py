"""How long a machine was kept from the processor, so that its time limits do not count it.

A limit is for the command, not for its neighbours: while others of the host have all processors, the clock of a limit
stands still. What a machine used of the processor always counts, and so does the time in which it waited for nothing:
a program that sleeps ends in time on a busy host too. The kernel keeps both times of every thread, and adds a wait when
it is over; one that lasts longer than from look to look is counted as it goes.
"""

from __future__ import annotations

import os
import time
from typing import NamedTuple

_NS = 1e-9


class _Thread(NamedTuple):
    ran: float
    waited: float
    ahead: float = 0.0  # of a wait that is not over: what was counted already


class Clock:
    def __init__(self) -> None:
        self._at = time.monotonic()
        self._slack = 0.0  # seconds before the last look in which the machine neither ran nor seemed to wait
        self._threads: dict[str, _Thread] = {}  # by directory
        self.look()

    def look(self) -> float:
        """Seconds since the last look in which threads waited for a processor, and others had it."""
        now, threads = time.monotonic(), {}
        passed, self._at = now - self._at, now
        ran = waited = 0.0
        for thread, found in _threads():
            before = self._threads.get(thread, _Thread(0.0, 0.0))
            newly = found.waited - before.waited
            if found[:2] == before[:2] and _is_runnable(thread):
                waited += passed
                found = found._replace(ahead=before.ahead + passed)
            else:
                waited += max(newly - before.ahead, 0.0)
            ran += found.ran - before.ran
            threads[thread] = found
        self._threads = threads
        used = min(ran, passed)
        lost = max(min(waited, passed + self._slack - used), 0.0)
        self._slack = max(passed - used - lost, 0.0)
        return lost


def _threads() -> list[tuple[str, _Thread]]:
    found = []
    for process in os.listdir("/proc"):
        if not process.isdigit() or process == "1":
            continue
        try:
            for number in os.listdir(f"/proc/{process}/task"):
                thread = f"/proc/{process}/task/{number}"
                with open(f"{thread}/schedstat", "rb") as file:
                    ran, waited, _ = file.read().split()
                found.append((thread, _Thread(int(ran) * _NS, int(waited) * _NS)))
        except (OSError, ValueError):  # it has just ended, or this kernel keeps no times
            continue
    return found


def _is_runnable(thread: str) -> bool:
    try:
        with open(f"{thread}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"R"
    except (OSError, IndexError):
        return False
