"""The FP8 products of a mixture, compared with emulated ones, which multiply the dequantised codes."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rollmill.models.kernels.forms import seen
from rollmill.models.kernels.grouped import experts as through_grouped
from rollmill.models.kernels.quantised import fp8
from tests.kernels import DEVICE, INTERPRETED, hopper, without_kernels
from tests.models.test_quantize import draw

pytestmark = [pytest.mark.kernels, hopper]
# tolerance for sums in another order, relative to the row's largest number: Hopper keeps about 14 bits per 128 products
SUMS = 2**-11 if INTERPRETED else 2**-8
# if bf16 rounds a sum differently, the next quantiser may round a whole step differently
STEPS = 5e-3 if INTERPRETED else 2e-2
COUNTS = {
    "some": [70, 3, 129, 41],
    "empty ones": [0, 100, 0, 0, 64, 0],
    "one has all": [0, 0, 150],
    "whole tiles": [64, 128],
    "one row": [0, 1, 0],
}


def served(*shape: int, seed: int) -> Tensor:
    """Weights as they are served: equal to their dequantised codes."""
    with without_kernels():
        return fp8.rounded(draw(*shape, seed=seed) / shape[-2] ** 0.5, fp8.BLOCK).bfloat16()


def uneven(rows: int, width: int, seed: int = 0) -> Tensor:
    """Rows of many magnitudes, so of many scales."""
    return (draw(rows, width, seed=seed) * torch.exp2(draw(rows, 1, seed=seed + 1) * 4)).bfloat16()


def ends(counts: list[int]) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(DEVICE, torch.int32)


def exact(x_RI: Tensor, weight_EIO: Tensor, counts: list[int]) -> Tensor:
    with without_kernels():
        rounded = seen(x_RI, "fp8").double().split(counts)
    return torch.cat([rows @ weight for rows, weight in zip(rounded, weight_EIO.double(), strict=True)])


def multiplied(x_RI: Tensor, weight_EIO: Tensor, counts: list[int]) -> Tensor:
    from rollmill.models.kernels.quantised import fp8_grouped_triton as ours
    from rollmill.models.kernels.quantised.fp8_triton import quantise_transposed

    places = torch.arange(len(x_RI), device=DEVICE)[:, None]
    codes, scales = ours.spread_codes(x_RI.to(DEVICE), places)
    tiles = ours.row_tiles(ends(counts), len(x_RI))
    return ours.product(codes, scales, *quantise_transposed(weight_EIO.to(DEVICE)), tiles).cpu()


def test_transposed_codes_equal_the_plain_ones() -> None:
    from rollmill.models.kernels.quantised.fp8_triton import quantise_transposed

    weight = (draw(2, 256, 384) * torch.exp2(draw(2, 256, 1, seed=1) * 6)).bfloat16()
    weight[1, :128, 128:256] = 0
    codes, scales = (each.cpu() for each in quantise_transposed(weight.to(DEVICE)))
    with without_kernels():
        plain_codes, plain_scales = fp8.quantise(weight, fp8.BLOCK)
    assert torch.equal(codes.view(torch.uint8), plain_codes.transpose(1, 2).view(torch.uint8))
    assert torch.equal(scales, plain_scales.transpose(1, 2))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_tiles_hold_each_row_once(counts: list[int]) -> None:
    from rollmill.models.kernels.quantised import fp8_grouped_triton as ours

    seen = []
    for expert, first, end in ours.row_tiles(ends(counts), sum(counts)).tolist():
        seen += [(row, expert) for row in range(first, min(first + ours._ROWS, end))]
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    assert seen == list(enumerate(experts))


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 384), (384, 128)], ids=str)
def test_a_product_equals_the_emulated_one(counts: list[int], inputs: int, outputs: int) -> None:
    x, weight = uneven(sum(counts), inputs), served(len(counts), inputs, outputs, seed=3)
    expected = exact(x, weight, counts)
    error = (multiplied(x, weight, counts).double() - expected).abs()
    # at most half a step of bf16
    assert (error <= 2**-8 * expected.abs() + SUMS * expected.abs().amax(1, keepdim=True)).all()


def test_nan_stays_in_its_row() -> None:
    counts = [70, 3, 129, 41]
    x, weight = uneven(sum(counts), 256), served(len(counts), 256, 128, seed=3)
    plain = multiplied(x, weight, counts)
    bad = [0, 69, 71, 100, 242]
    x[bad, 7] = math.nan
    out = multiplied(x, weight, counts)
    kept = [row for row in range(len(x)) if row not in bad]
    assert out[bad].isnan().all() and torch.equal(out[kept], plain[kept])


def test_fused_passes_give_the_codes_of_separate_passes() -> None:
    from rollmill.models.kernels.fused_triton import spread, swiglu_forward
    from rollmill.models.kernels.quantised import fp8_grouped_triton as ours

    x, order = uneven(45, 256).to(DEVICE), torch.randperm(90, generator=torch.Generator().manual_seed(4))
    places, gate_up = order.view(45, 2).to(DEVICE), uneven(45, 512, seed=5).to(DEVICE)
    for (codes, scales), rows in (
        (ours.spread_codes(x, places), spread(x, places)),
        (ours.swiglu_codes(gate_up), swiglu_forward(gate_up)),
    ):
        plain_codes, plain_scales = fp8.quantise(rows, 1)
        assert torch.equal(codes.view(torch.uint8), plain_codes.view(torch.uint8))
        assert torch.equal(scales.t(), plain_scales)


def through(experts: int, *, skips: bool) -> list[Tensor]:
    """Returns the experts' output for some tokens, and the gradients."""
    tokens, width, inner = 20 if INTERPRETED else 50, 256, 128
    chosen = torch.arange(tokens)[:, None] * torch.tensor([1, 3]) % experts
    chosen[chosen == 2] = 0  # expert 2 has no rows
    inputs = [
        uneven(tokens, width),
        draw(tokens, 2, seed=2).sigmoid().bfloat16(),
        served(experts, width, 2 * inner, seed=3),
        served(experts, inner, width, seed=4),
        draw(tokens, width, seed=6).bfloat16(),
    ]
    x, weights, gate_up, down, skip = (each.to(DEVICE).requires_grad_() for each in inputs)
    out = through_grouped(x, weights, chosen.to(DEVICE), gate_up, down, skip if skips else None, "fp8")
    wanted = (x, weights, gate_up, down, *([skip] if skips else []))
    slope = draw(tokens, width, seed=7).to(DEVICE, torch.bfloat16)
    return [each.detach().float().cpu() for each in (out, *torch.autograd.grad(out, wanted, slope))]


@pytest.mark.parametrize("skips", [False, True], ids=["alone", "added"])
def test_experts_and_their_gradients_equal_the_emulated_ones(skips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from rollmill.models.kernels.quantised import fp8_grouped_triton as ours

    expected = through(5, skips=skips)
    monkeypatch.setattr(ours, "_FEWEST_ROWS", 1)
    calls = []
    product = ours.product
    monkeypatch.setattr(ours, "product", lambda *given: calls.append(given) or product(*given))
    for mine, theirs in zip(through(5, skips=skips), expected, strict=True):
        assert float((mine - theirs).norm()) <= STEPS * float(theirs.norm()), mine.shape
    assert len(calls) == 2


def test_shapes_that_do_not_fit_use_the_emulated_product() -> None:
    from rollmill.models.kernels.quantised.fp8_grouped_triton import _FEWEST_ROWS, multiplies

    def fits(rows: int, width: int = 256, inner: int = 128, dtype: torch.dtype = torch.bfloat16) -> bool:
        x, gate_up, down = (
            torch.empty(shape, dtype=dtype, device=DEVICE)
            for shape in ((1, width), (2, width, 2 * inner), (2, inner, width))
        )
        return multiplies(x, torch.empty(rows // 2, 2, device=DEVICE), gate_up, down)

    assert fits(2 * _FEWEST_ROWS) and not fits(2 * _FEWEST_ROWS - 2)
    assert not fits(2 * _FEWEST_ROWS, width=192) and not fits(2 * _FEWEST_ROWS, inner=64)
    assert not fits(2 * _FEWEST_ROWS, dtype=torch.float32)
