"""The adapter of a version as PEFT's files, which PEFT, vLLM and other servers load beside the same base.

q, k and v are one matrix of ours and have one A, so each of theirs gets the same A. That is the same adapter.
"""

from __future__ import annotations

from collections.abc import Iterator

import safetensors.torch
import torch
from torch import Tensor

from rollmill.errors import WeightsError
from rollmill.models.huggingface.config import Layout
from rollmill.models.huggingface.layouts import named_views
from rollmill.models.merging import adapted_names, adapter_of
from rollmill.models.quantize import place
from rollmill.weights.files.checkpoint_directory import encode_json
from rollmill.weights.format.tensors import Tensors

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_HOST = torch.device("cpu")


def adapter_files(layout: Layout, tensors: Tensors) -> dict[str, bytes]:
    """The files of a directory that PEFT loads. Raises WeightsError for a version without an adapter."""
    scale, shapes = adapter_of(tensors)
    if not shapes:
        raise WeightsError(
            "this version has no adapter", hint="leave out --adapter: the whole model is written, as it was trained"
        )
    odd = next((name for name in shapes if ".mlp." in name and layout.model.experts), None)
    if odd is not None:
        raise WeightsError(
            f"PEFT has no names for {odd}: it renames the MLPs of a mixture of experts by rules of its own",
            hint="leave out --adapter: the adapter is merged; or train one with targets = ['attention']",
        )
    rank = next(shape[0] for name, shape in shapes.items() if name.endswith(".a"))
    found = dict(_matrices(layout, tensors))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": scale * rank,
        "target_modules": sorted({name.split(".")[-3] for name in found}),
        "bias": "none",
        "inference_mode": True,
        "base_model_name_or_path": None,
    }
    return {WEIGHTS: safetensors.torch.save(found, {"format": "pt"}), CONFIG: encode_json(config)}


def _matrices(layout: Layout, tensors: Tensors) -> Iterator[tuple[str, Tensor]]:
    for name in adapted_names(tensors):
        a, b = (place(tensors[f"{name}_adapter.{part}"], _HOST) for part in "ab")
        for each in named_views(layout, {name: b}):
            module = f"base_model.model.{each.name.removesuffix('.weight')}"
            yield f"{module}.lora_A.weight", a.clone()
            yield f"{module}.lora_B.weight", each.theirs().clone(memory_format=torch.contiguous_format)
