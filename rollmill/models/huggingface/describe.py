"""config.json for a model that began from random weights: the Hugging Face layout that computes what our decoder does.

attention            dense      mixture of experts
plain                Llama      Mixtral
biases of q, k, v    Qwen2
norms of q and k     Qwen3      Qwen3-MoE
latent                          DeepSeek-V3

The file is read back and compared with the model: what no layout has is refused before the model is trained.
"""

from __future__ import annotations

from typing import Any

from rollmill.errors import ConfigError
from rollmill.models.config import Llama3Rope, ModelConfig
from rollmill.models.huggingface.config import config_from_huggingface

DENSE_ONLY = ("mlp_width",)
MIXTURE_ONLY = (
    "experts_per_token", "expert_width", "shared_experts", "gate", "gate_bias", "gate_groups", "gate_groups_kept",
    "gate_normalised", "gate_scale", "dense_layers", "dense_also",
)  # fmt: skip


def describe_model(model: ModelConfig) -> dict[str, Any]:
    """The tree of a config.json. Raises ConfigError if no layout computes exactly this model."""
    tree = _tree(model)
    hint = "set qk_norm = true (Qwen3 layouts), or leave the setting at its default"
    try:
        found = config_from_huggingface(tree, f"the {tree['architectures'][0]} layout")
    except ConfigError as error:
        raise ConfigError(f"no Hugging Face layout has this model: {error.message}", hint=hint) from None
    wanted, got = _used(model), _used(found)
    for name in sorted(wanted, key=lambda name: name in DENSE_ONLY):  # last: it differs where dense_layers does
        if wanted[name] != got[name]:
            raise ConfigError(
                f"model.{name} = {wanted[name]!r}: no Hugging Face layout has it together with the rest of [model]; "
                f"{tree['architectures'][0]} is the nearest",
                hint=hint,
            )
    return tree


def _used(model: ModelConfig) -> dict[str, Any]:
    """The settings, None for those that this model does not use."""
    tree: dict[str, Any] = model.model_dump()
    dense = [layer for layer in range(model.layers) if not model.is_mixture(layer)]
    unused = (() if dense else DENSE_ONLY) + (() if model.experts else MIXTURE_ONLY)
    if model.experts:
        # the same layers can be named in two ways; with one expert per token the gate is never normalised
        tree |= {"dense_layers": dense, "dense_also": None}
        tree["gate_normalised"] = model.gate_normalised and model.experts_per_token > 1
    return tree | dict.fromkeys(unused)


def _tree(model: ModelConfig) -> dict[str, Any]:
    common = {
        "torch_dtype": "bfloat16",
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "intermediate_size": model.mlp_width,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": model.max_context,
        "rope_theta": model.rope_theta,
        "rope_scaling": describe_rope(model),
    }
    if model.latent is not None:
        return {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **common, **_deepseek(model)}
    if model.experts and model.qk_norm:
        return {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **common, **_qwen3_moe(model)}
    if model.experts:
        return {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **common, **_mixtral(model)}
    bias = {"attention_bias": model.qkv_bias}
    if model.qk_norm:
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **common, **bias}
    if model.qkv_bias and not model.output_bias:
        return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **common}
    return {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **common, **bias}


def _mixtral(model: ModelConfig) -> dict[str, Any]:
    return {
        "intermediate_size": model.expert_width,
        "num_local_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "sliding_window": None,
    }


def _qwen3_moe(model: ModelConfig) -> dict[str, Any]:
    return {
        "attention_bias": model.qkv_bias,
        "num_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.expert_width,
        "norm_topk_prob": model.gate_normalised and model.experts_per_token > 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer in range(model.layers) if not model.is_mixture(layer)],
    }


def _deepseek(model: ModelConfig) -> dict[str, Any]:
    latent = model.latent
    assert latent is not None
    return {
        "head_dim": latent.rope_dim,  # here the rotated part of a head
        "rope_interleave": True,
        "attention_bias": False,
        "q_lora_rank": latent.q_rank,
        "kv_lora_rank": latent.kv_rank,
        "qk_nope_head_dim": latent.plain_dim,
        "qk_rope_head_dim": latent.rope_dim,
        "v_head_dim": latent.value_dim,
        "n_routed_experts": model.experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.expert_width,
        "n_shared_experts": model.shared_experts,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "n_group": model.gate_groups,
        "topk_group": model.gate_groups_kept,
        "norm_topk_prob": model.gate_normalised,
        "routed_scaling_factor": model.gate_scale,
        "first_k_dense_replace": model.dense_layers,
        "num_nextn_predict_layers": 0,
    }


def describe_rope(model: ModelConfig) -> dict[str, Any] | None:
    """`rope_scaling` of a config.json."""
    scaling = model.rope_scaling
    if scaling is None:
        return None
    common = {
        "rope_type": scaling.type,
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_context,
    }
    if isinstance(scaling, Llama3Rope):
        return {**common, "low_freq_factor": scaling.low_factor, "high_freq_factor": scaling.high_factor}
    return {
        **common,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "truncate": scaling.truncate,
        "attention_factor": scaling.angle_scale,
    }
