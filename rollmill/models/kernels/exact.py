"""Products with the same bits for a row in every batch. On Hopper a kernel does it (exact_triton); this is for the CPU.

BLAS chooses its loops by the number of rows, so a row may get other bits alone than in a batch. But for most numbers of
rows it sums in the same order. `product` measures once per shape which numbers these are, and calls BLAS with no
others: rows are cut into such blocks, and the last block is filled up with zeros.

    sizes       2 … 16, 20, 24 … 64, 80, 96, 112, 128, 256, 512
    37 rows     one block of 40
    700 rows    512 + 128 + 60

The measurement compares the bits of random products with those of one large block on one thread, each row at another
place of its block. So engines and trainers agree, whatever their threads, if they run on the same kind of CPU with the
same torch. If no number of rows passes, rows are multiplied one by one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollmill.models.triton import has_triton

COLUMNS = 4096  # of one call; a wider matrix would take seconds to measure
_SHIFT = 3  # rows; odd, so that a row comes to another place of every tile
_SIZES = (*range(2, 17), *range(20, 65, 4), *range(80, 129, 16), 256, 512)


class Calls(NamedTuple):
    """How BLAS may be called for matrices of one shape."""

    sizes: tuple[int, ...]  # numbers of rows, ascending
    threads: int


class Plan(NamedTuple):
    """How rows are multiplied by a matrix of one shape."""

    blocks: tuple[tuple[int, int], ...]  # (first row, size) of each call. Only the last may reach beyond the rows
    threads: int


def product(x_NI: Tensor, weight_IO: Tensor, out_NO: Tensor | None = None) -> Tensor:
    """x · weight, in the type of `x`. The bits of a row depend on that row and on the weight only."""
    if has_triton(x_NI.device):
        from rollmill.models.kernels import exact_triton

        return exact_triton.product(x_NI, weight_IO, out_NO)
    (rows, inputs), outputs, threads = x_NI.shape, weight_IO.shape[1], torch.get_num_threads()
    across = weight_IO.stride(0) == 1
    if outputs <= COLUMNS:
        plan = _plan(rows, inputs, outputs, across, threads)
        if plan.blocks == ((0, rows),) and plan.threads == threads:  # mostly: nothing to cut or fill up
            return torch.mm(x_NI, weight_IO, out=out_NO)
    out_NO = x_NI.new_empty(rows, outputs) if out_NO is None else out_NO
    for first in range(0, outputs, COLUMNS):
        weight, out = weight_IO[:, first : first + COLUMNS], out_NO[:, first : first + COLUMNS]
        plan = _plan(rows, inputs, weight.shape[1], across, threads)
        with _threads(plan.threads):
            for start, size in plan.blocks:
                _multiply(x_NI[start : start + size], weight, out[start : start + size], size)
    return out_NO


def fp32_product(x_NI: Tensor, weight_IO: Tensor) -> Tensor:
    """The same with an FP32 result."""
    if has_triton(x_NI.device) and x_NI.dtype == weight_IO.dtype:
        from rollmill.models.kernels import exact_triton

        return exact_triton.product(x_NI, weight_IO, dtype=torch.float32)
    return product(x_NI.float(), weight_IO.float())


def add_product_(out_NO: Tensor, x_NI: Tensor, weight_IO: Tensor) -> Tensor:
    """Adds x · weight to `out`, before it is rounded to the type of `out`. On Hopper."""
    from rollmill.models.kernels import exact_triton

    return exact_triton.product(x_NI, weight_IO, out_NO, add=True)


def fixes_order(device: torch.device) -> bool:
    """Whether products have fixed bits on this device: on a CPU, and on Hopper with Triton."""
    if device.type != "cuda":
        return True
    return has_triton(device) and torch.cuda.get_device_capability(device)[0] == 9


@functools.lru_cache(1 << 16)
def _plan(rows: int, inputs: int, outputs: int, across: bool, threads: int) -> Plan:
    calls = allowed_calls(inputs, outputs, across, threads)
    return Plan(tuple(blocks(rows, calls.sizes)), calls.threads)


def blocks(rows: int, sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(first row, size) of each block."""
    start = 0
    while start < rows:
        left = rows - start
        enough = next((size for size in sizes if size >= left), None)
        below = next((size for size in reversed(sizes) if size <= left), None)
        # a little padding is cheaper than another call, which reads the whole weight again
        size = enough if enough is not None and (below is None or enough <= 1.25 * left) else below
        assert size is not None
        yield start, size
        start += size


def _multiply(x: Tensor, weight: Tensor, out: Tensor, size: int) -> None:
    if len(x) == size:
        torch.mm(x, weight, out=out)
    else:
        out.copy_(torch.mm(pad(x, (0, 0, 0, size - len(x))), weight)[: len(x)])


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.cache
def allowed_calls(inputs: int, outputs: int, across: bool, threads: int) -> Calls:
    """The numbers of rows that give the bits of the largest block on one thread. `across`: the weight is stored
    transposed."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_SIZES[-1] + _SHIFT, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator).t()
    weight = weight if across else weight.contiguous()
    with _threads(1):
        reference = next(
            filter(None, (_reference(x, weight, size) for size in reversed(_SIZES) if size > 2 * _SHIFT)), None
        )
    if reference is None:
        return Calls((1,), 1)
    for count in dict.fromkeys((threads, 1)):
        with _threads(count):
            sizes = tuple(size for size in _SIZES if size <= len(reference.rows) and reference.agrees(x, weight, size))
        if sizes:
            return Calls(sizes, count)
    return Calls((len(reference.rows),), 1)


class _Rows(NamedTuple):
    rows: Tensor  # the product of the first rows

    def agrees(self, x: Tensor, weight: Tensor, size: int) -> bool:
        """Whether a block of `size` rows has these bits. It starts at another row, if it can."""
        shift = min(_SHIFT, len(self.rows) - size)
        return torch.equal(torch.mm(x[shift : shift + size], weight), self.rows[shift : shift + size])


def _reference(x: Tensor, weight: Tensor, size: int) -> _Rows | None:
    """The product of the first `size` rows, if its bits do not depend on a row's place."""
    rows, moved = torch.mm(x[:size], weight), torch.mm(x[_SHIFT : _SHIFT + size], weight)
    return _Rows(rows) if torch.equal(moved[: size - _SHIFT], rows[_SHIFT:]) else None
