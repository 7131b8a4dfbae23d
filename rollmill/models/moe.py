"""Mixture of experts: an FP32 router, top-k experts per token, shared experts, and router replay.

Replay makes the trainer compute with the experts that the engine used. The recorded choice replaces the live choice if
it is valid. The gate weights stay live: they are gathered from all scores and normalised over the chosen experts, so
the gate keeps its gradient. (Scores that are zero outside the live top-k would lose it.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rollmill.models.adapters import ExpertsLowRank, LowRank, adapted, adapted_experts, adapted_rows
from rollmill.models.config import Adapter, ModelConfig
from rollmill.models.kernels.elementwise import swiglu
from rollmill.models.kernels.forms import linear
from rollmill.models.kernels.fused import fp32_linear
from rollmill.models.kernels.grouped import experts, groups
from rollmill.models.kernels.routing import choose_experts, gate_weights, score
from rollmill.models.kernels.rows import combine_rows, dispatch_rows
from rollmill.models.replay import plausible_routes
from rollmill.models.triton import has_triton


@dataclass(frozen=True)
class Replay:
    """Recorded routes of N packed tokens. Row t holds the experts chosen when token t was the input."""

    routes: Tensor  # integer [N, moe layers, k], top-k order
    valid: Tensor  # bool [N]; where False, the router's live choice counts
    plausibility: float = 0.0  # `ratio` of the filter in models.replay; 0 replays everything as recorded

    def to(self, device: torch.device) -> Replay:
        """Routes are moved in their recorded type, the smallest; each layer widens its own."""
        if self.routes.device == device and self.valid.device == device:
            return self
        return Replay(self.routes.to(device), self.valid.to(device), self.plausibility)


@dataclass(frozen=True)
class Routing:
    """What the router of one layer did. `live` and `chosen` differ only with replay."""

    scores: Tensor  # FP32 [N, experts], with gradient
    live: Tensor  # int64 [N, k]
    chosen: Tensor  # int64 [N, k]


def expert_counts(chosen_Nk: Tensor, experts: int) -> Tensor:
    """int64 [experts]: how often each expert was chosen."""
    if has_triton(chosen_Nk.device):  # bincount would wait for the device, to learn the largest number
        from rollmill.models.kernels.routing_triton import count

        return count(chosen_Nk, experts)
    return torch.bincount(chosen_Nk.flatten(), minlength=experts)


def rows_by_expert(chosen_Nk: Tensor) -> tuple[Tensor, Tensor]:
    """One row per choice, in order of expert: the token of each row, and the row of each choice. A stable sort, so the
    order of an expert's rows does not depend on the algorithm."""
    order_R = chosen_Nk.flatten().argsort(stable=True)
    rank_R = torch.arange(order_R.numel(), device=order_R.device)
    place_Nk = torch.empty_like(order_R).index_copy_(0, order_R, rank_R).view_as(chosen_Nk)
    return order_R // chosen_Nk.shape[1], place_Nk


def balance_loss(routings: Sequence[Routing]) -> Tensor:
    """A scalar with gradient, 1 when the load of the experts is even; add a small multiple to the loss."""
    found = []
    for routing in routings:
        experts = routing.scores.shape[1]
        share = expert_counts(routing.chosen, experts).float() / routing.chosen.numel()
        probability = routing.scores / routing.scores.sum(-1, keepdim=True)
        found.append(experts * (share * probability.mean(0)).sum())
    return torch.stack(found).mean()


class Router(nn.Module):
    """Computes scores in FP32 in every model: with rounding, near-ties would flip experts between machines."""

    bias: Tensor | None

    def __init__(self, config: ModelConfig, moe_layer: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.experts, config.width, dtype=dtype))
        # not trained by gradient; FP32, because it must resolve small differences of scores
        self.register_buffer("bias", torch.zeros(config.experts) if config.gate_bias else None)
        self._moe_layer, self._k, self._gate = moe_layer, config.experts_per_token, config.gate
        self._groups, self._groups_kept = config.gate_groups, config.gate_groups_kept
        # with one expert per token the weight would always be 1, and the gate would not learn
        self._normalised = config.gate_normalised and config.experts_per_token > 1
        self._scale = config.gate_scale
        self.exact = False

    def forward(self, x_NW: Tensor, replay: Replay | None) -> tuple[Routing, Tensor]:
        """Returns (the routing, the gate weights [N, k] of the chosen experts)."""
        scores_NE, live_Nk = self._choose(fp32_linear(x_NW, self.weight, self.exact))
        chosen_Nk = live_Nk
        if replay is not None:
            recorded_Nk = replay.routes[:, self._moe_layer].long()
            if replay.plausibility > 0:
                recorded_Nk = plausible_routes(recorded_Nk, live_Nk, scores_NE, replay.plausibility, self.bias)
            chosen_Nk = torch.where(replay.valid.unsqueeze(1), recorded_Nk, live_Nk)
        weights_Nk = gate_weights(scores_NE, chosen_Nk, self._scale, normalised=self._normalised)
        return Routing(scores_NE, live_Nk, chosen_Nk), weights_Nk

    def _choose(self, logits_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (scores, the k best experts by score + bias), from the best groups only if there are groups."""
        softmax = self._gate == "softmax"
        if self._groups == 1:
            return choose_experts(logits_NE, self.bias, self._k, softmax=softmax)
        scores_NE = score(logits_NE, softmax=softmax)
        ranks_NE = scores_NE.detach() if self.bias is None else scores_NE.detach() + self.bias
        grouped_NGE = ranks_NE.unflatten(1, (self._groups, -1))
        # the rank of a group is the sum of its two best experts
        kept_NG = grouped_NGE.topk(2, dim=-1).values.sum(-1).topk(self._groups_kept, dim=-1).indices
        hidden_NG = torch.ones_like(grouped_NGE[..., 0], dtype=torch.bool).scatter_(1, kept_NG, False)
        ranks_NE = grouped_NGE.masked_fill(hidden_NG.unsqueeze(-1), -torch.inf).flatten(1)
        return scores_NE, ranks_NE.topk(self._k, dim=-1).indices


@torch.no_grad()
def move_gate_biases(model: nn.Module, load_LE: Tensor, rate: float) -> None:
    """Make each expert that was chosen less often than the mean likelier by `rate`, and each other one less likely.
    `load_LE` counts the choices of all tokens of a step. Models without a gate's bias stay as they are."""
    load_LE = load_LE.double()  # counts are exact, so every rank moves alike
    direction_LE = (load_LE.mean(1, keepdim=True) - load_LE).sign()
    for router in model.modules():
        if isinstance(router, Router) and router.bias is not None:
            router.bias.add_(direction_LE[router._moe_layer].to(router.bias), alpha=rate)


class MixtureOfExperts(nn.Module):
    def __init__(self, config: ModelConfig, moe_layer: int, dtype: torch.dtype, form: str = "bf16") -> None:
        super().__init__()
        self._form, self.exact = form, False
        width, inner = config.width, config.expert_width
        self.router = Router(config, moe_layer, dtype)
        # [in, out], unlike the dense layers: with the few rows per expert while decoding, BLAS would spend most of its
        # time transposing the right side
        self.gate_up = nn.Parameter(torch.empty(config.experts, width, 2 * inner, dtype=dtype))
        self.down = nn.Parameter(torch.empty(config.experts, inner, width, dtype=dtype))
        adapter, count = config.adapts("experts"), config.experts
        self.gate_up_adapter = None if adapter is None else ExpertsLowRank(count, width, 2 * inner, adapter, dtype)
        self.down_adapter = None if adapter is None else ExpertsLowRank(count, inner, width, adapter, dtype)
        self.shared = MLP(width, config.shared_experts * inner, dtype, form) if config.shared_experts else None

    def forward(self, x_NW: Tensor, skip_NW: Tensor, replay: Replay | None) -> tuple[Tensor, Routing]:
        """Returns (`skip` + the experts' output for x, the routing). `skip` is the residual."""
        routing, weights_Nk = self.router(x_NW, replay)
        if self.shared is not None:
            skip_NW = skip_NW + self.shared(x_NW)
        return self.through_experts(x_NW, weights_Nk, routing.chosen, skip_NW), routing

    def through_experts(
        self, x_NW: Tensor, weights_Nk: Tensor, chosen_Nk: Tensor, skip_NW: Tensor | None = None
    ) -> Tensor:
        """Sends each token through its chosen experts, sums the weighted outputs in top-k order, and adds `skip`."""
        up, down = self.gate_up_adapter, self.down_adapter
        if len(x_NW) and groups(x_NW, self.gate_up, self.down):
            if up is not None and down is not None:
                matrices = (self.gate_up, up, self.down, down)
                return adapted_experts(x_NW, weights_Nk, chosen_Nk, matrices, skip_NW, self._form)
            return experts(x_NW, weights_Nk, chosen_Nk, self.gate_up, self.down, skip_NW, self._form, self.exact)
        token_R, place_Nk = rows_by_expert(chosen_Nk)
        counts = torch.bincount(chosen_Nk.flatten(), minlength=self.gate_up.shape[0]).tolist()
        rows = dispatch_rows(x_NW, token_R, place_Nk)
        inner = swiglu(adapted_rows(rows, self.gate_up, up, counts, self._form, self.exact))
        rows = adapted_rows(inner, self.down, down, counts, self._form, self.exact)
        out_NW = combine_rows(rows, weights_Nk, token_R, place_Nk)
        return out_NW if skip_NW is None else skip_NW + out_NW


class MLP(nn.Module):
    """SwiGLU: a dense layer, or all shared experts as one wide layer."""

    def __init__(
        self, width: int, inner: int, dtype: torch.dtype, form: str = "bf16", adapter: Adapter | None = None
    ) -> None:
        super().__init__()
        self._form, self.exact = form, False
        self.gate_up = nn.Parameter(torch.empty(2 * inner, width, dtype=dtype))
        self.down = nn.Parameter(torch.empty(width, inner, dtype=dtype))
        self.gate_up_adapter = None if adapter is None else LowRank(2 * inner, width, adapter, dtype)
        self.down_adapter = None if adapter is None else LowRank(width, inner, adapter, dtype)

    def add_to(self, skip_NW: Tensor, x_NW: Tensor) -> Tensor:
        """`skip` + the layer's output for x: in place on CUDA, where `skip` must be a copy."""
        if self.gate_up_adapter is None or self.down_adapter is None:
            return skip_NW + self(x_NW)
        gate_up = adapted(x_NW, self.gate_up, None, self.gate_up_adapter, self._form, self.exact)
        return adapted(gate_up, self.down, None, self.down_adapter, self._form, self.exact, skip_NW, gated=True)

    def forward(self, x_NW: Tensor) -> Tensor:
        inner = swiglu(linear(x_NW, self.gate_up, form=self._form, exact=self.exact))
        return linear(inner, self.down, form=self._form, exact=self.exact)
