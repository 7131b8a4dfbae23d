"""python -m tests.gateway.seal_large DIRECTORY TOKENS

Records a session of that many tokens with routes of 60 layers of 8 experts and a branch at its end, seals it, and
prints the peak memory in MB before and during the seal.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from pathlib import Path

import numpy as np

from rollmill.gateway.config import GatewayConfig
from rollmill.gateway.recording.entries import encode_open, encode_turn
from rollmill.gateway.recording.recorder import Recorder
from rollmill.gateway.recording.replaying import replay
from rollmill.gateway.recording.sealing import Sealer, payload_key
from rollmill.gateway.sessions.registry import Registry
from rollmill.gateway.sessions.segments import Turn
from rollmill.gateway.sessions.sessions import SessionFacts
from rollmill.gateway.watching.metrics import Metrics
from rollmill.gateway.wire.answer import Answer
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import PolicyRef, Sampling, Span

TURN, LAYERS, TOP_K = 10_000, 60, 8


def turn(start: int, rows: np.ndarray, **fields: object) -> Turn:
    """Half of it is a prompt, half an answer. The routes of the last token come with the next turn."""
    half = TURN // 2
    first = max(0, start - 1)
    span = Span(start + half, start + TURN, Sampling(), "stop", "e", "home", "rollout", 0.0, 1.0, 0)
    answer = Answer(
        tokens=list(range(half)),
        logprobs=[-0.5] * half,
        policy=[0] * half,
        policies=[PolicyRef("main", 1, "bf16", "d")],
        spans=[span],
        routes=[(first, rows[: start + TURN - 1 - first])],
        finish="stop",
        closed=True,
        message={"role": "assistant", "content": "x"},
    )
    question = {"role": "user", "content": "y"}
    return Turn("a.0", [question], list(range(half)), answer, **fields)  # type: ignore[arg-type]


def peak_mb() -> float:
    """Not `ru_maxrss`: that includes the peak of the process that started this one."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


async def main(directory: Path, tokens: int) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (TURN, LAYERS, TOP_K)).astype(np.uint8)
    objects = Objects.open(directory / "store")
    store = TrajectoryStore(open_database(f"sqlite:///{directory}/mill.db"), objects)
    store.create("run", "g", "t", ["a"], {})
    recorder = Recorder(directory / "gateway", compact_bytes=1 << 40)
    registry = Registry("secret")
    replay(registry, recorder.replay())
    recorder.start()
    facts = SessionFacts("a", run="run", group_id="g", task_id="t")
    await recorder.append("a", encode_open(facts))
    session = registry.add(facts)
    session.logged = True
    turns = [turn(start, rows) for start in range(0, tokens, TURN)]
    branch = turn(tokens, rows, parent=("a.0", tokens), cause="fork", inherited=2 * len(turns))
    branch.segment = "a.1"
    for each in [*turns, branch]:
        await recorder.append("a", encode_turn("a", each))
        registry.append(session, each)
    gc.collect()
    before = peak_mb()
    await Sealer(GatewayConfig(), recorder, registry, store, objects, Metrics()).seal("a", None)
    recorder.close()
    found = {"before": before, "during": peak_mb(), "payload": (objects.head(payload_key("a")) or 0) / (1 << 20)}
    print(json.dumps(found))


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2])))
