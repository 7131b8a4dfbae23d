"""Reads a checkpoint's config.json as a ModelConfig. No torch: run configurations are read without it.

What our decoder cannot do (sliding windows, other activations …) is refused by name. A model that is
computed almost right is worse than none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from rollmill.config import validate_config
from rollmill.errors import ConfigError
from rollmill.models.config import ModelConfig, yarn_scale

# Larger values in a config.json are refused, because they decide how much memory and time is used.
LARGEST = {
    "max_position_embeddings": 1 << 24,
    "original_max_position_embeddings": 1 << 24,
    "vocab_size": 1 << 24,
    "num_hidden_layers": 10_000,
    "num_nextn_predict_layers": 100,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts"), 1 << 16),
    **dict.fromkeys(("num_attention_heads", "head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 1 << 14),
}
LARGEST_OTHER = 1 << 20
T = TypeVar("T")
_ROPE_TYPES = ("default", "llama3", "yarn")


@dataclass(frozen=True)
class Layout:
    """The layout of a checkpoint: our configuration, and what else is needed to read its files."""

    architecture: str
    model: ModelConfig
    interleaved: bool = False  # rotated rows are stored as pairs (0, 1), (2, 3) …; ours are (0, D/2) …
    unused_layers: int = 0  # extra layers at the end that predict further tokens; they are not read
    prefix: str = ""  # of the names of all tensors; without it are parts that are not read, such as one for images


def config_from_huggingface(config: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    return read_layout(config, source).model


def read_layout(config: Mapping[str, Any], source: str = "config.json") -> Layout:
    """Raises ConfigError for an architecture, an option or a value that our decoder does not have."""
    fields = _Fields(text_config(config), source)
    architecture = _architecture(fields)
    if fields.get("hidden_act", "silu") != "silu":
        raise fields.refuse("hidden_act", "the MLP is SwiGLU, with silu")
    for option in ("mlp_bias", "use_sliding_window", "attention_sink", "add_cross_attention"):
        if fields.get(option, False):
            raise fields.refuse(option)
    if any(kind != "full_attention" for kind in fields.items("layer_types", str)):
        raise fields.refuse("layer_types", "every layer attends to the whole context")
    tree = {**_common(fields), **_ARCHITECTURES[architecture](fields)}
    latent = "latent" in tree
    # latent attention says in another way which part of a head is rotated
    tree["rope_theta"], tree["rope_scaling"] = _rope(fields, latent=latent, partial=latent or "rotated_dim" in tree)
    if tree.get("experts") and tree["experts_per_token"] == 1 and tree["gate_normalised"]:
        raise fields.refuse("num_experts_per_tok", "with one expert and norm_topk_prob the gate is always 1")
    return Layout(
        architecture,
        validate_config(ModelConfig, tree, source),
        interleaved=latent and bool(fields.get("rope_interleave", True)),
        unused_layers=fields.integer("num_nextn_predict_layers", 0),
        prefix=_WITH_IMAGES.get(config.get("model_type", ""), ""),
    )


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model, as one of a model without images would."""
    inner = config.get("text_config")
    if config.get("model_type") not in _WITH_IMAGES or not isinstance(inner, Mapping):
        return config
    outer = {key: config[key] for key in ("quantization_config", "tie_word_embeddings", "dtype") if key in config}
    named = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    return {**inner, **outer, **named}


class _Fields:
    """Typed access to config.json. Every error names the file, the key and the value."""

    def __init__(self, tree: Mapping[str, Any], source: str) -> None:
        self._tree, self.source = tree, source

    def get(self, key: str, default: Any) -> Any:
        value = self._tree.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if value is None:
            raise ConfigError(f"{self.source} has no {key}", hint="is it the config.json of a language model?")
        if type(value) is not int or not 0 <= value <= LARGEST.get(key, LARGEST_OTHER):
            raise ConfigError(f"{self.source}: {key} is {value!r}, not a whole number that a real model has")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{self.source}: {key} is {value!r}, not a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.source}: {key} is {value!r}, not true or false")
        return value

    def items(self, key: str, kind: type[T]) -> list[T]:
        value = self.get(key, [])
        if not isinstance(value, list) or not all(type(item) is kind for item in value):
            raise ConfigError(f"{self.source}: {key} is {value!r}, not a list of {kind.__name__}")
        return value

    def refuse(self, key: str, why: str = "the decoder has no such thing") -> ConfigError:
        return ConfigError(
            f"{self.source}: {key} = {self._tree.get(key)!r} cannot be computed here: {why}",
            hint="take a checkpoint without it",
        )


def _architecture(fields: _Fields) -> str:
    kind = str(fields.get("model_type", ""))
    named = fields.items("architectures", str) or [_MODEL_TYPES.get(kind, "")]
    if named[0] in _ARCHITECTURES:
        return named[0]
    raise ConfigError(
        f"{fields.source}: the architecture {named[0]!r} (model_type {kind!r}) is not known",
        hint=f"one of {', '.join(_ARCHITECTURES)}",
    )


def _common(fields: _Fields) -> dict[str, Any]:
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if not heads:
        raise ConfigError(f"{fields.source}: num_attention_heads is 0")
    return {
        "vocab_size": fields.integer("vocab_size"),
        "layers": fields.integer("num_hidden_layers"),
        "width": width,
        "heads": heads,
        "kv_heads": fields.integer("num_key_value_heads", heads),
        "head_dim": fields.integer("head_dim", width // heads),
        "mlp_width": fields.integer("intermediate_size"),
        "experts": 0,
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        "max_context": fields.integer("max_position_embeddings"),
    }


def _llama(fields: _Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return {"qkv_bias": bias, "output_bias": bias}


def _smollm3(fields: _Fields) -> dict[str, Any]:
    layers, every = fields.integer("num_hidden_layers"), fields.integer("no_rope_layer_interval", 4)
    rotated = fields.items("no_rope_layers", int) or [(layer + 1) % max(every, 1) for layer in range(layers)]
    return {
        **_llama(fields),
        "unrotated_layers": [layer for layer in range(layers) if layer < len(rotated) and not rotated[layer]],
    }


def _qwen2(fields: _Fields) -> dict[str, Any]:
    return {"qkv_bias": True}


def _qwen3(fields: _Fields) -> dict[str, Any]:
    return {**_llama(fields), "qk_norm": True, "head_dim": fields.integer("head_dim", 128)}


def _qwen3_moe(fields: _Fields) -> dict[str, Any]:
    layers, every = fields.integer("num_hidden_layers"), fields.integer("decoder_sparse_step", 1)
    dense = set(fields.items("mlp_only_layers", int))
    dense |= {layer for layer in range(layers) if every == 0 or (layer + 1) % every}
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    return {
        **_llama(fields),
        "qk_norm": True,
        "head_dim": fields.integer("head_dim", width // heads),
        "experts": fields.integer("num_experts", fields.integer("num_local_experts", 128)),
        "experts_per_token": fields.integer("num_experts_per_tok", 8),
        "expert_width": fields.integer("moe_intermediate_size", 768),
        "gate_normalised": fields.flag("norm_topk_prob", False),
        "dense_also": sorted(dense),
    }


def _mixtral(fields: _Fields) -> dict[str, Any]:
    if fields.integer("sliding_window", 0):
        raise fields.refuse("sliding_window", "every layer attends to the whole context")
    return {
        "experts": fields.integer("num_local_experts", 8),
        "experts_per_token": fields.integer("num_experts_per_tok", 2),
        "expert_width": fields.integer("intermediate_size"),
        "gate_normalised": True,
    }


def _deepseek(fields: _Fields) -> dict[str, Any]:
    if fields.flag("attention_bias", False):
        raise fields.refuse("attention_bias")
    plain, rope = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
    q_rank = fields.get("q_lora_rank", None)
    return {
        "kv_heads": fields.integer("num_attention_heads"),
        "head_dim": plain + rope,
        "latent": {
            "q_rank": None if q_rank is None else fields.integer("q_lora_rank"),
            "kv_rank": fields.integer("kv_lora_rank"),
            "plain_dim": plain,
            "rope_dim": rope,
            "value_dim": fields.integer("v_head_dim"),
        },
        **_sigmoid_experts(fields),
    }


def _glm4_moe(fields: _Fields) -> dict[str, Any]:
    width, heads = fields.integer("hidden_size"), max(fields.integer("num_attention_heads"), 1)
    head = fields.integer("head_dim", width // heads)
    factors = (fields, _Fields(fields.get("rope_parameters", {}), fields.source))
    factor = next(
        (each.number("partial_rotary_factor") for each in factors if each.get("partial_rotary_factor", 0)), 0.5
    )
    return {
        "qkv_bias": fields.flag("attention_bias", False),
        "qk_norm": fields.flag("use_qk_norm", False),
        "rotated_dim": int(head * factor),
        **_sigmoid_experts(fields),
    }


def _sigmoid_experts(fields: _Fields) -> dict[str, Any]:
    """DeepSeek's mixture: chosen by score and bias, with experts that every token passes through."""
    for option, expected in {"moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}.items():
        if fields.get(option, expected) != expected:
            raise fields.refuse(option, "experts are chosen by score and bias, in every layer after the dense ones")
    return {
        "experts": fields.integer("n_routed_experts", fields.integer("num_local_experts", 0)),
        "experts_per_token": fields.integer("num_experts_per_tok"),
        "expert_width": fields.integer("moe_intermediate_size"),
        "shared_experts": fields.integer("n_shared_experts", 0),
        "gate": "sigmoid",
        "gate_bias": True,
        "gate_groups": fields.integer("n_group", 1),
        "gate_groups_kept": fields.integer("topk_group", 1),
        "gate_normalised": fields.flag("norm_topk_prob", True),
        "gate_scale": fields.number("routed_scaling_factor", 1.0),
        "dense_layers": fields.integer("first_k_dense_replace", 0),
    }


def _rope(fields: _Fields, *, latent: bool, partial: bool) -> tuple[float, dict[str, Any] | None]:
    """Returns rope_theta and our rope_scaling. Newer files have rope_parameters; older ones rope_theta and
    rope_scaling."""
    parameters = fields.get("rope_parameters", None) or fields.get("rope_scaling", None) or {}
    if not isinstance(parameters, dict):
        raise ConfigError(f"{fields.source}: the rope parameters are {parameters!r}, not an object")
    rope = _Fields(parameters, f"{fields.source}, rope parameters")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_TYPES:
        raise ConfigError(
            f"{fields.source}: rope type {kind!r} is not known", hint=f"known are {', '.join(_ROPE_TYPES)}"
        )
    for owner in (fields, rope):
        if not partial and owner.get("partial_rotary_factor", 1.0) != 1.0:
            raise owner.refuse("partial_rotary_factor", "whole heads are rotated")
    theta = rope.number("rope_theta", fields.number("rope_theta", 10000.0))
    context = fields.integer("max_position_embeddings")
    original = rope.integer("original_max_position_embeddings", context)
    if kind == "default":
        return theta, None
    if kind == "llama3":
        return theta, {
            "type": "llama3",
            "factor": rope.number("factor"),
            "low_factor": rope.number("low_freq_factor"),
            "high_factor": rope.number("high_freq_factor"),
            "original_context": original,
        }
    return theta, _yarn(rope, original, context, latent=latent)


def _yarn(rope: _Fields, original: int, context: int, *, latent: bool) -> dict[str, Any]:
    factor = rope.number("factor", context / max(original, 1))
    scale, scale_all = rope.number("mscale", 0.0), rope.number("mscale_all_dim", 0.0)
    default = yarn_scale(factor, 1.0)
    if scale and scale_all:
        default = yarn_scale(factor, scale) / yarn_scale(factor, scale_all)
    return {
        "type": "yarn",
        "factor": factor,
        "original_context": original,
        "beta_fast": rope.number("beta_fast", 32.0),
        "beta_slow": rope.number("beta_slow", 1.0),
        "truncate": rope.flag("truncate", True),
        "angle_scale": rope.number("attention_factor", default),
        # only latent attention has it: the part that is not rotated must be scaled too
        "score_scale": yarn_scale(factor, scale_all) ** 2 if latent and scale_all else 1.0,
    }


_ARCHITECTURES: Mapping[str, Callable[[_Fields], dict[str, Any]]] = {
    "LlamaForCausalLM": _llama,
    "SmolLM3ForCausalLM": _smollm3,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
    "Qwen3MoeForCausalLM": _qwen3_moe,
    "MixtralForCausalLM": _mixtral,
    "DeepseekV3ForCausalLM": _deepseek,
    "Glm4MoeForCausalLM": _glm4_moe,
}
_WITH_IMAGES: Mapping[str, str] = {"kimi_k25": "language_model."}
_MODEL_TYPES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}
