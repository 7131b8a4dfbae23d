"""The gateway's log is rewritten without dead entries while answers go on being recorded."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill.errors import StorageError
from rollmill.gateway.recording import rewriting
from tests.gateway import conftest
from tests.gateway.test_recorder import full_disk, record, recording, replayed

SMALL = 4096


async def until(holds: Callable[[], bool]) -> None:
    async def asked() -> bool:
        return holds()

    await conftest.until(asked)


class Held:
    """A rewriting that stands still after each few bytes until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stands, self.go = threading.Event(), threading.Event()
        monkeypatch.setattr(rewriting, "_CHUNK", 256)
        monkeypatch.setattr(rewriting, "_pause_since", self._pause)

    def _pause(self, started: float) -> None:
        self.stands.set()
        assert self.go.wait(60)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


async def test_answers_are_recorded_while_the_log_is_rewritten(tmp_path: Path, held: Held) -> None:
    async with recording(tmp_path) as recorder:
        for name in ("a", "b", "c"):
            await recorder.append(name, record(name, "x" * 300))
        await recorder.forget("a")
        erased = asyncio.create_task(recorder.erase())
        await until(held.stands.is_set)
        await recorder.append("b", record("b", "meanwhile"))
        await recorder.append("new", record("new", "meanwhile"))
        await recorder.forget("c")  # its entries may be copied already
        assert not erased.done()
        held.go.set()
        await erased
        await recorder.append("b", record("b", "after"))
        assert b'"a"' not in (tmp_path / "sessions.log").read_bytes()
    assert replayed(tmp_path) == [("b", "x" * 300), ("b", "meanwhile"), ("new", "meanwhile"), ("b", "after")]


async def test_who_is_forgotten_while_the_log_is_rewritten_is_erased_by_the_next(tmp_path: Path, held: Held) -> None:
    async with recording(tmp_path) as recorder:
        await recorder.append("private", record("private", "x" * 300))
        await recorder.append("b", record("b", "x" * 300))
        first = asyncio.create_task(recorder.erase())
        await until(held.stands.is_set)
        await recorder.forget("private")
        second = asyncio.create_task(recorder.erase())
        await asyncio.sleep(0)
        held.go.set()
        await asyncio.gather(first, second)
        assert b"private" not in (tmp_path / "sessions.log").read_bytes()
    assert replayed(tmp_path) == [("b", "x" * 300)]


async def test_nothing_is_lost_if_the_process_dies_while_it_rewrites(tmp_path: Path, held: Held) -> None:
    log, died = tmp_path / "log", tmp_path / "died"
    async with recording(log) as recorder:
        for name in ("a", "b", "c"):
            await recorder.append(name, record(name, "x" * 300))
        await recorder.forget("a")
        erased = asyncio.create_task(recorder.erase())
        await until(held.stands.is_set)
        await recorder.append("b", record("b", "meanwhile"))
        shutil.copytree(log, died)  # what a kill would leave
        held.go.set()
        await erased
    assert (died / "sessions.new").exists()
    assert replayed(died) == [("b", "x" * 300), ("c", "x" * 300), ("b", "meanwhile")]
    assert not (died / "sessions.new").exists()
    assert replayed(log) == replayed(died)


async def test_whoever_reads_the_old_file_reads_on(tmp_path: Path) -> None:
    async with recording(tmp_path) as recorder:
        await recorder.append("a", record("a", "1"))
        with recorder.located("a") as (file, [(begin, end)]):
            await recorder.erase()
            await recorder.erase()
            assert os.pread(file, end - begin, begin) == record("a", "1")
            assert os.fstat(file).st_nlink == 0
        with recorder.located("a") as (file, [(begin, end)]):
            assert os.pread(file, end - begin, begin) == record("a", "1")
            assert os.fstat(file).st_nlink == 1


async def test_who_opened_the_old_file_by_its_name_reads_on(tmp_path: Path) -> None:
    async with recording(tmp_path) as recorder:
        await recorder.append("a", record("a", "1"))
        before = recorder._file
        with (tmp_path / "sessions.log").open("rb") as old:
            await recorder.erase()
            await until(lambda: not is_open(before))
            assert old.read() == record("a", "1")


async def test_old_files_are_freed_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[int, int]] = []  # of all files: threads of other tests may still free theirs
    truncate = os.ftruncate
    monkeypatch.setattr(rewriting, "_CHUNK", 64)
    monkeypatch.setattr(os, "ftruncate", lambda file, size: (steps.append((file, size)), truncate(file, size)))
    async with recording(tmp_path) as recorder:
        await recorder.append("a", record("a", "x" * 1000))
        before, size = recorder._file, recorder._size
        await recorder.erase()
        await until(lambda: not is_open(before))
    assert [size for file, size in steps if file == before] == [*range(size - 256, 0, -256), 0]


async def test_a_rewriting_that_fails_leaves_the_log_as_it_was(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with recording(tmp_path) as recorder:
        for name in ("a", "b"):
            await recorder.append(name, record(name, "x" * 300))
        with full_disk(200), pytest.raises(StorageError, match="hint"):
            await recorder.erase()
        assert "cannot rewrite" in caplog.text and recorder.problem is None
        assert not (tmp_path / "sessions.new").exists()
        await recorder.append("a", record("a", "2"))
        await recorder.erase()
    assert sorted(replayed(tmp_path)) == [("a", "2"), ("a", "x" * 300), ("b", "x" * 300)]


async def test_a_gateway_that_stops_does_not_wait_for_a_rewriting(tmp_path: Path, held: Held) -> None:
    (tmp_path / "sessions.new").write_bytes(b"of a process that died")
    async with recording(tmp_path, compact_bytes=SMALL) as recorder:
        assert not (tmp_path / "sessions.new").exists()
        await recorder.append("b", record("b", "x" * 300))
        for index in range(8):
            await recorder.append(f"s{index}", record(f"s{index}", "x" * 600))
            await recorder.forget(f"s{index}")
        await until(held.stands.is_set)
        asyncio.get_running_loop().call_later(0.1, held.go.set)
        await asyncio.to_thread(recorder.close)
        assert not (tmp_path / "sessions.new").exists()
        assert (tmp_path / "sessions.log").stat().st_size > SMALL
        recorder.close = lambda: None  # type: ignore[method-assign]
    assert replayed(tmp_path) == [("b", "x" * 300)]


@pytest.mark.parametrize("seed", range(4))
async def test_random_sessions_survive_rewritings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Many sessions at once, some of which end, in a log that is rewritten again and again, and with restarts."""
    monkeypatch.setattr(rewriting, "_LITTLE", 0)
    monkeypatch.setattr(rewriting, "_PAUSE_S", 0.0)
    chance, expected, written = random.Random(seed), dict[str, list[str]](), 0

    async def live(name: str) -> None:
        nonlocal written
        for index in range(chance.randrange(1, 30)):
            text = f"{index} " + "x" * chance.randrange(200)
            await recorder.append(name, data := record(name, text))
            written += len(data)
            expected.setdefault(name, []).append(text)
        if chance.random() < 0.8:
            await recorder.forget(name)
            del expected[name]

    for restart in range(3):
        async with recording(tmp_path, compact_bytes=SMALL) as recorder:
            for turn in range(6):
                await asyncio.gather(*(live(f"{restart}-{turn}-{number}") for number in range(12)))
            assert (tmp_path / "sessions.log").stat().st_size < written * 3 / 4
            living = sum(end - begin for own in recorder._places.extents.values() for begin, end in own)
            assert recorder._places.living == living
        found: dict[str, list[str]] = {}
        for session, text in replayed(tmp_path):
            found.setdefault(session, []).append(text)
        assert found == expected


def is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True
