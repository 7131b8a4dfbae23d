"""`rollmill model upcycle`: turns a dense checkpoint into a mixture of experts with the same outputs.

Every expert starts as a copy of the dense layer, and the gate's top-k weights sum to one. So the layer's output equals
that of the dense layer, up to rounding, whatever the (random) router chooses. Experts then diverge, because each sees
other tokens. `noise` makes them differ from the start without changing their output: in that share of an expert's inner
units, the up weights are doubled or halved, and the down weights halved or doubled. Powers of two are exact in every
float format, and an optimizer with equal step sizes changes such units at another relative speed.

The mixture is written in the layout with the same attention: Qwen3 → Qwen3-MoE, Llama → Mixtral. Models with Qwen2's
attention biases are refused: neither layout has them, and adding q/k norms would change the model.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollmill.errors import ConfigError, RollmillError, WeightsError
from rollmill.models.huggingface.convert import (
    HuggingFaceModel,
    open_checkpoint,
    read_tensor,
    tensor_entry,
)
from rollmill.models.huggingface.files import CONFIG, companions
from rollmill.models.huggingface.layouts import EXPERTS, LAYER, RENAMED
from rollmill.weights.files.checkpoint_directory import encode_json, write_directory
from rollmill.weights.files.safetensors import Entry

ROUTER_DEVIATION = 0.02  # small: the gate starts nearly even


@dataclass(frozen=True)
class Upcycle:
    experts: int
    per_token: int
    every: int = 1  # every N-th layer has experts
    noise: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.per_token <= self.experts:
            raise ConfigError(
                f"{self.per_token} of {self.experts} experts per token cannot start equal to the dense model",
                hint="use two or more per token: the weight of a single expert would not be 1, or would never learn",
            )
        if self.every < 1 or not 0 <= self.noise <= 1:
            raise ConfigError(f"every = {self.every} must be 1 or more, noise = {self.noise} between 0 and 1")

    def has_experts(self, layer: int) -> bool:
        return (layer + 1) % self.every == 0


def upcycle(source: Path, target: Path, how: Upcycle) -> HuggingFaceModel:
    """Converts tensor by tensor, from file to file: memory holds one tensor."""
    dense = open_checkpoint(source)
    config = _config(dense, how)
    files = {path.name: path.read_bytes() for path in companions(source)} | {CONFIG: encode_json(config)}
    write_directory(target, _entries(dense, config["architectures"][0], how), files)
    try:
        return open_checkpoint(target)
    except RollmillError:
        shutil.rmtree(target)
        raise


def _config(dense: HuggingFaceModel, how: Upcycle) -> dict[str, Any]:
    model, tree = dense.layout.model, dict(dense.files.config)
    if model.experts:
        raise WeightsError(f"{dense.files.directory} is a mixture of experts already")
    if how.every > model.layers:
        raise ConfigError(f"every = {how.every} leaves no layer with experts: the model has {model.layers} layers")
    tree = {key: value for key, value in tree.items() if key not in ("layer_types", "quantization_config")}
    if dense.layout.architecture == "Qwen3ForCausalLM":
        return tree | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_experts": how.experts,
            "num_experts_per_tok": how.per_token,
            "moe_intermediate_size": model.mlp_width,
            "norm_topk_prob": True,
            "decoder_sparse_step": how.every,
            "mlp_only_layers": [],
        }
    if dense.layout.architecture != "LlamaForCausalLM" or model.qkv_bias:
        raise WeightsError(
            f"{dense.files.directory} is a {dense.layout.architecture} with attention that no mixture layout has",
            hint="Llama models without attention biases (SmolLM2 …) and Qwen3 models can be upcycled",
        )
    if how.every != 1:
        raise ConfigError(
            f"every {how.every} layers: a Llama model becomes a Mixtral, which has experts in every layer",
            hint="--every 1, or upcycle a Qwen3 model",
        )
    return tree | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": how.experts,
        "num_experts_per_tok": how.per_token,
        "sliding_window": None,
    }


def _entries(dense: HuggingFaceModel, architecture: str, how: Upcycle) -> Iterator[Entry]:
    split = [layer for layer in range(dense.layout.model.layers) if how.has_experts(layer)]
    mlp = (*LAYER["mlp.gate_up"], *LAYER["mlp.down"])
    replaced = {f"model.layers.{layer}.{name}" for layer in split for name in mlp}
    for name in dense.names:
        if name not in replaced:
            yield _entry(dense, name, name)
    renamed = {**LAYER, **EXPERTS, **RENAMED.get(architecture, {})}
    names = dict(zip(mlp, (*renamed["mlp.gate_up"], *renamed["mlp.down"]), strict=True))
    (router,) = renamed["mlp.router.weight"]
    generator = torch.Generator().manual_seed(how.seed)
    for layer in split:
        prefix = f"model.layers.{layer}."
        weight = torch.randn(how.experts, dense.layout.model.width, generator=generator) * ROUTER_DEVIATION
        yield tensor_entry(prefix + router, dense.dtype, weight.shape, weight.clone)
        for expert in range(how.experts):
            scales = _unit_scales(dense.layout.model.mlp_width, how.noise, generator)
            for theirs, name in names.items():
                yield _entry(dense, prefix + theirs, prefix + name.format(expert=expert), scales)


def _entry(dense: HuggingFaceModel, source: str, name: str, scales: Tensor | None = None) -> Entry:
    def produce() -> Tensor:
        tensor = read_tensor(dense.files, source)
        if scales is not None and source.endswith("up_proj.weight"):
            return tensor.float() * scales.unsqueeze(1)
        if scales is not None and source.endswith("down_proj.weight"):
            return tensor.float() / scales
        return tensor

    return tensor_entry(name, dense.dtype, dense.files.tensors[source].shape, produce)


def _unit_scales(units: int, noise: float, generator: torch.Generator) -> Tensor:
    """2 or ½ for a share `noise` of the inner units, and 1 for the others."""
    chosen = torch.rand(units, generator=generator) < noise
    doubled = torch.rand(units, generator=generator) < 0.5
    return torch.where(chosen, torch.where(doubled, 2.0, 0.5), 1.0)
