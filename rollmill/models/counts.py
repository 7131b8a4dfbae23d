"""How many parameters a model has, and numbers its KV cache, from its shape alone. No torch here."""

from __future__ import annotations

from rollmill.models.config import ModelConfig


def all_parameters(model: ModelConfig) -> int:
    """Every weight, and the biases that balance experts."""
    head = 0 if model.tie_embeddings else model.vocab_size * model.width
    layers = sum(_layer(model, model.is_mixture(number), model.experts) for number in range(model.layers))
    return model.vocab_size * model.width + layers + model.width + head


def active_parameters(model: ModelConfig) -> int:
    """Weights that one token is multiplied with: of the experts only the chosen ones, with the head, without the
    embedding."""
    chosen = model.experts_per_token
    layers = sum(_layer(model, model.is_mixture(number), chosen) for number in range(model.layers))
    return layers + model.vocab_size * model.width


def _layer(model: ModelConfig, mixture: bool, experts: int) -> int:
    norms = 2 * model.width
    if not mixture:
        return norms + _attention(model) + 3 * model.width * model.mlp_width
    router = model.experts * (model.width + (1 if model.gate_bias else 0))
    inner = (experts + model.shared_experts) * model.expert_width
    return norms + _attention(model) + router + 3 * model.width * inner


def _attention(model: ModelConfig) -> int:
    output = model.width * model.heads * model.value_dim + (model.width if model.output_bias else 0)
    latent = model.latent
    if latent is None:
        rows = (model.heads + 2 * model.kv_heads) * model.head_dim
        bias = rows if model.qkv_bias else 0
        return output + rows * model.width + bias + (2 * model.head_dim if model.qk_norm else 0)
    queries = model.heads * model.head_dim
    rank = latent.q_rank
    q = queries * model.width if rank is None else rank * (model.width + 1 + queries)
    down = (latent.kv_rank + latent.rope_dim) * model.width + latent.kv_rank
    return output + q + down + latent.kv_rank * model.heads * (latent.plain_dim + latent.value_dim)


def cache_numbers(model: ModelConfig) -> int:
    """Numbers that the KV cache holds per token."""
    if model.latent is not None:
        return model.layers * (model.latent.kv_rank + model.latent.rope_dim)
    return model.layers * 2 * model.kv_heads * model.head_dim
