"""A decoder whose rows are sharded over the ranks: FSDP2 gathers a layer's parameters for its computation and sums its
gradients.

Gradients are summed, not averaged: each rank divides its loss by the totals of the whole step. Parameters are rows of
the canonical tensors, with the same names; only experts are first divided by expert (see mesh.py). What torch shards
with takes seconds to import: functions that shard import it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder, Layer
from rollmill.models.moe import MixtureOfExperts
from rollmill.training.parallel.expert_parallel import ExpertParallel
from rollmill.training.parallel.mesh import Meshes
from rollmill.training.parallel.sharding import Rows, Sharding
from rollmill.training.parallel.world import World


def sharded_decoder(
    config: ModelConfig, dtype: torch.dtype, form: str, world: World, meshes: Meshes, device: torch.device
) -> tuple[Decoder, Sharding]:
    """This rank's rows of a decoder, on `device`. No rank ever has a whole one, not even on the host. Parameters are
    not initialised. Collective."""
    with torch.device("meta"):
        model = Decoder(config, dtype, form)
    expert = meshes.experts.get_local_rank("expert")
    cut: dict[str, int] = {}  # parameters divided by expert → the first expert here
    if meshes.expert > 1:
        for name, module in model.named_modules():
            if isinstance(module, MixtureOfExperts):
                first = _keep_experts(module, config.experts, meshes.expert, expert)
                cut |= {f"{name}.gate_up": first, f"{name}.down": first}
                parallel = ExpertParallel(module, config.experts, meshes.experts.get_group("expert"))
                module.forward = parallel.forward  # type: ignore[method-assign]
    _fully_shard(model, meshes, meshes.expert > 1)
    model.to_empty(device=device)
    for buffer in model.buffers():  # as in a new whole decoder
        buffer.zero_()
    model.make_angles()
    own = {name: _rows(each, cut.get(name), config.experts) for name, each in model.named_parameters()}
    everyone = world.gather(own)
    rows = {name: [each[name] for each in everyone] for name in own}
    return model, Sharding(world, meshes, rows)


def release(model: Decoder) -> None:
    """Free what a forward pass gathered and kept for a backward pass, if none follows."""
    from torch.distributed.fsdp import FSDPModule

    assert isinstance(model, FSDPModule)
    model.reshard()


def _keep_experts(module: MixtureOfExperts, experts: int, ranks: int, rank: int) -> int:
    size = experts // ranks
    for name in ("gate_up", "down"):
        whole = getattr(module, name)
        setattr(module, name, nn.Parameter(whole.detach()[rank * size : (rank + 1) * size].clone()))
    return rank * size


def _fully_shard(model: Decoder, meshes: Meshes, experts: bool) -> None:
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    # sums over ranks are in FP32, whatever type the model computes in
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for layer in model.layers:
        assert isinstance(layer, Layer)
        if experts and isinstance(layer.mlp, MixtureOfExperts):
            # a parent module does not shard what is inside a nested one: shard router and shared experts separately
            fully_shard(layer.mlp.router, mesh=meshes.all, mp_policy=policy)
            if layer.mlp.shared is not None:
                fully_shard(layer.mlp.shared, mesh=meshes.all, mp_policy=policy)
            fully_shard(layer.mlp, mesh=meshes.experts["replica"], mp_policy=policy)
        fully_shard(layer, mesh=meshes.all, mp_policy=policy)
    # embedding, norm and head; not resharded, because the head is used after the forward pass
    fully_shard(model, mesh=meshes.all, reshard_after_forward=False, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # some backends have no other reduction


def _rows(parameter: Tensor, first_expert: int | None, experts: int) -> Rows:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    assert isinstance(parameter, DTensor)
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    start, whole = offset[0], tuple(parameter.shape)
    if shape[0] == 0:
        start = 0
    if first_expert is not None:
        start, whole = start + first_expert, (experts, *whole[1:])
    return Rows(whole, start, start + shape[0])
