"""Open sessions from the log: after a crash, or for commands that read it while the gateway runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollmill.gateway.recording.entries import LogEntry, decode_turn, scan_entries
from rollmill.gateway.recording.recorder import LOG_NAME
from rollmill.gateway.sessions.registry import Registry
from rollmill.gateway.sessions.sessions import Session, SessionFacts
from rollmill.gateway.wire.dialect import Stored
from rollmill.gateway.workers import log_directories
from rollmill.types import Trajectory


def replay(registry: Registry, entries: Iterable[LogEntry]) -> list[LogEntry]:
    """Rebuilds the sessions that a crash interrupted. Returns the entries of early feedback."""
    early = []
    for entry in entries:
        if entry.op == "early":
            early.append(entry)
        else:
            _replay(registry, entry)
    return early


def _replay(registry: Registry, entry: LogEntry) -> None:
    session, header = registry.get(entry.session), entry.header
    if session is None:
        if "facts" not in header:
            return  # the session was deleted or sealed while a request of it was being answered
        session = registry.add(SessionFacts(**header["facts"]))
        session.logged = True
    if entry.op == "seal":
        session.sealing, session.submission_key = True, header["submission_key"]
    elif entry.op == "turn":
        registry.append(session, decode_turn(entry))
    elif entry.op == "response":
        _replay_response(registry, session, header)
    elif entry.op == "waited":
        session.waits.restore(header["seconds"])
    elif entry.op == "incomplete":
        session.unrecorded = header["reason"]


def _replay_response(registry: Registry, session: Session, header: dict[str, Any]) -> None:
    segment = session.segments.get(header["segment"])
    if segment is not None and header["number"] < len(segment.turns):
        messages = segment.messages_up_to(header["number"])[header["skipped"] :]
        registry.responses.add(Stored(session.facts.trajectory, messages, header["body"], header["skipped"]))


def read_sessions(directory: Path, trajectory: str | None = None) -> list[Session]:
    """The open sessions in the logs of a gateway, which may be running; with `trajectory` that one only.

    Takes no lock: a log only grows or is replaced as a whole, and an entry that is being written is skipped.
    """
    return [session for path in log_directories(directory) for session in _read_log(path, trajectory)]


def _read_log(directory: Path, trajectory: str | None) -> list[Session]:
    try:
        file = os.open(directory / LOG_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    registry = Registry("")
    try:
        for _, _, entry in scan_entries(file):
            if trajectory not in (None, entry.session):
                continue
            session = registry.get(entry.session)
            if entry.op != "close":
                replay(registry, [entry])
            elif session is not None:
                registry.remove(session)
    finally:
        os.close(file)
    return list(registry)


def read_open_session(directory: Path, trajectory: str) -> Trajectory | None:
    """The record of an open session, from the logs of the gateway that records it; None if it is not there."""
    found = (session for session in read_sessions(directory, trajectory) if session.segments)
    return next((session.build() for session in found), None)
