"""Changing parameters in place: everything that takes time before the pause, and then the pause.

`stage` checks, converts and moves changes to where the parameters are; decoding may go on meanwhile. `Staged.apply` is
what runs between two decode steps: it writes the new values, audits, and waits until both have happened. Values are
absolute, so applying twice, or again after a crash, does no harm.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rollmill.errors import WeightsError
from rollmill.models.triton import current, has_triton
from rollmill.models.updates.audit import Audited, audit_many
from rollmill.models.updates.bits import INTEGERS, bits_of, widened

if TYPE_CHECKING:
    from rollmill.weights.format.tensors import HostTensor
    from rollmill.weights.reading.patches import Patch

FORMS: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "fp4x2": torch.uint8,
    "int32": torch.int32,
}


def apply_changes(parameter: Tensor, indices: Tensor, values: Tensor) -> None:
    """Write `values` (the parameter's dtype, integers of its width, or narrower floats) at flat `indices`, in place."""
    bits = bits_of(parameter)
    if values.is_floating_point() and values.dtype != parameter.dtype:
        new = widened(bits_of(values), values.dtype, parameter.dtype)
    else:
        new = bits_of(values)
    if new.dtype != bits.dtype:
        raise WeightsError(f"values of {values.dtype} are not elements of a parameter of {parameter.dtype}")
    if has_triton(bits.device):
        from rollmill.models.updates.apply_triton import scatter_table

        with current(bits.device):
            scatter_table([(bits.data_ptr(), indices.numel())], indices.to(torch.int32), new).run()
    else:
        bits.index_copy_(0, indices.to(torch.int64), new)


def stage(
    parameters: Mapping[str, Tensor],
    patches: Mapping[str, list[Patch] | None] | None,
    tensors: Mapping[str, HostTensor],
    expected: Mapping[str, int] | None = None,
) -> Staged:
    """Prepare the change of `parameters` to the version that `tensors` are the bytes of.

    Patches as an update has them: lists of changes, None for a tensor to copy whole; None instead of all: copy all.
    Those with the same start count in their order; with different ones they have no element in common. `expected`: the
    audits that parameters must have afterwards, by name. Nothing is touched yet, and nothing is staged unless all fit.
    """
    if patches is None:
        patches = dict.fromkeys((*parameters, *tensors))
    expected = expected or {}
    targets = {name: _target(name, parameters, tensors) for name in (*patches, *expected)}
    for name, listed in patches.items():
        _check(name, listed or (), targets[name])
    stages = {device: _device_stage(device) for device in {parameter.device for parameter, _ in targets.values()}}
    for name, listed in patches.items():
        parameter, form = targets[name]
        if listed is None:
            stages[parameter.device].add_whole(parameter, form, tensors[name].data)
        else:
            stages[parameter.device].add_patches(parameter, form, listed)
    return Staged(list(stages.values()), {name: targets[name] for name in expected}, expected)


def _device_stage(device: torch.device) -> DeviceStage:
    if not has_triton(device):
        return TorchStage(device)
    from rollmill.models.updates.stage_triton import TritonStage

    return TritonStage(device)


def _target(name: str, parameters: Mapping[str, Tensor], tensors: Mapping[str, HostTensor]) -> Audited:
    """A parameter and the dtype it is served as."""
    if name not in parameters or name not in tensors:
        raise WeightsError(
            f"no parameter {name!r} here or no bytes for it",
            hint="the [model] section must be the one the line was trained with",
        )
    parameter, tensor = parameters[name].detach(), tensors[name]
    form = FORMS[tensor.dtype]
    if parameter.numel() * form.itemsize != tensor.data.size:
        raise WeightsError(
            f"{name} is {tuple(parameter.shape)} here and {tensor.shape} there",
            hint="the [model] section must be the one the line was trained with",
        )
    widened(torch.empty(0, dtype=form).view(INTEGERS[form.itemsize]), form, parameter.dtype)  # says so if it cannot
    return parameter, form


def _check(name: str, patches: Sequence[Patch], target: Audited) -> None:
    """On a device nothing stops a write beyond the end of a tensor, so it is ruled out here."""
    parameter, form = target
    for start, indices, values in patches:
        if indices.size != values.size or values.dtype.itemsize != form.itemsize or indices.dtype != np.uint32:
            raise WeightsError(f"{name}: a patch of {indices.size} indices and {values.size} values of {values.dtype}")
        if start < 0 or (indices.size and start + int(indices.max()) >= parameter.numel()):
            raise WeightsError(f"{name}: a patch changes an element beyond its {parameter.numel()}")


class Staged:
    """A change of parameters that is ready to happen."""

    def __init__(
        self, stages: Sequence[DeviceStage], audited: Mapping[str, Audited], expected: Mapping[str, int]
    ) -> None:
        self._stages, self._expected = stages, expected
        devices = [stage.device for stage in stages]
        names = [[name for name, (t, _) in audited.items() if t.device == device] for device in devices]
        self._names = [name for part in names for name in part]
        for stage_, part in zip(stages, names, strict=True):
            stage_.ready([audited[name] for name in part])

    def apply(self) -> dict[str, int]:
        """Write, audit what is expected to have a certain audit, and wait for both. Returns these audits."""
        for stage_ in self._stages:
            stage_.write()
        found = [value for stage_ in self._stages for value in stage_.audits()]
        audits = dict(zip(self._names, found, strict=True))
        wrong = sorted(name for name, value in self._expected.items() if audits[name] != value)
        if wrong:
            raise WeightsError(
                f"{len(wrong)} parameters are not the version's after an update: {', '.join(wrong[:5])}",
                hint="they started from another version, or memory failed: copy the tensors whole",
            )
        return audits


class DeviceStage(Protocol):
    """Changes of the parameters of one device."""

    device: torch.device

    def add_whole(self, parameter: Tensor, form: torch.dtype, data: np.ndarray) -> None: ...
    def add_patches(self, parameter: Tensor, form: torch.dtype, patches: Sequence[Patch]) -> None: ...
    def ready(self, audited: Sequence[Audited]) -> None: ...
    def write(self) -> None: ...
    def audits(self) -> list[int]: ...


class TorchStage:
    """Runs anywhere, one write for each patch. On a host that is all there is to do: nothing has to be moved."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._writes: list[Callable[[], Any]] = []
        self._audited: Sequence[Audited] = ()

    def add_whole(self, parameter: Tensor, form: torch.dtype, data: np.ndarray) -> None:
        bits = bits_of(parameter)
        self._writes.append(lambda: bits.copy_(widened(elements(data, form), form, parameter.dtype)))

    def add_patches(self, parameter: Tensor, form: torch.dtype, patches: Sequence[Patch]) -> None:
        bits = bits_of(parameter)
        for start, indices, values in patches:
            at, new = indices.astype(np.int64) + start, widened(elements(values, form), form, parameter.dtype)
            if self.device.type == "cpu":  # numpy does much less around each write than torch
                self._writes.append(partial(bits.numpy().__setitem__, at, new.numpy()))
            else:
                place = torch.from_numpy(at).to(self.device)
                self._writes.append(partial(bits.index_copy_, 0, place, new.to(self.device)))

    def ready(self, audited: Sequence[Audited]) -> None:
        self._audited = audited

    def write(self) -> None:
        for write in self._writes:
            write()

    def audits(self) -> list[int]:
        return audit_many(self._audited)


def elements(data: np.ndarray, form: torch.dtype) -> Tensor:
    """Bytes or integers as integers of the form's width; shares the memory where that is writable."""
    flat = data.reshape(-1).view(f"i{form.itemsize}")
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())  # torch wants it writable even to read
