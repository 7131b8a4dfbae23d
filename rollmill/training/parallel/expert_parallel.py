"""Expert parallel: each rank of an expert group holds some experts whole, and tokens travel to the experts they chose.

    route here ─► rows in order of expert ─► to the experts' ranks ─► through them ─► back ─► weighted and summed

Router, replay and weighting stay on the token's rank, so routing figures and the order of a token's sum do not change.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from rollmill.models.kernels.rows import combine_rows, dispatch_rows
from rollmill.models.moe import MixtureOfExperts, Replay, Routing, expert_counts, rows_by_expert
from rollmill.training.parallel.collectives import send_rows


class ExpertParallel:
    """Replaces the forward of a mixture layer that holds only its share of the experts."""

    def __init__(self, layer: MixtureOfExperts, number: int, group: dist.ProcessGroup) -> None:
        """`number`: the number of experts in the whole layer."""
        self._layer, self._number, self._group = layer, number, group
        self._ranks = dist.get_world_size(group)

    def forward(self, x_NW: Tensor, skip_NW: Tensor, replay: Replay | None) -> tuple[Tensor, Routing]:
        routing, weights_Nk = self._layer.router(x_NW, replay)
        if self._layer.shared is not None:
            skip_NW = skip_NW + self._layer.shared(x_NW)
        return skip_NW + self._through_experts(x_NW, weights_Nk, routing.chosen), routing

    def _through_experts(self, x_NW: Tensor, weights_Nk: Tensor, chosen_Nk: Tensor) -> Tensor:
        token_R, place_Nk = rows_by_expert(chosen_Nk)
        leaving = expert_counts(chosen_Nk, self._number).view(self._ranks, -1)
        arriving = torch.empty_like(leaving)  # [sending rank, expert on this rank]
        dist.all_to_all_single(arriving, leaving, group=self._group)
        sent, received = leaving.sum(1).tolist(), arriving.sum(1).tolist()
        rows = send_rows(dispatch_rows(x_NW, token_R, place_Nk), sent, received, self._group)
        rows = send_rows(self._own_experts(rows, arriving), received, sent, self._group)
        return combine_rows(rows, weights_Nk, token_R, place_Nk)

    def _own_experts(self, rows_RW: Tensor, arriving: Tensor) -> Tensor:
        numbers = torch.arange(arriving.shape[1], device=arriving.device).repeat(self._ranks)
        chosen_R1 = numbers.repeat_interleave(arriving.flatten(), output_size=len(rows_RW)).unsqueeze(1)
        ones_R1 = torch.ones(chosen_R1.shape, device=rows_RW.device)  # weights are applied on the token's rank
        return self._layer.through_experts(rows_RW, ones_R1, chosen_R1)
