"""An optimizer on FP32 masters. The model itself holds the served values: masters rounded to the published form.

So the trainer computes log-probs with exactly the weights that the engines have, and an update too small to change a
rounded weight is not lost: it adds up in the master. How masters move is an UpdateRule (update_rule.py).

Each rank updates the rows it holds (ParameterRows of training/parallelism.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rollmill.errors import TrainingError
from rollmill.models.adapters import SCALE, trained
from rollmill.models.kernels.forms import is_quantised
from rollmill.models.kernels.fused import fuses
from rollmill.models.quantize import quantises
from rollmill.training.config import OptimizerConfig
from rollmill.training.optimizers.adamw import AdamW
from rollmill.training.optimizers.muon import Muon
from rollmill.training.optimizers.update_rule import Parameters, UpdateRule
from rollmill.training.parallelism import ParameterRows
from rollmill.training.single import SINGLE

RULES: Mapping[str, type[UpdateRule]] = {"adamw": AdamW, "muon": Muon}


def rules_of(model: nn.Module, config: OptimizerConfig) -> dict[type[UpdateRule], list[str]]:
    """The names of the parameters that each rule moves: AdamW those that the chosen one is not made for."""
    chosen = RULES[config.kind]
    moved = set(chosen.moves(model))
    names: dict[type[UpdateRule], list[str]] = {chosen: [], AdamW: []}
    for name in trained(model):
        names[chosen if name in moved else AdamW].append(name)
    return names


@dataclass(frozen=True)
class Update:
    grad_norm: float  # before clipping
    lr: float
    applied: bool  # False: nothing changed, because the gradient was not finite or there was none
    kept: float = 1.0  # the share of the update that the step guard left

    @property
    def why_unchanged(self) -> str:
        """If it was not applied."""
        return "there was nothing to learn from" if math.isfinite(self.grad_norm) else "its gradient was not finite"

    def figures(self) -> dict[str, float | bool | None]:
        """For events; JSON has no NaN."""
        finite = math.isfinite(self.grad_norm)
        cut = {} if self.kept == 1 else {"update_kept": self.kept}
        return {"grad_norm": self.grad_norm if finite else None, "lr": self.lr, "applied": self.applied, **cut}


class MasterOptimizer:
    """Takes the model's parameters as masters and rounds the model to `form`."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        form: str,
        state: Mapping[str, Tensor] | None = None,
        rows: ParameterRows = SINGLE.rows,
    ) -> None:
        """With a `state` to go on from, the parameters need not be initialised."""
        self._form, self._rows = form, rows
        self._parameters = trained(model)
        self._served = {name: rows.local(parameter.detach()) for name, parameter in self._parameters.items()}
        self._masters = {name: served.to(torch.float32, copy=True) for name, served in self._served.items()}
        coded = {name for name, served in self._served.items() if is_quantised(form) and quantises(name, served)}
        fused = all(fuses(served) for served in self._served.values())
        known = Parameters(self._masters, self._served, coded, form, rows, fused)
        self._rules = [rule(model, names, known, config) for rule, names in rules_of(model, config).items()]
        serves = {name for rule in self._rules for name in rule.serves}
        self._unserved = [name for name in self._masters if name not in serves]
        self._gradients = _FusedGradients() if fused else _Gradients()
        self._sums: dict[str, Tensor] = {}  # FP32 sums of gradients, if a step has several micro-batches
        self._updates = 0
        if state is None:
            self._serve(self._masters)
        else:
            self.load(state)

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the model's gradients to FP32 sums. To be called after every micro-batch, if a step has more than one: a
        sum in bf16 would lose the later ones."""
        self._gradients.add(self._sums, self._take_gradients())

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

        `revocable`: `take_back` may follow. The norm is read last, if the rules do not need it on the host: then all
        work is queued before.
        """
        for rule in self._rules:
            rule.remember(revocable)
        if self._sums:
            self.accumulate()
        gradients = self._sums or self._take_gradients()
        self._sums = {}
        if not gradients:
            return Update(0.0, lr, applied=False)  # with zeros, momentum would still move the weights
        norm = self._gradients.norm(list(gradients.values()), self._rows)
        if not all(rule.checks_norm for rule in self._rules) and not math.isfinite(float(norm)):
            return Update(float(norm), lr, applied=False)
        dtype = next(iter(gradients.values())).dtype  # sums are FP32 whatever the model is
        absent = self._served.keys() - gradients.keys()
        gradients |= {name: torch.zeros_like(self._served[name], dtype=dtype) for name in absent}
        for rule in self._rules:
            rule.update({name: gradients[name] for name in rule.names}, norm, lr, self._updates + 1)
        self._serve(self._unserved)
        applied = math.isfinite(float(norm))
        self._updates += applied
        return Update(float(norm), lr, applied=applied)

    @torch.no_grad()
    def take_back(self, lr: float, kept: float, keep: float) -> None:
        """Reduce the last update from the share `kept` to the share `keep`. The moments stay. Collective."""
        for rule in self._rules:
            rule.take_back(lr, kept, keep, self._updates)
        self._serve(self._masters)

    @torch.no_grad()
    def _serve(self, names: Iterable[str]) -> None:
        """Round the masters of these parameters into the model. Quantised codes are made from the masters: values that
        were rounded to the model's type first could get other codes."""
        self._rows.round_into(((name, self._masters[name], self._served[name]) for name in names), self._form)

    @torch.no_grad()
    def dither(self, seed: int, coded: bool = True) -> None:
        """The masters are served values: move each to a place inside its quantum. What is served stays the same.
        `coded`: also those of matrices with codes; otherwise these are finer than their codes. Collective."""
        for name, master in self._masters.items():
            if not coded and is_quantised(self._form) and quantises(name, master):
                continue
            master.copy_(self._rows.dithered(name, master, self._form, seed))
        self._serve(self._masters)

    def state(self) -> dict[str, Tensor]:
        """Everything needed to continue bit for bit: `master.NAME`, the moments of the rules (`mean.NAME`,
        `square.NAME`) and `updates`. Before the first update there are no moments."""
        return self._state(self._updates)

    def _state(self, updates: int) -> dict[str, Tensor]:
        """The state after `updates` updates."""
        groups: dict[str, Mapping[str, Tensor]] = {"master": self._masters}
        for rule in self._rules if updates else ():
            for kind, moments in rule.moments.items():
                groups[kind] = {**groups.get(kind, {}), **moments}
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
            for moments in (each for rule in self._rules for each in rule.moments.values()):
                for moment in moments.values():
                    moment.zero_()
        self._updates = updates
        self._serve(self._masters)


def goes_on(model: nn.Module, state: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> bool:
    """Whether a checkpoint has the masters of what this model trains. With another adapter, or with one on one side
    only, it has not."""
    own = model.state_dict()
    if SCALE not in own.keys() | buffers.keys():
        return True
    masters = {name.removeprefix("master."): each.shape for name, each in state.items() if name.startswith("master.")}
    same = {name: each.shape for name, each in trained(model).items()} == masters
    return same and own.keys() >= buffers.keys() and torch.equal(own[SCALE].cpu(), buffers[SCALE].cpu())


def inherited(model: nn.Module, config: OptimizerConfig, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What a new line takes over of its parent's optimizer: the masters, and with `keep_moments` all, if it is of the
    same kind."""
    masters = {name: tensor for name, tensor in state.items() if name.startswith("master.")}
    moments = {
        f"{kind}.{name}" for rule, names in rules_of(model, config).items() for name in names for kind in rule.KINDS
    }
    if config.keep_moments and state.keys() == masters.keys() | moments | {"updates"}:
        return state
    return {**masters, "updates": torch.tensor(0)}


class _Gradients:
    def add(self, sums: dict[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        """Add to FP32 sums; a name that is new begins with zeros."""
        for name, gradient in gradients.items():
            if name in sums:
                sums[name].add_(gradient)
            else:
                sums[name] = gradient.to(torch.float32, copy=True)  # a CUDA graph may own the gradient

    def norm(self, gradients: Collection[Tensor], rows: ParameterRows) -> Tensor:
        """Of the whole model. Collective."""
        return rows.whole_norm(torch.stack([gradient.norm() for gradient in gradients]).norm())


class _FusedGradients(_Gradients):
    """The same in one launch each; the norm stays on the device."""

    def __init__(self) -> None:
        from rollmill.training.optimizers.fused_adamw import GradientNorm, GradientSums

        self._sums, self._norm = GradientSums(), GradientNorm()

    def add(self, sums: dict[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
        self._sums.add(sums, gradients)

    def norm(self, gradients: Collection[Tensor], rows: ParameterRows) -> Tensor:
        own = self._norm(list(gradients))
        return rows.whole_norm(own).to(own)


def _shape(tensors: Mapping[str, Tensor], name: str) -> torch.Size | None:
    return tensors[name].shape if name in tensors else None
