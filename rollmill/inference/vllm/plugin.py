"""Loads our weights into vLLM's workers: a weight-transfer engine of vLLM. It runs in vLLM's processes.

vLLM finds it by the entry point `vllm.general_plugins`. A worker maps the file that the engine wrote (`handover`),
views our tensors under the names of the model's Hugging Face layout, and lets vLLM's own loaders fuse and shard them.
vLLM restores each layer to how it was before it was packed for its kernels, and packs it again when it is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload, initialize_layerwise_reload

from rollmill.models.huggingface.config import read_layout
from rollmill.models.huggingface.layouts import named_views

BACKEND = "rollmill"  # as `process` names it


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on before the first weights."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    path: str  # a safetensors file with every tensor of a version, under our names


class RollmillTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        if self.device.type == "cpu":
            _pack_experts_again(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    @torch.no_grad()
    def receive_weights(self, update_info: UpdateInfo) -> None:
        config = json.loads((Path(self.model_config.model) / "config.json").read_text())
        self.model.load_weights(views(config, update_info.path))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


def views(config: dict[str, Any], path: str) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the file, under the names of the Hugging Face layout."""
    layout = read_layout(config)
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - it is no dict
            for each in named_views(layout, {name: file.get_tensor(name)}):
                yield each.name, each.theirs()


def _pack_experts_again(model: torch.nn.Module) -> None:
    """vLLM 0.32 packs experts for the CPU only together with their first kernel. Without one, it makes both anew."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def register() -> None:
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, RollmillTransfer)
