"""The device and the dtype a model computes in."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from rollmill.errors import ConfigError
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder

Device = Literal["auto", "cpu", "cuda"]


def choose_device(wanted: Device) -> torch.device:
    """`auto` is the GPU if there is one."""
    present = torch.cuda.is_available()
    if wanted == "cuda" and not present:
        raise ConfigError(
            "device is 'cuda', but torch finds no CUDA device",
            hint="`rollmill doctor` shows what it finds; device = 'auto' uses the CPU if there is no GPU",
        )
    return torch.device("cuda" if present and wanted != "cpu" else "cpu")


def compute_dtype(device: torch.device) -> torch.dtype:
    """bf16 on CUDA. FP32 on the CPU, which holds served values exactly; its bf16 products are slow and round each
    sum."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def decoder_on(device: torch.device, config: ModelConfig, form: str = "bf16") -> Decoder:
    """A decoder made on the device, without a copy on the host. Its weights are uninitialised."""
    with device:
        return Decoder(config, compute_dtype(device), form)


def decoder_like(model: Decoder) -> Decoder:
    """Another decoder of the same shape, device, dtype, form and numerics. Its weights are uninitialised."""
    with model.embedding.device:
        made = Decoder(model.config, model.embedding.dtype, model.form)
    if model.exact:
        made.compute_exactly()
    return made


@contextmanager
def uncollected() -> Iterator[None]:
    """Turns garbage collection off: freeing a CUDA graph while another is recorded would break the recording."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def recording(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Records a CUDA graph, whose memory is in `pool`. What other threads run on the device meanwhile is not recorded.

    Unlike `torch.cuda.graph`, this leaves torch's cache of memory alone if memory is left: allocating it again takes
    longer than recording."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    if free < total // 8:
        torch.cuda.empty_cache()
    with uncollected(), torch.cuda.stream(_recording_stream()):
        graph.capture_begin(pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            graph.capture_end()


@functools.cache
def _recording_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()


def is_full(error: BaseException) -> bool:
    """Whether a device ran out of memory. Torch's allocator has an error class for it; for kernels and cuBLAS only the
    message tells."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("out of memory" in text or "ALLOC_FAILED" in text)
