"""The digest of a task: of what is played and graded, and of nothing else."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from rollmill.environments.task import Task, WholeDiff

TASK = Task("a", "add", files={"main.py": b"x"}, submission=("main.py",), grading={"cases": [[1, 2]], "kind": "calls"})
OTHER: dict[str, Any] = {
    "instruction": "subtract",
    "image": "node",
    "files": {"main.py": b"y"},
    "submission": WholeDiff(),
    "grading": {"kind": "calls", "cases": [[1, 3]]},
    "executable": ("main.py",),
    "links": {"other.py": "main.py"},
}
SAME: dict[str, Any] = {
    "id": "b",
    "instruction": [{"role": "user", "content": "add"}],
    "split": "heldout",
    "family": "sums",
    "files": MappingProxyType({"main.py": b"x"}),
    "submission": ["main.py"],
    "grading": MappingProxyType({"kind": "calls", "cases": ((1, 2),)}),
    "reference": {"main.py": b"z"},
    "tags": {"level": "easy"},
    "timeout_s": 3.0,
}


@pytest.mark.parametrize("name", OTHER)
def test_another_task_has_another_digest(name: str) -> None:
    assert replace(TASK, **{name: OTHER[name]}).digest != TASK.digest


@pytest.mark.parametrize("name", SAME)
def test_the_same_task_has_the_same_digest(name: str) -> None:
    assert replace(TASK, **{name: SAME[name]}).digest == TASK.digest


def test_it_is_the_same_in_every_process() -> None:
    """Of a value that JSON cannot write too: sets have another order in each process."""
    known = "8afad7eeaa3c4a14c5e6599e70bac24b3b777003b2733e12c7320dd227658fb9"
    assert replace(TASK, grading={"names": {"b", "a", "c"}, "data": b"\xff"}).digest == known
