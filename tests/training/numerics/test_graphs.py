"""When passes are recorded, and when they run directly. test_step.py checks what a graph computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rollmill.models.device import decoder_on, is_full
from rollmill.training.batching import MicroBatch
from rollmill.training.numerics.graphs import GraphedPasses
from rollmill.training.numerics.next_token import NextTokenPasses
from tests.training.test_memory_errors import LENGTH, MODEL

FULL = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
]


class Recorder(GraphedPasses):
    """Never has enough memory for a graph."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.tried: list[Sequence[Tensor]] = []

    def _record(self, inputs: Sequence[Tensor], backward: Any) -> Any:
        self.tried.append(inputs)
        self._pool = "a pool"
        backward(*inputs)  # leaves an incomplete result behind
        raise FULL[0]


def double(model: nn.Linear) -> Any:
    def backward(x: Tensor) -> Tensor:
        loss = 2 * model(x).sum()
        loss.backward()
        return loss.detach()

    return backward


def run(passes: GraphedPasses, model: nn.Linear, shape: Any) -> tuple[float, Tensor]:
    x = torch.ones(1, 3)
    loss = float(passes.run(shape, [x], double(model)))
    gradient, model.weight.grad = model.weight.grad, None
    assert gradient is not None
    return loss, gradient


def test_shapes_that_do_not_repeat_are_forgotten():
    model = nn.Linear(3, 1, bias=False)
    passes = Recorder(model)
    for shape in range(2000):
        run(passes, model, (shape, *range(100)))
    assert passes.tried == [] and len(passes._seen) < 2000


def test_without_memory_for_a_graph_passes_run_directly():
    model = nn.Linear(3, 1, bias=False)
    passes = Recorder(model)
    for _ in range(4):
        loss, gradient = run(passes, model, "a shape")
        assert loss == pytest.approx(2 * float(model.weight.detach().sum()))
        assert torch.equal(gradient, torch.full((1, 3), 2.0)), "gradients of the failed recording do not count"
    assert len(passes.tried) == 1, "it is not tried again"


def test_a_direct_pass_without_memory_raises():
    model = nn.Linear(3, 1, bias=False)

    def backward(x: Tensor) -> Tensor:
        raise FULL[0]

    with pytest.raises(torch.OutOfMemoryError):
        Recorder(model).run("a shape", [torch.ones(1, 3)], backward)


@pytest.mark.parametrize("error", FULL, ids=str)
def test_every_error_of_a_full_device_is_recognised(error: Exception):
    assert is_full(error)


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), ValueError("out of memory"), MemoryError()], ids=repr)
def test_other_errors_are_not_taken_for_a_full_device(error: Exception):
    assert not is_full(error)


def packed(lengths: list[int]) -> MicroBatch:
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, MODEL.vocab_size, (sum(lengths),), generator=draw)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return MicroBatch(tokens, positions, lengths, torch.arange(len(tokens)), tokens, None, None, None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_graphs_are_freed_for_a_pass_that_needs_their_memory():
    """Memory for one pass and a third: enough for any pass alone, but not beside the graph of another."""
    model = decoder_on(torch.device("cuda"), MODEL)
    model.initialise(0)
    often, other = packed([LENGTH, LENGTH]), packed([LENGTH + 1, LENGTH - 1])
    tokens = len(often.tokens_N)
    passes, plain = NextTokenPasses(model, 0.0), NextTokenPasses(model, 0.0, graphs=False)

    def gradients(of: NextTokenPasses, part: MicroBatch) -> list[Tensor]:
        assert math.isfinite(float(of(part, tokens, tokens)[0]))
        found = [each.grad.float().cpu() for each in model.parameters() if each.grad is not None]
        model.zero_grad()
        return found

    expected = gradients(plain, other)
    for _ in range(2):
        gradients(passes, often)
    assert passes._graphs is not None and len(passes._graphs._recorded) == 1
    torch.cuda.empty_cache()
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(1.33 * torch.cuda.memory_reserved() / total)
    try:
        found = gradients(passes, other)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert not passes._graphs._recorded
    for ours, theirs in zip(found, expected, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-2
