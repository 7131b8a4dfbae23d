"""Only training over several ranks knows about them."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rollmill.training.parallelism
from rollmill.errors import TrainingError
from rollmill.training.config import TrainingConfig
from rollmill.training.single import SINGLE, choose_parallelism

TRAINING = Path(rollmill.training.parallelism.__file__).parent


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_only_the_choice_imports_the_parallel_package() -> None:
    outside = [path for path in TRAINING.rglob("*.py") if "parallel" not in path.relative_to(TRAINING).parts]
    users = {
        path.name
        for path in outside
        if any(name.startswith(("rollmill.training.parallel.", "torch.distributed")) for name in imports(path))
    }
    assert users == {"single.py"}, "everything else uses the interfaces"


def test_a_whole_trainer_does_not_import_the_parallel_package() -> None:
    names = (
        "rollmill.training.loop, rollmill.training.rl.rl_objective, rollmill.training.pretraining.document_objective"
    )
    code = f"import sys, {names}; print(*[m for m in sys.modules if m.startswith('rollmill.training.parallel.')])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split() == []


def test_one_rank_is_whole_and_other_numbers_must_match_the_environment() -> None:
    cpu = torch.device("cpu")
    assert choose_parallelism("test", cpu, TrainingConfig(), {}) is SINGLE
    with pytest.raises(TrainingError, match=r"training\.ranks is 2, but the environment describes 1 ranks"):
        choose_parallelism("test", cpu, TrainingConfig(ranks=2), {})
    with pytest.raises(TrainingError, match="these are not set: RANK, MASTER_ADDR, MASTER_PORT"):
        choose_parallelism("test", cpu, TrainingConfig(ranks=2), {"WORLD_SIZE": "2"})
