"""The models of `benchmarks.train_step` with the fewest operations and bytes of a step, and its peers: `transformers`
compiled by torch, and the same with `liger-kernel`.

Peers have the same weights, tokens, loss, precision and optimizer as ours: bf16 weights and activations, FP32 masters
and moments, gradients scaled by their norm, torch's fused AdamW, and the masters rounded into the model.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rollmill.models.config import Adapter, ModelConfig, with_adapter
from rollmill.models.counts import active_parameters, trained_parameters
from rollmill.models.decoder import Decoder
from rollmill.training.config import OptimizerConfig

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
    "vocab_size": 49152, "layers": 30, "width": 576, "heads": 9, "kv_heads": 3, "head_dim": 64, "mlp_width": 1536,
    "experts": 0, "tie_embeddings": True, "rope_theta": 100000.0, "max_context": 2048,
}  # fmt: skip
MIXTURE = {
    "vocab_size": 49152, "layers": 16, "width": 1024, "heads": 16, "kv_heads": 4, "head_dim": 64, "qk_norm": True,
    "experts": 32, "experts_per_token": 4, "expert_width": 512, "norm_eps": 1e-6, "rope_theta": 1000000.0,
    "max_context": 2048,
}  # fmt: skip
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


def adapter_shapes(device: str, rank: int) -> list[Shape]:
    """Whole models beside which adapters are trained."""
    adapter = Adapter(rank=rank, alpha=2.0 * rank)
    sizes = {"llama-1b": LLAMA_1B, "llama-8b": LLAMA_8B | {"layers": 32}, "qwen3-30b": QWEN3_30B | {"layers": 48}}
    if device == "cpu":
        dense = SMOLLM2 | TINY | {"mlp_width": 128}
        sizes = {"dense": dense, "mixture": MIXTURE | TINY | {"expert_width": 32, "experts": 8, "experts_per_token": 2}}
    length, sequences = (2048, 8) if device == "cuda" else (64, 8)
    models = {name: with_adapter(ModelConfig.model_validate(size), adapter) for name, size in sizes.items()}
    return [Shape(name, model, length, sequences) for name, model in models.items()]


def step_operations(shape: Shape) -> tuple[float, float]:
    """Operations of forward and backward: (of parameters: 6 per token and active parameter, 4 beside an adapter; of
    causal attention)."""
    model = shape.model
    attention = 6 * model.layers * model.heads * model.head_dim * shape.length  # half of the scores are masked
    return (4.0 if model.adapter else 6.0) * active_parameters(model) * shape.tokens, float(attention) * shape.tokens


def step_bytes(shape: Shape) -> float:
    """Weights read twice, gradients written and read, optimizer state read and written. Per layer the activations that
    must be kept (inputs of both halves, q k v, attended, gate and up), written and read again."""
    model = shape.model
    optimizer = trained_parameters(model) * (2 * 2 + 2 * 2 + 3 * 4 * 2 + 2)
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


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


class MasterAdamW:
    """Torch's fused AdamW on FP32 copies of a bf16 model's parameters."""

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._masters = [parameter.detach().float().clone() for parameter in self._parameters]
        self._longest = config.max_grad_norm
        fused = self._masters[0].is_cuda
        self._optimizer = torch.optim.AdamW(
            self._masters, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=0.0, fused=fused
        )

    @torch.no_grad()
    def step(self, lr: float) -> None:
        nn.utils.clip_grad_norm_(self._parameters, self._longest, foreach=True)
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
            parameter.grad = None
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        torch._foreach_copy_(self._parameters, self._masters)


def transformers_step(
    ours: Decoder,
    tokens_BT: Tensor,
    targets_BT: Tensor,
    config: OptimizerConfig,
    *,
    liger: bool,
    compile: Literal["all", "layers"] | None,
    experts: str = "grouped_mm",
    recompute: bool = False,
) -> Callable[[float], Tensor]:
    """Returns a function that does one step at a learning rate and returns the loss, on the device. `compile` selects
    the whole model, or only its layers; then the head and its loss run uncompiled. If ours has an adapter, theirs is
    PEFT's."""
    model = transformers_model(ours, experts)
    adapter, head = ours.config.adapter, model
    if adapter is not None:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(r=adapter.rank, lora_alpha=int(adapter.alpha), target_modules="all-linear")
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    if liger:
        _patch(head)
    model.train()
    if recompute:
        head.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    optimizer = MasterAdamW(model, config)
    if compile:
        torch._logging.set_logs(all=logging.ERROR)  # liger's kernels log thousands of lines
        part: Any = head.model if compile == "layers" else model
        part.compile()

    def step(lr: float) -> Tensor:
        loss = model(input_ids=tokens_BT, labels=targets_BT, shift_labels=targets_BT, use_cache=False).loss
        loss.backward()
        optimizer.step(lr)
        return loss.detach()

    return step


def transformers_model(ours: Decoder, experts: str = "grouped_mm") -> nn.Module:
    """The same model with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape = ours.config
    common: dict[str, Any] = {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_context,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "tie_word_embeddings": shape.tie_embeddings,
        "attn_implementation": "sdpa",
    }
    device = ours.embedding.device
    with torch.device(device):
        if shape.experts:
            config = Qwen3MoeConfig(
                **common,
                num_experts=shape.experts,
                num_experts_per_tok=shape.experts_per_token,
                moe_intermediate_size=shape.expert_width,
                norm_topk_prob=True,
                decoder_sparse_step=1,
                output_router_logits=False,
                experts_implementation=experts,
            )
            model: nn.Module = Qwen3MoeForCausalLM._from_config(config, dtype=ours.embedding.dtype)
        else:
            config = LlamaConfig(**common, intermediate_size=shape.mlp_width)
            model = LlamaForCausalLM._from_config(config, dtype=ours.embedding.dtype)
    _copy_weights(ours, model)
    return model


@torch.no_grad()
def _copy_weights(ours: Decoder, theirs: nn.Module) -> None:
    state = theirs.state_dict()
    names: dict[str, Tensor] = {"model.embed_tokens.weight": ours.embedding, "model.norm.weight": ours.norm}
    if ours.head is not None:
        names["lm_head.weight"] = ours.head
    for number, layer in enumerate(ours.layers):
        own: dict[str, Tensor] = {name: each for name, each in layer.named_parameters() if "_adapter" not in name}
        prefix = f"model.layers.{number}."
        rows = layer.qkv_rows  # type: ignore[operator, union-attr]
        for name, part in zip("qkv", own["qkv"].split(rows), strict=True):
            names[f"{prefix}self_attn.{name}_proj.weight"] = part
        names[f"{prefix}self_attn.o_proj.weight"] = own["output"]
        names[f"{prefix}input_layernorm.weight"] = own["attention_norm"]
        names[f"{prefix}post_attention_layernorm.weight"] = own["mlp_norm"]
        if "q_norm" in own:
            names[f"{prefix}self_attn.q_norm.weight"] = own["q_norm"]
            names[f"{prefix}self_attn.k_norm.weight"] = own["k_norm"]
        if "mlp.router.weight" in own:
            names[f"{prefix}mlp.gate.weight"] = own["mlp.router.weight"]
            names[f"{prefix}mlp.experts.gate_up_proj"] = own["mlp.gate_up"].transpose(1, 2)
            names[f"{prefix}mlp.experts.down_proj"] = own["mlp.down"].transpose(1, 2)
        else:
            gate, up = own["mlp.gate_up"].chunk(2)
            names[f"{prefix}mlp.gate_proj.weight"], names[f"{prefix}mlp.up_proj.weight"] = gate, up
            names[f"{prefix}mlp.down_proj.weight"] = own["mlp.down"]
    unknown = (names.keys() ^ state.keys()) - {"lm_head.weight"}
    assert not unknown, sorted(unknown)[:5]
    for name, tensor in names.items():
        state[name].copy_(tensor)


def _patch(model: nn.Module) -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model)
