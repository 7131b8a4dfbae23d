"""AdamW. On CUDA it updates all its parameters, masters, moments and served values, in one launch (fused_adamw.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rollmill.models.host_tensors import DTYPES
from rollmill.training.config import OptimizerConfig
from rollmill.training.optimizers.update_rule import Parameters, UpdateRule

if TYPE_CHECKING:
    from rollmill.training.optimizers.fused_adamw import FusedAdamW


class AdamW(UpdateRule):
    KINDS = ("mean", "square")

    def __init__(self, model: nn.Module, names: Sequence[str], parameters: Parameters, config: OptimizerConfig) -> None:
        super().__init__(model, names, parameters, config)
        self._means, self._squares = (self.moments[kind] for kind in self.KINDS)
        self._fused = self._fuse(parameters) if parameters.fused and names else None
        if self._fused is not None:
            self.checks_norm = True
            self.serves = [name for name in names if name not in parameters.coded]

    def _fuse(self, parameters: Parameters) -> FusedAdamW:
        from rollmill.training.optimizers.fused_adamw import FusedAdamW, Group

        named = (self._masters, self._means, self._squares, parameters.served)
        groups = [Group(*(tensors[name].detach() for tensors in named)) for name in self.names]
        decays = [self._config.weight_decay if group.master.ndim > 1 else 0.0 for group in groups]
        unserved = [name in parameters.coded for name in self.names] if parameters.coded else []
        return FusedAdamW(groups, decays, DTYPES.get(parameters.form, torch.bfloat16), unserved)

    def update(self, gradients: Mapping[str, Tensor], norm: Tensor, lr: float, updates: int) -> None:
        if self._fused is not None:
            dials = (*self._config.betas, self._config.eps, self._config.max_grad_norm)
            self._fused.step([gradients[name] for name in self.names], norm, lr, updates, dials)
            return
        scale, (beta_mean, beta_square) = self.clip(norm), self._config.betas
        for name, master in self._masters.items():
            gradient, mean, square = gradients[name].float().mul_(scale), self._means[name], self._squares[name]
            mean.lerp_(gradient, 1 - beta_mean)
            square.mul_(beta_square).addcmul_(gradient, gradient, value=1 - beta_square)
            if master.ndim > 1:
                master.mul_(1 - lr * self._config.weight_decay)
            master.addcdiv_(mean, self._spread(square, updates), value=-lr / (1 - beta_mean**updates))

    def take_back(self, lr: float, kept: float, keep: float, updates: int) -> None:
        """The update follows from the moments."""
        step = lr * (kept - keep) / (1 - self._config.betas[0] ** updates)
        for name, square in self._squares.items():
            self._masters[name].addcdiv_(self._means[name], self._spread(square, updates), value=step)

    def _spread(self, square: Tensor, updates: int) -> Tensor:
        """What the mean of the gradient is divided by."""
        return square.sqrt().div_(math.sqrt(1 - self._config.betas[1] ** updates)).add_(self._config.eps)
