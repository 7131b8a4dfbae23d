"""Activation checkpointing: memory for time, by a dial.

    recompute_every   kept between forward and backward                              time
    0                 every layer's activations                                      —
    k                 of every k-th layer only its input; it runs again in the       + 1/3k of the layers' work
                      backward pass

Half-way dials matter because the first gigabytes are the cheapest: k = 2 gives half of what k = 1 gives, at half the
price. On CUDA a layer keeps little even at 0 (see kernels.fused).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def recomputes(number: int, recompute_every: int) -> bool:
    """Whether it is the turn of layer `number`."""
    return recompute_every > 0 and torch.is_grad_enabled() and number % recompute_every == 0


def run_layer(layer: nn.Module, number: int, recompute_every: int, x_NW: Tensor, *arguments: Any) -> Any:
    """`layer(x, …)`, recomputed in the backward pass if it is its turn."""
    if recomputes(number, recompute_every):
        from torch.utils.checkpoint import checkpoint  # imports the compiler

        # there is no dropout, so no random state to bring back
        return checkpoint(layer, x_NW, *arguments, use_reentrant=False, preserve_rng_state=False)
    return layer(x_NW, *arguments)
