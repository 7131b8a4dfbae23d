"""The number of tokens per micro-batch, if not configured: on a GPU, as many as half its memory holds, up to 32,768.

With few tokens a GPU waits for Python to queue kernels; with more than 32,768 it gains nothing. The other half is for
an engine that shares the device, and for memory that is not counted here. The device's total memory decides, not what
is free: a run that starts again must be cut the same way, to give the same bits.
"""

from __future__ import annotations

import torch

from rollmill.models.config import ModelConfig
from rollmill.training.config import TrainingConfig
from rollmill.training.memory_estimate import fitting_tokens, recomputes_mlp

_ON_CPU = 8192


def fitted(config: TrainingConfig, model: ModelConfig, device: torch.device) -> TrainingConfig:
    """The configuration with `tokens_per_microbatch` and `recompute_mlp` filled in."""
    tokens, recompute = config.tokens_per_microbatch or _ON_CPU, bool(config.recompute_mlp)
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
        tokens = config.tokens_per_microbatch or fitting_tokens(config, model, memory)
        recompute = recomputes_mlp(config, model, memory)
    return config.model_copy(update={"tokens_per_microbatch": tokens, "recompute_mlp": recompute})
