"""Passes whose shape comes back are recorded once as a CUDA graph and replayed: the device then never waits for Python.

A pass launches a thousand kernels. Where micro-batches are small, or the model is, queueing them takes longer than
running them. A graph is bound to its shapes (here: the lengths of the sequences and how many targets there are) and to
the memory it was recorded with, so inputs are copied into it, and gradients are found where the recording left them.
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

MOST = 4  # shapes kept; each graph holds on to a pass's memory
_REMEMBERED = 256  # shapes that came once: what comes back later than that is not worth a graph


class _Recorded(NamedTuple):
    graph: Any  # torch.cuda.CUDAGraph
    inputs: Sequence[Tensor]
    output: Tensor
    gradients: Sequence[Tensor | None]
    backward: Callable[..., Tensor]  # what it holds on to is read by the graph: it must not be freed


class GraphedPasses:
    """Forward and backward passes of one model. The first pass of a shape runs as it is, the second is recorded, while
    there is room: recording costs more than it saves where shapes take turns with too many others."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())
        self._most = MOST
        self._seen: deque[Hashable] = deque(maxlen=_REMEMBERED)
        self._recorded: dict[Hashable, _Recorded] = {}
        self._pool: Any = None  # passes run one after another, so their graphs share what they need on the way

    def run(self, shape: Hashable, inputs: Sequence[Tensor], backward: Callable[..., Tensor]) -> Tensor:
        """`backward(*inputs)`, which returns a loss and leaves gradients on parameters that had none.

        `inputs` are on the device. The result is overwritten by the next pass of this shape. Memory that graphs hold is
        given back where a pass needs it.
        """
        assert all(parameter.grad is None for parameter in self._parameters)
        try:
            return self._run(shape, inputs, backward)
        except RuntimeError as error:
            if self._pool is None or not is_full(error):
                raise
        # only here, since the error held on to what the pass had made
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
        """All graphs, since they share their memory, and no more are recorded: passes run as they are."""
        telemetry.emit("warning", text="recorded passes left too little memory for others: none is recorded any more")
        for parameter in self._parameters:
            parameter.grad = None
        self._recorded.clear()
        self._most, self._pool = 0, None
        gc.collect()
        torch.cuda.empty_cache()

    def _record(self, inputs: Sequence[Tensor], backward: Callable[..., Tensor]) -> _Recorded:
        inputs = [tensor.clone() for tensor in inputs]
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()  # what the pass that ran as it is left behind
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with uncollected(), torch.cuda.graph(graph, pool=self._pool):
            output = backward(*inputs)
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        return _Recorded(graph, inputs, output, gradients, backward)
