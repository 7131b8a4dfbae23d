"""The probe of process snapshots: what a real CRIU says here, and each of its ends with a stand-in for CRIU."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmill.machines import process_snapshot

pytestmark = pytest.mark.asyncio(loop_scope="module")
# it saves nothing: the machine runs on, and "restored" is the process that should have been saved
STAND_IN = """#!/bin/sh
operation=$1; shift; kept=$(dirname "$0")/pid
while [ $# -gt 0 ]; do
    case $1 in -D) directory=$2;; -o) log=$2;; --pidfile) written=$2;; -t) echo "$2" > "$kept";; esac; shift
done
[ {fails} = dump ] && echo "(00.1) Error (a.c:1): no room" > "$directory/$log" && exit 1
[ {fails} = "$operation" ] && kill -SEGV $$
[ "$operation" = dump ] || cat "$kept" > "$written"
"""


async def test_a_real_criu_says_why_or_does_it() -> None:
    tried = await process_snapshot.try_process_snapshot()
    assert tried.words and (not tried.works or "restored it in" in tried.words)


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("dump", "CRIU refuses to save a machine (exit code 1): no room"),
        ("restore", "CRIU saved a machine and cannot restore it (ended by signal 11)"),
        ("nothing", "CRIU saved a machine in"),
    ],
)
async def test_only_a_restored_process_that_goes_on_counts(
    fails: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "criu"
    program.write_text(STAND_IN.format(fails=fails))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(process_snapshot.os, "geteuid", lambda: 0)
    tried = await process_snapshot.try_process_snapshot()
    if "could not be tried" in tried.words:
        pytest.skip(tried.words)
    assert tried.works == (fails == "nothing") and said in tried.words
