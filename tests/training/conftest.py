from pathlib import Path

import pytest

from tests.training.world import World


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world with all its groups finished. Tests copy it before a trainer works in it."""
    path = tmp_path_factory.mktemp("prepared")
    World(path).add_steps()
    return path
