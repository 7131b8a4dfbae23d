"""The shape of a decoder. No torch here: configurations are read on machines that have none."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from rollmill.config import Config


class ModelConfig(Config):
    """One decoder, dense (`experts = 0`) or mixture of experts. The defaults are the demo's 0.95M parameters."""

    vocab_size: int = Field(gt=0)
    layers: int = Field(default=2, gt=0)
    width: int = Field(default=128, gt=0)
    heads: int = Field(default=4, gt=0)
    kv_heads: int = Field(default=2, gt=0)  # fewer than `heads`: grouped-query attention
    head_dim: int = Field(default=32, gt=0)
    mlp_width: int = Field(default=256, gt=0)  # of dense layers
    experts: int = Field(default=8, ge=0)  # 0: every layer is dense
    experts_per_token: int = Field(default=2, gt=0)
    expert_width: int = Field(default=128, gt=0)
    shared_experts: int = Field(default=0, ge=0)  # experts every token passes through, without a gate
    gate: Literal["softmax", "sigmoid"] = "softmax"
    dense_layers: int = Field(default=0, ge=0)  # the first layers that are dense in a mixture of experts
    rope_theta: float = Field(default=10000.0, gt=0)
    norm_eps: float = Field(default=1e-5, gt=0)
    tie_embeddings: bool = False
    max_context: int = Field(default=512, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim ({self.head_dim}) must be even: rotary embeddings turn pairs")
        if self.experts and self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token ({self.experts_per_token}) exceeds experts ({self.experts})")
        return self

    def is_mixture(self, layer: int) -> bool:
        return self.experts > 0 and layer >= self.dense_layers

    @property
    def moe_layers(self) -> int:
        return sum(self.is_mixture(layer) for layer in range(self.layers))
