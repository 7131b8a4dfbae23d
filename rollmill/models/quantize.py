"""Quantised forms: converts a model's parameters to codes with scales, and back. Trainer, exporter and engine share it.

    form      matrices of the layers                        beside NAME (the codes)
    fp8       e4m3, see kernels.fp8                         NAME.scale  fp32 [⌈R/128⌉, ⌈C/128⌉]
    nvfp4     e2m1, two per byte, see kernels.nvfp4         NAME.scale  e4m3 [out, ⌈in/16⌉], NAME.scale2  fp32 []

Experts are stacked: each is a matrix of its own, with a leading dimension in codes and scales. In nvfp4 matrices are
stored [out, in], because its blocks lie along the inputs; our experts are [in, out] and are transposed. Embedding,
head, norms, router, adapters and biases stay bf16. The router's bias stays FP32.

Parameters always hold the served values: dequantised, exact in bf16, and quantising them gives the same codes again. So
a model needs no second copy of its weights, trainer and engine compute with the same values, and the digest of the
device copy can be computed at any time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from rollmill.errors import WeightsError
from rollmill.models.adapters import SCALE as ADAPTER_SCALE
from rollmill.models.adapters import is_adapter
from rollmill.models.kernels.quantised import fp8, nvfp4
from rollmill.weights.format.manifest import TensorEntry
from rollmill.weights.format.tensors import HostTensor

SCALE, POWER = ".scale", ".scale2"
_KEPT_WIDE = (".router.bias", ADAPTER_SCALE)
_DTYPES: Mapping[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp8_e4m3": fp8.CODES,
    "fp4x2": torch.uint8,
}
CODES = {"fp8_e4m3", "fp4x2"}  # dtypes that only quantised forms have
_PIECE = 1 << 24  # elements quantised at once: bounds the extra memory to a few times this


def quantises(name: str, tensor: Tensor) -> bool:
    """Whether a quantised form has codes for this parameter: for the matrices of the layers except the router and
    adapters."""
    return name.startswith("layers.") and tensor.dim() > 1 and ".router." not in name and not is_adapter(name)


def owner(name: str) -> str:
    """The parameter that a tensor of a version belongs to: itself, or the one whose scales it holds."""
    return name.removesuffix(POWER).removesuffix(SCALE)


def part_names(name: str) -> tuple[str, ...]:
    """The names of the tensors that a parameter may consist of in a version."""
    return name, name + SCALE, name + POWER


@torch.no_grad()
def quantise_state(state: Mapping[str, Tensor], form: str) -> dict[str, HostTensor]:
    """All tensors of a version, in host memory. Raises WeightsError for NaN and infinities, which have no codes."""
    tensors: dict[str, HostTensor] = {}
    for name, tensor in state.items():
        if quantises(name, tensor):
            _check_finite([name], *_largest([tensor]))
            parts = quantise(name, tensor.detach(), form)
        else:
            parts = {name: tensor.detach().to(served_type(name))}
        for part, values in parts.items():
            tensors[part] = _to_host(values)
    return tensors


def placed_parts(
    state: Mapping[str, Tensor], tensors: Mapping[str, HostTensor], changed: Iterable[str] | None = None
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Yields each parameter's name with its codes and scales, on the parameter's device. If `changed` is given, only
    the parameters whose tensors it names. Raises WeightsError at once for weights of another model."""
    check_layout(state, tensors)
    for name in state if changed is None else dict.fromkeys(map(owner, changed)):
        parts = {part: tensors[part] for part in part_names(name) if part in tensors}
        yield name, {part: place(parts[part], state[name].device) for part in parts}


@torch.no_grad()
def dequantise_into(
    state: Mapping[str, Tensor], tensors: Mapping[str, HostTensor], changed: Iterable[str] | None = None
) -> None:
    """Copies a version into the parameters. No parameter is changed unless all tensors fit."""
    for name, parts in placed_parts(state, tensors, changed):
        state[name].copy_(dequantise(name, parts))


@torch.no_grad()
def round_codes_into(parameters: Iterable[tuple[str, Tensor, Tensor]], form: str) -> None:
    """`host_tensors.round_into` in a quantised form. It runs after every step, so it launches few kernels and waits
    once."""
    coded: list[tuple[str, Tensor, Tensor]] = []
    for name, values, into in parameters:
        if quantises(name, values):
            coded.append((name, values, into))
        else:
            into.copy_(values.to(served_type(name)))
    if not coded:
        return
    if form == "fp8":
        found = [_round_fp8(values, into) for _, values, into in coded]
        largest, matrices = torch.cat(found), [len(each) for each in found]
    else:
        largest, matrices = _largest([values for _, values, _ in coded])
        for (_, values, into), power in zip(coded, nvfp4.power_of(largest).split(matrices), strict=True):
            for (piece, own), (place, _) in zip(_pieces(values, power), _pieces(into, power), strict=True):
                assert own is not None
                place.copy_(nvfp4.rounded(piece, own))
    _check_finite([name for name, _, _ in coded], largest, matrices)


def quantise(name: str, tensor: Tensor, form: str) -> dict[str, Tensor]:
    """Codes and scales by name, on the tensor's device."""
    if form == "fp8":
        quantised = [fp8.quantise(piece, fp8.BLOCK) for piece, _ in _pieces(tensor, None)]
        codes, scales = (torch.cat(parts) for parts in zip(*quantised, strict=True))
        return {name: codes, name + SCALE: scales}
    if tensor.shape[-2 if tensor.dim() == 3 else -1] % 2:
        raise WeightsError(
            f"{name} {tuple(tensor.shape)} has an odd number of inputs, and nvfp4 packs two of them into a byte",
            hint="form = 'fp8' takes any shape",
        )
    powers = nvfp4.power_of(_largest([tensor])[0])
    quantised = [nvfp4.quantise(piece, own) for piece, own in _pieces(tensor, powers) if own is not None]
    codes, scales = (torch.cat(parts) for parts in zip(*quantised, strict=True))
    return {name: codes, name + SCALE: scales, name + POWER: powers if tensor.dim() == 3 else powers.squeeze()}


def dequantise(name: str, parts: Mapping[str, Tensor]) -> Tensor:
    """The values of a parameter. One without codes is returned as it is."""
    codes = parts[name]
    if codes.dtype == fp8.CODES:
        return fp8.dequantise(codes, parts[name + SCALE], fp8.BLOCK)
    if name + POWER not in parts:
        return codes
    power = parts[name + POWER].unsqueeze(-1).unsqueeze(-1)
    values = nvfp4.dequantise(codes, parts[name + SCALE], power)
    return values.transpose(1, 2) if values.dim() == 3 else values


def dequantise_rows(name: str, parts: Mapping[str, Tensor], first: int) -> Tensor:
    """The values of some rows of a parameter, from row `first` on. Parts are of these rows alone, but for scales that
    rows share: those are all there."""
    codes = parts[name]
    if codes.dtype != fp8.CODES or codes.dim() == 3:
        return dequantise(name, parts)
    blocks = torch.arange(first, first + len(codes), device=codes.device) // fp8.BLOCK
    return fp8.dequantise(codes, parts[name + SCALE][blocks], 1)


def dequantised(tensors: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
    """A version of a quantised form as the bf16 numbers it stands for, without loss."""
    plain: dict[str, HostTensor] = {}
    for name in dict.fromkeys(map(owner, tensors)):
        parts = {part: tensors[part] for part in part_names(name) if part in tensors}
        values = dequantise(name, {part: place(parts[part], torch.device("cpu")) for part in parts})
        plain[name] = _to_host(values.to(served_type(name)))
    return plain


def _largest(tensors: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """Returns the largest magnitude of each matrix, in order (NaN if the matrix has one), and the number of matrices
    per tensor."""
    matrices = [tensor.detach().unbind() if tensor.dim() == 3 else (tensor.detach(),) for tensor in tensors]
    found = torch._foreach_norm(list(itertools.chain(*matrices)), math.inf)
    return torch.stack(found).float(), [len(each) for each in matrices]


def _round_fp8(values: Tensor, into: Tensor) -> Tensor:
    """Returns the largest magnitude of each piece, or of each matrix in it. NaN and infinities stay what they are."""
    pieces = zip(_pieces(values, None), _pieces(into, None), strict=True)
    found = [fp8.round_blocks(piece, place) for (piece, _), (place, _) in pieces]
    return torch.cat([blocks.amax((-2, -1)).view(-1) for blocks in found])


def _pieces(tensor: Tensor, powers: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Views of whole blocks, in order. With `powers`, one per matrix (nvfp4), views are [..., out, in] and come with
    their own powers."""
    stacked = tensor.dim() == 3
    if powers is not None and stacked:
        tensor = tensor.transpose(1, 2)
    step = max(1, _PIECE // max(tensor[0].numel(), 1))
    if not stacked:
        step = max(fp8.BLOCK, step - step % fp8.BLOCK)
    for start in range(0, tensor.shape[0], step):
        piece = tensor[start : start + step]
        if powers is None:
            yield piece, None
        else:
            yield piece, powers[start : start + step, None, None] if stacked else powers[:, None]


def _check_finite(names: Sequence[str], largest: Tensor, matrices: Sequence[int]) -> None:
    """Checks all tensors at once, because each question waits for the device."""
    bad = ~(largest <= fp8.LARGEST_WEIGHT)
    if bool(bad.any()):
        place = int(bad.int().argmax())
        name = list(itertools.chain(*([name] * count for name, count in zip(names, matrices, strict=True))))[place]
        raise WeightsError(
            f"{name} has no codes: its largest magnitude is {float(largest[place])}",
            hint="weights that are not finite cannot be repaired: go back to the last good version or checkpoint",
        )


def served_type(name: str) -> torch.dtype:
    """The narrowest type that holds a parameter's served values exactly."""
    # the router's bias is never rounded: engine and trainer would choose different experts
    return torch.float32 if name.endswith(_KEPT_WIDE) else torch.bfloat16


def _to_host(values: Tensor) -> HostTensor:
    kinds = {dtype: kind for kind, dtype in _DTYPES.items()}
    return host_tensor(values, kinds[values.dtype], values.dtype)


def host_tensor(values: Tensor, kind: str, dtype: torch.dtype) -> HostTensor:
    """A copy in host memory, as `kind`, which torch calls `dtype`. A copy from a GPU goes into pinned memory, which the
    GPU writes directly and torch keeps for the next copy. Fresh pages would have to be found and cleared by the system
    one by one."""
    copy = torch.empty(values.shape, dtype=dtype, pin_memory=values.is_cuda).copy_(values)
    return HostTensor(kind, tuple(values.shape), copy.view(-1).view(torch.uint8).numpy())


def place(tensor: HostTensor, device: torch.device) -> Tensor:
    """A tensor of a version, in any form, on `device`."""
    data = tensor.data if tensor.data.flags.writeable else tensor.data.copy()  # torch reads only writable memory
    return torch.from_numpy(data).to(device).view(_DTYPES[tensor.dtype]).view(tensor.shape)


def check_layout(state: Mapping[str, Tensor], tensors: Mapping[str, HostTensor | TensorEntry]) -> None:
    """Raises WeightsError unless these tensors are of this model, in any form."""
    codes = {tensor.dtype for tensor in tensors.values()}
    expected: dict[str, object]
    found: dict[str, object]
    if codes & CODES:
        form = "nvfp4" if "fp4x2" in codes else "fp8"
        parts = [layout_of_parts(name, tensor, form) for name, tensor in state.items()]
        expected = {part: entry for each in parts for part, entry in each.items()}
        found = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    else:
        expected = {name: tuple(tensor.shape) for name, tensor in state.items()}
        found = {name: tensor.shape for name, tensor in tensors.items()}
    odd = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if odd:
        here, there = expected.get(odd[0]), found.get(odd[0])
        raise WeightsError(
            f"the weights are of another model: {len(odd)} tensors differ, as {odd[0]}: {here} here, {there} there",
            hint="the [model] section and the form must be those the line was trained with",
        )


def layout_of_parts(name: str, tensor: Tensor, form: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The dtype and shape of each tensor a parameter consists of."""
    shape = tuple(tensor.shape)
    if not quantises(name, tensor):
        return {name: ("fp32" if served_type(name) == torch.float32 else "bf16", shape)}
    *lead, rows, columns = shape
    if form == "fp8":
        scales = (*lead, -(-rows // fp8.BLOCK), -(-columns // fp8.BLOCK))
        return {name: ("fp8_e4m3", shape), name + SCALE: ("fp32", scales)}
    if lead:
        rows, columns = columns, rows
    return {
        name: ("fp4x2", (*lead, rows, columns // 2)),
        name + SCALE: ("fp8_e4m3", (*lead, rows, -(-columns // nvfp4.BLOCK))),
        name + POWER: ("fp32", tuple(lead)),
    }
