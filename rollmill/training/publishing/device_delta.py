"""Codes the delta of a version on the GPU that trains it. Only the coded changes and the bytes to hash leave the GPU.

A copy of the weights that were exported last stays on the device: the next version is compared with it. `base` is the
digest these weights were published under; a publisher whose base has another digest codes the delta on the host.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollmill.models.host_tensors import layout_in
from rollmill.models.triton import has_triton
from rollmill.models.updates.delta import Differences, Pair
from rollmill.weights.writing.encoder import DevicePayloads, Run, rows_of, runs_of

_MOST_SHARE = 0.05  # of the device's memory, for the copy


class DeviceDelta:
    """For parameters that do not move. Not thread-safe, except that any thread may set `base` between two calls."""

    def __init__(self, state: Mapping[str, Tensor], form: str) -> None:
        self._now = {name: tensor.detach().view(-1) for name, tensor in state.items()}
        self._last = {name: tensor.clone() for name, tensor in self._now.items()}
        self._runs = runs_of(rows_of(layout_in(state, form)))
        self._differences = Differences([self._pairs(run) for run in self._runs])
        self.base: str | None = None  # the digest of the weights in the copy; None: they are not published (yet)

    def make(self) -> DevicePayloads | None:
        """The coded changes since the last call, for a publisher whose base is `base`. None if that is not known."""
        base, self.base = self.base, None
        made = None
        if base is not None:
            coded = self._differences.start()
            made = DevicePayloads(base, {run[0].place: each for run, each in zip(self._runs, coded, strict=True)})
        torch._foreach_copy_(list(self._last.values()), list(self._now.values()))
        return made

    def _pairs(self, run: Run) -> list[Pair]:
        parts = [(row.tensor, slice(row.start // row.width, row.stop // row.width)) for row in run]
        return [(self._last[name][part], self._now[name][part]) for name, part in parts]


def codes_on_device(state: Mapping[str, Tensor], form: str) -> bool:
    """Whether these weights are those of the form, on a GPU with room for a copy."""
    tensors = list(state.values())
    if not all(tensor.is_cuda and has_triton(tensor.device) and tensor.is_contiguous() for tensor in tensors):
        return False
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    served = {name: kinds.get(dtype) for name, dtype, _ in layout_in(state, form)}
    if any(served.get(name) != tensor.dtype for name, tensor in state.items()):
        return False
    memory = torch.cuda.get_device_properties(tensors[0].device).total_memory
    return sum(tensor.nbytes for tensor in tensors) <= _MOST_SHARE * memory
