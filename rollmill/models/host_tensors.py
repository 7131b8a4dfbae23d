"""Converts a model's parameters to the host bytes of a version, and back.

The trainer publishes `to_host(model.state_dict())`, and engines load exactly those bytes. Parameters may have a wider
type than the form: every bf16 value is exact in FP32, so loading and exporting again gives the same bytes. Quantised
forms use models.quantize, with the same guarantee.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from rollmill.errors import WeightsError
from rollmill.models.adapters import is_adapter
from rollmill.models.kernels.forms import is_quantised
from rollmill.models.merging import adapter_of, merged, without_adapter
from rollmill.models.quantize import (
    CODES,
    check_layout,
    dequantise_into,
    host_tensor,
    layout_of_parts,
    quantise_state,
    round_codes_into,
    served_type,
)
from rollmill.weights.format.chunk_audit import audit_host
from rollmill.weights.format.manifest import Layout, TensorEntry, describe, root_digest
from rollmill.weights.format.tensors import HostTensor

_PIECE = 1 << 23  # elements
_THREADED_BYTES = 64 << 20  # smaller weights are hashed and audited in one thread
_MOST_THREADS = 16
DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def to_host(state: Mapping[str, Tensor], form: str = "bf16") -> dict[str, HostTensor]:
    """The bytes of `form`, rounded to nearest if parameters are wider."""
    if is_quantised(form):
        return quantise_state(state, form)
    tensors = {}
    for name, tensor in state.items():
        kept = _kept(name, form)
        tensors[name] = host_tensor(tensor.detach(), kept, _dtype(kept))
    return tensors


@torch.no_grad()
def load_host(model: nn.Module, tensors: Mapping[str, HostTensor], changed: Iterable[str] | None = None) -> None:
    """Copies host bytes into the parameters, only those in `changed` if given. No parameter changes unless all fit.

    Of weights with another adapter than the model's, what it adds goes into the weights, and the model's own adds
    nothing yet.
    """
    state, anew = model.state_dict(), []
    if adapter_of(state) != adapter_of(tensors):
        tensors, changed, anew = merged(tensors), None, [state[name] for name in state if is_adapter(name)]
        state = {name: state[name] for name in without_adapter(state)}
    if any(tensor.dtype in CODES for tensor in tensors.values()):
        dequantise_into(state, tensors, changed)
    else:
        check_layout(state, tensors)
        for name in state if changed is None else changed:
            _copy(state[name], tensors[name])
    for tensor in anew:
        tensor.zero_()


def layout_in(state: Mapping[str, Tensor], form: str) -> Layout:
    """The names, dtypes and shapes that `to_host` gives, without looking at values."""
    if is_quantised(form):
        parts = [layout_of_parts(name, tensor, form) for name, tensor in state.items()]
        return tuple(sorted((name, *entry) for each in parts for name, entry in each.items()))
    return tuple(sorted((name, _kept(name, form), tuple(tensor.shape)) for name, tensor in state.items()))


def device_digest(model: nn.Module, form: str = "bf16") -> str:
    """The root digest of the current parameters, exported to `form`: the audit of a device copy."""
    return root_digest(describe(to_host(model.state_dict(), form)))


class Auditor:
    """Computes `device_digest` repeatedly. Tensors that have not changed since the last time are not exported again."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self._state = state  # the parameters, which are changed in place
        self._entries: dict[str, TensorEntry] = {}
        self._form: str | None = None

    def digest(self, form: str, touched: Iterable[str] | None = None) -> str:
        """The root digest now. Only tensors in `touched` (default: all) may have changed since the last call."""
        if touched is None or form != self._form:
            touched, self._form, self._entries = self._state, form, {}
        names = [*touched, *(self._state.keys() - self._entries.keys())]
        for entry in describe(to_host({name: self._state[name] for name in names}, form)):
            self._entries[entry.name] = entry
        return root_digest(tuple(self._entries[name] for name in sorted(self._entries)))


@dataclass(frozen=True)
class HostFacts:
    """Facts about the host bytes of a version: the digest that names it, and the audits a device copy must have."""

    entries: Mapping[str, TensorEntry]
    audits: Mapping[str, int]

    @classmethod
    def of(cls, tensors: Mapping[str, HostTensor]) -> HostFacts:
        many = sum(tensor.data.nbytes for tensor in tensors.values()) >= _THREADED_BYTES
        if not many:
            audits = {name: audit_host(tensor.data, tensor.width) for name, tensor in tensors.items()}
            return cls({entry.name: entry for entry in describe(tensors)}, audits)
        with ThreadPoolExecutor(min(os.cpu_count() or 1, _MOST_THREADS), "host-facts") as pool:
            entries = {name: pool.submit(describe, {name: tensor}) for name, tensor in tensors.items()}
            parts = {name: [pool.submit(part) for part in _audit_parts(tensor)] for name, tensor in tensors.items()}
            audits = {name: sum(part.result() for part in each) % 2**64 for name, each in parts.items()}
            return cls({name: entry.result()[0] for name, entry in entries.items()}, audits)

    def after(self, tensors: Mapping[str, HostTensor], changed: Iterable[str]) -> HostFacts:
        """The facts of the next version, in which only tensors in `changed` differ. Nothing else is read."""
        new = HostFacts.of({name: tensors[name] for name in changed})
        return HostFacts({**self.entries, **new.entries}, {**self.audits, **new.audits})

    @property
    def digest(self) -> str:
        return root_digest(tuple(self.entries[name] for name in sorted(self.entries)))


def _audit_parts(tensor: HostTensor) -> Iterator[Callable[[], int]]:
    """Calls whose results add up to the tensor's audit."""
    for first in range(0, max(tensor.elements, 1), _PIECE):
        part = tensor.data[first * tensor.width : (first + _PIECE) * tensor.width]
        yield partial(audit_host, part, tensor.width, first, compiled=True)


@torch.no_grad()
def round_to_form_(parameters: Iterable[Tensor] | Iterable[tuple[str, Tensor]], form: str = "bf16") -> None:
    """Rounds in place to the values that will be served, so that trainer and engine compute with the same weights.
    Quantised forms need names, because only some parameters are quantised."""
    named = [item if isinstance(item, tuple) else ("", item) for item in parameters]
    assert all(name for name, _ in named) or not is_quantised(form), "pairs of name and parameter"
    round_into(((name, parameter, parameter) for name, parameter in named), form)


@torch.no_grad()
def round_into(parameters: Iterable[tuple[str, Tensor, Tensor]], form: str) -> None:
    """For each (name, values, into): writes the values that will be served into `into`, which may be `values`."""
    if is_quantised(form):
        return round_codes_into(parameters, form)
    dtype = _dtype(form)
    for _, values, into in parameters:
        into.copy_(values)
        into.copy_(into.to(dtype))


def _kept(name: str, form: str) -> str:
    return "fp32" if served_type(name) == torch.float32 else form


def _dtype(form: str) -> torch.dtype:
    if form not in DTYPES:
        raise WeightsError(f"form {form!r} is not one a model can be exported to", hint=f"one of {', '.join(DTYPES)}")
    return DTYPES[form]


def _copy(parameter: Tensor, tensor: HostTensor) -> None:
    dtype = _dtype(tensor.dtype)
    if tensor.data.flags.writeable:
        parameter.copy_(torch.from_numpy(tensor.data).view(dtype).view(tensor.shape))
        return
    # torch needs writable memory even to read; a read-only tensor is copied in parts, not all at once
    flat = parameter.view(-1)
    for start in range(0, tensor.elements, _PIECE):
        piece = tensor.data[start * tensor.width : (start + _PIECE) * tensor.width].copy()
        flat[start : start + _PIECE].copy_(torch.from_numpy(piece).view(dtype))
