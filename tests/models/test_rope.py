"""Configurations of real models, as in their config.json: rotations and sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rollmill.models.config import YarnRope
from rollmill.models.huggingface.config import config_from_huggingface
from rollmill.models.huggingface.convert import parameter_counts
from rollmill.models.rope import _frequencies
from tests.later import Later

transformers = Later("transformers")

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}  # fmt: skip
QWEN2_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "max_position_embeddings": 131072, "rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "use_sliding_window": False, "sliding_window": 131072,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
}  # fmt: skip
QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "head_dim": 128,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936, "max_position_embeddings": 40960,
    "rope_theta": 1000000.0, "rope_scaling": None, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
    "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "moe_layer_freq": 1, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280,
    "num_nextn_predict_layers": 1, "max_position_embeddings": 163840, "rope_theta": 10000, "rms_norm_eps": 1e-6,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
}  # fmt: skip
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
    "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827, "first_k_dense_replace": 1, "vocab_size": 163840,
    "num_nextn_predict_layers": 0, "max_position_embeddings": 131072, "rope_theta": 50000.0,
    "rope_scaling": DEEPSEEK_V3["rope_scaling"] | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
}  # fmt: skip
# both ends of the ramp at one pair: a step
STEP = KIMI_K2 | {"rope_scaling": KIMI_K2["rope_scaling"] | {"truncate": False}}
# all parameters and those of one token, in billions, as their authors state them
MODELS = {
    "Llama-3.1-8B": (LLAMA_8B, 8.03, 8.03),
    "Qwen2.5-7B": (QWEN2_7B, 7.62, 7.62),
    "Qwen3-30B-A3B": (QWEN3_30B, 30.5, 3.3),
    "DeepSeek-V3": (DEEPSEEK_V3, 671, 37),
    "Kimi-K2": (KIMI_K2, 1030, 32),
}


@pytest.mark.parametrize("name", [*MODELS, "step"])
def test_frequencies_are_those_of_transformers(name: str) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    tree = STEP if name == "step" else MODELS[name][0]
    kind = "deepseek_v3" if tree["model_type"] == "kimi_k2" else tree["model_type"]
    theirs = transformers.AutoConfig.for_model(kind, **{key: tree[key] for key in tree if key != "model_type"})
    config = config_from_huggingface(tree)
    rope = config.rope_scaling
    if rope is None:
        expected, scale = config.rope_theta ** -(torch.arange(0, 128, 2) / 128), 1.0
    else:
        expected, scale = ROPE_INIT_FUNCTIONS[rope.type](theirs, "cpu")
    torch.testing.assert_close(_frequencies(config).float(), expected, rtol=3e-6, atol=0)
    assert (rope.angle_scale if isinstance(rope, YarnRope) else 1.0) == pytest.approx(scale)


def test_only_latent_attention_scales_its_scores() -> None:
    scales = {"mscale": 1.0, "mscale_all_dim": 1.0}
    scaled = QWEN2_7B | {"rope_scaling": QWEN2_7B["rope_scaling"] | scales}
    deep, qwen, other = (config_from_huggingface(tree).rope_scaling for tree in (DEEPSEEK_V3, QWEN2_7B, scaled))
    assert isinstance(deep, YarnRope) and isinstance(qwen, YarnRope) and isinstance(other, YarnRope)
    assert other.score_scale == other.angle_scale == 1.0
    assert deep.score_scale == pytest.approx((0.1 * 3.6888795 + 1) ** 2) and deep.angle_scale == 1.0  # ln 40 = 3.6889
    assert qwen.score_scale == 1.0 and qwen.angle_scale == pytest.approx(0.1 * 1.3862944 + 1)  # ln 4 = 1.3863


@pytest.mark.parametrize("name", MODELS)
def test_sizes_are_the_published_ones(name: str) -> None:
    tree, total, active = MODELS[name]
    counts = parameter_counts(config_from_huggingface(tree))
    assert counts[0] == pytest.approx(total * 1e9, rel=0.005)
    assert counts[1] == pytest.approx(active * 1e9, rel=0.03)
