"""How kernels are called: through autograd where gradients are wanted, directly where not.

Autograd's entry costs as much as a small kernel; at the sizes one decode step has, that is a sixth of the step. Both
ways run the same `forward`, so the bits are the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class _NoContext:
    """Takes what a forward pass would keep for its backward, and keeps nothing."""

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def mark_dirty(self, *tensors: Tensor) -> None: ...

    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...

    def set_materialize_grads(self, value: bool) -> None: ...


def call(function: type[Function], *arguments: Any) -> Tensor:
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_NoContext(), *arguments)
