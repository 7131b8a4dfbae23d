"""Changes parameters in place, with a short pause: what takes time is done before it.

`prepare` checks the changes, converts them and moves them to the parameters' devices while decoding goes on.
`ParameterChange.apply` runs between two decode steps: it writes the new values, audits them, and waits for both. Values
are absolute, so applying twice, or again after a crash, does no harm.
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
from rollmill.models.updates.bits import INTEGERS, bits_of, elements, widened
from rollmill.models.updates.device_audit import Audited, audit_many

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
    """Writes `values` (of the parameter's dtype, integers of its width, or narrower floats) at flat `indices`, in
    place."""
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


def prepare(
    parameters: Mapping[str, Tensor],
    patches: Mapping[str, list[Patch] | None] | None,
    tensors: Mapping[str, HostTensor],
    expected: Mapping[str, int] | None = None,
) -> ParameterChange:
    """Prepare to change `parameters` to the version whose bytes are `tensors`. No parameter is changed yet.

    `patches` maps names to lists of changes, or to None to copy that tensor whole; None instead of the mapping copies
    all. Patches with the same start are applied in order; patches with different starts have no element in common.
    `expected` maps names to the audits that parameters must have afterwards. Raises WeightsError if anything does not
    fit.
    """
    if patches is None:
        patches = dict.fromkeys((*parameters, *tensors))
    expected = expected or {}
    targets = {name: _target(name, parameters, tensors) for name in (*patches, *expected)}
    for name, listed in patches.items():
        _check(name, listed or (), targets[name])
    changes = {device: _device_change(device) for device in {parameter.device for parameter, _ in targets.values()}}
    for name, listed in patches.items():
        parameter, form = targets[name]
        if listed is None:
            changes[parameter.device].add_whole(parameter, form, tensors[name].data)
        else:
            changes[parameter.device].add_patches(parameter, form, listed)
    return ParameterChange(list(changes.values()), {name: targets[name] for name in expected}, expected)


def _device_change(device: torch.device) -> DeviceChange:
    if not has_triton(device):
        return TorchChange(device)
    from rollmill.models.updates.patch_preparation_triton import TritonChange

    return TritonChange(device)


def _target(name: str, parameters: Mapping[str, Tensor], tensors: Mapping[str, HostTensor]) -> Audited:
    """Returns the parameter and the dtype it is served as. Raises WeightsError if the bytes do not fit it."""
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
    widened(torch.empty(0, dtype=form).view(INTEGERS[form.itemsize]), form, parameter.dtype)  # raises if it cannot
    return parameter, form


def _check(name: str, patches: Sequence[Patch], target: Audited) -> None:
    """Raises for a patch beyond the end of the tensor: on a device nothing stops such a write."""
    parameter, form = target
    for start, indices, values in patches:
        if indices.size != values.size or values.dtype.itemsize != form.itemsize or indices.dtype != np.uint32:
            raise WeightsError(f"{name}: a patch of {indices.size} indices and {values.size} values of {values.dtype}")
        if start < 0 or (indices.size and start + int(indices.max()) >= parameter.numel()):
            raise WeightsError(f"{name}: a patch changes an element beyond its {parameter.numel()}")


class ParameterChange:
    """A change of parameters that is ready to be applied."""

    def __init__(
        self, changes: Sequence[DeviceChange], audited: Mapping[str, Audited], expected: Mapping[str, int]
    ) -> None:
        self._changes, self._expected = changes, expected
        devices = [change.device for change in changes]
        names = [[name for name, (t, _) in audited.items() if t.device == device] for device in devices]
        self._names = [name for part in names for name in part]
        for change, part in zip(changes, names, strict=True):
            change.ready([audited[name] for name in part])

    def apply(self) -> dict[str, int]:
        """Writes, audits the parameters with an expected audit, and waits for both. Returns these audits."""
        for change in self._changes:
            change.write()
        found = [value for change in self._changes for value in change.audits()]
        audits = dict(zip(self._names, found, strict=True))
        wrong = sorted(name for name, value in self._expected.items() if audits[name] != value)
        if wrong:
            raise WeightsError(
                f"{len(wrong)} parameters do not match the version after an update: {', '.join(wrong[:5])}",
                hint="they started from another version, or memory failed: copy the tensors whole",
            )
        return audits


class DeviceChange(Protocol):
    """Changes to the parameters of one device."""

    device: torch.device

    def add_whole(self, parameter: Tensor, form: torch.dtype, data: np.ndarray) -> None: ...
    def add_patches(self, parameter: Tensor, form: torch.dtype, patches: Sequence[Patch]) -> None: ...
    def ready(self, audited: Sequence[Audited]) -> None: ...
    def write(self) -> None: ...
    def audits(self) -> list[int]: ...


class TorchChange:
    """Runs on any device, with one write per patch. On the CPU nothing has to be moved before."""

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
            if self.device.type == "cpu":  # numpy has much less overhead per write than torch
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
