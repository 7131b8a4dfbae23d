"""Log-probs, entropies and cross-entropy of target tokens without ever holding the logits.

The head's product is made for some rows at a time, with FP32 accumulation and FP32 logits: never rounded to bf16, which
would move log-probs by 1e-2. Two ways, by when the gradient of a log-prob is known:

    logprobs      any loss of log-probs and entropies: logits are made again in the backward pass
    next_token    Σ weight · (−log-prob), weights known: gradients are made beside the loss, logits once; on Hopper not
                  even that, the product ends in their exponentials (powers_triton)

Gradients of logits are in the model's type, those of the weight are summed over the pieces in FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from rollmill.models.triton import has_triton

PIECE_ELEMENTS = 101_000_000  # logits at a time: 400 MB, enough rows for the products to run near full speed
# Where gradients are made, half as many logits at a time, and so many times their rows in one product of gradients: at
# most 600 MB together. That of the weight is added to an FP32 sum, whose own reading and writing should be rare.
PARTS = 4


def head_logprobs(
    hidden_MW: Tensor, weight_VW: Tensor, targets_M: Tensor, temperatures_M: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(log-probs of the targets, entropies), FP32 with gradients, under logits divided by the temperatures."""
    return _Logprobs.apply(hidden_MW, weight_VW, targets_M, temperatures_M)


def head_next_token(hidden_MW: Tensor, weight_VW: Tensor, targets_M: Tensor, weights_M: Tensor) -> Tensor:
    """Σ weight · (−log-prob of the target): FP32 scalar with gradient to hidden and head."""
    if not torch.is_grad_enabled():
        logprobs_M, _ = head_logprobs(hidden_MW, weight_VW, targets_M)
        return -(logprobs_M * weights_M).sum()
    return _NextToken.apply(hidden_MW, weight_VW, targets_M, weights_M)


def _pieces(rows: slice, vocabulary: int, elements: int) -> Iterator[slice]:
    """As few as there may be, of nearly one size: a short one at the end would leave most of a device idle."""
    count = rows.stop - rows.start
    pieces = -(-count // max(1, elements // vocabulary))
    step = -(-count // max(1, pieces) // 64) * 64
    for start in range(rows.start, rows.stop, max(step, 1)):
        yield slice(start, min(start + step, rows.stop))


def _exact(left: Tensor, right: Tensor) -> Tensor:
    """The product in FP32."""
    if left.is_cuda and left.dtype == right.dtype == torch.bfloat16:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.mm(left.float(), right.float())


def _logits(hidden_MW: Tensor, weight_VW: Tensor, temperatures_M: Tensor | None) -> Tensor:
    logits_MV = _exact(hidden_MW, weight_VW.t())
    return logits_MV if temperatures_M is None else logits_MV.div_(temperatures_M[:, None])


class _Gradients:
    """What the pieces add up to."""

    def __init__(self, hidden_MW: Tensor, weight_VW: Tensor) -> None:
        self._hidden, self._weight = hidden_MW, weight_VW
        self.hidden = torch.empty_like(hidden_MW)
        self._sum = torch.zeros(weight_VW.shape, dtype=torch.float32, device=weight_VW.device)

    def add_all(self, fill: Callable[[slice, Tensor], None]) -> None:
        """`fill(rows, grad)` writes the gradient of the logits of these rows."""
        rows, vocabulary = len(self._hidden), len(self._weight)
        for piece in _pieces(slice(0, rows), vocabulary, PARTS * PIECE_ELEMENTS // 2):
            grad_MV = self._hidden.new_empty(piece.stop - piece.start, vocabulary)
            for part in _pieces(piece, vocabulary, PIECE_ELEMENTS // 2):
                fill(part, grad_MV[part.start - piece.start : part.stop - piece.start])
            self._add(piece, grad_MV)
            del grad_MV  # the next one takes its memory

    def add_powers(self, piece: slice, powers_MV: Tensor, scales_M: Tensor) -> None:
        """The gradient of these rows' logits is that of the powers times a factor of its row."""
        scaled_MW = torch.mul(self._hidden[piece], scales_M[:, None]).to(powers_MV.dtype)
        torch.mul(_exact(powers_MV, self._weight), scales_M[:, None], out=self.hidden[piece])
        self._add_weight(powers_MV, scaled_MW)

    def _add(self, piece: slice, grad_MV: Tensor) -> None:
        torch.mm(grad_MV, self._weight.to(grad_MV.dtype), out=self.hidden[piece])
        self._add_weight(grad_MV, self._hidden[piece])

    def _add_weight(self, grad_MV: Tensor, hidden_MW: Tensor) -> None:
        if grad_MV.is_cuda and grad_MV.dtype == torch.bfloat16:
            torch.ops.aten.addmm.dtype_out(self._sum, grad_MV.t(), hidden_MW, torch.float32, out=self._sum)
        else:
            self._sum.addmm_(grad_MV.t().float(), hidden_MW.float())

    @property
    def weight(self) -> Tensor:
        return self._sum.to(self._weight.dtype)


class _Logprobs(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_MW: Tensor, weight_VW: Tensor, targets_M: Tensor, temperatures_M: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        out = torch.empty((3, len(targets_M)), dtype=torch.float32, device=hidden_MW.device)
        for piece in _pieces(slice(0, len(targets_M)), len(weight_VW), PIECE_ELEMENTS):
            logits_MV = _logits(hidden_MW[piece], weight_VW, _of(temperatures_M, piece))
            _measure(logits_MV, targets_M[piece], out[:, piece])
        logprobs_M, entropies_M, sums_M = out.unbind()
        ctx.save_for_backward(hidden_MW, weight_VW, targets_M, temperatures_M, sums_M, entropies_M)
        ctx.set_materialize_grads(False)  # hardly ever is there a bonus for entropy
        return logprobs_M, entropies_M

    @staticmethod
    def backward(ctx: Any, grad_M: Tensor | None, grad_entropies_M: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_MW, weight_VW, targets_M, temperatures_M, sums_M, entropies_M = ctx.saved_tensors
        if grad_M is None and grad_entropies_M is None:
            return None, None, None, None
        slopes_M = torch.zeros_like(sums_M) if grad_M is None else grad_M

        def fill(part: slice, grad_MV: Tensor) -> None:
            temperatures = _of(temperatures_M, part)
            grads = (slopes_M[part], _of(grad_entropies_M, part))
            if temperatures is not None:  # of the logits before they were divided
                grads = (grads[0] / temperatures, None if grads[1] is None else grads[1] / temperatures)
            logits_MV = _logits(hidden_MW[part], weight_VW, temperatures)
            _slopes(logits_MV, targets_M[part], sums_M[part], entropies_M[part], *grads, grad_MV)

        gradients = _Gradients(hidden_MW, weight_VW)
        gradients.add_all(fill)
        return gradients.hidden, gradients.weight, None, None


class _NextToken(Function):
    @staticmethod
    def forward(ctx: Any, hidden_MW: Tensor, weight_VW: Tensor, targets_M: Tensor, weights_M: Tensor) -> Tensor:
        logprobs_M = torch.empty(len(targets_M), dtype=torch.float32, device=hidden_MW.device)
        gradients = _Gradients(hidden_MW, weight_VW)
        if _makes_powers(hidden_MW, weight_VW):
            from rollmill.models.kernels.powers_triton import next_token_powers

            for piece in _pieces(slice(0, len(targets_M)), len(weight_VW), PARTS * PIECE_ELEMENTS // 2):
                given = (hidden_MW[piece], weight_VW, targets_M[piece], weights_M[piece], logprobs_M[piece])
                gradients.add_powers(piece, *next_token_powers(*given))
        else:
            gradients.add_all(
                lambda part, grad_MV: _next_token_slopes(
                    _logits(hidden_MW[part], weight_VW, None),
                    targets_M[part],
                    weights_M[part],
                    logprobs_M[part],
                    grad_MV,
                )
            )
        ctx.save_for_backward(gradients.hidden, gradients.weight)
        return -(logprobs_M * weights_M).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        # made for one use: nothing else holds them, so they are scaled in place
        return grad_hidden.mul_(grad), grad_weight.mul_(grad), None, None


def _makes_powers(hidden_MW: Tensor, weight_VW: Tensor) -> bool:
    if not has_triton(hidden_MW.device):
        return False
    from rollmill.models.kernels.powers_triton import fits

    return fits(hidden_MW, weight_VW)


def _of(values_M: Tensor | None, piece: slice) -> Tensor | None:
    return None if values_M is None else values_M[piece]


def _measure(logits_MV: Tensor, targets_M: Tensor, out_3M: Tensor) -> None:
    """Fill rows of (log-prob of the target, entropy, log of the sum of exponentials). Overwrites the logits."""
    if has_triton(logits_MV.device):
        from rollmill.models.kernels.head_triton import measure

        return measure(logits_MV, targets_M, out_3M)
    sums_M = torch.logsumexp(logits_MV, -1)
    out_3M[0] = logits_MV.gather(1, targets_M[:, None]).squeeze(1) - sums_M
    logprobs_MV = logits_MV.sub_(sums_M[:, None])
    out_3M[1] = -logprobs_MV.exp().mul_(logprobs_MV).nansum(-1)  # 0 · −inf is 0 here
    out_3M[2] = sums_M


def _slopes(
    logits_MV: Tensor,
    targets_M: Tensor,
    sums_M: Tensor,
    entropies_M: Tensor,
    grad_M: Tensor,
    grad_entropies_M: Tensor | None,
    out_MV: Tensor,
) -> None:
    """The gradient of the logits, given those of the log-probs and entropies. The logits may be overwritten."""
    if has_triton(logits_MV.device):
        from rollmill.models.kernels.head_triton import slopes

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
    """The gradient of the logits of Σ weight · (−log-prob); fills in the log-probs."""
    if has_triton(logits_MV.device):
        from rollmill.models.kernels.head_triton import next_token_slopes

        return next_token_slopes(logits_MV, targets_M, weights_M, logprobs_M, out_MV)
    sums_M = torch.logsumexp(logits_MV, -1)
    logprobs_M.copy_(logits_MV.gather(1, targets_M[:, None]).squeeze(1) - sums_M)
    _slopes(logits_MV, targets_M, sums_M, sums_M, -weights_M.float(), None, out_MV)
