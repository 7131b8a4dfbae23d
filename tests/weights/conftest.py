from pathlib import Path

import pytest

from tests.weights.build import publish_line


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with a store of five versions."""
    publish_line(tmp_path / "store", 5, snapshot_every=3)
    return tmp_path
