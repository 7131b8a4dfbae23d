"""One process of a run: `python -m rollmill.cluster.worker ROLE[-REGION] DIRECTORY [ARGUMENT…]`. See ARCHITECTURE.md.

Exit codes: 0 the work is done, 3 trying again will not help (bad configuration, broken host), anything else may be
restarted.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import signal
import sys
import traceback
from pathlib import Path

from rollmill import telemetry
from rollmill.cluster.local import exclusive
from rollmill.cluster.run import RunDirectory
from rollmill.errors import ConfigError, HarnessError, RollmillError, TaskError, TrainingError

FINAL = 3
PR_SET_PDEATHSIG = 1
ROLES = ("midtrain", "trainer", "store", "engine", "gateway", "dispatcher")


def main(role: str, directory: str, *arguments: str) -> int:
    _end_with_parent()
    run = RunDirectory.open(Path(directory))
    telemetry.open_events(run.events, role)
    try:
        with exclusive(run, role):
            kind, _, region = role.partition("-")
            assert kind in ROLES, f"no role {kind!r}"
            module = importlib.import_module(f"rollmill.cluster.roles.{kind}")
            module.main(run, *([region] if region else []), *arguments)
    except (ConfigError, HarnessError, TaskError, TrainingError) as error:
        print(error, file=sys.stderr)
        return FINAL
    except RollmillError as error:
        print(error, file=sys.stderr)
        return 1
    except BaseExceptionGroup as group:
        return _judge(group)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def _judge(group: BaseExceptionGroup) -> int:
    """Task groups wrap what went wrong; the first error of ours in there is the one to tell."""
    ours = group.subgroup(RollmillError)
    if ours is None:
        traceback.print_exception(group)
        return 1
    error: BaseException = ours
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    print(error, file=sys.stderr)
    return FINAL if isinstance(error, ConfigError | HarnessError | TaskError) else 1


def _end_with_parent() -> None:
    """A run whose supervisor was killed must not go on half-alive: its processes end with it."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
