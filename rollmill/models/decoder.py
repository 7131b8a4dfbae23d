"""The one decoder, used by trainer and engine alike: what differs is only how attention finds its keys and values.

Tokens are packed flat [N]: sequences end to end, without padding. Grouped-query or latent attention, rotary embedding,
RMSNorm, SwiGLU, dense or mixture of experts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rollmill.errors import TrainingError
from rollmill.models.attention import Attend
from rollmill.models.config import ModelConfig
from rollmill.models.kernels.elementwise import rms_norm, rotate
from rollmill.models.latent import LatentProjection
from rollmill.models.moe import MLP, MixtureOfExperts, Replay, Routing
from rollmill.models.rope import angle_table, score_scale


@dataclass(frozen=True)
class DecoderOutput:
    hidden: Tensor  # [N, width], after the last norm; `Decoder.logits` takes the rows that are needed
    routings: list[Routing] = field(default_factory=list)  # one a mixture layer, empty for a dense model

    @property
    def routes(self) -> Tensor | None:
        """The experts used, int64 [N, moe layers, k] in top-k order."""
        return torch.stack([routing.chosen for routing in self.routings], 1) if self.routings else None


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._index, self._eps, self._score_scale = index, config.norm_eps, score_scale(config)
        self._heads, self._kv_heads, self._dim = config.heads, config.kv_heads, config.head_dim

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype))

        self.attention_norm = empty(config.width)
        self.latent = None if config.latent is None else LatentProjection(config, dtype)
        if config.latent is None:
            rows = (config.heads + 2 * config.kv_heads) * config.head_dim
            self.qkv = empty(rows, config.width)
            self.qkv_bias = empty(rows) if config.qkv_bias else None
            self.q_norm = empty(config.head_dim) if config.qk_norm else None
            self.k_norm = empty(config.head_dim) if config.qk_norm else None
        self.output = empty(config.width, config.heads * config.value_dim)
        self.output_bias = empty(config.width) if config.output_bias else None
        self.mlp_norm = empty(config.width)
        self.mlp: nn.Module = (
            MixtureOfExperts(config, config.mixtures_before(index), dtype)
            if config.is_mixture(index)
            else MLP(config.width, config.mlp_width, dtype)
        )

    def attend(self, x_NW: Tensor, angles: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        normal_NW = rms_norm(x_NW, self.attention_norm, self._eps)
        q_NHD, k_NKD, v_NKD = (self._project if self.latent is None else self.latent)(normal_NW, angles)
        if self._score_scale != 1.0:
            q_NHD = q_NHD * self._score_scale
        return x_NW + nn.functional.linear(attend(self._index, q_NHD, k_NKD, v_NKD), self.output, self.output_bias)

    def _project(self, normal_NW: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        qkv = nn.functional.linear(normal_NW, self.qkv, self.qkv_bias).view(normal_NW.shape[0], -1, self._dim)
        qk, v_NKD = qkv.split((self._heads + self._kv_heads, self._kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_NHD, k_NKD = qk.split((self._heads, self._kv_heads), dim=1)
            q_NHD, k_NKD = self._head_norm(q_NHD, self.q_norm), self._head_norm(k_NKD, self.k_norm)
            return rotate(q_NHD, *angles), rotate(k_NKD, *angles), v_NKD
        q_NHD, k_NKD = rotate(qk, *angles).split((self._heads, self._kv_heads), dim=1)
        return q_NHD, k_NKD, v_NKD

    def _head_norm(self, x_NHD: Tensor, weight_D: Tensor) -> Tensor:
        return rms_norm(x_NHD.reshape(-1, self._dim), weight_D, self._eps).view(x_NHD.shape)

    def mix(self, x_NW: Tensor, replay: Replay | None) -> tuple[Tensor, Routing | None]:
        normal_NW = rms_norm(x_NW, self.mlp_norm, self._eps)
        if isinstance(self.mlp, MixtureOfExperts):
            out_NW, routing = self.mlp(normal_NW, replay)
            return x_NW + out_NW, routing
        return x_NW + self.mlp(normal_NW), None


class Decoder(nn.Module):
    _cos: Tensor
    _sin: Tensor

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.width, dtype=dtype))
        self.layers = nn.ModuleList(Layer(config, index, dtype) for index in range(config.layers))
        self.norm = nn.Parameter(torch.empty(config.width, dtype=dtype))
        self.head = (
            None if config.tie_embeddings else nn.Parameter(torch.empty(config.vocab_size, config.width, dtype=dtype))
        )
        cos, sin = (table.to(self.embedding.device) for table in angle_table(config))
        self.register_buffer("_cos", cos, persistent=False)
        self.register_buffer("_sin", sin, persistent=False)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Random weights, the same for the same seed on every machine: drawn in FP32 on the CPU, in order of name."""
        generator = torch.Generator().manual_seed(seed)
        residual = (2 * self.config.layers) ** -0.5  # each layer adds twice to the residual stream
        for name, parameter in sorted(self.named_parameters()):
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            fan_in = parameter.shape[-2] if parameter.dim() == 3 else parameter.shape[-1]  # experts are [in, out]
            deviation = fan_in**-0.5
            if name.endswith(("output", "down")):
                deviation *= residual
            draw = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.copy_(draw * deviation)

    def forward(
        self, tokens_N: Tensor, positions_N: Tensor, attend: Attend, replay: Replay | None = None
    ) -> DecoderOutput:
        """`attend` also decides which tokens see which; `replay` forces recorded experts (see models.moe)."""
        self._check_replay(replay, tokens_N)
        angles = (self._cos.index_select(0, positions_N), self._sin.index_select(0, positions_N))
        x_NW = nn.functional.embedding(tokens_N, self.embedding)
        routings: list[Routing] = []
        for layer in self.layers:
            assert isinstance(layer, Layer)
            x_NW = layer.attend(x_NW, angles, attend)
            x_NW, routing = layer.mix(x_NW, replay)
            if routing is not None:
                routings.append(routing)
        return DecoderOutput(rms_norm(x_NW, self.norm, self.config.norm_eps), routings)

    def _check_replay(self, replay: Replay | None, tokens_N: Tensor) -> None:
        expected = (tokens_N.shape[0], self.config.moe_layers, self.config.experts_per_token)
        if replay is not None and tuple(replay.routes.shape) != expected:
            raise TrainingError(
                f"cannot replay routes {tuple(replay.routes.shape)}: [tokens, moe layers, k] is {expected} here",
                hint="the trajectories were sampled by a model of another shape",
            )

    def logits(self, hidden_MW: Tensor) -> Tensor:
        """FP32 [M, vocab], accumulated and kept in FP32: a logit rounded to bf16 would move log-probs by 1e-2."""
        weight = self.embedding if self.head is None else self.head
        return nn.functional.linear(hidden_MW.float(), weight.float())
