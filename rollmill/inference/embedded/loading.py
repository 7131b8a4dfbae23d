"""Copies the bytes of an update into the parameters, and checks that they arrived.

    prepare   beside decoding, in any thread: refuses weights of another model, moves and converts
    load      in the pause: writes, then checks the parameters against the version that tokens will be labelled with

On the CPU, parameters are exported again and must have the version's digest. On a device that would copy the whole
model in every pause. There the host bytes are checked against the digest before anything is written, so a wrong version
leaves the served one in place. Afterwards the parameters are checked against the audits of the host bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from rollmill.errors import WeightsError
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import Auditor, HostFacts, device_digest, load_host
from rollmill.models.kernels.forms import is_quantised
from rollmill.models.quantize import check_layout, dequantise, placed_parts, served_type
from rollmill.models.updates.device_audit import audit, audit_many
from rollmill.models.updates.patch_preparation import ParameterChange, prepare
from rollmill.types import PolicyRef
from rollmill.weights.format.manifest import TensorEntry, describe, root_digest
from rollmill.weights.reading.line_follower import Update


class Loader(Protocol):
    """With `patched`, the parameters are at `update.base`, and the patches lead to the new version."""

    def prepare(self, update: Update, patched: bool) -> Any: ...
    def load(self, update: Update, patched: bool, prepared: Any) -> None: ...


def make_loader(model: Decoder) -> Loader:
    if is_quantised(model.form):
        return QuantisedLoader(model)
    return DeviceLoader(model) if model.embedding.is_cuda else HostLoader(model)


class HostLoader:
    def __init__(self, model: Decoder) -> None:
        self._model, self._parameters = model, model.state_dict()
        self._auditor = Auditor(self._parameters)

    def prepare(self, update: Update, patched: bool) -> ParameterChange:
        check_layout(self._parameters, update.tensors)
        return prepare(self._parameters, update.patches if patched else None, update.tensors)

    def load(self, update: Update, patched: bool, prepared: ParameterChange) -> None:
        policy = update.policy
        prepared.apply()
        if self._auditor.digest(policy.form, update.patches if patched else None) != policy.digest:
            load_host(self._model, update.tensors)
            _expect_parameters(self._auditor.digest(policy.form), policy)


@dataclass(frozen=True)
class _Preparation:
    change: ParameterChange
    facts: HostFacts


class DeviceLoader:
    def __init__(self, model: Decoder) -> None:
        self._parameters = model.state_dict()
        self._served = HostFacts.of({})

    def prepare(self, update: Update, patched: bool) -> _Preparation:
        check_layout(self._parameters, update.tensors)
        patches, facts = update.patches if patched else None, None
        if patches is not None:
            facts = self._served.after(update.tensors, patches)
        if facts is None or facts.digest != update.policy.digest:  # patches may leave out changes
            patches, facts = None, HostFacts.of(update.tensors)
        _expect_bytes(facts.digest, update.policy)
        return _Preparation(prepare(self._parameters, patches, update.tensors, facts.audits), facts)

    def load(self, update: Update, patched: bool, prepared: _Preparation) -> None:
        try:
            prepared.change.apply()
        except WeightsError:  # the patches did not lead to the version
            prepare(self._parameters, None, update.tensors, prepared.facts.audits).apply()
        self._served = prepared.facts


@dataclass(frozen=True)
class _Codes:
    parts: Mapping[str, Mapping[str, Tensor]]  # by parameter, on its device; a fraction of the parameter's size
    audits: Mapping[str, int]  # of each parameter after the update
    entries: Mapping[str, TensorEntry]  # all tensors of the version


class QuantisedLoader:
    """For quantised forms, whose codes the parameters do not hold. Codes are moved beside decoding and dequantised in
    the pause. Digests tell which tensors changed, because patches may leave some out."""

    def __init__(self, model: Decoder) -> None:
        self._model, self._parameters = model, model.state_dict()
        self._served: Mapping[str, int] = {}  # the audits of all parameters
        self._entries: Mapping[str, TensorEntry] = {}  # the bytes they were made from

    @torch.no_grad()
    def prepare(self, update: Update, patched: bool) -> _Codes:
        entries = {entry.name: entry for entry in describe(update.tensors)}
        _expect_bytes(root_digest(tuple(entries.values())), update.policy)
        changed = [name for name, entry in entries.items() if entry != self._entries.get(name)] if patched else None
        parts = dict(placed_parts(self._parameters, update.tensors, changed))
        audits = {}
        for name, each in parts.items():
            values = torch.empty_like(self._parameters[name]).copy_(
                dequantise(name, each)
            )  # computed again in the pause
            audits[name] = audit(values, served_type(name))
        return _Codes(parts, audits, entries)

    @torch.no_grad()
    def load(self, update: Update, patched: bool, prepared: _Codes) -> None:
        for name, parts in prepared.parts.items():
            self._parameters[name].copy_(dequantise(name, parts))
        expected = {**(self._served if patched else {}), **prepared.audits}
        if self._audits() != expected:  # a parameter is damaged
            load_host(self._model, update.tensors)
            _expect_parameters(device_digest(self._model, self._model.form), update.policy)
            expected = self._audits()
        self._served, self._entries = expected, prepared.entries

    def _audits(self) -> dict[str, int]:
        found = audit_many([(parameter, served_type(name)) for name, parameter in self._parameters.items()])
        return dict(zip(self._parameters, found, strict=True))


def _expect_bytes(digest: str, policy: PolicyRef) -> None:
    """Called before anything is written."""
    if digest != policy.digest:
        raise WeightsError(
            f"{policy.line}@{policy.number}: the bytes that arrived do not have digest {policy.digest}",
            hint="the previous version is served meanwhile; `rollmill weights verify` checks what is stored",
        )


def _expect_parameters(digest: str, policy: PolicyRef) -> None:
    if digest != policy.digest:
        raise WeightsError(
            f"{policy.line}@{policy.number}: the parameters do not have digest {policy.digest}",
            hint="nothing is served until weights that match arrive; `rollmill weights verify` checks them",
        )
