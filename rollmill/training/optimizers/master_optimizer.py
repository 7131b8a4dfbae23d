"""AdamW or Muon on fp32 masters. The model itself holds the served values: masters rounded to the published form.

So the trainer computes log-probs with exactly the weights that the engines have, and an update too small to change a
rounded weight is not lost: it adds up in the master.

Each rank updates the rows it holds. The gradient's norm and the matrices that Muon orthogonalises need all ranks
(training/parallelism.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rollmill.errors import TrainingError
from rollmill.models.host_tensors import DTYPES, round_to_form_
from rollmill.models.kernels.forms import is_quantised
from rollmill.models.kernels.fused import fuses
from rollmill.models.quantize import quantises
from rollmill.training.config import OptimizerConfig
from rollmill.training.optimizers.muon import matrix_parts, muon_step
from rollmill.training.parallelism import ParameterRows
from rollmill.training.single import SINGLE

if TYPE_CHECKING:
    from rollmill.training.optimizers.fused_adamw import FusedAdamW


def learning_rate(config: OptimizerConfig, step: int, steps: int) -> float:
    """The rate of step `step` (from 1) of `steps`: linear warm-up, then decay to `final_fraction`."""
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
    kept: float = 1.0  # the share of the update that the step guard left

    def figures(self) -> dict[str, float | bool | None]:
        """For events; JSON has no NaN."""
        finite = math.isfinite(self.grad_norm)
        cut = {} if self.kept == 1 else {"update_kept": self.kept}
        return {"grad_norm": self.grad_norm if finite else None, "lr": self.lr, "applied": self.applied, **cut}


class MasterOptimizer:
    """Takes the model's parameters as masters and rounds the model to `form`.

    On CUDA, AdamW of all parameters is one launch (training/optimizers/fused_adamw.py). Muon's matrices have no
    `square`.
    """

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        form: str,
        state: Mapping[str, Tensor] | None = None,
        rows: ParameterRows = SINGLE.rows,
    ) -> None:
        """With a `state` to go on from, the parameters need not be initialised."""
        self._config = config
        self._form = form
        self._rows = rows
        self._parameters = dict(model.named_parameters())
        self._served = {name: rows.local(parameter.detach()) for name, parameter in self._parameters.items()}
        self._masters = {name: served.to(torch.float32, copy=True) for name, served in self._served.items()}
        self._means = {name: torch.zeros_like(master) for name, master in self._masters.items()}
        self._parts = matrix_parts(model) if config.kind == "muon" else {}
        rest = {name: master for name, master in self._masters.items() if name not in self._parts}
        self._squares = {name: torch.zeros_like(master) for name, master in rest.items()}
        # what the fused kernel does not round: codes, and Muon's matrices
        coded = {name for name, served in self._served.items() if is_quantised(form) and quantises(name, served)}
        self._rounded = [name for name in self._served if name in coded or name in self._parts]
        self._sums: dict[str, Tensor] = {}  # FP32 sums of gradients, if a step has several micro-batches
        self._updates = 0
        self._before: dict[str, Tensor] = {}  # Muon's masters before the last update, if it can be taken back
        if state is None:
            self._serve()
        else:
            self.load(state)
        self._fused = self._fuse() if rest and all(fuses(served) for served in self._served.values()) else None

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the model's gradients to FP32 sums. To be called after every micro-batch, if a step has more than one: a
        sum in bf16 would lose the later ones."""
        gradients = self._take_gradients()
        if self._fused is not None:
            return self._fused.sums.add(self._sums, gradients)
        for name, gradient in gradients.items():
            if name in self._sums:
                self._sums[name].add_(gradient)
            else:
                self._sums[name] = gradient.to(torch.float32, copy=True)  # a CUDA graph may own the gradient

    def _take_gradients(self) -> dict[str, Tensor]:
        """This rank's rows of the gradients, taken off the model."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                found[name] = self._rows.local(parameter.grad)
                parameter.grad = None
        return found

    @torch.no_grad()
    def update(self, lr: float, *, revocable: bool = False) -> Update:
        """One update with the gradients that the model holds or has accumulated. It consumes them. Collective.

        `revocable`: `take_back` may follow. AdamW's update follows from its moments; for Muon's, masters are copied.
        """
        self._before = {name: self._masters[name].clone() for name in self._parts} if revocable else {}
        if self._sums:
            self.accumulate()
        gradients = self._sums or self._take_gradients()
        self._sums = {}
        if not gradients:
            return Update(0.0, lr, applied=False)  # with zeros, momentum would still move the weights
        if self._fused is not None:
            return self._update_fused(gradients, lr)
        own_norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
        norm = float(self._rows.whole_norm(own_norm))
        if not math.isfinite(norm):
            return Update(norm, lr, applied=False)
        scale = min(1.0, self._config.max_grad_norm / max(norm, 1e-12))
        self._updates += 1
        for name, master in self._masters.items():
            gradient = gradients.get(name)
            self._step(name, torch.zeros_like(master) if gradient is None else gradient.float().mul_(scale), lr)
        self._serve()
        return Update(norm, lr, applied=True)

    @torch.no_grad()
    def take_back(self, lr: float, kept: float, keep: float) -> None:
        """Reduce the last update from the share `kept` to the share `keep`. The moments stay. Collective."""
        beta_mean, beta_square = self._config.betas
        step = lr * (kept - keep) / (1 - beta_mean**self._updates)
        for name, square in self._squares.items():
            spread = square.sqrt().div_(math.sqrt(1 - beta_square**self._updates)).add_(self._config.eps)
            self._masters[name].addcdiv_(self._means[name], spread, value=step)
        for name, before in self._before.items():
            self._masters[name].lerp_(before, 1 - keep / kept)
        self._serve()

    def _step(self, name: str, gradient: Tensor, lr: float) -> None:
        if name in self._parts:
            return self._step_muon(name, gradient, lr)
        master, mean, square = self._masters[name], self._means[name], self._squares[name]
        beta_mean, beta_square = self._config.betas
        mean.lerp_(gradient, 1 - beta_mean)
        square.mul_(beta_square).addcmul_(gradient, gradient, value=1 - beta_square)
        spread = square.sqrt().div_(math.sqrt(1 - beta_square**self._updates)).add_(self._config.eps)
        if master.ndim > 1:
            master.mul_(1 - lr * self._config.weight_decay)
        master.addcdiv_(mean, spread, value=-lr / (1 - beta_mean**self._updates))

    def _step_muon(self, name: str, gradient: Tensor, lr: float) -> None:
        muon_step(
            self._masters[name],
            self._means[name],
            gradient,
            self._parts[name],
            lr=lr,
            momentum=self._config.momentum,
            decay=self._config.weight_decay,
            gather=self._rows.gather_of(name),
        )

    def _fuse(self) -> FusedAdamW:
        from rollmill.training.optimizers.fused_adamw import FusedAdamW, Group

        named = (self._masters, self._means, self._squares, self._served)
        groups = [Group(*(tensors[name].detach() for tensors in named)) for name in self._squares]
        decays = [self._config.weight_decay if group.master.ndim > 1 else 0.0 for group in groups]
        unserved = [name in self._rounded for name in self._squares] if is_quantised(self._form) else []
        return FusedAdamW(groups, decays, DTYPES.get(self._form, torch.bfloat16), unserved)

    def _update_fused(self, gradients: dict[str, Tensor], lr: float) -> Update:
        """The norm is read last, when all work is queued. The kernel changes nothing if the norm is not finite."""
        assert self._fused is not None
        own_norm = self._fused.norm(list(gradients.values()))
        norm = self._rows.whole_norm(own_norm).to(own_norm)
        if self._parts and not math.isfinite(float(norm)):  # Muon's update has no such check
            return Update(float(norm), lr, applied=False)
        dtype = next(iter(gradients.values())).dtype  # sums are FP32 whatever the model is
        absent = self._served.keys() - gradients.keys()
        gradients |= {name: torch.zeros_like(self._served[name], dtype=dtype) for name in absent}
        dials = (*self._config.betas, self._config.eps, self._config.max_grad_norm)
        self._fused.step([gradients[name] for name in self._squares], norm, lr, self._updates + 1, dials)
        for name in self._parts:
            scale = min(1.0, self._config.max_grad_norm / max(float(norm), 1e-12))
            self._step_muon(name, gradients[name].float().mul_(scale), lr)
            self._served[name].copy_(self._masters[name])
        self._round(self._rounded)
        applied = math.isfinite(float(norm))
        self._updates += applied
        return Update(float(norm), lr, applied=applied)

    @torch.no_grad()
    def _serve(self) -> None:
        for name, master in self._masters.items():
            self._served[name].copy_(master)
        self._round(self._served)

    def _round(self, names: Iterable[str]) -> None:
        """Round the model's copies of these parameters to the form. Quantised codes are made from the masters: values
        that were rounded to the model's type first could get other codes."""
        if not is_quantised(self._form):
            return round_to_form_([(name, self._served[name]) for name in names], self._form)
        self._rows.round_into(((name, self._masters[name], self._served[name]) for name in names), self._form)

    @torch.no_grad()
    def dither(self, seed: int, coded: bool = True) -> None:
        """The masters are served values: move each to a place inside its quantum. What is served stays the same.
        `coded`: also those of matrices with codes; otherwise these are finer than their codes. Collective."""
        for name, master in self._masters.items():
            if not coded and is_quantised(self._form) and quantises(name, master):
                continue
            master.copy_(self._rows.dithered(name, master, self._form, seed))
        self._serve()

    def state(self) -> dict[str, Tensor]:
        """Everything needed to continue bit for bit: `master.NAME`, `mean.NAME`, `square.NAME` and `updates`. Before
        the first update there are no moments."""
        return self._state(self._updates)

    def _state(self, updates: int) -> dict[str, Tensor]:
        """The state after `updates` updates."""
        moments = {"mean": self._means, "square": self._squares} if updates else {}
        groups = {"master": self._masters, **moments}
        tensors = {f"{kind}.{name}": tensor for kind, group in groups.items() for name, tensor in group.items()}
        return {**tensors, "updates": torch.tensor(updates)}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        updates = int(tensors["updates"])
        own = self._state(updates)
        different = {name for name in own.keys() | tensors.keys() if _shape(own, name) != _shape(tensors, name)}
        if different:
            raise TrainingError(
                f"the checkpoint is of another model: {', '.join(sorted(different)[:3])} … differ",
                hint="use the [model] it was made with, or give this model another line",
            )
        for name, tensor in own.items():
            tensor.copy_(tensors[name])
        if not updates:
            for moment in (*self._means.values(), *self._squares.values()):
                moment.zero_()
        self._updates = updates
        self._serve()


def inherited(model: nn.Module, config: OptimizerConfig, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What a new line takes over of its parent's optimizer: the masters, and with `keep_moments` all, if it is of the
    same kind."""
    matrices = matrix_parts(model) if config.kind == "muon" else {}
    squares = {f"square.{name}" for name, _ in model.named_parameters() if name not in matrices}
    if config.keep_moments and {name for name in state if name.startswith("square.")} == squares:
        return state
    masters = {name: tensor for name, tensor in state.items() if name.startswith("master.")}
    return {**masters, "updates": torch.tensor(0)}


def _shape(tensors: Mapping[str, Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None
