"""Passes whose shape comes again are recorded as a CUDA graph and replayed: the device then never waits for Python.

A pass launches about a thousand kernels. If micro-batches or the model are small, queueing them takes longer than
running them. A graph is bound to its shapes (here: the sequence lengths and the number of targets) and to the memory it
was recorded with. So inputs are copied into that memory, and gradients are where the recording left them.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rollmill import telemetry
from rollmill.models.device import is_full, uncollected

MOST = 4  # graphs kept; each one holds the memory of a pass
_REMEMBERED = 256  # shapes seen once; a shape that comes again later than that is not worth a graph


class _Recording(NamedTuple):
    graph: Any  # torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]
    output: Tensor
    gradients: Sequence[Tensor | None]
    backward: Callable[..., Tensor]  # the graph reads what it refers to, so it must not be freed


class GraphedPasses:
    """Forward and backward passes of one model. The first pass of a shape runs normally, the second is recorded, for up
    to MOST shapes. With more shapes, recording would cost more than it saves."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._most = MOST
        self._seen: deque[Hashable] = deque(maxlen=_REMEMBERED)
        self._recorded: dict[Hashable, _Recording] = {}
        self._pool: Any = None  # passes run one after another, so their graphs share temporary memory

    def run(self, shape: Hashable, inputs: Sequence[Tensor], backward: Callable[..., Tensor]) -> Tensor:
        """Run `backward(*inputs)`, which returns a loss and leaves gradients on parameters that had none.

        `inputs` are on the device. The next pass of this shape overwrites the result. If a pass runs out of memory, the
        graphs are freed.
        """
        assert all(parameter.grad is None for parameter in self._parameters)
        try:
            return self._run(shape, inputs, backward)
        except RuntimeError as error:
            if self._pool is None or not is_full(error):
                raise
        # only here: while the error is handled, it holds the pass's tensors
        self._give_back()
        return backward(*inputs)

    def _run(self, shape: Hashable, inputs: Sequence[Tensor], backward: Callable[..., Tensor]) -> Tensor:
        if shape not in self._recorded:
            if len(self._recorded) == self._most:
                return backward(*inputs)
            if shape not in self._seen:
                self._seen.append(shape)
                return backward(*inputs)
            self._recorded[shape] = self._record(inputs, backward)
        found = self._recorded[shape]
        for mine, given in zip(found.inputs, inputs, strict=True):
            mine.copy_(given)
        found.graph.replay()
        for parameter, gradient in zip(self._parameters, found.gradients, strict=True):
            parameter.grad = gradient
        return found.output

    def _give_back(self) -> None:
        """Free all graphs, since they share memory, and record no more."""
        telemetry.emit("warning", text="recorded passes left too little memory for others: no more are recorded")
        for parameter in self._parameters:
            parameter.grad = None
        self._recorded.clear()
        self._most, self._pool = 0, None
        gc.collect()
        torch.cuda.empty_cache()

    def _record(self, inputs: Sequence[Tensor], backward: Callable[..., Tensor]) -> _Recording:
        inputs = [tensor.clone() for tensor in inputs]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # free what the first pass of this shape left behind
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with uncollected(), torch.cuda.graph(graph, pool=self._pool):
            output = backward(*inputs)
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return _Recording(graph, inputs, output, gradients, backward)
