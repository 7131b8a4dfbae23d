"""Shared by our own matrix products: tiles are copied by Hopper's tensor memory accelerator (TMA), and the grid has
only as many programs as run at once, each of which computes several tiles."""

from __future__ import annotations

import functools
import threading
from collections.abc import Sequence

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_thread = threading.local()


@functools.cache
def has_accelerator(device: torch.device) -> bool:
    """Whether there is a TMA. On the CPU, Triton's interpreter emulates one."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 2


def programs(tiles: int, each: int, device: torch.device) -> tuple[int]:
    """The grid for `tiles` tiles, with `each` programs at once per multiprocessor."""
    return (min(tiles, each * multiprocessors(device)),)


def descriptor(x: Tensor, tile: Sequence[int]) -> TensorDescriptor:
    """The TMA descriptor of `x` for tiles of shape `tile`.

    The driver needs a CUDA context, which a thread gets when torch first runs something in it. A thread of autograd may
    start with this call, so something is run first.
    """
    if x.is_cuda and not hasattr(_thread, "has_context"):
        torch.zeros(1, device=x.device)
        _thread.has_context = True
    return TensorDescriptor.from_tensor(x, list(tile))
