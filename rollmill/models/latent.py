"""Multi-head latent attention (DeepSeek-V3, Kimi-K2): q, k and v from low-rank vectors.

    q      = up(norm(down(x)))                each head: plain | rotated
    k, v   = up(norm(c)), (c | r) = down(x)   c is the latent vector, r one rotated key that all heads share

There are two ways to attend, with the same result. `expand` makes the keys and values of all heads, so attention works
as without latents. `absorb` moves `up` = (U, V) to the other side of the products:

    q · k  =  (q_plain · U | q_rotated) · (norm(c) | r)        Σ weight · v  =  (Σ weight · norm(c)) · V

So all heads share one key, (norm(c) | r), which is also their value: it is all that an engine caches. Products with it
are wider than with expanded keys, so a trainer expands. With exact numerics the forward pass of a trainer absorbs too,
because it must have the engine's bits; its backward pass expands.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from rollmill.models.attention import Attend
from rollmill.models.config import ModelConfig
from rollmill.models.exact_attention import gradients_of
from rollmill.models.kernels.call import call
from rollmill.models.kernels.elementwise import rotate
from rollmill.models.kernels.exact import product
from rollmill.models.kernels.forms import linear, seen
from rollmill.models.kernels.fused import norm_fork
from rollmill.models.kernels.grouped import groups

NORM_EPS = 1e-6  # for the latent norms in every published checkpoint, independent of the model's norm_eps


class _Exact(Protocol):
    plain: Attend  # attention that can be differentiated


class LatentProjection(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype, form: str = "bf16") -> None:
        super().__init__()
        assert config.latent is not None
        self._form, self.exact = form, False
        self.absorbs = False
        self._shape, self._heads, self._dim = config.latent, config.heads, config.head_dim
        queries, rank = config.heads * config.head_dim, config.latent.q_rank
        if rank is None:
            self.q = nn.Parameter(torch.empty(queries, config.width, dtype=dtype))
        else:
            self.q_down = nn.Parameter(torch.empty(rank, config.width, dtype=dtype))
            self.q_norm = nn.Parameter(torch.empty(rank, dtype=dtype))
            self.q_up = nn.Parameter(torch.empty(queries, rank, dtype=dtype))
        latent = config.latent
        self.kv_down = nn.Parameter(torch.empty(latent.kv_rank + latent.rope_dim, config.width, dtype=dtype))
        self.kv_norm = nn.Parameter(torch.empty(latent.kv_rank, dtype=dtype))
        rows = config.heads * (latent.plain_dim + latent.value_dim)
        self.kv_up = nn.Parameter(torch.empty(rows, latent.kv_rank, dtype=dtype))

    def forward(
        self, x_NW: Tensor, angles: tuple[Tensor, Tensor], layer: int, attend: Attend, score_scale: float
    ) -> Tensor:
        """The attention output [N, heads · value_dim]."""
        shape = self._shape
        q_plain, q_rope = self._queries(x_NW).split((shape.plain_dim, shape.rope_dim), dim=2)
        c_NC, r_NR = self._linear(x_NW, self.kv_down).split((shape.kv_rank, shape.rope_dim), dim=1)
        c_NC, r_N1R = _norm(c_NC, self.kv_norm), rotate(r_NR.unsqueeze(1), *angles)
        q_NHD = torch.cat((q_plain, rotate(q_rope, *angles)), dim=2)
        if score_scale != 1.0:
            q_NHD = q_NHD * score_scale
        if self.absorbs:
            return call(_Absorbed, q_NHD, c_NC, r_N1R, self.kv_up, self, layer, attend)
        return attend(layer, *self.expand(q_NHD, c_NC, r_N1R, self.kv_up))

    def expand(self, q_NHD: Tensor, c_NC: Tensor, r_N1R: Tensor, kv_up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k [N, heads, D], and v [N, heads, value_dim]."""
        kv_NHE = self._linear(c_NC, kv_up).view(len(c_NC), self._heads, -1)
        k_plain, v_NHE = kv_NHE.split((self._shape.plain_dim, self._shape.value_dim), dim=2)
        return q_NHD, torch.cat((k_plain, r_N1R.expand(-1, self._heads, -1)), dim=2), v_NHE

    def absorb(self, q_NHD: Tensor, c_NC: Tensor, r_N1R: Tensor, kv_up: Tensor, layer: int, attend: Attend) -> Tensor:
        """The attention output, without a backward pass."""
        shape = self._shape
        up_HEC = kv_up.view(self._heads, -1, shape.kv_rank)
        keys_HPC, values_HEC = up_HEC.split((shape.plain_dim, shape.value_dim), dim=1)
        wide = shape.kv_rank + shape.rope_dim
        q_NHD = q_NHD * (wide / self._dim) ** 0.5  # `attend` divides by the root of the wider width
        q_plain, q_rope = q_NHD.split((shape.plain_dim, shape.rope_dim), dim=2)
        q_NHL = torch.cat((_by_head(q_plain, keys_HPC, self.exact), q_rope), dim=2)
        k_N1L = torch.cat((seen(c_NC, self._form).unsqueeze(1), r_N1R), dim=2)
        out_NHC = attend(layer, q_NHL, k_N1L, k_N1L[..., : shape.kv_rank]).view(*q_NHD.shape[:2], -1)
        return _by_head(out_NHC, values_HEC.transpose(1, 2), self.exact).flatten(1)

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight, form=self._form, exact=self.exact)

    def _queries(self, x_NW: Tensor) -> Tensor:
        linear = self._linear
        if self._shape.q_rank is None:
            q = linear(x_NW, self.q)
        else:
            q = linear(_norm(linear(x_NW, self.q_down), self.q_norm), self.q_up)
        return q.view(len(x_NW), self._heads, -1)


class _Absorbed(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_NHD: Tensor,
        c_NC: Tensor,
        r_N1R: Tensor,
        kv_up: Tensor,
        latent: LatentProjection,
        layer: int,
        attend: Attend,
    ) -> Tensor:
        ctx.save_for_backward(q_NHD, c_NC, r_N1R, kv_up)
        ctx.latent, ctx.layer, ctx.attend = latent, layer, attend
        return latent.absorb(q_NHD, c_NC, r_N1R, kv_up, layer, attend)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plain = cast(_Exact, ctx.attend).plain

        def expanded(*inputs: Tensor) -> Tensor:
            return plain(ctx.layer, *ctx.latent.expand(*inputs))

        return *gradients_of(expanded, ctx.saved_tensors, grad), None, None, None


def _norm(x: Tensor, norm: Tensor) -> Tensor:
    return norm_fork(x, norm, NORM_EPS, copy=False)[0]


def _by_head(x_NHI: Tensor, weight_HIO: Tensor, exact: bool) -> Tensor:
    """x · weight for each head, [N, H, O]. With `exact`, the bits of a token do not depend on the others."""
    tokens, heads, _ = x_NHI.shape
    if not exact:
        return torch.bmm(x_NHI.transpose(0, 1), weight_HIO).transpose(0, 1)
    if groups(x_NHI, weight_HIO):  # with the bits of `product`
        ends_H = torch.arange(tokens, (heads + 1) * tokens, tokens, dtype=torch.int32, device=x_NHI.device)
        rows = x_NHI.transpose(0, 1).reshape(heads * tokens, -1)
        return torch._grouped_mm(rows, weight_HIO, offs=ends_H).view(heads, tokens, -1).transpose(0, 1)
    return torch.stack([product(x, weight) for x, weight in zip(x_NHI.unbind(1), weight_HIO, strict=True)], 1)
