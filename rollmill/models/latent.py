"""Multi-head latent attention (DeepSeek-V3, Kimi-K2): q, k and v from low-rank vectors.

    q      = up(norm(down(x)))                each head: plain | rotated
    k, v   = up(norm(c)), (c | r) = down(x)   c is the latent vector, r one rotated key that all heads share

Keys and values are expanded to all heads before `attend`, so attention works as without it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rollmill.models.config import ModelConfig
from rollmill.models.kernels.elementwise import rotate
from rollmill.models.kernels.forms import linear
from rollmill.models.kernels.fused import norm_fork

NORM_EPS = 1e-6  # for the latent norms in every published checkpoint, independent of the model's norm_eps


class LatentProjection(nn.Module):
    def __init__(self, config: ModelConfig, dtype: torch.dtype, form: str = "bf16") -> None:
        super().__init__()
        assert config.latent is not None
        self._form, self.exact = form, False
        self._shape, self._heads = config.latent, config.heads
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

    def forward(self, x_NW: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """q and k [N, heads, D], rotated, and v [N, heads, value_dim]."""
        shape, tokens, linear = self._shape, x_NW.shape[0], self._linear
        q_NHD = self._queries(x_NW).view(tokens, self._heads, -1)
        q_plain, q_rope = q_NHD.split((shape.plain_dim, shape.rope_dim), dim=2)
        latent_NC, k_rope = linear(x_NW, self.kv_down).split((shape.kv_rank, shape.rope_dim), dim=1)
        kv_NHE = linear(_norm(latent_NC, self.kv_norm), self.kv_up).view(tokens, self._heads, -1)
        k_plain, v_NHE = kv_NHE.split((shape.plain_dim, shape.value_dim), dim=2)
        k_rope = rotate(k_rope.unsqueeze(1), *angles).expand(-1, self._heads, -1)
        q_NHD = torch.cat((q_plain, rotate(q_rope, *angles)), dim=2)
        return q_NHD, torch.cat((k_plain, k_rope), dim=2), v_NHE

    def _linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight, form=self._form, exact=self.exact)

    def _queries(self, x_NW: Tensor) -> Tensor:
        linear = self._linear
        if self._shape.q_rank is None:
            return linear(x_NW, self.q)
        return linear(_norm(linear(x_NW, self.q_down), self.q_norm), self.q_up)


def _norm(x: Tensor, norm: Tensor) -> Tensor:
    return norm_fork(x, norm, NORM_EPS, copy=False)[0]
