"""Ranks on CUDA. Two share one GPU and meet over gloo, one meets itself over NCCL, which wants a GPU for each."""

import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rollmill.training.parallel.world import World
from tests.kernels import cuda
from tests.training.parallel.cases import Shape, passes
from tests.training.parallel.ranks import run_ranks

pytestmark = [cuda, pytest.mark.timeout(600)]  # each rank compiles its kernels the first time
# ranks, expert, context
CASES: list[tuple[str, Shape]] = [
    ("dense", (2, 1, 1)),
    ("dense", (2, 1, 2)),
    ("mixture", (2, 1, 1)),
    ("mixture", (2, 2, 1)),
    ("latent", (2, 1, 2)),
]


def on_gpu(world: Any, cases: list[tuple[str, Shape]]) -> list[dict[str, Any]]:
    found = [passes(world, name, shape, torch.device("cuda")) for name, shape in cases]
    return [{key: _on_host(value) for key, value in each.items()} for each in found]


def _on_host(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _on_host(each) for key, each in value.items()}
    return value.float().cpu() if isinstance(value, torch.Tensor) else value


def test_same_losses_and_gradients_as_one_process(tmp_path: Path) -> None:
    """But for the rounding of bf16: products of fewer rows may be summed in another order."""
    found = run_ranks(tmp_path, 2, on_gpu, CASES)
    for index, (name, shape) in enumerate(CASES):
        expected = on_gpu(None, [(name, (1, 1, 1))])[0]
        for rank in range(2):
            assert_near(found[rank][index], expected, f"{name} {shape}")


def test_one_rank_over_nccl() -> None:
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for name in ("dense", "mixture", "latent"):
            alone = World(0, 1, dist.HashStore(), datetime.timedelta(minutes=5))
            found, expected = (on_gpu(world, [(name, (1, 1, 1))])[0] for world in (alone, None))
            assert_near(found, expected, name)
    finally:
        dist.destroy_process_group()


def assert_near(found: dict[str, Any], expected: dict[str, Any], case: str) -> None:
    assert found["next token"] == pytest.approx(expected["next token"], rel=1e-2), case
    for kind in ("policy", "filtered"):
        torch.testing.assert_close(found[kind]["logprobs"], expected[kind]["logprobs"], rtol=0, atol=5e-2)
    for kind in ("next token gradients", "policy gradients", "filtered gradients"):
        assert found[kind].keys() == expected[kind].keys()
        for name, gradient in expected[kind].items():
            error = float((found[kind][name] - gradient).norm() / (gradient.norm() + 1e-6))
            assert error < 0.05, f"{case}: {kind} of {name}: {error:.3f}"
