"""One process of a run: `python -m rollmill.cluster.worker ROLE[-REGION] DIRECTORY [ARGUMENT…]`. See ARCHITECTURE.md.

Exit codes: 0 the work is done, 3 trying again will not help (bad configuration, broken host), anything else may be
restarted.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import sys
import traceback
from pathlib import Path

from rollmill import telemetry
from rollmill.cluster.local import FINAL, SUPERVISOR, exclusive
from rollmill.cluster.ranks import outside_rank
from rollmill.cluster.run import RunDirectory
from rollmill.errors import ConfigError, HarnessError, RollmillError, TaskError, TrainingError

HOPELESS = (ConfigError, HarnessError, TaskError, TrainingError)
PR_SET_PDEATHSIG = 1
TRAINING = ("midtrain", "trainer")  # what may run on several ranks
ROLES = ("midtrain", "trainer", "store", "engine", "gateway", "dispatcher")


def main(role: str, directory: str, *arguments: str) -> int:
    _end_with_supervisor()
    try:
        run = RunDirectory.open(Path(directory))
        kind, _, region = role.partition("-")
        assert kind in ROLES, f"no role {kind!r}"
        with contextlib.ExitStack() as held:
            # of several ranks the first speaks for all, and none does anything without it
            if kind not in TRAINING or outside_rank() == 0:
                telemetry.open_events(run.events, role)
                held.enter_context(exclusive(run, role))
            module = importlib.import_module(f"rollmill.cluster.roles.{kind}")
            module.main(run, *([region] if region else []), *arguments)
    except Exception as error:
        ours = _first_of_ours(error)
        if ours is None:
            traceback.print_exc()
            return 1
        print(ours, file=sys.stderr)
        return FINAL if isinstance(ours, HOPELESS) else 1
    return 0


def _first_of_ours(error: BaseException) -> RollmillError | None:
    """Task groups wrap what went wrong; the first error of ours in there is the one to tell."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(_first_of_ours, error.exceptions)), None)
    return error if isinstance(error, RollmillError) else None


def _end_with_supervisor() -> None:
    """A run whose supervisor was killed must not go on half-alive: its processes end with it."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(os.environ.get(SUPERVISOR, os.getppid())):  # it died before the call
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
