"""A run that never happened, with the events and trajectories of one that did, for the report and progress tests."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from rollmill.types import Grade, PolicyRef, Sampling, Segment, Span, Trajectory, TrajectoryState

START = 1_700_000_000.0
MIDTRAIN, EVALUATE, STEP = 52.0, 14.0, 2.1  # seconds
FULL_BYTES = 1_912_000
PHASES = ["mid-train", "evaluate before", "reinforce", "evaluate after"]


class Script:
    """Collects events with made-up times and writes them where processes would have."""

    def __init__(self, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.events: list[dict[str, Any]] = []
        self.now = START

    def emit(self, process: str, kind: str, at: float | None = None, **fields: Any) -> None:
        self.events.append({"at": self.now if at is None else at, "process": process, "kind": kind, **fields})

    def busy(self, process: str, what: str, start: float, end: float) -> None:
        self.emit(process, "busy", at=end, what=what, start=start, end=end)

    def write(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for event in sorted(self.events, key=lambda event: event["at"]):
            with (directory / f"{event['process']}.jsonl").open("a") as file:
                file.write(json.dumps(event) + "\n")


def demo_run(steps: int = 60, seed: int = 0) -> Script:
    """The whole loop: mid-train, evaluate, reinforce on two engines, evaluate again."""
    script = Script(seed)
    _midtrain(script)
    _evaluate(script, "before", 1, 0)
    _phase(script, 2, "start")
    for step in range(1, steps + 1):
        _reinforce(script, step, steps)
    _phase(script, 2, "end")
    _evaluate(script, "after", 3, steps)
    script.emit("supervisor", "restart", target="engine-away", exit_code=-9, restarts=1)
    return script


def _phase(script: Script, index: int, state: str) -> None:
    script.emit("supervisor", "phase", phase=PHASES[index], state=state)


def _midtrain(script: Script) -> None:
    _phase(script, 0, "start")
    for step in range(10, 501, 10):
        start, script.now = script.now, script.now + MIDTRAIN / 50
        loss = 0.55 + 2.6 * math.exp(-step / 70) + script.random.normal(0, 0.03)
        script.emit("trainer", "document_step", step=step, steps=500, loss=loss, tokens=15000, tokens_per_s=11400.0)
        script.busy("trainer", "step", start, script.now)
    script.emit(
        "trainer",
        "publish",
        line="mid",
        encoding="snapshot",
        version=0,
        bytes=1_431_000,
        full_bytes=FULL_BYTES,
        density=1.0,
        seconds=0.06,
    )
    _phase(script, 0, "end")


def _evaluate(script: Script, label: str, index: int, version: int) -> None:
    _phase(script, index, "start")
    start = script.now
    script.now += EVALUATE
    for engine in ("engine-home", "engine-away"):
        script.busy(engine, "decode", start + 0.3, script.now - 0.4)
    script.busy("dispatcher", "rollouts", start, script.now)
    rates = {
        ("heldout", "sampled"): (0.418, 0.867, 512),
        ("heldout", "greedy"): (0.477, 0.898, 128),
        ("heldout_family", "sampled"): (0.246, 0.762, 256),
    }
    for (split, mode), (before, after, attempts) in rates.items():
        rate = before if label == "before" else after
        half = 1.96 * math.sqrt(rate * (1 - rate) / (attempts / 2))
        script.emit(
            "supervisor",
            "eval",
            label=label,
            split=split,
            mode=mode,
            solved=round(rate * attempts),
            attempts=attempts,
            rate=rate,
            low=rate - half,
            high=rate + half,
            version=version,
            seconds=EVALUATE / 3,
        )
    _phase(script, index, "end")


def _reinforce(script: Script, step: int, steps: int) -> None:
    random, progress = script.random, step / steps
    start = script.now
    wait, work = max(0.05, random.normal(0.35, 0.2)), STEP - 0.7 + random.normal(0, 0.1)
    script.busy("trainer", "wait", start, start + wait)
    script.busy("trainer", "step", start + wait, start + wait + work)
    script.now = start + wait + work
    script.busy("trainer", "publish", script.now, script.now + 0.12)
    rate = 0.42 + 0.46 * (1 - math.exp(-3 * progress)) + random.normal(0, 0.035)
    script.emit("trainer", "step", **_step_facts(random, step, steps, rate, wait, work))
    delta = FULL_BYTES * (0.31 - 0.12 * progress + random.normal(0, 0.008))
    script.emit(
        "trainer",
        "publish",
        line="demo",
        version=step,
        encoding="snapshot" if step % 25 == 0 else "delta",
        delta_bytes=delta,
        bytes=FULL_BYTES * 0.75 if step % 25 == 0 else delta,
        full_bytes=FULL_BYTES,
        density=0.55 - 0.2 * progress + random.normal(0, 0.01),
        seconds=0.12,
        digest=f"{step:08x}" * 8,
    )
    _rollouts(script, step, rate, start)
    _engines(script, step, start, delta)
    script.now += 0.15


def _step_facts(
    random: np.random.Generator, step: int, steps: int, rate: float, wait: float, work: float
) -> dict[str, Any]:
    shares = random.dirichlet([3, 6, 3, 1][: min(step, 4)])
    counts = {str(level): int(1800 * share) for level, share in enumerate(shares)}
    return {
        "step": step,
        "steps": steps,
        "version": step,
        "loss": float(random.normal(0, 0.02)),
        "reward_mean": rate * 0.94 + 0.02,
        "solve_rate": rate,
        "groups": 16,
        "trajectories": 128,
        "tokens": 6000,
        "trained_tokens": 1800,
        "masked_stale": 0,
        "staleness_mean": sum(int(level) * count for level, count in counts.items()) / 1800,
        "staleness_max": len(shares) - 1,
        "staleness_counts": counts,
        "mismatch_k1": float(random.normal(0, 1e-5)),
        "mismatch_k3": float(10 ** random.normal(-6.1, 0.25)),
        "mismatch_p99": float(10 ** random.normal(-3.4, 0.15)),
        "mismatch_max": float(10 ** random.normal(-2.4, 0.2)),
        "mismatch_tokens": 150,
        "mismatch_left_out": {"attended to keys and values of other weights, or may have": 30},
        "drift_k1": float(random.normal(2e-3, 1e-3)),
        "drift_k3": float(10 ** random.normal(-2.3, 0.3)),
        "drift_p99": float(10 ** random.normal(-0.6, 0.15)),
        "drift_max": float(10 ** random.normal(0.1, 0.2)),
        "ess": float(0.93 + random.normal(0, 0.015)),
        "mask_fraction": float(abs(random.normal(0.01, 0.006))),
        "entropy": float(0.62 - 0.38 * step / steps + random.normal(0, 0.02)),
        "grad_norm": 0.8,
        "lr": 6e-4,
        "router_flip_rate": 0.004,
        "router_zero_overlap": 0.0,
        "seconds": work,
        "wait_seconds": wait,
        "due_seconds": wait / 4,
    }


def _rollouts(script: Script, step: int, rate: float, start: float) -> None:
    script.busy("dispatcher", "rollouts", start, script.now)
    script.busy("dispatcher", "grade", start + 0.9, start + 1.25)
    for index in range(8):
        graded = script.random.random() > 0.01
        script.emit(
            "dispatcher",
            "rollout",
            trajectory=f"r{step}-{index}",
            group=f"g{step}",
            task=f"fix/{step}",
            family="fix",
            split="train",
            state="graded" if graded else "failed",
            reward=float(script.random.random() < rate) if graded else None,
            turns=4,
            tool_calls=4,
            bad_tool_calls=0,
            tokens=47,
            seconds=1.1,
            reason=None,
        )


def _engines(script: Script, step: int, start: float, delta: float) -> None:
    for engine, region, latency in (("engine-home", "home", 0.08), ("engine-away", "away", 0.22)):
        arrived = script.now + latency * float(script.random.lognormal(0, 0.35))
        pause = 0.004 * float(script.random.lognormal(0, 0.3))
        script.busy(engine, "decode", start, arrived)
        script.busy(engine, "apply", arrived, arrived + 0.03)
        script.emit(
            engine,
            "apply",
            at=arrived,
            engine=engine,
            region=region,
            line="demo",
            version=step,
            digest=f"{step:08x}" * 8,
            bytes=delta,
            fetch_seconds=latency / 2,
            pause_seconds=pause,
            running=int(script.random.integers(20, 64)),
            since_publish_seconds=arrived - script.now,
        )
        script.emit(engine, "engine", engine=engine, region=region, tokens_per_s=2400.0, running=48, waiting=0)


WORDS = [
    "<call>", "read", "main.py", "<end>", "edit", "return", "(", "x", "-", "8", ")", ">=", "28", "run", "tests", "done",
    "I", "will", "look", "first", ".", "+", "max",
]  # fmt: skip


def decode(ids: Any) -> str:
    return " ".join(WORDS[token % len(WORDS)] for token in ids)


def _segment(answers: list[list[int]], versions: list[int], seed: int) -> Segment:
    """A prompt of twelve tokens, then answers with four tokens of tool result between them."""
    random = np.random.default_rng(seed)
    tokens, sampled, spans = list(range(12)), [False] * 12, []
    for answer in answers:
        sampling = Sampling()
        spans.append(
            Span(
                len(tokens), len(tokens) + len(answer), sampling, "stop", "engine-home", "home", "rollout", 0.0, 1.0, 0
            )
        )
        tokens += answer + [2] * 4
        sampled += [True] * len(answer) + [False] * 4
    policies = [PolicyRef("demo", version, "bf16", f"{version:08x}" * 8) for version in versions]
    mask = np.array(sampled)
    order = np.cumsum(mask) - 1
    policy = np.where(mask, np.minimum(order * len(policies) // max(mask.sum(), 1), len(policies) - 1), -1)
    logprobs = np.where(mask, -random.exponential(0.4, len(tokens)), np.nan).astype(np.float32)
    return Segment("s0", np.array(tokens, np.int32), mask, logprobs, policy.astype(np.int16), policies, spans)


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": name, "type": "function", "function": function}]}


def trajectory(solved: bool, versions: list[int], seed: int = 0) -> Trajectory:
    """Read, edit, run the tests, done."""
    body = "( x - 8 ) >= 28" if solved else "( x + 8 ) >= 28"
    messages = [
        {"role": "system", "content": "You fix small Python repositories. Use the tools; say done when finished."},
        {"role": "user", "content": 'Write f from its docstring: "x minus 8, then at least 28". The file is main.py.'},
        _call("read", path="main.py"),
        {"role": "tool", "content": 'def f(x):\n    "x minus 8 then at least 28"\n    ...\n'},
        _call("edit", path="main.py", line=3, text=f"    return {body}"),
        {"role": "tool", "content": "ok"},
        _call("run", command="tests"),
        {"role": "tool", "content": "1 passed" if solved else "1 failed: f(30) is True, expected False"},
        {"role": "assistant", "content": "done"},
    ]
    reward = Grade(
        float(solved),
        {"calls": float(solved), "files_intact": 1.0},
        {
            "passed": 6 if solved else 2,
            "cases": 6,
            "first_failure": None if solved else "f(20): got True, expected False",
        },
        "hidden-tests",
    )
    segment = _segment([[0, 1, 2, 3], [0, 4, 2, 5, 6, 7, 8, 9, 10, 11, 12, 3], [0, 13, 14, 3], [15, 3]], versions, seed)
    return Trajectory(
        id=f"t{seed}",
        segments=[segment],
        task_id="write/subtract-0-8+at_least-0-28/42",
        group_id="g1",
        state=TrajectoryState.graded,
        messages=messages,
        provenance={"family": "write", "split": "heldout", "mode": "sampled"},
        rewards=[(1, reward)],
    )


def trajectories() -> dict[str, Trajectory]:
    return {
        "Before training": trajectory(False, [0], 1),
        "Failed": trajectory(False, [31, 32], 2),
        "Solved": trajectory(True, [58, 59, 60], 3),
    }
