"""Device meshes. The same ranks are cut twice, and neither cut knows of the other:

data × context      rank = data · context size + context. Sequences go to a data group, their tokens to its ranks.
replica × expert    rank = replica · expert size + expert. Experts are cut over the expert group; its replicas hold
                    the same experts, each of them a part of their rows.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Meshes:
    """Made by all ranks together. `expert` and `context` divide their number."""

    def __init__(self, ranks: int, expert: int, context: int, device: torch.device) -> None:
        self.expert, self.context = expert, context
        self.all: DeviceMesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("ranks",))
        self.tokens: DeviceMesh = init_device_mesh(
            device.type, (ranks // context, context), mesh_dim_names=("data", "context")
        )
        self.experts: DeviceMesh = init_device_mesh(
            device.type, (ranks // expert, expert), mesh_dim_names=("replica", "expert")
        )
