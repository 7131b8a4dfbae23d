"""Between a model's parameters and the host bytes a version is served as.

The trainer publishes `to_host(model.state_dict())`; engines load exactly those bytes. Parameters may be kept in a wider
type than the form: every bf16 value is exact in FP32, so loading and exporting again gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from rollmill.errors import WeightsError
from rollmill.weights.manifest import describe, root_digest
from rollmill.weights.tensors import HostTensor

DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def to_host(state: Mapping[str, Tensor], form: str = "bf16") -> dict[str, HostTensor]:
    """The bytes of `form`, rounded to nearest where parameters are wider."""
    dtype = _dtype(form)
    tensors = {}
    for name, tensor in state.items():
        served = tensor.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
        data = served.view(-1).view(torch.uint8).numpy()
        tensors[name] = HostTensor(form, tuple(tensor.shape), data)
    return tensors


@torch.no_grad()
def load_host(model: nn.Module, tensors: Mapping[str, HostTensor], changed: Iterable[str] | None = None) -> None:
    """Copy host bytes into the parameters, only those of `changed` if given. Nothing is touched unless all fit."""
    state = model.state_dict()
    _check_layout(state, tensors)
    for name in state if changed is None else changed:
        state[name].copy_(_view(tensors[name]))


def device_digest(model: nn.Module, form: str = "bf16") -> str:
    """The root digest of what the parameters hold now, exported to `form`: the audit of a device copy."""
    return root_digest(describe(to_host(model.state_dict(), form)))


@torch.no_grad()
def round_to_form_(parameters: Iterable[Tensor], form: str = "bf16") -> None:
    """Round in place to the values that will be served, so that trainer and engine compute with the same weights."""
    dtype = _dtype(form)
    for parameter in parameters:
        parameter.copy_(parameter.to(dtype))


def _dtype(form: str) -> torch.dtype:
    if form not in DTYPES:
        raise WeightsError(f"form {form!r} is not one a model can be exported to", hint=f"one of {', '.join(DTYPES)}")
    return DTYPES[form]


def _view(tensor: HostTensor) -> Tensor:
    # torch wants writable memory even to read from it; a mapped or received buffer may be read-only
    data = tensor.data if tensor.data.flags.writeable else tensor.data.copy()
    return torch.from_numpy(data).view(_dtype(tensor.dtype)).view(tensor.shape)


def _check_layout(state: Mapping[str, Tensor], tensors: Mapping[str, HostTensor]) -> None:
    missing, unknown = sorted(state.keys() - tensors.keys()), sorted(tensors.keys() - state.keys())
    shapes = [
        f"{name} is {tuple(state[name].shape)} here and {tensors[name].shape} there"
        for name in sorted(state.keys() & tensors.keys())
        if tuple(state[name].shape) != tensors[name].shape
    ]
    if missing or unknown or shapes:
        raise WeightsError(
            f"the weights are of another model: missing {missing}, unknown {unknown}, shapes {shapes}",
            hint="the [model] section must be the one the line was trained with",
        )
