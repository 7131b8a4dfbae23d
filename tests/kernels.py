"""Tests of kernels run on a CUDA device, or on the CPU in Triton's interpreter (TRITON_INTERPRET=1).

A test marked `kernels` has its tensors on DEVICE, and is skipped if there is neither. With the interpreter, everything
on the CPU runs through kernels; inside `without_kernels` a test computes the result to compare with.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rollmill.models import triton as triton_support
from rollmill.models.updates import bits

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")  # for tests of more than kernels
hopper = pytest.mark.skipif(
    not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="no Hopper device",
)
# for tests that run with and without kernels
devices = pytest.mark.parametrize("device", ["cpu", pytest.param(DEVICE, marks=pytest.mark.kernels, id="kernels")])


def prepare() -> None:
    """Runs before a test marked `kernels`."""
    if INTERPRETED:
        _round_like_hardware()
        _interpret_faster()
    elif not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@contextmanager
def without_kernels() -> Iterator[None]:
    """Inside, tensors on the CPU are computed without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_support, "interpreted", False)
        yield


@functools.cache
def _round_like_hardware() -> None:
    """The interpreter truncates FP32 to bf16, rounds differently to FP8, and multiplies the bits of bf16 numbers as
    integers. This replaces these by torch, which does what the hardware does."""
    import triton.language as tl
    from triton.runtime import interpreter

    types = {
        tl.float32: torch.float32,
        tl.float16: torch.float16,
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
    }

    def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        numbers = torch.from_numpy(np.array(data)).view(types[source])
        if target == tl.float8e4nv:
            numbers = numbers.float().clamp(-448, 448)  # NaN stays NaN, all else becomes a number
        return numbers.to(types[target]).view(bits.INTEGERS[types[target].itemsize]).numpy()

    dot = interpreter.InterpreterBuilder.create_dot

    def wide_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = [self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return dot(self, *wide, *rest)

    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = wide_dot


@functools.cache
def _interpret_faster() -> None:
    """The interpreter spends half its time on work that changes nothing. This leaves that work out:

    - Each launch, and each call of one @triton.jit function by another, replaces the whole language by interpreted
      functions; a launch takes that back at its end. Here they are replaced once and stay.
    - Each sum and product of integers is checked for overflow, but the result of the check is used only in debug mode.
    - The table of numpy types is built for each lookup.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: interpreter._LangPatchScope()  # it changes nothing
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
    numpy_types: dict[str, np.dtype] = {}
    look_up = interpreter._get_np_dtype

    def numpy_type(kind: Any) -> np.dtype:
        name = kind.scalar.name
        if name not in numpy_types:
            numpy_types[name] = look_up(kind.scalar)
        return numpy_types[name]

    interpreter._get_np_dtype = numpy_type
