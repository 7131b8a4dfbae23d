"""Counted parameters are those of the decoder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rollmill.models.config import ModelConfig
from rollmill.models.counts import active_parameters, all_parameters, quantised_parameters
from rollmill.models.decoder import Decoder
from rollmill.models.huggingface.config import config_from_huggingface
from rollmill.models.quantize import quantises
from tests.models.checkpoints import COMMON, LAYOUTS


def shape(name: str) -> ModelConfig:
    import transformers

    kind, settings = LAYOUTS[name]
    settings = COMMON | settings
    if settings.get("n_group") == 1:
        settings["topk_group"] = 1
    tree: dict[str, Any] = getattr(transformers, f"{kind}Config")(**settings).to_dict()
    tree["architectures"] = [f"{kind}ForCausalLM"]
    return config_from_huggingface(tree, str(Path(name)))


@pytest.mark.parametrize("name", LAYOUTS)
def test_all_parameters(name: str) -> None:
    model = shape(name)
    with torch.device("meta"):
        decoder = Decoder(model)
    state = decoder.state_dict()
    assert all_parameters(model) == sum(each.numel() for each in state.values())
    assert quantised_parameters(model) == sum(each.numel() for name, each in state.items() if quantises(name, each))


def test_active_parameters() -> None:
    """Without the embedding; of four experts, one is chosen."""
    model = ModelConfig(vocab_size=100, layers=1, width=8, heads=2, kv_heads=1, head_dim=4, experts=4, expert_width=16)
    one = model.model_copy(update={"experts_per_token": 1})
    idle = 3 * 8 * 16 * 3
    assert active_parameters(one) == all_parameters(one) - 100 * 8 - 8 - idle
    assert active_parameters(model) == active_parameters(one) + 3 * 8 * 16
