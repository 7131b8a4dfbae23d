"""A trajectory that is larger than the memory its seal may use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rollmill.gateway.recording.sealing import payload_key
from rollmill.storage.objects import Objects
from rollmill.trajectories.payload import decode_trajectory
from tests.gateway.seal_large import LAYERS, TOP_K, TURN


def seal(directory: Path, tokens: int) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.gateway.seal_large", str(directory), str(tokens)]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


@pytest.mark.slow
def test_a_million_tokens_with_routes_are_sealed_in_bounded_memory(tmp_path: Path) -> None:
    """Their routes have 458 MB; a branch shares all of them."""
    found = seal(tmp_path, 1_000_000)
    assert found["during"] - found["before"] < 100
    assert found["during"] < 400
    assert found["payload"] < 500


def test_routes_that_went_through_the_log_are_whole(tmp_path: Path) -> None:
    seal(tmp_path, 3 * TURN)
    first, branch = decode_trajectory(Objects.open(tmp_path / "store").get(payload_key("a"))).segments
    rows = np.random.default_rng(0).integers(0, 256, (TURN, LAYERS, TOP_K)).astype(np.uint8)
    assert first.routes is not None and branch.routes is not None
    assert first.routes_valid is not None and branch.routes_valid is not None
    assert first.routes_valid[:-1].all() and not first.routes_valid[-1]
    assert branch.routes_valid[:-1].all() and branch.parent == ("a.0", 3 * TURN)
    np.testing.assert_array_equal(branch.routes[: 3 * TURN - 1], first.routes[:-1])
    np.testing.assert_array_equal(first.routes[: TURN - 1], rows[: TURN - 1])
    np.testing.assert_array_equal(first.routes[TURN - 1 : 2 * TURN - 1], rows)
    np.testing.assert_array_equal(branch.routes[3 * TURN - 1 : -1], rows)  # the last shared token is the branch's
