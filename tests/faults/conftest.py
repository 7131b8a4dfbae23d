from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.world import Nursery, World


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def world(nursery: Nursery, tmp_path: Path) -> Iterator[World]:
    world = World(nursery, tmp_path)
    yield world
    world.close()
