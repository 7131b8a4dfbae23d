"""Gradients of hidden rows and head, from the gradients of the logits. These come in chunks of rows, one after another.

`Gradients` multiplies in the model's type, and sums the weight's gradient over the chunks in FP32. `CodedGradients`
multiplies in FP8, for a model in that form on Hopper. It keeps the codes of all chunks, one byte per logit, for one
product that gives the weight's gradient. The logits themselves are never in FP8: every form serves the head in bf16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rollmill.models.kernels.quantised import fp8
from rollmill.models.triton import has_triton

MOST_CODES = 3_000_000_000  # bytes kept for one product; with more, several products are summed in FP32


def cut(rows: slice, vocabulary: int, elements: int, multiple: int = 64) -> Iterator[slice]:
    """The fewest chunks, of nearly equal size: a short last chunk would leave most of the device idle."""
    count = rows.stop - rows.start
    chunks = -(-count // max(1, elements // vocabulary))
    step = -(-count // max(1, chunks) // multiple) * multiple
    for start in range(rows.start, rows.stop, max(step, 1)):
        yield slice(start, min(start + step, rows.stop))


def fp32_product(left: Tensor, right: Tensor) -> Tensor:
    """The product in FP32."""
    if left.is_cuda and left.dtype == right.dtype == torch.bfloat16:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left.float(), right.float())


def _adds_to_fp32(x: Tensor) -> bool:
    """Whether a product of bf16 numbers can be added to an FP32 sum."""
    return x.is_cuda and x.dtype == torch.bfloat16


class Gradients:
    """Each chunk that `chunks` yields is to be added before the next one is asked for."""

    def __init__(self, hidden_MW: Tensor, weight_VW: Tensor, trains: bool = True) -> None:
        """`trains`: the head gets a gradient too."""
        self._hidden, self._weight, self._trains = hidden_MW, weight_VW, trains
        self.hidden = torch.empty_like(hidden_MW)
        self._overwrites = _adds_to_fp32(hidden_MW) and len(hidden_MW) > 0  # the first chunk: nothing is added to it
        empty = torch.empty if self._overwrites else torch.zeros
        self._sum = empty(weight_VW.shape if trains else 0, dtype=torch.float32, device=weight_VW.device)

    def chunks(self, elements: int) -> Iterator[slice]:
        """Cuts the rows: at most about `elements` logits per chunk."""
        return cut(slice(0, len(self._hidden)), len(self._weight), elements)

    def add(self, chunk: slice, grad_MV: Tensor) -> None:
        """`grad`: of these rows' logits."""
        torch.mm(grad_MV, self._weight.to(grad_MV.dtype), out=self.hidden[chunk])
        self._add_weight(grad_MV, self._hidden[chunk])

    def add_powers(self, chunk: slice, powers_MV: Tensor, scales_M: Tensor) -> None:
        """The gradient of these rows' logits is `powers` times `scales` per row."""
        scaled_MW = torch.mul(self._hidden[chunk], scales_M[:, None]).to(powers_MV.dtype)
        torch.mul(fp32_product(powers_MV, self._weight), scales_M[:, None], out=self.hidden[chunk])
        self._add_weight(powers_MV, scaled_MW)

    def _add_weight(self, grad_MV: Tensor, hidden_MW: Tensor) -> None:
        if not self._trains:
            return
        if _adds_to_fp32(grad_MV):
            kept = 0.0 if self._overwrites else 1.0
            self._overwrites = False
            total = self._sum
            torch.ops.aten.addmm.dtype_out(total, grad_MV.t(), hidden_MW, torch.float32, beta=kept, out=total)
        else:
            self._sum.addmm_(grad_MV.t().float(), hidden_MW.float())

    def finish(self, factor: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns the gradients of hidden and weight, times `factor`."""
        if not self._trains:
            return self.hidden if factor is None else times(self.hidden, factor, self.hidden), None
        if factor is None:
            return self.hidden, self._sum.to(self._weight.dtype)
        return times(self.hidden, factor, self.hidden), times(self._sum, factor, torch.empty_like(self._weight))


class CodedGradients:
    """The same, in FP8. The product of the last group of chunks is left to `finish`: its scales take the factor."""

    def __init__(self, hidden_MW: Tensor, weight_VW: Tensor) -> None:
        self._hidden, self._vocabulary = hidden_MW, len(weight_VW)
        self.hidden = torch.empty_like(hidden_MW)
        self._codes = fp8.along_tokens(weight_VW)  # of the transposed head
        self._sum: Tensor | None = None  # FP32, of all groups but the last

    def chunks(self, elements: int) -> Iterator[slice]:
        for group in cut(slice(0, len(self._hidden)), self._vocabulary, MOST_CODES, fp8.BLOCK):
            if group.start:
                product_VW = self._product(None).float()
                self._sum = product_VW if self._sum is None else self._sum.add_(product_VW)
            self._group, self._rows = group, fp8.along_tokens(self._hidden[group])
            self._columns = fp8.empty_columns(self._vocabulary, group.stop - group.start, self._hidden.device)
            yield from cut(group, self._vocabulary, elements, fp8.BLOCK)

    def _product(self, factor: Tensor | None) -> Tensor:
        codes, scales = self._rows
        return fp8.multiply(self._columns, fp8.Codes(codes, scales if factor is None else scales * factor))

    def add(self, chunk: slice, grad_MV: Tensor, scales_M: Tensor | None = None) -> None:
        start, last = chunk.start - self._group.start, chunk.stop == self._group.stop
        codes = fp8.both_ways_into(grad_MV, scales_M, self._columns, start, pads=last)
        self.hidden[chunk] = fp8.multiply(codes, self._codes)[: len(grad_MV)]

    def add_powers(self, chunk: slice, powers_MV: Tensor, scales_M: Tensor) -> None:
        self.add(chunk, powers_MV, scales_M)

    def finish(self, factor: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden_MW = self.hidden if factor is None else times(self.hidden, factor, self.hidden)
        weight_VW = self._product(factor)
        if self._sum is not None:
            total_VW = self._sum if factor is None else self._sum.mul_(factor)
            weight_VW = total_VW.add_(weight_VW).to(weight_VW.dtype)
        return hidden_MW, weight_VW


def times(x: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """Writes x · factor into `out`, which may be `x`, rounded to its type in the same pass."""
    if not has_triton(x.device):
        return torch.mul(x, factor, out=out)
    from rollmill.models.kernels.heads.head_triton import scale_into

    scale_into(x, factor, out)
    return out


def gradients_of(hidden_MW: Tensor, weight_VW: Tensor, form: str, trains: bool) -> Gradients | CodedGradients:
    coded = trains and form == "fp8" and fp8.differentiates_head(hidden_MW, weight_VW)
    return CodedGradients(hidden_MW, weight_VW) if coded else Gradients(hidden_MW, weight_VW, trains)
