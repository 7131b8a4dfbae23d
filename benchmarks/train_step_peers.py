"""The peers of `benchmarks.train_step`: `transformers` compiled by torch, and the same with `liger-kernel`.

The same weights, tokens, loss, precision and optimizer work as ours: bf16 weights and activations, FP32 masters and
moments, gradients scaled by their norm, torch's fused AdamW, and the masters rounded into the model.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rollmill.models.decoder import Decoder
from rollmill.training.config import OptimizerConfig


def has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


class MasterAdamW:
    """Torch's fused AdamW on FP32 copies of a bf16 model's parameters."""

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self._parameters = list(model.parameters())
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
) -> Callable[[float], Tensor]:
    """Returns a function that does one step at a learning rate and returns the loss, on the device. `compile` selects
    the whole model, or only its layers; then the head and its loss run uncompiled."""
    model = transformers_model(ours, experts)
    if liger:
        _patch(model)
    model.train()
    optimizer = MasterAdamW(model, config)
    if compile:
        torch._logging.set_logs(all=logging.ERROR)  # liger's kernels log thousands of lines
        part: Any = model.model if compile == "layers" else model
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
        own: dict[str, Tensor] = dict(layer.named_parameters())
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
