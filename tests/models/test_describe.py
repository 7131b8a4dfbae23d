"""Models made by rollmill are exported in a layout that transformers computes the same way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollmill.errors import ConfigError
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import to_host
from rollmill.models.huggingface.config import read_layout
from rollmill.models.huggingface.convert import open_checkpoint
from rollmill.models.huggingface.describe import describe_model
from rollmill.models.huggingface.served import checkpoint_tensors
from rollmill.types import PolicyRef
from rollmill.weights.files.checkpoint_directory import encode_json
from rollmill.weights.files.exchange import export_directory
from rollmill.weights.format.manifest import describe, root_digest
from tests.models.checkpoints import our_logits, their_logits

VOCABULARY = 96
LATENT = {
    "kv_heads": 4,
    "head_dim": 20,
    "latent": {"kv_rank": 16, "plain_dim": 12, "rope_dim": 8, "value_dim": 10},
    "gate": "sigmoid",
    "gate_bias": True,
}
# name → (model_type, what differs from the defaults)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "demo": ("mixtral", {"rope_theta": 500.0}),
    "plain": ("llama", {"experts": 0, "tie_embeddings": True, "head_dim": 16}),
    "all biases": ("llama", {"experts": 0, "qkv_bias": True, "output_bias": True}),
    "qkv biases": ("qwen2", {"experts": 0, "qkv_bias": True}),
    "norms": ("qwen3", {"experts": 0, "qk_norm": True}),
    "norms and experts": ("qwen3_moe", {"layers": 3, "qk_norm": True, "dense_layers": 1, "gate_normalised": False}),
    "one expert per token": ("qwen3_moe", {"qk_norm": True, "experts_per_token": 1, "dense_also": (1,)}),
    "latent": ("deepseek_v3", LATENT | {"shared_experts": 1, "gate_scale": 2.5, "dense_layers": 1}),
    "latent, groups": ("deepseek_v3", LATENT | {"gate_groups": 4, "gate_groups_kept": 2, "gate_normalised": False}),
    "llama3": ("llama", {"experts": 0, "rope_scaling": {"type": "llama3", "factor": 4.0, "original_context": 64}}),
    "yarn": (
        "llama",
        {"experts": 0, "rope_scaling": {"type": "yarn", "factor": 8.0, "original_context": 64, "angle_scale": 1.2}},
    ),
}


def noisy_decoder(config: ModelConfig) -> Decoder:
    """Random weights, biases and norms, all exact in bf16."""
    model = Decoder(config)
    model.initialise(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1).copy_(tensor.bfloat16())
    return model


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_transformers_computes_the_same_as_the_decoder(name: str, tmp_path: Path) -> None:
    import transformers

    kind, change = MODELS[name]
    config = ModelConfig(vocab_size=VOCABULARY, **change)
    tree, ours = describe_model(config), noisy_decoder(config)
    assert tree["model_type"] == kind
    with checkpoint_tensors(read_layout(tree), to_host(ours.state_dict())) as tensors:
        policy = PolicyRef("rl", 0, "bf16", root_digest(describe(tensors)))
        export_directory(tmp_path / "out", tensors, policy, {"config.json": encode_json(tree)})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    tokens = torch.randint(VOCABULARY, (40,), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(our_logits(ours, tokens), their_logits(theirs, tokens), atol=1e-4, rtol=1e-4)
    open_checkpoint(tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"qkv_bias": True}, "model.qkv_bias"),  # with experts
        ({"gate_normalised": False}, "model.gate_normalised"),
        ({"dense_layers": 1}, "model.dense_layers = [0]"),
        ({"shared_experts": 1}, "model.shared_experts"),
        ({"experts_per_token": 1}, "num_experts_per_tok"),
        ({"experts": 0, "output_bias": True}, "model.output_bias"),
        (LATENT | {"gate": "softmax"}, "model.gate"),
        (LATENT | {"dense_also": (1,)}, "model.dense_layers = [1]"),
    ],
)
def test_a_model_without_a_layout_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as raised:
        describe_model(ModelConfig(vocab_size=VOCABULARY, **change))
    assert named in raised.value.message and raised.value.hint
