"""Moves open sessions between the logs of workers, after the number of workers has changed.

    append to the log of the new owner ─► close in the old log

The process may die during either. Both logs then have the session, and one of them may have only its first entries: the
longer one is true, whichever log it is in. No gateway serves before all are moved, so neither has grown since.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from rollmill.gateway.recording.entries import LogEntry
from rollmill.gateway.recording.recorder import Recorder
from rollmill.gateway.sessions.registry import LIVE
from rollmill.gateway.workers import Workers, log_directories, log_directory


def move_sessions(directory: Path, count: int) -> dict[str, int]:
    """Gives each open session to the worker that it belongs to, of `count`. No gateway may run. Returns the worker of
    each session that lies where its client's name for it says, and not where its id says: see `Workers`."""
    if count == 1 and len(log_directories(directory)) <= 1:
        return {}
    return asyncio.run(_move_all(directory, count))


async def _move_all(directory: Path, count: int) -> dict[str, int]:
    own = [log_directory(directory, number) for number in range(count)]
    workers = Workers(0, [""] * count)
    with contextlib.ExitStack() as held:
        recorders: dict[Path, Recorder] = {}
        owners: dict[Path, dict[str, int]] = {}
        for path in dict.fromkeys([*own, *log_directories(directory)]):
            recorder = recorders[path] = Recorder(path, compact_bytes=1 << 62)
            held.callback(recorder.close)
            owners[path] = {}
            for entry in recorder.replay():
                owners[path].setdefault(entry.session, workers.owner(_name(entry)))
            recorder.start()
        for path, sessions in owners.items():
            strays = {session: own[number] for session, number in sessions.items() if own[number] != path}
            for session, target in strays.items():
                data = _read(recorders[path], session)
                if len(data) > len(_read(recorders[target], session)):
                    await recorders[target].forget(session)
                    await recorders[target].append(session, data)
            for session in strays:
                await recorders[path].forget(session)
    found = {session: number for sessions in owners.values() for session, number in sessions.items()}
    lives = {session: number for session, number in found.items() if session.startswith(LIVE)}
    return {session: number for session, number in lives.items() if workers.owner(session) != number}


def _read(recorder: Recorder, session: str) -> bytes:
    with recorder.located(session) as (file, extents):
        return b"".join(os.pread(file, end - begin, begin) for begin, end in extents)


def _name(first: LogEntry) -> str:
    """What decides whose it is: the name that a client gave to its session, or the trajectory. A session that was
    opened with its id (POST /sessions) is found by that. Feedback that waits for a session goes where that session will
    be. An unnamed conversation whose client does not send its session back is no longer found: the next request starts
    a new one."""
    if first.op == "early":
        return str(first.header["name"])
    facts = first.header.get("facts", {})
    by_name = facts.get("traffic") == "production" and first.session.startswith(LIVE)
    named = facts.get("provenance", {}).get("session") if by_name else None
    return str(named or first.session)
