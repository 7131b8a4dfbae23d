"""Short versions of `python -m benchmarks.machines_soak`, in processes of their own: they count what is left of one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from rollmill.errors import MachineError
from rollmill.machines.qemu.parts import find_parts


def _soak(*arguments: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.machines_soak", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    line = json.loads(done.stdout.splitlines()[-1])
    assert all(bar["holds"] for bar in line["bars"].values()), done.stdout[-2000:]
    figures: dict[str, float] = line["figures"]
    return figures


def test_machines_under_faults_leave_nothing() -> None:
    figures = _soak("--cycles", "60", "--virtual", "0")
    assert figures["soak_namespace_cycles"] == 60 and figures["soak_namespace_faults"] > 5


@pytest.mark.slow
def test_virtual_machines_under_faults_leave_nothing() -> None:
    try:
        find_parts()
    except MachineError as error:
        pytest.skip(str(error))
    assert _soak("--cycles", "0", "--virtual", "12")["soak_qemu_faults"] > 1
