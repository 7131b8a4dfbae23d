"""Forgetting a user: open sessions leave memory and log, sealed ones lose their payloads. The index keeps their rows,
marked `deleted`, so that every report still adds up."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollmill.gateway.recording.early_feedback import About
from rollmill.gateway.recording.recorder import Recorder
from rollmill.gateway.recording.replaying import replay
from rollmill.gateway.recording.sealing import delete_unfinished
from rollmill.gateway.sessions.registry import Registry, pseudonym
from rollmill.gateway.workers import log_directories
from rollmill.storage.objects import Objects
from rollmill.trajectories.trajectory_store import TrajectoryStore


async def forget_in_log(
    directory: Path, secret: str, user: str, trajectories: TrajectoryStore, objects: Objects
) -> int:
    """Removes the open sessions of a user from the log of a gateway that does not run, and the payloads of seals that
    did not end. Raises GatewayError if the gateway runs. Returns the number of sessions."""
    logs = log_directories(directory)
    return sum([await _forget_in(path, secret, user, trajectories, objects) for path in logs])


async def _forget_in(directory: Path, secret: str, user: str, trajectories: TrajectoryStore, objects: Objects) -> int:
    recorder = Recorder(directory, compact_bytes=1 << 62)
    try:
        registry = Registry(secret)
        early = replay(registry, recorder.replay())
        recorder.start()
        name = pseudonym(secret.encode(), user)
        found = [session for session in registry if session.facts.provenance.get("user") == name]
        for session in found:
            await asyncio.to_thread(delete_unfinished, trajectories, objects, session.facts.trajectory)
            await recorder.forget(session.facts.trajectory)
        about = About.of(found)
        for entry in early:
            if about.has(entry.header):
                await recorder.forget(entry.session)
        await recorder.erase()
        return len(found)
    finally:
        recorder.close()
