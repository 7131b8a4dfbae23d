"""Activation checkpointing: less memory for more time.

    recompute_every   kept between forward and backward                              time
    0                 every layer's activations                                      —
    k                 only the input of every k-th layer, which runs again in the    + 1/3k of the layers' work
                      backward pass

k = 2 saves half of what k = 1 saves, at half the cost. On CUDA a layer keeps little even with 0 (see kernels.fused).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def recomputes(number: int, recompute_every: int) -> bool:
    """Whether layer `number` is recomputed in the backward pass."""
    return recompute_every > 0 and torch.is_grad_enabled() and number % recompute_every == 0


def run_layer(layer: nn.Module, number: int, recompute_every: int, x_NW: Tensor, *arguments: Any) -> Any:
    """Runs `layer(x, …)`, which the backward pass recomputes if `recomputes` says so."""
    if recomputes(number, recompute_every):
        from torch.utils.checkpoint import checkpoint  # imports the compiler

        # there is no dropout, so no random state to restore
        return checkpoint(layer, x_NW, *arguments, use_reentrant=False, preserve_rng_state=False)
    return layer(x_NW, *arguments)
