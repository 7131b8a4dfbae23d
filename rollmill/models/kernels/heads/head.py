"""Log-probs, entropies and cross-entropy of target tokens, without holding all logits in memory.

The head's product is computed in chunks of rows, with FP32 accumulation and FP32 logits. Rounding logits to bf16 would
move log-probs by 1e-2. There are two ways:

    logprobs      for any loss of log-probs and entropies: the backward pass computes the logits again
    next_token    for Σ weight · (−log-prob) with known weights: the forward pass computes the gradients too, so logits
                  are computed once; on Hopper the product writes their exponentials instead (exp_logits_triton)

Gradients of logits are in the model's type, and in FP8 for a model in that form (head_gradients).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from rollmill.models.kernels.exact import fp32_product
from rollmill.models.kernels.heads.head_gradients import CodedGradients, Gradients, cut, gradients_of
from rollmill.models.kernels.heads.head_gradients import fp32_product as plain_product
from rollmill.models.triton import has_triton

PIECE_ELEMENTS = 101_000_000  # logits per chunk: 400 MB, enough rows for the products to run near full speed
# With gradients: logits in chunks of half this size, and the gradients of PARTS such chunks in one product, at most
# 600 MB together. The product adds to the FP32 sum of the weight's gradient, which should be read and written rarely.
PARTS = 4
FEWEST_ROWS = 4096  # in a chunk of `next_token` on Hopper: with fewer, that reading and writing takes longer


def head_logprobs(
    hidden_MW: Tensor,
    weight_VW: Tensor,
    targets_M: Tensor,
    temperatures_M: Tensor | None = None,
    exact: bool = False,
    form: str = "bf16",
) -> tuple[Tensor, Tensor]:
    """Returns (log-probs of the targets, entropies), FP32 with gradients. Logits are divided by the temperatures.
    `exact`: see models.kernels.exact. `form`: of the model; only the gradients depend on it."""
    return _Logprobs.apply(hidden_MW, weight_VW, targets_M, temperatures_M, exact, form)


def head_next_token(
    hidden_MW: Tensor, weight_VW: Tensor, targets_M: Tensor, weights_M: Tensor, form: str = "bf16"
) -> Tensor:
    """Σ weight · (−log-prob of the target): an FP32 scalar with gradients for hidden and head."""
    if not torch.is_grad_enabled():
        logprobs_M, _ = head_logprobs(hidden_MW, weight_VW, targets_M)
        return -(logprobs_M * weights_M).sum()
    return _NextToken.apply(hidden_MW, weight_VW, targets_M, weights_M, form)


def _logits(hidden_MW: Tensor, weight_VW: Tensor, temperatures_M: Tensor | None, exact: bool = False) -> Tensor:
    if exact:
        logits_MV = fp32_product(hidden_MW, weight_VW.t())
    else:
        logits_MV = plain_product(hidden_MW, weight_VW.t())
    return logits_MV if temperatures_M is None else logits_MV.div_(temperatures_M[:, None])


def _add_all(gradients: Gradients | CodedGradients, vocabulary: int, fill: Callable[[slice, Tensor], None]) -> None:
    """`fill(rows, grad)` writes the gradient of the logits of these rows, in the model's type."""
    for chunk in gradients.chunks(PARTS * PIECE_ELEMENTS // 2):
        grad_MV = gradients.hidden.new_empty(chunk.stop - chunk.start, vocabulary)
        for part in cut(chunk, vocabulary, PIECE_ELEMENTS // 2):
            fill(part, grad_MV[part.start - chunk.start : part.stop - chunk.start])
        gradients.add(chunk, grad_MV)
        del grad_MV  # the next chunk reuses its memory


class _Logprobs(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MW: Tensor,
        weight_VW: Tensor,
        targets_M: Tensor,
        temperatures_M: Tensor | None,
        exact: bool,
        form: str,
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty((3, len(targets_M)), dtype=torch.float32, device=hidden_MW.device)
        for chunk in cut(slice(0, len(targets_M)), len(weight_VW), PIECE_ELEMENTS):
            logits_MV = _logits(hidden_MW[chunk], weight_VW, _of(temperatures_M, chunk), exact)
            _measure(logits_MV, targets_M[chunk], out[:, chunk])
        logprobs_M, entropies_M, sums_M = out.unbind()
        ctx.save_for_backward(hidden_MW, weight_VW, targets_M, temperatures_M, sums_M, entropies_M)
        ctx.form = form
        ctx.set_materialize_grads(False)  # an entropy bonus is rare
        return logprobs_M, entropies_M

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor | None, grad_entropies_M: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_MW, weight_VW, targets_M, temperatures_M, sums_M, entropies_M = ctx.saved_tensors
        if grad_M is None and grad_entropies_M is None:
            return None, None, None, None, None, None
        slopes_M = torch.zeros_like(sums_M) if grad_M is None else grad_M

        def fill(part: slice, grad_MV: Tensor) -> None:
            temperatures = _of(temperatures_M, part)
            grads = (slopes_M[part], _of(grad_entropies_M, part))
            if temperatures is not None:  # of the logits before they were divided
                grads = (grads[0] / temperatures, None if grads[1] is None else grads[1] / temperatures)
            logits_MV = _logits(hidden_MW[part], weight_VW, temperatures)
            _slopes(logits_MV, targets_M[part], sums_M[part], entropies_M[part], *grads, grad_MV)

        gradients = gradients_of(hidden_MW, weight_VW, ctx.form, ctx.needs_input_grad[1])
        _add_all(gradients, len(weight_VW), fill)
        return *gradients.finish(), None, None, None, None


class _NextToken(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_MW: Tensor, weight_VW: Tensor, targets_M: Tensor, weights_M: Tensor, form: str
    ) -> Tensor:
        logprobs_M = torch.empty(len(targets_M), dtype=torch.float32, device=hidden_MW.device)
        gradients = gradients_of(hidden_MW, weight_VW, form, ctx.needs_input_grad[1])
        if _makes_powers(hidden_MW, weight_VW):
            from rollmill.models.kernels.heads.exp_logits_triton import next_token_powers

            for chunk in gradients.chunks(max(PARTS * PIECE_ELEMENTS // 2, FEWEST_ROWS * len(weight_VW))):
                given = (hidden_MW[chunk], weight_VW, targets_M[chunk], weights_M[chunk], logprobs_M[chunk])
                gradients.add_powers(chunk, *next_token_powers(*given))
        else:

            def fill(part: slice, grad_MV: Tensor) -> None:
                logits_MV = _logits(hidden_MW[part], weight_VW, None)
                _next_token_slopes(logits_MV, targets_M[part], weights_M[part], logprobs_M[part], grad_MV)

            _add_all(gradients, len(weight_VW), fill)
        ctx.gradients = gradients
        return -(logprobs_M * weights_M).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None  # not kept while the layers are differentiated: it is large
        return *gradients.finish(grad), None, None, None


def _makes_powers(hidden_MW: Tensor, weight_VW: Tensor) -> bool:
    if not has_triton(hidden_MW.device):
        return False
    from rollmill.models.kernels.heads.exp_logits_triton import fits

    return fits(hidden_MW, weight_VW)


def _of(values_M: Tensor | None, chunk: slice) -> Tensor | None:
    return None if values_M is None else values_M[chunk]


def _measure(logits_MV: Tensor, targets_M: Tensor, out_3M: Tensor) -> None:
    """Writes (log-prob of the target, entropy, log of the sum of exponentials). Overwrites the logits."""
    if has_triton(logits_MV.device):
        from rollmill.models.kernels.heads.head_triton import measure

        return measure(logits_MV, targets_M, out_3M)
    logprobs_MV = log_softmax(logits_MV)
    out_3M[0] = logprobs_MV.gather(1, targets_M[:, None]).squeeze(1)
    out_3M[2] = logits_MV.amax(-1) - logprobs_MV.amax(-1)
    out_3M[1] = -torch.exp(logprobs_MV, out=logits_MV).mul_(logprobs_MV).nansum(-1)  # 0 · −inf is 0 here


def log_softmax(logits_MV: Tensor) -> Tensor:
    """Log-probs of all tokens, FP32. Engine and trainer both use it: another way would have other bits."""
    if not has_triton(logits_MV.device) or logits_MV.dtype != torch.float32:
        return torch.log_softmax(logits_MV, -1)
    from rollmill.models.kernels.heads.head_triton import measure

    out_3M = torch.empty((3, len(logits_MV)), dtype=torch.float32, device=logits_MV.device)
    logits_MV = logits_MV.contiguous()
    measure(logits_MV, torch.zeros(len(logits_MV), dtype=torch.int64, device=logits_MV.device), out_3M)
    return logits_MV - out_3M[2].unsqueeze(1)


def _slopes(
    logits_MV: Tensor,
    targets_M: Tensor,
    sums_M: Tensor,
    entropies_M: Tensor,
    grad_M: Tensor,
    grad_entropies_M: Tensor | None,
    out_MV: Tensor,
) -> None:
    """Writes the gradient of the logits, given the gradients of log-probs and entropies. May overwrite the logits."""
    if has_triton(logits_MV.device):
        from rollmill.models.kernels.heads.head_triton import slopes

        return slopes(logits_MV, targets_M, sums_M, entropies_M, grad_M, grad_entropies_M, out_MV)
    logprobs_MV = logits_MV.sub_(sums_M[:, None])
    probabilities_MV = logprobs_MV.exp()
    grad_MV = probabilities_MV * -grad_M[:, None]
    grad_MV.scatter_add_(1, targets_M[:, None], grad_M[:, None])
    if grad_entropies_M is not None:  # dH/dlogit = −p · (log p + H), and p · log p is 0 where p is
        surprise_MV = logprobs_MV.clamp_(min=-1e4).add_(entropies_M[:, None])
        grad_MV -= probabilities_MV * surprise_MV.mul_(grad_entropies_M[:, None])
    out_MV.copy_(grad_MV)


def _next_token_slopes(
    logits_MV: Tensor, targets_M: Tensor, weights_M: Tensor, logprobs_M: Tensor, out_MV: Tensor
) -> None:
    """Writes the log-probs, and the gradient of Σ weight · (−log-prob) for the logits."""
    if has_triton(logits_MV.device):
        from rollmill.models.kernels.heads.head_triton import next_token_slopes

        return next_token_slopes(logits_MV, targets_M, weights_M, logprobs_M, out_MV)
    sums_M = torch.logsumexp(logits_MV, -1)
    logprobs_M.copy_(logits_MV.gather(1, targets_M[:, None]).squeeze(1) - sums_M)
    _slopes(logits_MV, targets_M, sums_M, sums_M, -weights_M.float(), None, out_MV)
