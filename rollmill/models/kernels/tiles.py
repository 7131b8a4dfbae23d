"""What products of our own have in common: tiles that travel through Hopper's tensor memory accelerator, made one after
the other by as many programs as run at once."""

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
    """The interpreter of Triton stands in for one on the CPU."""
    return device.type == "cpu" or torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 2


def programs(tiles: int, each: int, device: torch.device) -> tuple[int]:
    """The grid for so many tiles, with `each` programs at once on a multiprocessor."""
    return (min(tiles, each * multiprocessors(device)),)


def descriptor(x: Tensor, tile: Sequence[int]) -> TensorDescriptor:
    """Of the tensor, for tiles of this shape. The driver makes it in the context of CUDA, which a thread has only after
    something of torch ran in it; autograd's may begin with us."""
    if x.is_cuda and not hasattr(_thread, "has_context"):
        torch.zeros(1, device=x.device)
        _thread.has_context = True
    return TensorDescriptor.from_tensor(x, list(tile))
