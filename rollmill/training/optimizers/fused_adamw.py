"""AdamW of a whole model in one launch: it reads and writes masters, moments and the served copy once. Another launch
computes the norm of the gradients, and another one adds them up, if a step has several passes.

A table on the device holds the addresses of all tensors; each block works on 1024 elements of one tensor. The norm of
the gradient stays on the device too: if it is not finite, nothing is written, and the host need not wait to find out.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_ALIGNED = 16  # bytes: the kernel assumes this alignment of every address
_BLOCK = 1024  # with eight warps, four elements per thread: 16-byte accesses, and registers for six programs at once
_SQUARES = 16384  # elements per block of the norm, which are only read


class Group(NamedTuple):
    """One tensor's state. `master`, `mean` and `square` are FP32; all are contiguous."""

    master: Tensor
    mean: Tensor
    square: Tensor
    served: Tensor


@triton.jit
def _pointer(table_ptr, at, TYPE: tl.constexpr):
    return tl.multiple_of(tl.load(table_ptr + at).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def _update(
    master_ptr, mean_ptr, square_ptr, served_ptr, grad_ptr, at, inside, scale, lr, decay, beta_mean, beta_square, eps,
    mean_scale, square_scale, serves, FORM: tl.constexpr,
):  # fmt: skip
    grad = tl.load(grad_ptr + at, inside).to(tl.float32) * scale
    mean = tl.load(mean_ptr + at, inside)
    square = tl.load(square_ptr + at, inside)
    master = tl.load(master_ptr + at, inside)
    mean += (grad - mean) * (1.0 - beta_mean)
    square = square * beta_square + grad * grad * (1.0 - beta_square)
    master *= 1.0 - lr * decay
    master -= lr * mean_scale * mean / (tl.sqrt(square) * square_scale + eps)
    tl.store(mean_ptr + at, mean, inside)
    tl.store(square_ptr + at, square, inside)
    tl.store(master_ptr + at, master, inside)
    if serves:
        tl.store(served_ptr + at, master.to(FORM).to(served_ptr.dtype.element_ty), inside)


@triton.jit
def _adamw(
    table_ptr, size_ptr, decay_ptr, owner_ptr, first_ptr, norm_ptr, lr, beta_mean, beta_square, eps, mean_scale,
    square_scale, max_norm, tensors, GRAD: tl.constexpr, SERVED: tl.constexpr, FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    norm = tl.load(norm_ptr)
    if norm < float("inf"):  # false for NaN too
        block = tl.program_id(0)
        owner = tl.load(owner_ptr + block)
        start = (block - tl.load(first_ptr + owner)).to(tl.int64) * BLOCK
        at, size, decay = start + tl.arange(0, BLOCK), tl.load(size_ptr + owner), tl.load(decay_ptr + owner)
        scale = tl.minimum(1.0, max_norm / tl.maximum(norm, 1e-12))
        master_ptr = _pointer(table_ptr, owner, tl.float32)
        mean_ptr = _pointer(table_ptr, tensors + owner, tl.float32)
        square_ptr = _pointer(table_ptr, 2 * tensors + owner, tl.float32)
        served_ptr = _pointer(table_ptr, 3 * tensors + owner, SERVED)
        serves = tl.load(table_ptr + 3 * tensors + owner) != 0
        grad_ptr = _pointer(table_ptr, 4 * tensors + owner, GRAD)
        if start + BLOCK <= size:  # without a mask, accesses are four elements wide
            _update(
                master_ptr, mean_ptr, square_ptr, served_ptr, grad_ptr, at, None, scale, lr, decay, beta_mean,
                beta_square, eps, mean_scale, square_scale, serves, FORM,
            )  # fmt: skip
        else:
            _update(
                master_ptr, mean_ptr, square_ptr, served_ptr, grad_ptr, at, at < size, scale, lr, decay, beta_mean,
                beta_square, eps, mean_scale, square_scale, serves, FORM,
            )  # fmt: skip


_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _add(table_ptr, size_ptr, owner_ptr, first_ptr, tensors, GRAD: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    owner = tl.load(owner_ptr + block)
    start = (block - tl.load(first_ptr + owner)).to(tl.int64) * BLOCK
    at, size = start + tl.arange(0, BLOCK), tl.load(size_ptr + owner)
    sum_ptr, grad_ptr = _pointer(table_ptr, owner, tl.float32), _pointer(table_ptr, tensors + owner, GRAD)
    if start + BLOCK <= size:
        tl.store(sum_ptr + at, tl.load(sum_ptr + at) + tl.load(grad_ptr + at).to(tl.float32))
    else:
        inside = at < size
        total = tl.load(sum_ptr + at, inside) + tl.load(grad_ptr + at, inside).to(tl.float32)
        tl.store(sum_ptr + at, total, inside)


@triton.jit
def _squares(table_ptr, size_ptr, owner_ptr, first_ptr, out_ptr, GRAD: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    owner = tl.load(owner_ptr + block)
    start = (block - tl.load(first_ptr + owner)).to(tl.int64) * BLOCK
    at, size, grad_ptr = start + tl.arange(0, BLOCK), tl.load(size_ptr + owner), _pointer(table_ptr, owner, GRAD)
    if start + BLOCK <= size:
        grad = tl.load(grad_ptr + at).to(tl.float32)
        tl.store(out_ptr + block, tl.sum(grad * grad, 0))
    else:
        grad = tl.load(grad_ptr + at, at < size, 0.0).to(tl.float32)
        tl.store(out_ptr + block, tl.sum(grad * grad, 0))


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() % _ALIGNED else tensor


def _sent(numbers: Sequence[int] | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """The numbers on the device; does not wait for the copy."""
    tensor = torch.tensor(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class _Blocks:
    """How tensors are cut into blocks: the tensor of each block, and the first block of each tensor."""

    def __init__(self, tensors: Sequence[Tensor], block: int) -> None:
        sizes = torch.tensor([tensor.numel() for tensor in tensors])
        blocks = (sizes + block - 1) // block
        device = tensors[0].device
        self.count = int(blocks.sum())
        self.sizes = sizes.to(device)
        self.owners = torch.repeat_interleave(torch.arange(len(tensors)), blocks).int().to(device)
        self.firsts = (blocks.cumsum(0) - blocks).int().to(device)


class _Table:
    """Addresses of tensors on the device. They are sent again only if a tensor has moved, and the blocks are made again
    only for other sizes, since that waits for the device."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._addresses: list[list[int]] = []
        self._table: Tensor | None = None
        self._sizes: list[int] = []
        self._cut: _Blocks | None = None

    def of(self, *columns: Sequence[Tensor]) -> tuple[Tensor, _Blocks]:
        addresses = [[tensor.data_ptr() for tensor in column] for column in columns]
        if addresses != self._addresses or self._table is None:
            self._table, self._addresses = _sent(addresses, columns[0][0].device), addresses
        sizes = [tensor.numel() for tensor in columns[0]]
        if sizes != self._sizes or self._cut is None:
            self._cut, self._sizes = _Blocks(columns[0], self._block), sizes
        return self._table, self._cut


class GradientNorm:
    """The norm of all gradients together. Each block's squares are summed in a fixed order, and so are the blocks."""

    def __init__(self) -> None:
        self._table = _Table(_SQUARES)

    def __call__(self, gradients: Sequence[Tensor]) -> Tensor:
        """An FP32 scalar on the device."""
        gradients = [_aligned(gradient.contiguous()) for gradient in gradients]
        (dtype,) = {gradient.dtype for gradient in gradients}
        table, cut = self._table.of(gradients)
        sums = torch.empty(cut.count, dtype=torch.float32, device=table.device)
        _squares[(cut.count,)](
            table, cut.sizes, cut.owners, cut.firsts, sums, GRAD=_TYPES[dtype], BLOCK=_SQUARES, num_warps=8
        )
        return sums.sum().sqrt()


class GradientSums:
    """Adds gradients to FP32 sums: one launch, if no tensor has moved since the last time."""

    def __init__(self) -> None:
        self._table = _Table(_BLOCK)

    def add(self, sums: dict[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """Add to `sums`; a name that is new begins with zeros."""
        gradients = {name: _aligned(gradient.contiguous()) for name, gradient in gradients.items()}
        new = [name for name in gradients if name not in sums]
        if new:
            sums |= zip(new, _zeros([gradients[name] for name in new]), strict=True)
        if not gradients:
            return
        (dtype,) = {gradient.dtype for gradient in gradients.values()}
        table, cut = self._table.of([sums[name] for name in gradients], list(gradients.values()))
        _add[(cut.count,)](
            table, cut.sizes, cut.owners, cut.firsts, len(gradients), GRAD=_TYPES[dtype], BLOCK=_BLOCK, num_warps=8
        )


def _zeros(like: Sequence[Tensor]) -> list[Tensor]:
    """FP32 views of one tensor: one allocation and one launch, and the same addresses in every step."""
    starts = [0, *itertools.accumulate(-(-tensor.numel() // _BLOCK) * _BLOCK for tensor in like)]
    flat = torch.zeros(starts[-1], dtype=torch.float32, device=like[0].device)
    return [flat[start : start + tensor.numel()].view_as(tensor) for start, tensor in zip(starts, like, strict=False)]


class FusedAdamW:
    """For tensors that do not move. Gradients may be elsewhere each time."""

    def __init__(
        self, groups: Sequence[Group], decays: Sequence[float], form: torch.dtype, unserved: Sequence[bool] = ()
    ) -> None:
        """`unserved`: whose served copies are not written here, because codes are made from the masters."""
        self._groups, self._form = list(groups), form
        self.sums, self.norm = GradientSums(), GradientNorm()
        self._device = groups[0].master.device
        self._cut = _Blocks([group.master for group in groups], _BLOCK)
        addresses = [[tensor.data_ptr() for tensor in column] for column in zip(*groups, strict=True)]
        assert not any(address % _ALIGNED for column in addresses for address in column)
        for index in itertools.compress(range(len(groups)), unserved):
            addresses[3][index] = 0
        self._table = torch.tensor([*addresses, addresses[0]]).to(self._device)
        self._addresses: list[int] = []  # of the gradients in the table
        self._decays = torch.tensor(decays, dtype=torch.float32).to(self._device)

    def step(
        self, gradients: Sequence[Tensor], norm: Tensor, lr: float, updates: int, config: tuple[float, ...]
    ) -> None:
        """`norm`: of all gradients, an FP32 scalar on the device. `config`: both betas, eps, max_grad_norm."""
        beta_mean, beta_square, eps, max_norm = config
        gradients = [_aligned(gradient.contiguous()) for gradient in gradients]
        dtype = gradients[0].dtype
        assert all(gradient.dtype == dtype for gradient in gradients)
        addresses = [gradient.data_ptr() for gradient in gradients]
        if addresses != self._addresses:
            self._table[4] = _sent(addresses, self._device)
            self._addresses = addresses
        _adamw[(self._cut.count,)](
            self._table,
            self._cut.sizes,
            self._decays,
            self._cut.owners,
            self._cut.firsts,
            norm,
            lr,
            beta_mean,
            beta_square,
            eps,
            1 / (1 - beta_mean**updates),
            (1 - beta_square**updates) ** -0.5,
            max_norm,
            len(self._groups),
            GRAD=_TYPES[dtype],
            SERVED=_TYPES[self._groups[0].served.dtype],
            FORM=_TYPES[self._form],
            BLOCK=_BLOCK,
            num_warps=8,
        )
