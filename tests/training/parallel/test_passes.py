"""Losses and gradients of ranks are those of one process, for each mesh."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.parallel.cases import LENGTHS, MODELS, Shape, passes
from tests.training.parallel.ranks import run_ranks

pytestmark = pytest.mark.slow

# ranks, expert, context
CASES: list[tuple[str, Shape]] = [
    ("dense", (2, 1, 1)),
    ("dense", (2, 1, 2)),
    ("mixture", (2, 2, 1)),
    ("mixture", (4, 1, 1)),
    ("mixture", (4, 4, 1)),
    ("mixture", (4, 2, 2)),
    ("latent", (4, 1, 2)),
]


def several(world: Any, cases: list[tuple[str, Shape]]) -> list[dict[str, Any]]:
    return [passes(world, name, shape) for name, shape in cases]


@pytest.mark.parametrize("ranks", [2, 4])
def test_same_losses_and_gradients_as_one_process(ranks: int, tmp_path: Path) -> None:
    cases = [(name, shape) for name, shape in CASES if shape[0] == ranks]
    found = run_ranks(tmp_path, ranks, several, cases)
    torch.set_num_threads(1)
    for index, (name, shape) in enumerate(cases):
        expected = passes(None, name)
        for rank in range(ranks):
            assert_same(found[rank][index], expected, f"{name} {shape}")
        routed = [found[rank][index]["policy"]["routed"] for rank in range(ranks)]
        assert sum(routed) == sum(LENGTHS) * MODELS[name].moe_layers, "fillers are in no figure"


def assert_same(found: dict[str, Any], expected: dict[str, Any], case: str) -> None:
    assert found["next token"] == pytest.approx(expected["next token"], rel=1e-5), case
    for kind in ("policy", "filtered"):
        assert found[kind]["loss"] == pytest.approx(expected[kind]["loss"], rel=1e-5, abs=1e-6), case
        torch.testing.assert_close(found[kind]["logprobs"], expected[kind]["logprobs"], rtol=1e-5, atol=1e-5)
    for kind in ("next token gradients", "policy gradients", "filtered gradients"):
        assert found[kind].keys() == expected[kind].keys()
        for name, gradient in expected[kind].items():
            scale = float(gradient.abs().max()) + 1e-8
            torch.testing.assert_close(
                found[kind][name] / scale, gradient / scale, rtol=0, atol=1e-5, msg=f"{case}: {kind} of {name}"
            )
