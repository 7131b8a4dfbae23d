"""The models of `benchmarks.train_step`, and the fewest operations and bytes of a step of each."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rollmill.models.config import ModelConfig
from rollmill.models.counts import active_parameters, all_parameters
from rollmill.models.decoder import Decoder

PEAK_OPERATIONS = 790e12  # per second: bf16 products of random numbers on an H200
PEAK_BYTES = 4.3e12  # per second, read plus written, on an H200


@dataclass(frozen=True)
class Shape:
    name: str
    model: ModelConfig
    length: int  # tokens per sequence
    sequences: int

    @property
    def tokens(self) -> int:
        return self.length * self.sequences


SMOLLM2 = {
    "vocab_size": 49152,
    "layers": 30,
    "width": 576,
    "heads": 9,
    "kv_heads": 3,
    "head_dim": 64,
    "mlp_width": 1536,
    "experts": 0,
    "tie_embeddings": True,
    "rope_theta": 100000.0,
    "max_context": 2048,
}
MIXTURE = {
    "vocab_size": 49152,
    "layers": 16,
    "width": 1024,
    "heads": 16,
    "kv_heads": 4,
    "head_dim": 64,
    "qk_norm": True,
    "experts": 32,
    "experts_per_token": 4,
    "expert_width": 512,
    "norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_context": 2048,
}
LLAMA_1B = SMOLLM2 | {
    "vocab_size": 128256, "layers": 16, "width": 2048, "heads": 32, "kv_heads": 8, "mlp_width": 8192,
    "rope_theta": 500000.0,
}  # fmt: skip
LLAMA_8B = LLAMA_1B | {"layers": 8, "width": 4096, "head_dim": 128, "mlp_width": 14336, "tie_embeddings": False}
QWEN3_30B = MIXTURE | {
    "vocab_size": 151936, "layers": 6, "width": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "experts": 128,
    "experts_per_token": 8, "expert_width": 768,
}  # fmt: skip
TINY = {"vocab_size": 512, "layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "max_context": 64}


def shapes(device: str) -> list[Shape]:
    if device == "cuda":
        return [
            Shape("mixture", ModelConfig.model_validate(MIXTURE), 2048, 16),
            Shape("dense", ModelConfig.model_validate(SMOLLM2), 2048, 16),
            Shape("llama-1b", ModelConfig.model_validate(LLAMA_1B), 2048, 8),
            Shape("llama-8b", ModelConfig.model_validate(LLAMA_8B), 2048, 8),
            Shape("qwen3-30b", ModelConfig.model_validate(QWEN3_30B), 2048, 8),
        ]
    dense = SMOLLM2 | TINY | {"mlp_width": 128}
    mixture = MIXTURE | TINY | {"expert_width": 32, "experts": 8, "experts_per_token": 2}
    return [
        Shape("mixture", ModelConfig.model_validate(mixture), 64, 8),
        Shape("dense", ModelConfig.model_validate(dense), 64, 8),
    ]


def step_operations(shape: Shape) -> tuple[float, float]:
    """Operations of forward and backward: (of parameters: 6 per token and active parameter, of causal attention)."""
    model = shape.model
    attention = 6 * model.layers * model.heads * model.head_dim * shape.length  # half of the scores are masked
    return 6.0 * active_parameters(model) * shape.tokens, float(attention) * shape.tokens


def step_bytes(shape: Shape) -> float:
    """Weights read twice, gradients written and read, optimizer state read and written. Per layer the activations that
    must be kept (inputs of both halves, q k v, attended, gate and up), written and read again."""
    model = shape.model
    optimizer = all_parameters(model) * (2 * 2 + 2 * 2 + 3 * 4 * 2 + 2)
    rows = (3 * model.heads + 2 * model.kv_heads) * model.head_dim - model.heads * model.head_dim
    inner = 2 * (model.expert_width * model.experts_per_token if model.experts else model.mlp_width)
    kept = model.layers * (2 * model.width + rows + inner) * 2
    return float(optimizer + 2 * kept * shape.tokens)


def floor_seconds(shape: Shape) -> tuple[float, float]:
    """The least time on an H200: (by operations, by bytes)."""
    return sum(step_operations(shape)) / PEAK_OPERATIONS, step_bytes(shape) / PEAK_BYTES


@torch.no_grad()
def draw_(model: Decoder, seed: int) -> None:
    """Random weights, on CUDA drawn by the device: on the host, large models would take minutes."""
    if not model.embedding.is_cuda:
        return model.initialise(seed)
    generator, residual = torch.Generator("cuda").manual_seed(seed), (2 * model.config.layers) ** -0.5
    for name, each in model.named_parameters():
        if each.ndim == 1:
            each.fill_(1.0)
        else:
            deviation = (each.shape[-2] if each.ndim == 3 else each.shape[-1]) ** -0.5
            each.normal_(std=deviation * (residual if name.endswith(("output", "down")) else 1.0), generator=generator)
