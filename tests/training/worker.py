"""A trainer process that kills itself, with SIGKILL, right after one effect.

The effect is METHOD:COUNT[:TEXT], the COUNT-th call of that method whose first argument contains TEXT. `none` runs to
the end. `wait` then waits for groups that never come, and reports it with a file `waiting`. With `late:` before it, a
step is committed only when the step after it is recorded.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from rollmill import telemetry
from rollmill.models.config import ModelConfig
from rollmill.storage.objects import Objects
from rollmill.training.reproducible import on_sigterm
from rollmill.trajectories.ledger import Ledger
from rollmill.types import Version
from tests.training.world import MODEL, STEPS, World

OWNERS: dict[str, Any] = {"write_step": Ledger, "commit_step": Ledger, "put": Objects, "create": Objects}


def die_after(effect: str) -> None:
    method, count, text = (*effect.split(":"), "")[:3]
    owner = OWNERS[method]
    original = getattr(owner, method)
    calls = [0]

    def wrapped(self: Any, first: Any, *rest: Any, **named: Any) -> Any:
        result = original(self, first, *rest, **named)
        calls[0] += text in str(first)
        if calls[0] == int(count):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, method, wrapped)


def commit_late() -> None:
    """To be called behind `die_after`: who dies after the record of a step dies before the commit."""
    commit, record, recording = Ledger.commit_step, Ledger.write_step, threading.Lock()

    def commit_step(self: Ledger, number: int, *rest: Any) -> None:
        end = time.monotonic() + 20.0
        while number < STEPS and self.step(number + 1) is None and time.monotonic() < end:
            time.sleep(0.01)
        with recording:
            commit(self, number, *rest)

    def write_step(self: Ledger, *given: Any, **named: Any) -> Any:
        with recording:
            return record(self, *given, **named)

    setattr(Ledger, "commit_step", commit_step)  # noqa: B010
    setattr(Ledger, "write_step", write_step)  # noqa: B010


def run_trainer(
    directory: Path,
    effect: str,
    model: ModelConfig = MODEL,
    parent: Version | None = None,
    forms: tuple[str, ...] = ("bf16",),
) -> None:
    world = World(directory, model, forms=forms)
    telemetry.open_events(directory / "events", "trainer")
    late, effect = effect.startswith("late:"), effect.removeprefix("late:")
    if effect not in ("none", "wait"):
        die_after(effect)
    if late:
        commit_late()
    trainer = world.trainer(parent=parent)
    if effect == "wait":
        trainer.run(STEPS)
        with on_sigterm(trainer.stop):  # the signal may come before the second run listens
            (directory / "waiting").touch()
            trainer.run(STEPS + 1)
    else:
        trainer.run(STEPS)
