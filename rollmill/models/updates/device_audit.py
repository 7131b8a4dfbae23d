"""The audit of parameters on their device: the checksum of rollmill.weights.format.chunk_audit.

A parameter may have a wider type than its form. Then its elements are audited as elements of the form. An element that
the form cannot express counts as its rounded value plus 2^(bits of the form), which no element of the form does.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rollmill.models.triton import current, has_triton
from rollmill.models.updates.bits import INTEGERS, bits_of, unsigned, widened

Audited = tuple[Tensor, torch.dtype]  # a parameter, and the dtype of the form it is served as

# see rollmill.weights.format.chunk_audit; signed, because torch multiplies signed numbers modulo 2^64
_GOLDEN, _FIRST_FACTOR, _SECOND_FACTOR = (
    factor - (1 << 64) for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_BLOCK = {"cpu": 1 << 15, "cuda": 1 << 26}  # elements at once: intermediate values fit in the cache, or in memory


def audit(tensor: Tensor, form: torch.dtype | None = None) -> int:
    """The audit of one tensor, as elements of `form` (default: its own dtype)."""
    return audit_many([(tensor, form or tensor.dtype)])[0]


def audit_many(tensors: Sequence[Audited]) -> list[int]:
    """The audits of many tensors, with a few launches per device and one wait at the end."""
    result = [0] * len(tensors)
    compiled: dict[torch.device, list[int]] = {}
    for i, (tensor, form) in enumerate(tensors):
        if is_compiled(tensor, form):
            compiled.setdefault(tensor.device, []).append(i)
        else:
            found = _audit_on_host(tensor, form)
            result[i] = reference_audit(tensor, form) if found is None else found
    for device, which in compiled.items():
        from rollmill.models.updates.apply_triton import audit_tables, run_audits

        with current(device):
            for i, value in zip(which, run_audits(audit_tables([tensors[i] for i in which])), strict=True):
                result[i] = value
    return result


def audit_change(indices: Tensor, old: Tensor, new: Tensor, start: int = 0) -> int:
    """The number to add to an audit (modulo 2^64) when elements `start` + `indices` change from `old` to `new`."""
    positions = (indices.to(torch.int64) + start) * _GOLDEN
    total = _mixed(positions + unsigned(bits_of(new))).sum() - _mixed(positions + unsigned(bits_of(old))).sum()
    return int(total) % 2**64


def is_compiled(tensor: Tensor, form: torch.dtype) -> bool:
    return has_triton(tensor.device) and (tensor.dtype == form or form == torch.bfloat16)


def _audit_on_host(tensor: Tensor, form: torch.dtype) -> int | None:
    """The audit with numpy, several times faster; None if numpy cannot read the elements of the form directly."""
    from rollmill.weights.format.chunk_audit import audit_host

    if tensor.device.type != "cpu":
        return None
    bits = bits_of(tensor).numpy()
    if tensor.dtype == form:
        return audit_host(bits.view(np.uint8), form.itemsize)
    halves = bits.view("<u2").reshape(-1, 2)
    if (tensor.dtype, form) != (torch.float32, torch.bfloat16) or halves[:, 0].any():
        return None
    return audit_host(np.ascontiguousarray(halves[:, 1]).view(np.uint8), 2)


def reference_audit(tensor: Tensor, form: torch.dtype) -> int:
    """The audit in torch, on any device."""
    bits = bits_of(tensor)
    size = _BLOCK.get(bits.device.type, _BLOCK["cuda"])
    positions = torch.arange(min(size, bits.numel()), device=bits.device) * _GOLDEN
    totals = []
    for start in range(0, bits.numel(), size):
        elements = served_numbers(bits[start : start + size], tensor.dtype, form)
        origin = (start * _GOLDEN + (1 << 63)) % (1 << 64) - (1 << 63)
        totals.append(_mixed(elements.add_(positions[: elements.numel()]).add_(origin)).sum())
    return int(torch.stack(totals).sum()) % 2**64 if totals else 0


def served_numbers(bits: Tensor, dtype: torch.dtype, form: torch.dtype) -> Tensor:
    """The v of the audit: unsigned numbers (int64) of a parameter's elements seen as elements of `form`."""
    if dtype == form:
        return unsigned(bits)
    if (dtype, form) == (torch.float32, torch.bfloat16):
        served = (bits >> 16).to(torch.int16)  # truncated, not rounded; the check below finds lost bits
    else:
        served = bits.view(dtype).to(form).view(INTEGERS[form.itemsize])
    inexact = widened(served, form, dtype) != bits
    return unsigned(served) | (inexact.to(torch.int64) << 8 * form.itemsize)


def _mixed(keys: Tensor) -> Tensor:
    """The finaliser of splitmix64, in place. Shifting a signed number copies its sign bit, so it is masked off."""
    for shift, factor in ((30, _FIRST_FACTOR), (27, _SECOND_FACTOR)):
        keys ^= (keys >> shift) & ((1 << 64 - shift) - 1)
        keys *= factor
    keys ^= (keys >> 31) & ((1 << 33) - 1)
    return keys
