"""One role process of a run: `python -m rollmill.launch.role ROLE[-REGION] DIRECTORY [ARGUMENT…]`.

Exit codes: 0 the work is done; 3 a restart will not help (bad configuration, broken host); after any other code the
supervisor restarts it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from rollmill import telemetry
from rollmill.errors import ConfigError, HarnessError, RollmillError, TaskError, TrainingError
from rollmill.launch.launcher import FINAL
from rollmill.launch.parent_death import end_with_parent
from rollmill.launch.rank_processes import outside_rank
from rollmill.launch.role_inputs import hand_to, take
from rollmill.runs.exits import BEGINS, CAUSE
from rollmill.runs.lock import exclusive
from rollmill.runs.run import RunDirectory
from rollmill.tls import trust

FINAL_ERRORS = (ConfigError, HarnessError, TaskError, TrainingError)
TRAINING = ("trainer",)  # roles that may have several ranks
ROLES = ("trainer", "store", "engine", "gateway", "dispatcher", "evaluator")


def main(role: str, open_run: Callable[[], RunDirectory], *arguments: str) -> int:
    end_with_parent()
    time_lines()
    try:
        run = open_run()
        kind, _, region = role.partition("-")
        assert kind in ROLES, f"no role {kind!r}"
        if run.config.tls is not None:
            trust(run.config.tls.ca)
        with contextlib.ExitStack() as held:
            # rank 0 writes the events and holds the lock for all ranks: the others do nothing without it
            if kind not in TRAINING or outside_rank() == 0:
                telemetry.open_events(run.events, role, log=True)
                print(f"{role}{BEGINS}{os.getpid()}")
                held.enter_context(exclusive(run.path, role))
            module = importlib.import_module(f"rollmill.launch.roles.{kind}")
            module.main(run, *([region] if region else []), *arguments)
    except Exception as error:
        ours = _first_of_ours(error)
        if ours is None:
            traceback.print_exc()
            print(f"{CAUSE}{traceback.format_exception_only(_leaf(error))[-1]}", end="", file=sys.stderr)
            return 1
        print(f"{CAUSE}{ours}", file=sys.stderr)
        return FINAL if isinstance(ours, FINAL_ERRORS) else 1
    return 0


def _first_of_ours(error: BaseException) -> RollmillError | None:
    """The first RollmillError: task groups wrap errors in exception groups."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_first_of_ours, error.exceptions)), None)
    return error if isinstance(error, RollmillError) else None


def _leaf(error: BaseException) -> BaseException:
    return _leaf(error.exceptions[0]) if isinstance(error, BaseExceptionGroup) else error


class TimedStream:
    """A text stream that writes the time before each line. Everything else is that of the stream below."""

    def __init__(self, below: TextIO) -> None:
        self._below = below
        self._fresh = True  # at the beginning of a line
        self._lock = threading.Lock()

    def write(self, text: str) -> int:
        with self._lock:
            for line in text.splitlines(keepends=True):
                stamp = time.strftime("%Y-%m-%d %H:%M:%S ", time.gmtime()) if self._fresh else ""
                self._below.write(stamp + line)
                self._fresh = line.endswith("\n")
            self._below.flush()
        return len(text)

    def __getattr__(self, name: str) -> object:
        return getattr(self._below, name)


def time_lines() -> None:
    """From now on, what this process prints has times: `2026-01-31 12:00:00 text`, in UTC."""
    sys.stdout, sys.stderr = TimedStream(sys.stdout), TimedStream(sys.stderr)


if __name__ == "__main__":
    role, directory, *arguments = sys.argv[1:]
    sys.exit(main(role, lambda: take(hand_to(RunDirectory.open(Path(directory)), role)), *arguments))
