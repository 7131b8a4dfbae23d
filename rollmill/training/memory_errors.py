"""Explains running out of memory: what was tried, how much memory there is, and which setting to change."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import sys
from collections.abc import Iterator, Sequence

import torch

from rollmill.errors import TrainingError
from rollmill.models.device import is_full as device_is_full
from rollmill.training.batching import MicroBatch
from rollmill.training.config import TrainingConfig

_GIB = 1 << 30
# torch has its own error only for CUDA; on the CPU the message names the allocator
_CPU_ALLOCATOR = "DefaultCPUAllocator"


@contextlib.contextmanager
def explain_out_of_memory(
    what: str, device: torch.device, config: TrainingConfig, parts: Sequence[MicroBatch] = ()
) -> Iterator[None]:
    """Raises TrainingError instead of an allocator's error. `what` needed the memory; `parts`: of a step."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _ran_out(error):
            raise
        largest = max(parts, key=lambda part: len(part.tokens_N), default=None)
        tried = "" if largest is None else f": {_describe(largest, len(parts))}"
        memory = _cuda_memory(device) if device.type == "cuda" and device_is_full(error) else _host_memory()
        message = f"{what} ran out of memory{tried}; {memory}{_asked(error)}"
        raise TrainingError(message, hint=_hint(config, largest, device)) from error


def _ran_out(error: Exception) -> bool:
    return isinstance(error, MemoryError) or device_is_full(error) or _CPU_ALLOCATOR in str(error)


def _describe(part: MicroBatch, count: int) -> str:
    which = "its micro-batch has" if count == 1 else f"the largest of its {count} micro-batches has"
    return f"{which} {len(part.tokens_N)} tokens in {len(part.lengths)} sequences of up to {max(part.lengths)}"


def _cuda_memory(device: torch.device) -> str:
    free, total = torch.cuda.mem_get_info(device)
    others = total - free - torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_allocated(device)
    return (
        f"at the peak {peak / _GIB:.1f} GiB were in use, the device has {total / _GIB:.1f} GiB, "
        f"of which others hold {max(0, others) / _GIB:.1f} GiB"
    )


def _host_memory() -> str:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    limited = "" if limit == resource.RLIM_INFINITY else f", this process may use {limit / _GIB:.1f} GiB"
    return f"at the peak {peak / _GIB:.1f} GiB were in use, the machine has {total / _GIB:.1f} GiB{limited}"


def _asked(error: Exception) -> str:
    """How much more was asked for, if the allocator says so."""
    found = re.search(r"[Tt]ried to allocate ([\d.]+ (?:[KMG]iB|bytes))", str(error))
    if found is None:
        return ""
    amount, unit = found[1].split()
    return (
        f", {float(amount) / _GIB:.2g} GiB more were asked for"
        if unit == "bytes"
        else f", {found[1]} more were asked for"
    )


def _hint(config: TrainingConfig, largest: MicroBatch | None, device: torch.device) -> str:
    """The cheapest setting first; settings that would not help are not named."""
    if largest is None:
        return (
            "weights, masters and moments take about 16 bytes per parameter: "
            "use a smaller model, a GPU that engines do not share, or more GPUs"
        )
    dials = []
    if len(largest.lengths) > 1:
        dials.append(f"lower training.tokens_per_microbatch (it is {config.tokens_per_microbatch}), which costs little")
    if device.type == "cuda" and config.recompute_mlp is False and config.recompute_every != 1:
        dials.append("set training.recompute_mlp = true, which costs a dense model little more time")
    if config.recompute_every != 1:
        dials.append(
            f"set training.recompute_every = 1 (it is {config.recompute_every}), which costs a third more time"
        )
    dials.append(
        f"shorten the longest sequence ({max(largest.lengths)} tokens, by [model] max_context), or use more GPUs"
    )
    return "; then ".join(dials)
