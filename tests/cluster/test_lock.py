"""Locks of a run between real processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rollmill.cluster.lock import Holder, exclusive, holder
from rollmill.errors import RollmillError

HOLDER = """
import sys, time
from pathlib import Path
from rollmill.cluster.lock import exclusive
with exclusive(Path(sys.argv[1]), "supervisor"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_two_processes_never_hold_a_lock_at_once(tmp_path: Path) -> None:
    began = time.time()
    other = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path), "an argument"], stdout=subprocess.PIPE)
    assert other.stdout is not None and other.stdout.readline() == b"held\n"
    with pytest.raises(RollmillError) as raised, exclusive(tmp_path, "supervisor", patience_s=0.1):
        pass
    # the error names the process, its command and since when it holds the lock
    by = holder(tmp_path, "supervisor")
    assert by is not None and by.pid == other.pid and began <= by.since <= time.time()
    assert by.command == f"-c {tmp_path} 'an argument'"
    assert f"process {other.pid} (`{by.command}`), since 20" in raised.value.message
    assert f"rollmill stop {tmp_path}" in str(raised.value.hint)
    with exclusive(tmp_path, "trainer", patience_s=0.0):  # another lock is free
        pass
    other.kill()
    other.wait()
    other.stdout.close()
    assert holder(tmp_path, "supervisor") is None  # a killed process releases its locks
    with exclusive(tmp_path, "supervisor", patience_s=5.0):
        assert holder(tmp_path, "supervisor") == Holder.model_validate_json(
            (tmp_path / "locks" / "supervisor").read_text()
        )
        own = holder(tmp_path, "supervisor")
        assert own is not None and own.pid == os.getpid()


def test_a_lock_nobody_ever_held(tmp_path: Path) -> None:
    assert holder(tmp_path, "supervisor") is None
    assert list(tmp_path.iterdir()) == []  # looking leaves nothing behind
