"""Gradients of products in FP8: the codes of their factors, and how near the gradients are to those of bf16."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import round_to_form_
from rollmill.models.kernels.forms import OutputGradient, linear
from rollmill.models.kernels.heads import head, head_gradients
from rollmill.models.kernels.quantised import fp8
from tests.kernels import DEVICE, hopper, without_kernels
from tests.models.test_fp8_experts import uneven
from tests.models.test_fused import BASE, run
from tests.models.test_quantize import draw

LIMIT = 0.06  # relative error of a gradient: both factors have four significant bits
on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper device"
)


def error(mine: Tensor, theirs: Tensor) -> float:
    return float((mine.double().cpu() - theirs.double().cpu()).norm() / theirs.double().norm())


def same_codes(mine: fp8.Codes, theirs: fp8.Codes) -> bool:
    codes = torch.equal(mine.codes.cpu().view(torch.uint8), theirs.codes.view(torch.uint8))
    by_column = mine.scales.t().is_contiguous() == theirs.scales.t().is_contiguous()
    return codes and torch.equal(mine.scales.cpu(), theirs.scales) and by_column


def differentiate_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the hardware does not multiply FP8: the numbers of the codes are multiplied there."""
    monkeypatch.setattr(fp8, "differentiates", lambda grad, weight: not any(size % 128 for size in weight.shape))


@pytest.mark.kernels
@pytest.mark.parametrize("tokens", [1, 128, 130])
def test_one_pass_gives_the_codes_along_both_dimensions(tokens: int) -> None:
    x = uneven(tokens, 256)
    x[:, 128:] = 0
    with without_kernels():
        plain, columns = fp8.both_ways(x), fp8.along_tokens(x)
    found = fp8.both_ways(x.to(DEVICE))
    assert same_codes(found.rows, plain.rows) and same_codes(found.columns, plain.columns)
    assert same_codes(fp8.along_tokens(x.to(DEVICE)), columns)
    assert found.rows.codes.shape == (512, 256)
    assert same_codes(fp8.transposed(draw(256, 384).bfloat16().to(DEVICE)), _transposed(draw(256, 384).bfloat16()))


def _transposed(weight: Tensor) -> fp8.Codes:
    with without_kernels():
        return fp8.transposed(weight)


def test_gradients_are_near_and_the_result_keeps_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients(form: str) -> list[Tensor]:
        x, weight = uneven(70, 256).float(), draw(384, 256, seed=3)
        round_to_form_([("layers.0.output", weight)], "fp8")
        inputs = [x.requires_grad_(), weight.requires_grad_(), draw(384, seed=4).requires_grad_()]
        out = linear(*inputs, form=form)
        return [out.detach(), *torch.autograd.grad(out, inputs, uneven(70, 384, seed=6).float())]

    with without_kernels():
        plain, bf16 = gradients("fp8"), gradients("bf16")
        differentiate_in_fp8(monkeypatch)
        found = gradients("fp8")
        assert torch.equal(found[0], plain[0]) and torch.equal(found[3], plain[3])
        assert 0 < error(found[1], plain[1]) < LIMIT and 0 < error(found[2], plain[2]) < LIMIT
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(gradients("bf16"), bf16, strict=True))


@pytest.mark.kernels
@pytest.mark.parametrize("recompute", [False, True])
def test_a_model_learns_nearly_the_same(recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"layers": 1, "width": 128, "heads": 4, "head_dim": 16, "kv_heads": 2, "mlp_width": 128, "experts": 0}
    model = Decoder(ModelConfig.model_validate(BASE | sizes), torch.bfloat16, "fp8")
    model.initialise(0)
    with without_kernels():
        round_to_form_(model.named_parameters(), "fp8")
    model.to(DEVICE).recompute_mlp = recompute
    hidden, plain = run(model)
    differentiate_in_fp8(monkeypatch)
    again, found = run(model)
    assert torch.equal(again, hidden)
    different = [name for name in plain if not torch.equal(found[name], plain[name])]
    assert {"layers.0.qkv", "layers.0.output", "layers.0.mlp.gate_up", "layers.0.mlp.down"} <= set(different)
    for name, theirs in plain.items():
        assert error(found[name], theirs) < 2 * LIMIT, name


@pytest.mark.kernels
@pytest.mark.parametrize(("start", "tokens"), [(0, 256), (128, 70)])
def test_codes_of_a_chunk_are_written_beside_the_others(start: int, tokens: int) -> None:
    x, factors = uneven(tokens, 384), draw(tokens, seed=3).abs()
    found = []
    for device in ("cpu", DEVICE):
        columns = fp8.empty_columns(384, 512, torch.device(device))
        columns.codes.view(torch.uint8).zero_(), columns.scales.zero_()
        given = (x.to(device), factors.to(device), columns, start)
        with without_kernels() if not found else contextlib.nullcontext():
            found.append((fp8.both_ways_into(*given, pads=tokens < 128), columns))
    assert same_codes(found[1][0], found[0][0]) and same_codes(found[1][1], found[0][1])
    assert found[0][0].codes.shape == (512 - start if tokens < 128 else tokens, 512)


@pytest.mark.kernels
@pytest.mark.parametrize("groups", [1, 2])
def test_the_head_has_its_values_and_nearly_its_gradients(groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks of rows per group; the vocabulary is padded for the sum over it."""
    tokens, vocabulary = 128 * (1 + groups) + 70, 384
    monkeypatch.setattr(head, "PIECE_ELEMENTS", 64 * vocabulary)
    monkeypatch.setattr(head, "FEWEST_ROWS", 1)
    monkeypatch.setattr(head_gradients, "MOST_CODES", -(-tokens // groups) * vocabulary)
    monkeypatch.setattr(fp8, "differentiates_head", lambda hidden, weight: True)
    hidden, weight = (
        each.bfloat16().to(DEVICE).requires_grad_() for each in (draw(tokens, 128), draw(vocabulary, 128))
    )
    targets, weights = (torch.arange(tokens) * 7 % vocabulary).to(DEVICE), draw(tokens, seed=5).abs().to(DEVICE)

    def next_token(form: str) -> tuple[Tensor, ...]:
        loss = head.head_next_token(hidden, weight, targets, weights, form)
        return loss.detach(), *torch.autograd.grad(0.5 * loss, (hidden, weight))

    def logprobs(form: str) -> tuple[Tensor, ...]:
        found, entropies = head.head_logprobs(hidden, weight, targets, form=form)
        loss = (found * weights + 0.1 * entropies).sum()
        return torch.stack([found, entropies]).detach(), *torch.autograd.grad(loss, (hidden, weight))

    for compute in (next_token, logprobs):
        plain, found = compute("bf16"), compute("fp8")
        assert torch.equal(found[0], plain[0])
        for mine, theirs in zip(found[1:], plain[1:], strict=True):
            assert mine.dtype == theirs.dtype and 0 < error(mine, theirs) < LIMIT


@on_hopper
@pytest.mark.parametrize("shape", [(2048, 512, 1024), (2051, 1024, 512), (4096, 4096, 4096)], ids=str)
def test_the_hardware_agrees_with_the_emulated_gradients(shape: tuple[int, int, int]) -> None:
    tokens, out, inputs = shape
    grad, x, weight = (each.cuda() for each in (uneven(tokens, out), uneven(tokens, inputs, 2), draw(out, inputs)))
    weight = weight.bfloat16()
    round_to_form_([("layers.0.output", weight)], "fp8")
    assert fp8.differentiates(grad, weight)
    codes, columns = fp8.both_ways(grad), fp8.along_tokens(x)
    output = OutputGradient(grad, weight, "fp8")
    assert error(output.of_input(), (codes.rows.values()[:tokens] @ weight.float())) < 5e-3
    assert error(output.of_weight(x), codes.columns.values() @ columns.values().t()) < 5e-3
    assert error(output.of_input(), grad @ weight) < LIMIT and error(output.of_weight(x), grad.t() @ x) < LIMIT


@on_hopper
def test_the_hardware_agrees_with_the_head_in_bf16() -> None:
    hidden, weight = (each.bfloat16().cuda().requires_grad_() for each in (draw(2100, 512), draw(1152, 512) / 20))
    assert fp8.differentiates_head(hidden, weight)
    targets, weights = torch.arange(2100, device="cuda") % 1152, torch.full((2100,), 1 / 2100, device="cuda")
    losses = [head.head_next_token(hidden, weight, targets, weights, form) for form in ("bf16", "fp8")]
    plain, found = (torch.autograd.grad(loss, (hidden, weight)) for loss in losses)
    assert torch.equal(losses[0], losses[1])
    assert all(0 < error(mine, theirs) < LIMIT for mine, theirs in zip(found, plain, strict=True))


@hopper
@pytest.mark.kernels
def test_shapes_that_do_not_fit_are_differentiated_in_bf16() -> None:
    grad, weight = (torch.zeros(size, dtype=torch.bfloat16, device=DEVICE) for size in ((2048, 640), (640, 512)))
    assert not fp8.differentiates(grad, weight)
    assert OutputGradient(grad, weight, "fp8").codes is None
