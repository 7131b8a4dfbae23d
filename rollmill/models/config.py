"""The shape of a decoder. No torch here: machines without torch read configurations too."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from rollmill.config import Config


class Llama3Rope(Config):
    """Llama 3.1: slow rotations are slowed further by `factor`, fast ones kept, those between blended."""

    type: Literal["llama3"] = Field(description="Llama 3.1's scaling.")
    factor: float = Field(gt=0, description="How much longer the context becomes: slow pairs turn this much slower.")
    low_factor: float = Field(
        default=1.0, gt=0, description="Pairs that turn fewer times over the original context are slowed in full."
    )
    high_factor: float = Field(
        default=4.0, gt=0, description="Pairs that turn more times over the original context are not slowed."
    )
    original_context: int = Field(gt=0, description="Tokens of context that the model was trained with.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.high_factor <= self.low_factor:
            raise ValueError(f"high_factor ({self.high_factor}) must exceed low_factor ({self.low_factor})")
        return self


class YarnRope(Config):
    """YaRN: pairs that turn less than `beta_slow` times over the original context are slowed by `factor`, those that
    turn more than `beta_fast` times are kept, and between the two it is a ramp over the pairs."""

    type: Literal["yarn"] = Field(description="YaRN's scaling.")
    factor: float = Field(ge=1, description="How much longer the context becomes: slow pairs turn this much slower.")
    original_context: int = Field(gt=0, description="Tokens of context that the model was trained with.")
    beta_fast: float = Field(
        default=32.0, gt=0, description="Pairs that turn more times over the original context are not slowed."
    )
    beta_slow: float = Field(
        default=1.0, gt=0, description="Pairs that turn fewer times over the original context are slowed in full."
    )
    truncate: bool = Field(
        True, description="The ramp between slowed and unslowed pairs begins and ends at whole pairs."
    )
    angle_scale: float = Field(
        default=1.0, gt=0, description="Factor of cos and sin, so of the rotated part of queries and keys."
    )
    score_scale: float = Field(default=1.0, gt=0, description="Factor of the attention scores, beside 1/√head_dim.")


class LatentAttention(Config):
    """Multi-head latent attention: keys and values are made from one small vector per token. Each head has a part that
    is rotated and a part that is not; `head_dim` is their sum."""

    q_rank: int | None = Field(
        default=None,
        gt=0,
        description="Width of the small vector that queries are made from. Not set: from the hidden state itself.",
    )
    kv_rank: int = Field(
        gt=0, description="Width of the small vector that keys and values are made from; the KV cache holds it."
    )
    plain_dim: int = Field(gt=0, description="Width of each head's part that is not rotated.")
    rope_dim: int = Field(gt=0, description="Width of the rotated part; its key is shared by all heads.")
    value_dim: int = Field(gt=0, description="Width of each head's values.")


AdapterTarget = Literal["attention", "mlp", "experts"]


class Adapter(Config):
    """LoRA: two small matrices are trained beside each chosen matrix of the layers, and all else stays as it is."""

    rank: int = Field(
        default=16,
        ge=8,
        multiple_of=8,
        description="Width between the two matrices. Larger can learn more, and takes more memory and time.",
    )
    alpha: float = Field(
        default=32.0, gt=0, description="What the adapter adds counts alpha / rank times, as in other trainers."
    )
    targets: tuple[AdapterTarget, ...] = Field(
        ("attention", "mlp", "experts"),
        min_length=1,
        description="Which matrices get an adapter: those of `attention`, of the `mlp` of dense layers, of `experts`.",
    )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class ModelConfig(Config):
    """One decoder, dense (`experts = 0`) or mixture of experts. The defaults are the demo's 0.95M parameters."""

    vocab_size: int = Field(
        gt=0, description="Tokens in the vocabulary. Without a checkpoint, the tokenizer is trained to this size."
    )
    layers: int = Field(default=2, gt=0, description="Decoder layers.")
    width: int = Field(default=128, gt=0, description="Width of the hidden state.")
    heads: int = Field(default=4, gt=0, description="Attention heads per layer.")
    kv_heads: int = Field(
        default=2,
        gt=0,
        description="Heads of keys and values. Fewer than `heads` is grouped-query attention: a smaller KV cache.",
    )
    head_dim: int = Field(default=32, gt=0, description="Width of one attention head.")
    qkv_bias: bool = Field(False, description="The projections to queries, keys and values have a bias.")
    output_bias: bool = Field(False, description="The projection of attention's output has a bias.")
    qk_norm: bool = Field(False, description="RMSNorm on each head's queries and keys before they are rotated.")
    latent: LatentAttention | None = Field(
        None, description="Multi-head latent attention (DeepSeek). Not set: ordinary attention."
    )
    mlp_width: int = Field(default=256, gt=0, description="Inner width of the MLP in dense layers.")
    experts: int = Field(default=8, ge=0, description="Experts per mixture layer. 0 makes every layer dense.")
    experts_per_token: int = Field(default=2, gt=0, description="Experts that the router chooses per token.")
    expert_width: int = Field(default=128, gt=0, description="Inner width of one expert.")
    shared_experts: int = Field(default=0, ge=0, description="Experts that every token passes through, ungated.")
    gate: Literal["softmax", "sigmoid"] = Field("softmax", description="How the router's logits become scores.")
    gate_bias: bool = Field(
        False,
        description="A bias is added to the scores for choosing experts, not for weighting them: it balances the load "
        "without a loss. The stages' `gate_bias_rate` says how fast it follows the load.",
    )
    gate_groups: int = Field(
        default=1,
        gt=0,
        description="Groups that the experts are cut into; experts are chosen from the best `gate_groups_kept` groups.",
    )
    gate_groups_kept: int = Field(default=1, gt=0, description="Groups that experts may be chosen from, per token.")
    gate_normalised: bool = Field(
        True, description="The weights of the chosen experts sum to 1 (except with one expert per token)."
    )
    gate_scale: float = Field(default=1.0, gt=0, description="Factor of the routed experts' output.")
    dense_layers: int = Field(default=0, ge=0, description="How many of the first layers are dense.")
    dense_also: tuple[int, ...] = Field((), description="Further dense layers, by number from 0.")
    rope_theta: float = Field(
        default=10000.0, gt=0, description="Base of the rotary embedding. Larger suits longer contexts."
    )
    rope_scaling: Annotated[Llama3Rope | YarnRope, Field(discriminator="type")] | None = Field(
        None, description="Stretches the rotary embedding to a longer context, as some checkpoints do. Not set: none."
    )
    norm_eps: float = Field(default=1e-5, gt=0, description="Term in RMSNorm that keeps the division finite.")
    tie_embeddings: bool = Field(False, description="The output layer uses the input embedding's weights.")
    max_context: int = Field(
        default=512,
        gt=0,
        description="Most tokens in one context, prompt and answers together. Larger takes more memory; an episode "
        "that reaches it ends.",
    )

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

    @property
    def adapter(self) -> Adapter | None:
        """What is trained beside the weights, which then stay as they are; see `AdaptedModel`."""
        return None

    def adapts(self, target: AdapterTarget) -> Adapter | None:
        """The adapter of these matrices, if they have one."""
        return self.adapter if self.adapter is not None and target in self.adapter.targets else None

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


class AdaptedModel(ModelConfig):
    """A model as a stage with `[stages.training.adapter]` trains it, and as engines serve it then."""

    own_adapter: Adapter

    @property
    def adapter(self) -> Adapter:
        return self.own_adapter


def with_adapter(model: ModelConfig, adapter: Adapter | None) -> ModelConfig:
    """The model with this adapter, or without one. Raises ValueError for matrices that it has none for."""
    plain = {name: getattr(model, name) for name in ModelConfig.model_fields}
    if adapter is None:
        return ModelConfig(**plain)
    if model.latent is not None and "attention" in adapter.targets:
        raise ValueError("latent attention has no adapters: leave 'attention' out of adapter.targets")
    there = {"attention": True, "mlp": model.moe_layers < model.layers, "experts": model.moe_layers > 0}
    if not any(there[target] for target in adapter.targets):
        raise ValueError(f"the model has no {' or '.join(adapter.targets)}, so there is nothing to adapt")
    return AdaptedModel(**plain, own_adapter=adapter)


def with_context(model: ModelConfig, context: int, made_for: int) -> ModelConfig:
    """The model with a context of `context` tokens. Beyond `made_for` tokens, which its weights were made for, the
    rotary embedding is stretched: with YaRN, or as the model does it already. Raises ValueError if it cannot be."""
    scaling, longer = model.rope_scaling, context / made_for
    if longer > 1:
        if scaling is None:
            scaling = YarnRope(type="yarn", factor=longer, original_context=made_for, angle_scale=yarn_scale(longer))
        elif isinstance(scaling, Llama3Rope):
            scaling = scaling.model_copy(update={"factor": scaling.factor * longer})
        elif scaling.score_scale == 1:
            factor = scaling.factor * longer
            angle_scale = scaling.angle_scale * yarn_scale(factor) / yarn_scale(scaling.factor)
            scaling = scaling.model_copy(update={"factor": factor, "angle_scale": angle_scale})
        else:
            raise ValueError("a model whose YaRN also scales attention scores (DeepSeek) cannot be lengthened")
    return model.model_copy(update={"max_context": context, "rope_scaling": scaling})


def yarn_scale(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies queries and keys with: attention stays as sharp in a context `factor` times longer."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
