"""Only the sharded placement knows about ranks."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rollmill.training.ranks
from rollmill.errors import TrainingError
from rollmill.training.choose_placement import place
from rollmill.training.config import TrainingConfig
from rollmill.training.single import WHOLE

TRAINING = Path(rollmill.training.ranks.__file__).parent


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_only_the_choice_of_a_placement_imports_the_parallel_package() -> None:
    outside = [path for path in TRAINING.rglob("*.py") if "parallel" not in path.relative_to(TRAINING).parts]
    users = {
        path.name
        for path in outside
        if any(name.startswith(("rollmill.training.parallel", "torch.distributed")) for name in imports(path))
    }
    assert users == {"choose_placement.py"}, "everything else uses its Placement"


def test_a_whole_trainer_does_not_import_the_parallel_package() -> None:
    names = (
        "rollmill.training.loop, rollmill.training.rl.rl_objective, rollmill.training.pretraining.document_objective"
    )
    code = f"import sys, {names}; print(*[m for m in sys.modules if m.startswith('rollmill.training.parallel')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []


def test_one_rank_is_whole_and_other_numbers_must_match_the_environment() -> None:
    cpu = torch.device("cpu")
    assert place("test", cpu, TrainingConfig(), {}) is WHOLE
    with pytest.raises(TrainingError, match=r"training\.ranks is 2, but the environment describes 1 ranks"):
        place("test", cpu, TrainingConfig(ranks=2), {})
    with pytest.raises(TrainingError, match="these are not set: RANK, MASTER_ADDR, MASTER_PORT"):
        place("test", cpu, TrainingConfig(ranks=2), {"WORLD_SIZE": "2"})
