"""The guide to environments of others, word by word: packages from PyPI, and a small run that trains on each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rollmill.runs.run import RunDirectory
from rollmill.telemetry import read_events
from tests.cli.test_init import shell
from tests.test_repo import ROOT

GUIDE = ROOT / "docs" / "guides" / "bring-a-verifiers-or-openenv-environment.md"


def trained(run: Path) -> tuple[int, list[dict[str, Any]]]:
    """The steps that a run trained, and its episodes."""
    events = read_events(RunDirectory.open(run).events)
    return sum(event["kind"] == "step" for event in events), [event for event in events if event["kind"] == "rollout"]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("part", "run", "steps"), [(0, "hangman/runs/hangman", 2), (2, "echo/runs/echo", 3)])
def test_the_guide_trains_on_an_environment_of_others(part: int, run: str, steps: int, tmp_path: Path) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", GUIDE.read_text(), re.S)
    assert len(blocks) == 4, "a new block must be executed too"
    printed = shell("\n".join(blocks[part : part + 2]), tmp_path)
    taken, episodes = trained(tmp_path / run)
    assert taken == steps, printed[-2000:]
    assert {episode["state"] for episode in episodes} == {"graded"}
    assert len({episode["reward"] for episode in episodes}) > 1, "some answers are worth more than others"
