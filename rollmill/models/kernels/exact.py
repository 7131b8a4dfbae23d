"""Products with the same bits for a row in every batch. On Hopper a kernel does it (exact_triton); this is for the CPU.

BLAS chooses its loops by the number of rows, so a row may get other bits alone than in a batch. But for most numbers of
rows it sums in the same order. `product` measures once per shape which numbers these are, and calls BLAS with no
others: rows are cut into such blocks, and the last block is filled up with zeros.

    sizes       2 … 16, 20, 24 … 64, 80, 96, 112, 128, 256, 512
    37 rows     one block of 40
    700 rows    512 + 128 + 60

The measurement multiplies random rows, each at another place of its block, on one thread. The largest set of numbers
that give the same bits is used. So engines and trainers agree, whatever their threads, if they run on the same kind of
CPU with the same torch. With several threads, BLAS may also cut the sum, so that fewer numbers pass; others are then
multiplied by one thread, if that is less work. If no number of rows passes, rows are multiplied one by one.
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
    """How BLAS may be called for matrices of one shape: numbers of rows, ascending."""

    sizes: tuple[int, ...]  # on one thread
    threaded: tuple[int, ...]  # on `threads`
    threads: int


class Block(NamedTuple):
    """One call of BLAS."""

    first: int  # row
    size: int  # of the last block it may reach beyond the rows
    threads: int


def product(x_NI: Tensor, weight_IO: Tensor, out_NO: Tensor | None = None) -> Tensor:
    """x · weight, in the type of `x`. The bits of a row depend on that row and on the weight only."""
    if has_triton(x_NI.device):
        from rollmill.models.kernels import exact_triton

        return exact_triton.product(x_NI, weight_IO, out_NO)
    (rows, inputs), outputs, threads = x_NI.shape, weight_IO.shape[1], torch.get_num_threads()
    across = weight_IO.stride(0) == 1
    if outputs <= COLUMNS and _plan(rows, inputs, outputs, across, threads) == ((0, rows, threads),):
        return torch.mm(x_NI, weight_IO, out=out_NO)  # mostly: nothing to cut or fill up
    out_NO = x_NI.new_empty(rows, outputs) if out_NO is None else out_NO
    for first in range(0, outputs, COLUMNS):
        weight, out = weight_IO[:, first : first + COLUMNS], out_NO[:, first : first + COLUMNS]
        for start, size, count in _plan(rows, inputs, weight.shape[1], across, threads):
            with _threads(count):
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
def _plan(rows: int, inputs: int, outputs: int, across: bool, threads: int) -> tuple[Block, ...]:
    return tuple(blocks(rows, allowed_calls(inputs, outputs, across, threads)))


def blocks(rows: int, calls: Calls) -> Iterator[Block]:
    start = 0
    while start < rows:
        left = rows - start
        ways = [(_size(left, calls.threaded), calls.threads), (_size(left, calls.sizes), 1)]
        size, threads = min((way for way in ways if way[0]), key=lambda way: way[0] / way[1] / min(way[0], left))
        yield Block(start, size, threads)
        start += size


def _size(left: int, sizes: tuple[int, ...]) -> int:
    """Of the next block; 0 if there is none."""
    enough = next((size for size in sizes if size >= left), 0)
    below = next((size for size in reversed(sizes) if size <= left), 0)
    # a little padding is cheaper than another call, which reads the whole weight again
    return enough if enough and (not below or enough <= 1.25 * left) else below


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
    """`across`: the weight is stored transposed."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_SIZES[-1] + _SHIFT, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator).t()
    weight = weight if across else weight.contiguous()
    with _threads(1):
        found = _alike(x, weight)
    if not found:
        return Calls((1,), (), 1)
    rows, sizes = max(found, key=lambda each: len(each[1]))  # of equally many, those with the largest
    if threads == 1:
        return Calls(sizes, sizes, 1)
    with _threads(threads):
        fit = (size for size in _SIZES if size <= len(rows))
        return Calls(sizes, tuple(size for size in fit if _agrees(x, weight, size, rows)), threads)


def _alike(x: Tensor, weight: Tensor) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Sets of sizes that give the same bits, each with the product of its largest block."""
    found: list[tuple[Tensor, list[int]]] = []
    for size in reversed(_SIZES):
        same = next((sizes for rows, sizes in found if _agrees(x, weight, size, rows)), None)
        if same is not None:
            same.append(size)
        elif size > 2 * _SHIFT:
            rows, moved = torch.mm(x[:size], weight), torch.mm(x[_SHIFT : _SHIFT + size], weight)
            if torch.equal(moved[: size - _SHIFT], rows[_SHIFT:]):  # a row's place does not matter
                found.append((rows, [size]))
    return [(rows, tuple(reversed(sizes))) for rows, sizes in found]


def _agrees(x: Tensor, weight: Tensor, size: int, rows: Tensor) -> bool:
    """Whether a block of `size` rows has the bits of `rows`. It starts at another row, if it can."""
    shift = min(_SHIFT, len(rows) - size)
    return torch.equal(torch.mm(x[shift : shift + size], weight), rows[shift : shift + size])
