"""How many parameters a model has, and numbers its KV cache, from its shape alone. No torch here."""

from __future__ import annotations

from rollmill.models.config import ModelConfig


def all_parameters(model: ModelConfig) -> int:
    """Every weight, and the biases that balance experts."""
    head = 0 if model.tie_embeddings else model.vocab_size * model.width
    layers = sum(_layer(model, model.is_mixture(number), model.experts) for number in range(model.layers))
    return model.vocab_size * model.width + layers + model.width + head


def adapter_parameters(model: ModelConfig) -> int:
    """Weights of the model's adapter; 0 without one."""
    if model.adapter is None:
        return 0
    heads, width = (model.heads + 2 * model.kv_heads) * model.head_dim, model.width
    mixtures = model.moe_layers
    sizes = {  # inputs and outputs of the matrices
        "attention": model.layers * (width + heads + model.heads * model.value_dim + width),
        "mlp": (model.layers - mixtures) * (2 * width + 3 * model.mlp_width),
        "experts": mixtures * model.experts * (2 * width + 3 * model.expert_width),
    }
    return model.adapter.rank * sum(sizes[target] for target in model.adapter.targets)


def trained_parameters(model: ModelConfig) -> int:
    return adapter_parameters(model) or all_parameters(model)


def active_parameters(model: ModelConfig) -> int:
    """Weights that one token is multiplied with: of the experts only the chosen ones, with the head, without the
    embedding."""
    chosen = model.experts_per_token
    layers = sum(_layer(model, model.is_mixture(number), chosen) for number in range(model.layers))
    return layers + model.vocab_size * model.width


def quantised_parameters(model: ModelConfig) -> int:
    """Weights that the forms fp8 and nvfp4 have codes for: the matrices of the layers except the router. The others
    are bf16 in every form."""
    return sum(_matrices(model, model.is_mixture(number), model.experts) for number in range(model.layers))


def _layer(model: ModelConfig, mixture: bool, experts: int) -> int:
    router = model.experts * (model.width + (1 if model.gate_bias else 0)) if mixture else 0
    return _matrices(model, mixture, experts) + router + 2 * model.width + _attention_vectors(model)


def _matrices(model: ModelConfig, mixture: bool, experts: int) -> int:
    inner = (experts + model.shared_experts) * model.expert_width if mixture else model.mlp_width
    return _attention_matrices(model) + 3 * model.width * inner


def _attention_matrices(model: ModelConfig) -> int:
    output = model.width * model.heads * model.value_dim
    latent = model.latent
    if latent is None:
        return output + (model.heads + 2 * model.kv_heads) * model.head_dim * model.width
    queries, rank = model.heads * model.head_dim, latent.q_rank
    q = queries * model.width if rank is None else rank * (model.width + queries)
    down = (latent.kv_rank + latent.rope_dim) * model.width
    return output + q + down + latent.kv_rank * model.heads * (latent.plain_dim + latent.value_dim)


def _attention_vectors(model: ModelConfig) -> int:
    """Biases and norms."""
    output = model.width if model.output_bias else 0
    if model.latent is not None:
        return output + model.latent.kv_rank + (model.latent.q_rank or 0)
    bias = (model.heads + 2 * model.kv_heads) * model.head_dim if model.qkv_bias else 0
    return output + bias + (2 * model.head_dim if model.qk_norm else 0)


def cache_numbers(model: ModelConfig) -> int:
    """Numbers that the KV cache holds per token."""
    if model.latent is not None:
        return model.layers * (model.latent.kv_rank + model.latent.rope_dim)
    return model.layers * 2 * model.kv_heads * model.head_dim
