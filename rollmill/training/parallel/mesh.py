"""Device meshes. The same ranks form two meshes, which are independent of each other:

data × context      rank = data · context size + context. A sequence goes to a data group, its tokens to the group's
                    ranks.
replica × expert    rank = replica · expert size + expert. Experts are sharded over the expert group. Ranks with the
                    same `expert` are replicas: they share the same experts, each holds some of their rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class Meshes:
    """`expert` and `context` must divide `ranks`. Creating it is collective."""

    def __init__(self, ranks: int, expert: int, context: int, device: torch.device) -> None:
        self.expert, self.context = expert, context
        self.all: DeviceMesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("ranks",))
        self.tokens: DeviceMesh = init_device_mesh(
            device.type, (ranks // context, context), mesh_dim_names=("data", "context")
        )
        self.experts: DeviceMesh = init_device_mesh(
            device.type, (ranks // expert, expert), mesh_dim_names=("replica", "expert")
        )

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups of this rank."""
        return [group for mesh in (self.all, self.tokens, self.experts) for group in mesh.get_all_groups()]
