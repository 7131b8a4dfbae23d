"""The gateway's log in real files: truncated, damaged, on a full disk."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from rollmill.errors import GatewayError, StorageError
from rollmill.gateway.recording.entries import encode_entry, encode_open, encode_waited
from rollmill.gateway.recording.recorder import Recorder
from rollmill.gateway.recording.replaying import replay
from rollmill.gateway.sessions.registry import Registry
from rollmill.gateway.sessions.sessions import SessionFacts

LARGE = 1 << 30


@contextlib.asynccontextmanager
async def recording(directory: Path, compact_bytes: int = LARGE) -> AsyncIterator[Recorder]:
    recorder = Recorder(directory, compact_bytes=compact_bytes)
    recorder.replay()
    recorder.start()
    try:
        yield recorder
    finally:
        recorder.close()


def record(session: str, text: str) -> bytes:
    return encode_entry("turn", session, {"text": text})


def replayed(directory: Path) -> list[tuple[str, str]]:
    recorder = Recorder(directory, compact_bytes=LARGE)
    try:
        return [(entry.session, entry.header["text"]) for entry in recorder.replay()]
    finally:
        recorder.close()


@contextlib.contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Writes beyond `limit` bytes of a file fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def test_entries_survive_a_restart(tmp_path: Path) -> None:
    async with recording(tmp_path) as recorder:
        await recorder.append("a", record("a", "1"))
        await recorder.append("b", record("b", "1"))
        await recorder.append("a", record("a", "2"))
        await recorder.forget("b")
    assert replayed(tmp_path) == [("a", "1"), ("a", "2")]


async def test_a_write_interrupted_anywhere_is_dropped(tmp_path: Path) -> None:
    async with recording(tmp_path) as recorder:
        await recorder.append("a", record("a", "1"))
        whole = (tmp_path / "sessions.log").read_bytes()
        await recorder.append("a", record("a", "2"))
    data = (tmp_path / "sessions.log").read_bytes()
    for cut in range(len(whole), len(data)):
        (tmp_path / "sessions.log").write_bytes(data[:cut])
        assert replayed(tmp_path) == [("a", "1")]
        assert (tmp_path / "sessions.log").read_bytes() == whole
    assert not (tmp_path / "sessions.damaged").exists()


async def test_damage_in_the_middle_is_copied_aside_and_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with recording(tmp_path) as recorder:
        for text in "123":
            await recorder.append("a", record("a", text))
    data = bytearray((tmp_path / "sessions.log").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "sessions.log").write_bytes(data)
    assert replayed(tmp_path) == [("a", "1")]
    assert (tmp_path / "sessions.damaged").read_bytes() == bytes(data)
    assert "damaged" in caplog.text


async def test_waiting_entries_share_an_fsync(tmp_path: Path) -> None:
    async with recording(tmp_path) as recorder:
        await asyncio.gather(*(recorder.append("a", record("a", str(index))) for index in range(200)))
        assert recorder.fsyncs < 100
    assert len(replayed(tmp_path)) == 200


async def test_the_log_is_rewritten_without_closed_sessions(tmp_path: Path) -> None:
    async with recording(tmp_path, compact_bytes=4096) as recorder:
        await recorder.append("keep", record("keep", "first"))
        for index in range(50):
            await recorder.append(f"s{index}", record(f"s{index}", "x" * 200))
            await recorder.forget(f"s{index}")
        await recorder.append("keep", record("keep", "second"))
        assert (tmp_path / "sessions.log").stat().st_size < 3 * 4096
    assert replayed(tmp_path) == [("keep", "first"), ("keep", "second")]


class Looked(dict[str, list[tuple[int, int]]]):
    """Counts how often somebody goes through all sessions."""

    times = 0

    def __iter__(self) -> Iterator[str]:
        self.times += 1
        return super().__iter__()

    def values(self) -> Any:
        self.times += 1
        return super().values()

    def items(self) -> Any:
        self.times += 1
        return super().items()


async def test_a_write_does_not_look_at_all_open_sessions(tmp_path: Path) -> None:
    """A log larger than `compact_bytes` of which nothing can be dropped: no write may cost more than the one before."""
    async with recording(tmp_path, compact_bytes=4096) as recorder:
        for index in range(20):
            await recorder.append(f"s{index}", record(f"s{index}", "x" * 400))
        looked = recorder._places.extents = Looked(recorder._places.extents)
        for index in range(20):
            await recorder.append(f"s{index}", record(f"s{index}", "more"))
        await recorder.forget("s0")
        assert looked.times == 0


async def test_a_full_disk_raises_and_does_not_damage_the_log(tmp_path: Path) -> None:
    async with recording(tmp_path) as recorder:
        await recorder.append("a", record("a", "1"))
        size = (tmp_path / "sessions.log").stat().st_size
        with full_disk(size + 10):
            with pytest.raises(StorageError, match="hint"):
                await recorder.append("a", record("a", "lost"))
            assert recorder.problem is not None
        assert (tmp_path / "sessions.log").stat().st_size == size
        await recorder.append("a", record("a", "2"))
        assert recorder.problem is None
    assert replayed(tmp_path) == [("a", "1"), ("a", "2")]


@pytest.mark.parametrize("knows_dsync", [True, False])
async def test_an_append_returns_when_its_bytes_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, knows_dsync: bool
) -> None:
    """On disk: written by a call that waits for it, or followed by fsync where the system does not know such a call."""
    calls: list[str] = []
    pwritev, fsync = os.pwritev, os.fsync

    def write(file: int, buffers: list[memoryview], at: int, flags: int) -> int:
        calls.append("synced write" if flags & os.RWF_DSYNC else "write")
        if not knows_dsync:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return pwritev(file, buffers, at, flags)

    monkeypatch.setattr(os, "pwritev", write)
    monkeypatch.setattr(os, "fsync", lambda file: (calls.append("fsync"), fsync(file)))
    async with recording(tmp_path) as recorder:
        calls.clear()
        await recorder.append("a", record("a", "1"))
        assert calls == ["synced write", *([] if knows_dsync else ["fsync"])]
    assert replayed(tmp_path) == [("a", "1")]


async def test_two_gateways_cannot_share_a_log(tmp_path: Path) -> None:
    async with recording(tmp_path):
        with pytest.raises(GatewayError, match="another gateway"):
            Recorder(tmp_path, compact_bytes=LARGE)


async def test_an_answer_that_ends_after_its_session_was_deleted_does_not_hinder_a_restart(tmp_path: Path) -> None:
    facts = SessionFacts("gone")
    async with recording(tmp_path) as recorder:
        await recorder.append("gone", encode_open(facts))
        await recorder.forget("gone")
        await recorder.append("gone", encode_waited("gone", 1.0))
        await recorder.append("stays", encode_open(SessionFacts("stays")))
    registry, recorder = Registry(""), Recorder(tmp_path, compact_bytes=LARGE)
    replay(registry, recorder.replay())
    recorder.close()
    assert registry.get("gone") is None and registry.get("stays") is not None
