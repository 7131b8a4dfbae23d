"""Open sessions, described for people: GET /sessions and `rollmill sessions`. Never what was said in them."""

from __future__ import annotations

from typing import Any

from rollmill.gateway.sessions.sessions import Session
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
