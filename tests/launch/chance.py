"""Runs with a tiny model that has learnt nothing, and a reward for them: no mid-training is needed."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

from rollmill.environments.episode import Episode
from rollmill.environments.reward import Reward
from rollmill.runs.run import RunDirectory
from rollmill.types import Grade
from tests.e2e.small_run import small_run

_MODEL = ("layers=1", "width=32", "heads=2", "kv_heads=1", "head_dim=16", "mlp_width=32", "expert_width=16")
ANY_SIGNAL = (
    f"modules='{Path(__file__).parents[2]}'",
    "rewards=[{kind='calls'},{kind='tests.launch.chance:Chance'}]",
)
TINY = (
    *(f"model.{setting}" for setting in _MODEL),
    *ANY_SIGNAL,
    "stages.midtrain.steps=1",
)


class Chance(Reward):
    """Differs between any two different answers."""

    name = "chance"

    async def grade(self, episode: Episode) -> Grade:
        said = json.dumps([dict(message) for message in episode.messages], default=str)
        drawn = hashlib.sha256(said.encode()).digest()
        return Grade(int.from_bytes(drawn[:4]) / 2**32, grader=self.name)


def train_first_stage(run: RunDirectory) -> None:
    subprocess.run([sys.executable, "-m", "rollmill.launch.role", "trainer", str(run.path), "midtrain"], check=True)


def tiny_base(root: Path) -> RunDirectory:
    """A run whose first stage is over."""
    run = small_run(root, "base", *TINY)
    train_first_stage(run)
    return run
