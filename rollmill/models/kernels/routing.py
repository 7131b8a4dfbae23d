"""From a router's logits to scores, the best experts, and the gate weights of the chosen experts.

On CUDA each is one Triton pass (routing_triton); elsewhere they are torch operations.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from rollmill.models.kernels.call import call
from rollmill.models.kernels.elementwise import sigmoid
from rollmill.models.kernels.fused import fuses


class _Choose(Function):
    @staticmethod
    def forward(ctx: Any, logits_NE: Tensor, bias_E: Tensor | None, k: int, softmax: bool) -> tuple[Tensor, Tensor]:
        from rollmill.models.kernels.routing_triton import choose

        scores_NE, live_Nk = choose(logits_NE, bias_E, k, softmax=softmax)
        ctx.save_for_backward(scores_NE)
        ctx.softmax = softmax
        ctx.mark_non_differentiable(live_Nk)
        ctx.set_materialize_grads(False)
        return scores_NE, live_Nk

    @staticmethod
    def backward(ctx: Any, grad_NE: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        from rollmill.models.kernels.routing_triton import logit_slopes

        (scores_NE,) = ctx.saved_tensors
        return None if grad_NE is None else logit_slopes(scores_NE, grad_NE, softmax=ctx.softmax), None, None, None


def choose_experts(logits_NE: Tensor, bias_E: Tensor | None, k: int, *, softmax: bool) -> tuple[Tensor, Tensor]:
    """Returns (scores with gradient, int64 [N, k]: the best experts by score + bias, best first)."""
    if fuses(logits_NE):
        return call(_Choose, logits_NE, bias_E, k, softmax)  # type: ignore[return-value]
    scores_NE = score(logits_NE, softmax=softmax)
    ranks_NE = scores_NE.detach() if bias_E is None else scores_NE.detach() + bias_E
    return scores_NE, ranks_NE.topk(k, dim=-1).indices


def score(logits_NE: Tensor, *, softmax: bool) -> Tensor:
    return logits_NE.softmax(-1) if softmax else sigmoid(logits_NE)


class _Weigh(Function):
    @staticmethod
    def forward(ctx: Any, scores_NE: Tensor, chosen_Nk: Tensor, scale: float, normalised: bool) -> Tensor:
        from rollmill.models.kernels.routing_triton import weigh

        ctx.save_for_backward(scores_NE, chosen_Nk)
        ctx.scale, ctx.normalised = scale, normalised
        return weigh(scores_NE, chosen_Nk, scale, normalised=normalised)

    @staticmethod
    def backward(ctx: Any, grad_Nk: Tensor) -> tuple[Tensor | None, ...]:
        from rollmill.models.kernels.routing_triton import score_slopes

        scores_NE, chosen_Nk = ctx.saved_tensors
        grad_NE = score_slopes(scores_NE, chosen_Nk, grad_Nk, ctx.scale, normalised=ctx.normalised)
        return grad_NE, None, None, None


def gate_weights(scores_NE: Tensor, chosen_Nk: Tensor, scale: float, *, normalised: bool) -> Tensor:
    """[N, k]: the scores of the chosen experts, divided by their sum if `normalised`, times `scale`."""
    if fuses(scores_NE):
        return call(_Weigh, scores_NE, chosen_Nk, scale, normalised)
    weights_Nk = scores_NE.gather(1, chosen_Nk)
    if normalised:
        # in top-k order: the order of `sum` depends on the number of rows
        weights_Nk = weights_Nk / functools.reduce(torch.add, weights_Nk.unbind(1)).unsqueeze(1)
    return weights_Nk if scale == 1.0 else weights_Nk * scale
