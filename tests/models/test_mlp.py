"""The MLP of a dense layer with Triton, compared with the plain composition, with and without recomputing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rollmill.models.kernels import fused
from tests.kernels import DEVICE, INTERPRETED, without_kernels

pytestmark = pytest.mark.kernels
ROWS = (35, 32, 17) if INTERPRETED else (70, 64, 33)
SIZES = {"ROWS": 16, "COLUMNS": 32, "DEPTH": 16}  # of the interpreter's tiles: rows fill some tiles and exceed others


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(inputs: list[Tensor | None], device: str, dtype: torch.dtype, remakes: bool = False) -> list[Tensor]:
    """Returns the output, and the gradients of x, of the attention output and of the weights."""
    x, attended, *weights = (None if each is None else each.to(device, dtype).requires_grad_() for each in inputs)
    assert x is not None and attended is not None
    out = fused.add_mlp(x.clone(), x, attended, fused.DenseMLP(*weights), 1e-5, remakes=remakes)  # type: ignore[arg-type]
    wanted = [each for each in (x, attended, *weights) if each is not None]
    slope = drawn(*out.shape, seed=9).to(device, dtype)
    return [each.detach().cpu() for each in (out, *torch.autograd.grad(out, wanted, slope))]


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("joined", [True, False], ids=["one kernel", "product and pass"])
@pytest.mark.parametrize(("rows", "width", "inner"), [(ROWS[0], 48, 72), (ROWS[1], 40, 104), (ROWS[2], 64, 64)])
def test_mlp(rows: int, width: int, inner: int, joined: bool, bias: bool, monkeypatch: pytest.MonkeyPatch):
    from rollmill.models.kernels import swiglu_triton

    monkeypatch.setattr(swiglu_triton, "_FEWEST_ROWS", 1 if joined else rows + 1)
    if INTERPRETED:
        monkeypatch.setattr(swiglu_triton, "_SIZES", SIZES)
    inputs = [
        drawn(rows, width, seed=0),
        drawn(rows, 24, seed=1),
        drawn(width, 24, seed=2) / 24**0.5,
        drawn(width, seed=3) if bias else None,
        1 + 0.1 * drawn(width, seed=4),
        drawn(2 * inner, width, seed=5) / width**0.5,
        drawn(width, inner, seed=6) / inner**0.5,
    ]
    inputs = [None if each is None else each.bfloat16() for each in inputs]
    with without_kernels():
        expected = run(inputs, "cpu", torch.float32)
    kept, remade = (run(inputs, DEVICE, torch.bfloat16, remakes) for remakes in (False, True))
    for ours, again, theirs in zip(kept, remade, expected, strict=True):
        assert joined or torch.equal(ours, again)  # one kernel may sum in another order
        assert float((again.float() - theirs).norm()) <= 1e-2 * float(theirs.norm())
        assert float((ours.float() - theirs).norm()) <= 1e-2 * float(theirs.norm())
