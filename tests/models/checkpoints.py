"""Tiny random checkpoints of every layout, made and saved by `transformers`, to compare our decoder with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollmill.models.attention import PackedAttention, packed_positions
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.huggingface.config import read_layout
from rollmill.models.huggingface.convert import load_tensors, open_checkpoint, saved_config, tensor_entry
from rollmill.models.huggingface.files import CONFIG, companions, read_json
from rollmill.models.huggingface.layouts import NamedView, named_views
from rollmill.weights.files.checkpoint_directory import SHARD_BYTES, encode_json, write_directory
from rollmill.weights.files.safetensors import Entry

COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MOE: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 16}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
}
GLM: dict[str, Any] = {
    "head_dim": 16,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "n_group": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
DEEP_YARN = YARN | {"beta_fast": 8.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.7}

# name → (class, configuration); one line per feature of a layout
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "llama3": ("Llama", {"head_dim": 16, "rope_parameters": LLAMA3_ROPE | {"rope_theta": 500000.0}}),
    "llama, biases": ("Llama", {"attention_bias": True}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0], "pad_token_id": None}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2, yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rms_norm_eps": 1e-6}),
    "qwen3 moe": ("Qwen3Moe", MOE | {"norm_topk_prob": True}),
    "qwen3 moe, some dense": (
        "Qwen3Moe",
        MOE | {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": None}),
    "deepseek": ("DeepseekV3", LATENT | {"rope_parameters": DEEP_YARN, "rms_norm_eps": 1e-5}),
    "deepseek, no query rank": ("DeepseekV3", LATENT | {"q_lora_rank": None, "norm_topk_prob": False, "n_group": 1}),
    "glm": ("Glm4Moe", {**GLM, "use_qk_norm": True, "n_group": 4, "topk_group": 2}),
    "glm, biases": ("Glm4Moe", {**GLM, "attention_bias": True, "partial_rotary_factor": 0.25}),
    "deepseek, halves": ("DeepseekV3", LATENT | {"rope_interleave": False}),
}


def make_checkpoint(name: str, directory: Path, dtype: torch.dtype = torch.float32, **change: Any) -> Any:
    """Saves one of LAYOUTS to `directory`, and returns the model of `transformers`. No tensor is near zero."""
    import transformers

    kind, config = LAYOUTS[name]
    settings = COMMON | config | change
    if settings.get("n_group") == 1:
        settings["topk_group"] = 1
    torch.manual_seed(0)
    cls = getattr(transformers, f"{kind}ForCausalLM")
    model = cls(getattr(transformers, f"{kind}Config")(**settings)).eval()
    with torch.no_grad():
        for parameter in [*model.parameters(), *_correction_biases(model)]:
            scale = 0.2 if parameter.dim() > 1 else 0.1
            parameter.add_(torch.randn_like(parameter) * scale)
    model = model.to(dtype)
    model.save_pretrained(directory)
    return model


def _correction_biases(model: Any) -> list[Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


def tokens_of(length: int = 40) -> Tensor:
    return torch.randint(COMMON["vocab_size"], (length,), generator=torch.Generator().manual_seed(1))


def our_logits(model: Decoder, tokens: Tensor) -> Tensor:
    length = len(tokens)
    return model.logits(model(tokens, packed_positions([length]), PackedAttention([length])).hidden)


@torch.no_grad()
def their_logits(model: Any, tokens: Tensor) -> Tensor:
    return model(tokens.unsqueeze(0)).logits[0].float()


def load_checkpoint(
    directory: Path, dtype: torch.dtype | None = None, max_context: int | None = None
) -> tuple[ModelConfig, Decoder]:
    """The model in `dtype`, or as it is stored. `max_context` shortens the table of angles, if that is less."""
    checkpoint = open_checkpoint(directory)
    config = checkpoint.layout.model
    if max_context is not None:
        config = config.model_copy(update={"max_context": min(max_context, config.max_context)})
    model = Decoder(config, dtype or checkpoint.dtype)
    load_tensors(model.state_dict(), checkpoint)
    return config, model


def save_checkpoint(model: Decoder, directory: Path, like: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Writes `model` as a checkpoint directory. All other files come from the directory `like`."""
    tree = read_json(like / CONFIG)
    kept = {path.name: path.read_bytes() for path in companions(like)}
    layout = read_layout(tree, str(like / CONFIG))
    saved = saved_config(tree, model.embedding.dtype, layout)
    if saved != tree:
        kept[CONFIG] = encode_json(saved)
    entries = [_entry(each) for each in named_views(layout, model.state_dict())]
    write_directory(directory, entries, kept, shard_bytes=shard_bytes)


def _entry(each: NamedView) -> Entry:
    return tensor_entry(each.name, each.view.dtype, each.view.shape, lambda: each.theirs().detach())
