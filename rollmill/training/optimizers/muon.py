"""Muon: a matrix moves by the orthogonal matrix nearest to its momentum, so every direction moves by the same amount.

Used for the matrices inside layers: each expert's separately, and each part of a fused matrix (q, k, v; gate, up)
separately, since the parts are different maps that only share memory. Embedding, head, router and vectors use AdamW. An
orthogonal m×n matrix has entries of RMS max(m, n)^−½. Scaled by 0.2 · max(m, n)^½, an update is as large as AdamW's
usually are, so both share one learning rate and weight decay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rollmill.models.decoder import Layer
from rollmill.models.moe import MLP, MixtureOfExperts
from rollmill.training.config import OptimizerConfig
from rollmill.training.optimizers.update_rule import Parameters, UpdateRule
from rollmill.training.parallelism import Gather

# Coefficients of the quintic a·x + b·x³ + c·x⁵ that is applied to the singular values. It is steep at 0: five rounds
# bring all but the smallest to between 0.7 and 1.2. Exactly 1 is not needed.
_A, _B, _C = 3.4445, -4.7750, 2.0315
_ROUNDS = 5
_RMS = 0.2


class Part(NamedTuple):
    """A matrix within a parameter: [start, start + size) along `dim` (of [out, in] or [experts, in, out])."""

    dim: int
    start: int
    size: int


def orthogonalise(matrix: Tensor) -> Tensor:
    """Approximately U·Vᵀ, for a matrix (or each of a stack) with the decomposition U·S·Vᵀ, by Newton-Schulz."""
    # bf16 is precise enough: it changes singular values far less than five rounds leave them spread
    x = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)  # singular values are at most 1 now
    for _ in range(_ROUNDS):
        square = x @ x.mT
        x = _A * x + (_B * square + _C * square @ square) @ x
    return x.mT if tall else x


def matrix_parts(model: nn.Module) -> dict[str, Sequence[Part]]:
    """The parameters that Muon updates, by name, and the matrices in each."""
    parts: dict[str, Sequence[Part]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            if parameter.ndim < 2 or not _within_layer(prefix, model) or prefix.endswith("router"):
                continue
            parts[name] = _parts(module, name.rpartition(".")[2], parameter)
    return parts


def _within_layer(prefix: str, model: nn.Module) -> bool:
    layers = [name for name, module in model.named_modules() if isinstance(module, Layer)]
    return any(prefix == name or prefix.startswith(name + ".") for name in layers)


def _parts(module: nn.Module, name: str, parameter: Tensor) -> Sequence[Part]:
    dim = 2 if parameter.ndim == 3 else 0  # experts are [in, out]
    size = parameter.shape[dim]
    if isinstance(module, Layer) and name == "qkv":
        q, k, v = module.qkv_rows
        return [Part(0, 0, q), Part(0, q, k), Part(0, q + k, v)]
    if isinstance(module, MLP | MixtureOfExperts) and name == "gate_up":
        return [Part(dim, 0, size // 2), Part(dim, size // 2, size // 2)]
    return [Part(dim, 0, size)]


@torch.no_grad()
def muon_step(
    master: Tensor,
    mean: Tensor,
    gradient: Tensor,
    parts: Sequence[Part],
    *,
    lr: float,
    momentum: float,
    decay: float,
    gather: Gather | None = None,
) -> None:
    """One update of a master and its momentum, in place.

    With `gather` they are rows of a matrix. Each rank then gathers and orthogonalises the whole matrix and uses its own
    rows: that costs less than waiting for another rank to do it.
    """
    mean.lerp_(gradient, 1 - momentum)
    ahead = gradient.lerp(mean, momentum)  # Nesterov: where the momentum will be
    if gather is not None:
        ahead = gather.rows(ahead)
    master.mul_(1 - lr * decay)
    for dim, start, size in parts:
        direction = orthogonalise(ahead.narrow(dim, start, size))
        scale = _RMS * max(direction.shape[-2:]) ** 0.5
        if gather is not None:
            first, last = max(start, gather.first), min(start + size, gather.first + len(master))
            direction = direction[max(first - start, 0) : max(last - start, 0)]
            start, size = first - gather.first, max(last - first, 0)
        if size:
            master.narrow(dim, start, size).add_(direction.to(master.dtype), alpha=-lr * scale)


class Muon(UpdateRule):
    """For matrices inside layers."""

    KINDS = ("mean",)

    @classmethod
    def moves(cls, model: nn.Module) -> Collection[str]:
        return matrix_parts(model)

    def __init__(self, model: nn.Module, names: Sequence[str], parameters: Parameters, config: OptimizerConfig) -> None:
        super().__init__(model, names, parameters, config)
        self._parts, self._rows = matrix_parts(model), parameters.rows
        self._before: dict[str, Tensor] = {}  # masters before the last update, if it can be taken back

    def remember(self, revocable: bool) -> None:
        self._before = {name: master.clone() for name, master in self._masters.items()} if revocable else {}

    def update(self, gradients: Mapping[str, Tensor], norm: Tensor, lr: float, updates: int) -> None:
        scale = self.clip(norm)
        for name, master in self._masters.items():
            muon_step(
                master,
                self.moments["mean"][name],
                gradients[name].float().mul_(scale),
                self._parts[name],
                lr=lr,
                momentum=self._config.momentum,
                decay=self._config.weight_decay,
                gather=self._rows.gather_of(name),
            )

    def take_back(self, lr: float, kept: float, keep: float, updates: int) -> None:
        for name, before in self._before.items():
            self._masters[name].lerp_(before, 1 - keep / kept)
