"""Open sessions, described for people: GET /sessions and `rollmill sessions`. Never what was said in them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rollmill.gateway.recording.entries import scan_entries
from rollmill.gateway.recording.recorder import LOG_NAME
from rollmill.gateway.sessions.registry import Registry
from rollmill.gateway.sessions.sessions import Session
from rollmill.gateway.workers import log_directories
from rollmill.trajectories.table_rows import consent_of


def describe_session(session: Session) -> dict[str, Any]:
    facts = session.facts
    turns = [turn for segment in session.segments.values() for turn in segment.turns]
    spans = [span for turn in turns for span in turn.answer.spans]
    return {
        "trajectory": facts.trajectory,
        "name": session.name,
        "traffic": facts.traffic,
        "run": facts.run,
        "task": facts.task_id,
        "key": facts.provenance.get("key"),
        "consent": consent_of(facts.provenance) if facts.traffic == "production" else None,
        "segments": len(session.segments),
        "turns": len(turns),
        "tokens": sum(segment.length - segment.offset for segment in session.segments.values()),
        "sampled_tokens": sum(len(turn.answer.tokens) for turn in turns),
        "in_flight": len(session.flights),
        "waited_seconds": session.waits.seconds(),
        "answered_at": max((span.ended_at for span in spans), default=None),
        "state": "sealing" if session.sealing else "incomplete" if session.unrecorded else "open",
    }


def describe_segments(session: Session) -> list[dict[str, Any]]:
    return [
        {
            "segment": segment.id,
            "cause": segment.cause,
            "parent": segment.parent.id if segment.parent else None,
            "shared_tokens": segment.offset,
            "tokens": segment.length - segment.offset,
            "turns": len(segment.turns),
            "finish": segment.turns[-1].answer.finish,
        }
        for segment in session.segments.values()
    ]


def read_sessions(directory: Path) -> list[Session]:
    """The open sessions in the logs of a gateway, which may be running. Takes no lock: see `read_open_session`."""
    return [session for path in log_directories(directory) for session in _read_log(path)]


def _read_log(directory: Path) -> list[Session]:
    try:
        file = os.open(directory / LOG_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    registry = Registry("", keep_routes=False)
    try:
        for _, _, entry in scan_entries(file):
            session = registry.get(entry.session)
            if entry.op != "close":
                registry.replay([entry])
            elif session is not None:
                registry.remove(session)
    finally:
        os.close(file)
    return list(registry)
