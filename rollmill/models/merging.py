"""Adapters and the weights they are beside, told apart and put together: for models with another adapter or with none.

Merged weights are rounded once, so a merged model's log-probs differ from those of the adapted one by rounding.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollmill.errors import WeightsError
from rollmill.models.adapters import SCALE, is_adapter
from rollmill.models.kernels.forms import is_quantised
from rollmill.models.quantize import CODES, dequantised, host_tensor, place
from rollmill.weights.format.tensors import HostTensor

_HOST = torch.device("cpu")
_A, _B = "_adapter.a", "_adapter.b"


def adapter_of(tensors: Mapping[str, Tensor] | Mapping[str, HostTensor]) -> tuple[float, dict[str, tuple[int, ...]]]:
    """What adapter these tensors have: its scale, 0 without one, and its shapes."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items() if is_adapter(name)}
    return _scale(tensors), shapes


def without_adapter(names: Mapping[str, object]) -> list[str]:
    return [name for name in names if not is_adapter(name) and name != SCALE]


def adapted_names(names: Mapping[str, object]) -> list[str]:
    """The matrices that have an adapter."""
    return [name.removesuffix(_A) for name in names if name.endswith(_A)]


def merged(tensors: Mapping[str, HostTensor]) -> dict[str, HostTensor]:
    """The weights of a version with what its adapter adds, rounded to the version's type."""
    found = {name: tensors[name] for name in without_adapter(tensors)}
    scale, names = _scale(tensors), adapted_names(tensors)
    lacks = [each for name in names for each in (name, name + _B, SCALE) if each not in tensors]
    if lacks:
        raise WeightsError(f"the adapter of {names[0]} is not whole: there is no {lacks[0]}", hint="copy it again")
    for name in names:
        weight = tensors[name]
        if weight.dtype in CODES:
            raise WeightsError(
                f"{name} has codes, into which no adapter can be merged without loss",
                hint="take the version in the form bf16: `--form bf16`, if the run publishes it",
            )
        a, b = (place(tensors[name + part], _HOST).float() for part in (_A, _B))
        values = place(weight, _HOST)
        added = a @ b if a.dim() == 3 else b @ a  # experts are [in, out]
        found[name] = host_tensor(values.float().add_(added, alpha=scale), weight.dtype, values.dtype)
    return found


def plain(tensors: Mapping[str, HostTensor], form: str) -> Mapping[str, HostTensor]:
    """A version as numbers, without codes and without an adapter."""
    return merged(dequantised(tensors) if is_quantised(form) else tensors)


def _scale(tensors: Mapping[str, Tensor] | Mapping[str, HostTensor]) -> float:
    scale = tensors.get(SCALE)
    return 0.0 if scale is None else float(place(scale, _HOST) if isinstance(scale, HostTensor) else scale)
