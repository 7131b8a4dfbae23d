"""Locks of a run between real processes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rollmill.errors import RollmillError
from rollmill.runs import lock
from rollmill.runs.lock import Holder, exclusive, holder, terminate

HOLDER = """
import sys, time
from pathlib import Path
from rollmill.runs.lock import exclusive
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


def test_a_lock_that_is_taken_and_not_yet_signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "locks").mkdir()
    signed = Holder(pid=os.getpid(), command="me", since=1.0)
    with (tmp_path / "locks" / "supervisor").open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        signing = threading.Timer(0.2, lambda: (file.write(signed.model_dump_json()), file.flush()))
        signing.start()
        assert holder(tmp_path, "supervisor") == signed
        signing.join()
        file.truncate(0)
        monkeypatch.setattr(lock, "_SIGNING_S", 0.0)
        unknown = holder(tmp_path, "supervisor")
    assert unknown is not None and unknown.pid == 0


@pytest.mark.parametrize("pid", [0, -1])
def test_no_group_of_processes_is_ever_signalled(pid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(pid))  # the real one would end the tests
    with pytest.raises(RollmillError, match="has not said its pid"):
        terminate(Holder(pid=pid, command="unknown", since=1.0))
    assert sent == []


def test_who_looks_at_a_lock_does_not_hold_it(tmp_path: Path) -> None:
    with exclusive(tmp_path, "supervisor"):
        pass
    with (tmp_path / "locks" / "supervisor").open() as other:  # as `holder` in another process
        fcntl.flock(other, fcntl.LOCK_SH)
        assert holder(tmp_path, "supervisor") is None
