"""Calls a kernel through autograd if gradients are enabled, and directly if not.

Entering autograd costs as much as a small kernel: a sixth of a decode step. Both ways run the same `forward`, so the
bits are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class _NoContext:
    """Stands in for autograd's context, and keeps nothing for a backward pass."""

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_dirty(self, *tensors: Tensor) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def call(function: type[Function], *arguments: Any) -> Tensor:
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_NoContext(), *arguments)
