"""Whether Triton kernels run here, and on which device they are launched."""

from __future__ import annotations

import functools
import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext

import torch

# Triton then runs its kernels as Python, also on the CPU. It is slow; tests use it without a GPU.
interpreted = os.environ.get("TRITON_INTERPRET") == "1"


def has_triton(device: torch.device) -> bool:
    return (device.type == "cuda" or interpreted) and _finds_triton()


@functools.cache
def _finds_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes `device` current: Triton launches on the current device, not on that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
