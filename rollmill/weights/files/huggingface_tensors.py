"""Converts the dtypes of a file to those of a form, in numpy: without loss, or rounded to nearest even on request.

form bf16, fp16 or fp32    floats get the form's dtype; integers are unchanged
any other form             (fp8, packed 4-bit …) every tensor is unchanged: the form has a mix of dtypes
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rollmill.errors import WeightsError
from rollmill.weights.files.safetensors import DTYPES, SERVED, StoredTensor

FLOATS: Mapping[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<f4"),  # computed as the upper half of an fp32
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
}
_PIECE = 1 << 22  # elements converted at a time


def dtype_in(form: str, name: str, stored: StoredTensor) -> str:
    """The dtype of a tensor in a form. Raises WeightsError if the form cannot hold it."""
    converts = form in ("bf16", "fp16", "fp32")
    if converts and stored.dtype in FLOATS:
        return form
    if stored.dtype not in SERVED:
        raise WeightsError(
            f"{name} is {stored.dtype}, which no form supports", hint=f"one of {', '.join(DTYPES.values())}"
        )
    if converts and stored.dtype.startswith("F8"):
        raise WeightsError(
            f"{name} is {stored.dtype}: its values have no meaning without their scales, so it cannot become {form}",
            hint=f"--form {SERVED[stored.dtype]} leaves every tensor unchanged",
        )
    return SERVED[stored.dtype]


def convert(name: str, stored: StoredTensor, dtype: str, out: np.ndarray, *, lossy: bool) -> None:
    """Writes the tensor as `dtype` into `out` (uint8). Raises if a value would change, unless `lossy`; always raises if
    a value would become infinite."""
    source_width, target_width = stored.data.size // max(stored.elements, 1), out.size // max(stored.elements, 1)
    for first in range(0, stored.elements, _PIECE):
        last = min(first + _PIECE, stored.elements)
        source = stored.data[first * source_width : last * source_width]
        values = _decode(source, stored.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            encoded = _encode(values, dtype)
            back = _decode(encoded, DTYPES[dtype])
            same = _bits_as(back, stored.dtype) == source.view(f"<u{source_width}")
        if not np.isfinite(back[np.isfinite(values)]).all():
            raise WeightsError(
                f"{name} has values too large for {dtype}", hint="use a form with a wider range, for example fp32"
            )
        if not lossy and not same.all():
            raise WeightsError(
                f"{name} is {stored.dtype} and cannot become {dtype}: {np.count_nonzero(~same)} of its elements "
                f"{first} to {last - 1} would be rounded",
                hint="--convert rounds to nearest even; --form names another form",
            )
        out[first * target_width : last * target_width] = encoded


def _decode(data: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "BF16":
        return (data.view("<u2").astype("<u4") << np.uint32(16)).view("<f4")
    return data.view(FLOATS[dtype])


def _encode(values: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "fp16":
        return values.astype("<f2").view(np.uint8)
    if dtype == "fp32":
        return values.astype("<f4").view(np.uint8)
    return _round_bf16(values).view(np.uint8)


def _bits_as(values: np.ndarray, dtype: str) -> np.ndarray:
    """The bits of these values in the file's dtype. They equal the file's own bits exactly when nothing was lost."""
    if dtype == "BF16":
        return (values.astype("<f4").view("<u4") >> np.uint32(16)).astype("<u2")
    cast = values.astype(FLOATS[dtype])
    return cast.view(f"<u{cast.dtype.itemsize}")


def _round_bf16(values: np.ndarray) -> np.ndarray:
    """Rounds to nearest even, once: going through a correctly rounded fp32 would round FP64 values twice."""
    single = values.astype("<f4")
    bits = single.view("<u4")
    if values.dtype.itemsize > 4:
        inexact = (single.astype(values.dtype) != values) & ~np.isnan(values)
        away = inexact & (np.abs(single) > np.abs(values))
        bits = (bits - away) | inexact  # round to odd: keeps the side of a tie on which the value lies
        bits = bits.astype("<u4")
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    # rounding a NaN could carry into infinity; it is truncated instead, and its quiet bit keeps it a NaN
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    cut_exact = np.where(bits & np.uint32(0xFFFF), quiet, bits >> np.uint32(16))
    return np.where(np.isnan(single), cut_exact, rounded).astype("<u2")
