"""The shape of a decoder. No torch here: configurations are read on machines that have none."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rollmill.config import Config


class Llama3Rope(Config):
    """Llama 3.1: slow rotations are slowed further by `factor`, fast ones kept, those between blended."""

    type: Literal["llama3"]
    factor: float = Field(gt=0)
    low_factor: float = Field(default=1.0, gt=0)
    high_factor: float = Field(default=4.0, gt=0)
    original_context: int = Field(gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.high_factor <= self.low_factor:
            raise ValueError(f"high_factor ({self.high_factor}) must exceed low_factor ({self.low_factor})")
        return self


class YarnRope(Config):
    """YaRN: pairs that turn less than `beta_slow` times over the original context are slowed by `factor`, those that
    turn more than `beta_fast` times are kept, and between the two it is a ramp over the pairs."""

    type: Literal["yarn"]
    factor: float = Field(ge=1)
    original_context: int = Field(gt=0)
    beta_fast: float = Field(default=32.0, gt=0)
    beta_slow: float = Field(default=1.0, gt=0)
    truncate: bool = True  # the ramp begins and ends at whole pairs
    angle_scale: float = Field(default=1.0, gt=0)  # of cos and sin, so of the rotated part of q and of k
    score_scale: float = Field(default=1.0, gt=0)  # of the attention scores, beside 1/√D


class LatentAttention(Config):
    """Multi-head latent attention: keys and values are made from one small vector a token. Each head has a part that
    is rotated and a part that is not; `head_dim` is their sum."""

    q_rank: int | None = Field(default=None, gt=0)  # None: queries come straight from the hidden state
    kv_rank: int = Field(gt=0)
    plain_dim: int = Field(gt=0)
    rope_dim: int = Field(gt=0)  # one rotated key, shared by all heads
    value_dim: int = Field(gt=0)


class ModelConfig(Config):
    """One decoder, dense (`experts = 0`) or mixture of experts. The defaults are the demo's 0.95M parameters."""

    vocab_size: int = Field(gt=0)
    layers: int = Field(default=2, gt=0)
    width: int = Field(default=128, gt=0)
    heads: int = Field(default=4, gt=0)
    kv_heads: int = Field(default=2, gt=0)  # fewer than `heads`: grouped-query attention
    head_dim: int = Field(default=32, gt=0)
    qkv_bias: bool = False
    output_bias: bool = False  # of attention's output
    qk_norm: bool = False  # RMSNorm of each head's q and k, before they are rotated
    latent: LatentAttention | None = None
    mlp_width: int = Field(default=256, gt=0)  # of dense layers
    experts: int = Field(default=8, ge=0)  # 0: every layer is dense
    experts_per_token: int = Field(default=2, gt=0)
    expert_width: int = Field(default=128, gt=0)
    shared_experts: int = Field(default=0, ge=0)  # experts every token passes through, without a gate
    gate: Literal["softmax", "sigmoid"] = "softmax"
    gate_bias: bool = False  # added to the scores for choosing, not for weighting: balances without a loss
    gate_groups: int = Field(default=1, gt=0)  # experts are chosen from the best `gate_groups_kept` of these groups
    gate_groups_kept: int = Field(default=1, gt=0)
    gate_normalised: bool = True  # the chosen weights sum to one (not with one expert: see models.moe)
    gate_scale: float = Field(default=1.0, gt=0)  # of what the routed experts add
    dense_layers: int = Field(default=0, ge=0)  # the first layers that are dense in a mixture of experts
    dense_also: tuple[int, ...] = ()  # further dense layers, by number
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: Annotated[Llama3Rope | YarnRope, Field(discriminator="type")] | None = None
    norm_eps: float = Field(default=1e-5, gt=0)
    tie_embeddings: bool = False
    max_context: int = Field(default=512, gt=0)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads ({self.heads}) must be a multiple of kv_heads ({self.kv_heads})")
        if self.rope_dim % 2:
            raise ValueError(f"head_dim ({self.rope_dim}) must be even: rotary embeddings turn pairs")
        if self.experts and self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token ({self.experts_per_token}) exceeds experts ({self.experts})")
        return self

    @model_validator(mode="after")
    def _groups_fit(self) -> Self:
        if self.gate_groups == 1 or not self.experts:
            return self
        size = self.experts // self.gate_groups
        if self.experts % self.gate_groups or size < 2:
            raise ValueError(
                f"gate_groups ({self.gate_groups}) must cut {self.experts} experts into equal groups of 2+"
            )
        if not self.experts_per_token <= self.gate_groups_kept * size <= self.experts:
            raise ValueError(f"gate_groups_kept ({self.gate_groups_kept}) holds too few or too many experts")
        return self

    @model_validator(mode="after")
    def _latent_fits(self) -> Self:
        if self.latent is None:
            return self
        if self.head_dim != self.latent.plain_dim + self.latent.rope_dim:
            raise ValueError(f"head_dim ({self.head_dim}) must be latent.plain_dim + latent.rope_dim")
        if self.kv_heads != self.heads:
            raise ValueError(f"latent attention has a key for every head: kv_heads must be {self.heads}")
        if self.qkv_bias or self.qk_norm:
            raise ValueError("latent attention has neither qkv_bias nor qk_norm")
        return self

    def is_mixture(self, layer: int) -> bool:
        return self.experts > 0 and layer >= self.dense_layers and layer not in self.dense_also

    def mixtures_before(self, layer: int) -> int:
        return sum(self.is_mixture(before) for before in range(layer))

    @property
    def moe_layers(self) -> int:
        return self.mixtures_before(self.layers)

    @property
    def rope_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.latent is None else self.latent.value_dim
