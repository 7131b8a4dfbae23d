"""UpdateRule: how one optimizer moves the parameters that it is given.

MasterOptimizer keeps the masters, adds up and clips gradients, rounds the model to its form, and saves everything. A
rule has what is its own: which parameters it moves, its moments, and one update. A new optimizer is a class that
derives from this one, with a name in `RULES` (master_optimizer.py) and in `kind` of the settings.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from rollmill.training.config import OptimizerConfig
from rollmill.training.parallelism import ParameterRows


@dataclass(frozen=True)
class Parameters:
    """The parameters of a model, this rank's rows of each, by name."""

    masters: Mapping[str, Tensor]  # FP32
    served: Mapping[str, Tensor]  # the model's own: masters rounded to `form`
    coded: Collection[str]  # whose served values are those of codes: no rule writes them
    form: str
    rows: ParameterRows
    fused: bool  # whether all of them are on a device whose kernels update a whole model at once


class UpdateRule(ABC):
    KINDS: ClassVar[tuple[str, ...]]  # names of its moments, one FP32 tensor per parameter each
    checks_norm = False  # whether its update changes nothing, by itself, where the norm is not finite
    serves: Collection[str] = ()  # the parameters whose served values its update writes, already rounded

    @classmethod
    def moves(cls, model: nn.Module) -> Collection[str]:
        """The parameters it is made for. AdamW moves the others."""
        return [name for name, _ in model.named_parameters()]

    def __init__(self, model: nn.Module, names: Sequence[str], parameters: Parameters, config: OptimizerConfig) -> None:
        """`names`: the parameters to move."""
        self.names, self._config = names, config
        self._masters = {name: parameters.masters[name] for name in names}
        self.moments = {
            kind: {name: torch.zeros_like(master) for name, master in self._masters.items()} for kind in self.KINDS
        }

    @abstractmethod
    def update(self, gradients: Mapping[str, Tensor], norm: Tensor, lr: float, updates: int) -> None:
        """Update `updates` (from 1) of masters and moments. It may overwrite the gradients, which are as the passes
        gave them: `norm` is that of the whole model. Collective."""

    @abstractmethod
    def take_back(self, lr: float, kept: float, keep: float, updates: int) -> None:
        """Reduce the last update of the masters from the share `kept` to the share `keep`. The moments stay."""

    def remember(self, revocable: bool) -> None:
        """Called before each update. `revocable`: `take_back` may follow it."""

    def clip(self, norm: Tensor) -> float:
        """What to multiply gradients with. Waits for the device."""
        return min(1.0, self._config.max_grad_norm / max(float(norm), 1e-12))
