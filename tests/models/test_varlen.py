"""Packed attention on CUDA against the padded one in FP32: any lengths, grouped queries, narrow values.

What runs through kernels of our own also runs in Triton's interpreter; cuDNN and torch's flash attention need a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from rollmill.models.attention import PackedAttention
from rollmill.models.device import uncollected
from rollmill.models.kernels.attention import varlen
from rollmill.models.kernels.attention.varlen import VarlenAttention
from rollmill.models.packed_attention import packed_attention
from tests.kernels import DEVICE, INTERPRETED, cuda, hopper, without_kernels
from tests.models import test_fused

Shape = tuple[int, int, int, int]  # heads, kv_heads, D, E


def test_strategy_by_device():
    assert isinstance(packed_attention([3], "cpu", torch.float32), PackedAttention)
    assert isinstance(packed_attention([3], "cpu", torch.bfloat16), PackedAttention)


@cuda
def test_strategy_by_type():
    assert isinstance(packed_attention([3], "cuda", torch.bfloat16), VarlenAttention)
    assert isinstance(packed_attention([3], "cuda", torch.float32), PackedAttention)


def problem(lengths: Sequence[int], shape: Shape) -> list[Tensor]:
    """q, k, v and a gradient of the output."""
    heads, kv_heads, dim, value_dim = shape
    generator = torch.Generator().manual_seed(len(lengths))
    sizes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim), (1, heads * value_dim))
    drawn = [torch.randn(sum(lengths), *size, generator=generator).to(DEVICE).bfloat16() for size in sizes]
    return [*(tensor.requires_grad_() for tensor in drawn[:3]), drawn[3].squeeze(1)]


@contextmanager
def repeating(deterministic: bool = True) -> Iterator[None]:
    torch.use_deterministic_algorithms(deterministic)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def old_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from rollmill.models.kernels.attention import packed_triton as attention_triton

    monkeypatch.setattr(attention_triton, "has_accelerator", lambda device: False)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records which kernels each call runs. Nothing is computed."""
    from rollmill.models.kernels.attention import packed_triton as attention_triton

    found: list[str] = []

    def stand_in(way: str) -> Any:
        def call(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
            found.append(way)
            out = q.new_zeros(len(q), q.shape[1], v.shape[2])
            return out if way == "ours" else out.flatten(1)

        return call

    monkeypatch.setattr(attention_triton, "attend", stand_in("ours"))
    monkeypatch.setattr(varlen, "_uniform", stand_in("cuDNN"))
    monkeypatch.setattr(varlen, "flash", stand_in("flash"))
    return found


@hopper
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("lengths", "shape", "ways"),  # without and with bits that repeat
    [
        ([5, 1], (9, 3, 64, 64), ["ours", "ours"]),
        ([6], (8, 2, 128, 128), ["ours", "ours"]),
        ([3, 3], (9, 3, 64, 64), ["ours", "ours"]),
        ([3, 3], (8, 2, 128, 128), ["cuDNN", "ours"]),
        ([5, 1], (4, 4, 48, 48), ["flash", "flash"]),
        ([3, 3], (4, 4, 48, 48), ["cuDNN", "flash"]),
        ([5, 1], (4, 4, 64, 32), ["flash", "flash"]),
    ],
    ids=str,
)
def test_which_kernels_run(lengths: list[int], shape: Shape, ways: list[str], taken: list[str], monkeypatch: Any):
    q, k, v, _ = problem(lengths, shape)
    attend = VarlenAttention(lengths, DEVICE)
    for deterministic in (False, True):
        with repeating(deterministic):
            assert attend(0, q, k, v).shape == (6, shape[0] * shape[3])
    assert taken == ways
    old_device(monkeypatch)
    with repeating():
        attend(0, q, k, v)
    assert taken[2:] == ["flash"]


def errors(lengths: Sequence[int], shape: Shape, deterministic: bool) -> list[float]:
    """The errors of the output and of the gradients of q, k and v."""
    q, k, v, grad = problem(lengths, shape)
    wide = [tensor.detach().float().requires_grad_() for tensor in (q, k, v)]
    with without_kernels():
        reference = PackedAttention(lengths, DEVICE)(0, *wide)
        theirs = torch.autograd.grad(reference, wide, grad.float())
    with repeating(deterministic):
        out = VarlenAttention(lengths, DEVICE)(0, q, k, v)
        ours = torch.autograd.grad(out, (q, k, v), grad)
    pairs = zip((out, *ours), (reference, *theirs), strict=True)
    return [float(((mine.float() - expected).norm() / (expected.norm() + 1e-3)).detach()) for mine, expected in pairs]


@cuda
@pytest.mark.parametrize("lengths", [[1], [5, 1, 130], [128, 128, 128], [64] * 7, [300, 299, 1, 1]], ids=str)
@pytest.mark.parametrize("shape", [(4, 4, 64, 64), (9, 3, 64, 64), (4, 4, 48, 32), (8, 2, 128, 128)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("device", ["this", "old"])
def test_values_and_gradients(lengths: Sequence[int], shape: Shape, deterministic: bool, device: str, monkeypatch: Any):
    if device == "old":
        old_device(monkeypatch)
    assert max(errors(lengths, shape, deterministic)) < 1e-2


@hopper
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("lengths", "shape", "deterministic"),
    [([5, 1, 130], (3, 1, 64, 64), False), ([70, 70], (2, 2, 128, 128), True)],
    ids=["ragged", "even, bits repeat"],
)
def test_values_and_gradients_of_our_own_kernels(lengths: Sequence[int], shape: Shape, deterministic: bool):
    assert max(errors(lengths, shape, deterministic)) < 1e-2


@cuda
def test_flash_takes_rows_that_start_at_any_address():
    """Keys of 8 and values of 6 numbers lie side by side, so rows start at any address."""
    lengths = [5, 1, 130]
    starts = torch.tensor([0, 5, 6, 136], dtype=torch.int32, device="cuda")
    q, k, v, grad = problem(lengths, (2, 2, 8, 6))
    both = torch.cat((k, v), 2)
    assert both.stride(0) % 8

    def run(k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        with repeating():
            out = varlen.flash(q, k, v, (starts, starts), (130, 130))
        return out, *torch.autograd.grad(out, (q, k, v), grad)

    assert all(torch.equal(mine, other) for mine, other in zip(run(*both.split((8, 6), 2)), run(k, v), strict=True))


@cuda
@pytest.mark.parametrize("device", ["this", "old"])
def test_deterministic_mode_repeats_its_bits(device: str, monkeypatch: pytest.MonkeyPatch):
    if device == "old":
        old_device(monkeypatch)
    q, k, v, grad = problem([700, 41, 512], (9, 3, 64, 64))
    with repeating():
        attend = VarlenAttention([700, 41, 512], "cuda")
        first, *others = [torch.autograd.grad(attend(0, q, k, v), (q, k, v), grad) for _ in range(4)]
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@cuda
@hopper
def test_its_first_call_may_be_recorded():
    """Kernels have run by then, but not with these lengths."""

    def gradients(attend: VarlenAttention, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attend(0, q, k, v), (q, k, v), grad)

    gradients(VarlenAttention([90, 41], "cuda"), *problem([90, 41], (9, 3, 64, 64)))
    given = problem([70, 1, 60], (9, 3, 64, 64))
    attend, graph = VarlenAttention([70, 1, 60], "cuda"), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with uncollected(), torch.cuda.graph(graph):
        recorded = gradients(attend, *given)
    with torch.no_grad():
        given[0].mul_(0.5)
    graph.replay()
    assert all(torch.equal(mine, other) for mine, other in zip(recorded, gradients(attend, *given), strict=True))


@hopper
@pytest.mark.kernels
@pytest.mark.parametrize(
    ("variant", "heads"),
    [
        ("dense", (3, 1, 64) if INTERPRETED else (9, 3, 64)),
        ("dense with norms of heads", (6, 2, 32)),
        ("dense with a scale of scores", (4, 2, 32) if INTERPRETED else (6, 2, 32)),
    ],
)
def test_a_decoder_reaches_our_own_kernels(variant: str, heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch):
    """Rows of q, k and v are as its kernels make them. Layers that are recomputed give the same bits."""
    scaled = {"experts": 0, "rope_scaling": {"type": "yarn", "factor": 4, "original_context": 16, "score_scale": 1.2}}
    monkeypatch.setitem(test_fused.VARIANTS, "dense with a scale of scores", scaled)
    for name, value in zip(("heads", "kv_heads", "head_dim"), heads, strict=True):
        monkeypatch.setitem(test_fused.BASE, name, value)
    if INTERPRETED:
        monkeypatch.setitem(test_fused.BASE, "layers", 1)
    model = test_fused.decoder(variant)
    with without_kernels():
        hidden, gradients = test_fused.run(model)
    monkeypatch.setattr(test_fused, "packed_attention", lambda lengths, device, _: VarlenAttention(lengths, device))
    monkeypatch.setattr(varlen, "flash", None)  # it must not be called
    model = test_fused.in_type(model, torch.bfloat16)
    found, our_gradients = test_fused.run(model)
    assert test_fused.relative(found, hidden) < test_fused.BF16_LIMIT
    for name, expected in gradients.items():
        assert test_fused.relative(our_gradients[name], expected) < test_fused.BF16_LIMIT, name
    model.recompute_every = 1
    again, gradients_again = test_fused.run(model)
    assert torch.equal(found, again)
    assert all(torch.equal(each, gradients_again[name]) for name, each in our_gradients.items())
