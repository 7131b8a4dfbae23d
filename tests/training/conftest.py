from pathlib import Path

import pytest

from tests.training.world import World


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A world with all its groups finished, to be copied before a trainer goes to work in it."""
    path = tmp_path_factory.mktemp("prepared")
    World(path).add_steps()
    return path
