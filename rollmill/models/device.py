"""Where a model computes, and in what."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

from rollmill.errors import ConfigError
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder

Device = Literal["auto", "cpu", "cuda"]


def choose_device(wanted: Device) -> torch.device:
    """`auto` is the GPU where there is one."""
    present = torch.cuda.is_available()
    if wanted == "cuda" and not present:
        raise ConfigError(
            "device is 'cuda', and torch finds no CUDA device here",
            hint="`rollmill doctor` shows what it finds; device = 'auto' takes the CPU where there is no GPU",
        )
    return torch.device("cuda" if present and wanted != "cpu" else "cpu")


def compute_dtype(device: torch.device) -> torch.dtype:
    """On the CPU served values are held in FP32, exactly: its bf16 products are slow and round every sum."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def decoder_on(device: torch.device, config: ModelConfig, form: str = "bf16") -> Decoder:
    """A decoder on the device, without a copy on the host first; its weights are whatever memory held."""
    with device:
        return Decoder(config, compute_dtype(device), form)


def decoder_like(model: Decoder) -> Decoder:
    """Another one that computes where and as this one does."""
    with model.embedding.device:
        return Decoder(model.config, model.embedding.dtype, model.form)


@contextmanager
def uncollected() -> Iterator[None]:
    """No garbage is collected in here: a CUDA graph that is freed while another is recorded spoils it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def is_full(error: BaseException) -> bool:
    """Whether a device had no memory left. Torch's allocator has an error for it; kernels and cuBLAS, which also need
    some, only have words."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "ALLOC_FAILED" in text)
