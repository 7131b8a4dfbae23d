"""AdamW on fp32 masters. The model itself holds the served values: masters rounded to the form that is published.

So the trainer computes its log-probs with exactly the weights the engines have, and an update too small to move a
rounded weight is not lost but gathers in the master.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rollmill.errors import TrainingError
from rollmill.models.host import round_to_form_
from rollmill.training.config import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """Of step `step` (from 1) in a run of `steps`: up in a line over the warm-up, then down to `final_fraction`."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    if config.decay == "constant":
        return config.lr
    progress = min(1.0, (step - config.warmup_steps) / max(1, steps - config.warmup_steps))
    if config.decay == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return config.lr * (1 - (1 - config.final_fraction) * progress)


@dataclass(frozen=True)
class Update:
    grad_norm: float  # before clipping
    lr: float
    applied: bool  # False: nothing changed, because the gradient was not finite or there was none

    def figures(self) -> dict[str, float | bool | None]:
        """For events; JSON has no NaN."""
        finite = math.isfinite(self.grad_norm)
        return {"grad_norm": self.grad_norm if finite else None, "lr": self.lr, "applied": self.applied}


class MasterOptimizer:
    """Takes the model's parameters as masters and rounds the model to `form`."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, form: str) -> None:
        self._config = config
        self._form = form
        self._served = dict(model.named_parameters())
        self._masters = {name: served.detach().clone() for name, served in self._served.items()}
        self._means = {name: torch.zeros_like(master) for name, master in self._masters.items()}
        self._squares = {name: torch.zeros_like(master) for name, master in self._masters.items()}
        self._updates = 0
        self._serve()

    @torch.no_grad()
    def update(self, lr: float) -> Update:
        """One AdamW step with the gradients the model holds, which are consumed."""
        gradients = {name: served.grad for name, served in self._served.items() if served.grad is not None}
        for served in self._served.values():
            served.grad = None
        if not gradients:
            return Update(0.0, lr, applied=False)  # zeros would still move the weights, by momentum
        norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
        if not math.isfinite(norm):
            return Update(norm, lr, applied=False)
        scale = min(1.0, self._config.max_grad_norm / max(norm, 1e-12))
        self._updates += 1
        for name, master in self._masters.items():
            gradient = gradients.get(name)
            self._step(name, torch.zeros_like(master) if gradient is None else gradient.mul_(scale), lr)
        self._serve()
        return Update(norm, lr, applied=True)

    def _step(self, name: str, gradient: Tensor, lr: float) -> None:
        master, mean, square = self._masters[name], self._means[name], self._squares[name]
        beta_mean, beta_square = self._config.betas
        mean.lerp_(gradient, 1 - beta_mean)
        square.mul_(beta_square).addcmul_(gradient, gradient, value=1 - beta_square)
        spread = square.sqrt().div_(math.sqrt(1 - beta_square**self._updates)).add_(self._config.eps)
        if master.ndim > 1:
            master.mul_(1 - lr * self._config.weight_decay)
        master.addcdiv_(mean, spread, value=-lr / (1 - beta_mean**self._updates))

    @torch.no_grad()
    def _serve(self) -> None:
        for name, master in self._masters.items():
            self._served[name].copy_(master)
        round_to_form_(self._served.values(), self._form)

    def state(self) -> dict[str, Tensor]:
        """Everything needed to go on bit for bit: `master.NAME`, `mean.NAME`, `square.NAME`, and `updates`."""
        groups = {"master": self._masters, "mean": self._means, "square": self._squares}
        tensors = {f"{kind}.{name}": tensor for kind, group in groups.items() for name, tensor in group.items()}
        return {**tensors, "updates": torch.tensor(self._updates)}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        own = self.state()
        different = {name for name in own.keys() | tensors.keys() if _shape(own, name) != _shape(tensors, name)}
        if different:
            raise TrainingError(
                f"the checkpoint is of another model: {', '.join(sorted(different)[:3])} … differ",
                hint="go on with the [model] it was made with, or give this one another line",
            )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        self._updates = int(tensors["updates"])
        self._serve()


def _shape(tensors: Mapping[str, Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None
