"""A micro-batch over the ranks: each computes its share, then log-probs or losses are gathered.

Every rank then has the log-probs of all targets and computes the same loss from them. Its backward pass starts with the
gradient of its own targets. Routings stay on the rank that made them: their figures are sums over the ranks.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from rollmill.models.attention import Attend
from rollmill.models.decoder import Decoder
from rollmill.models.moe import Replay, Routing, expert_counts
from rollmill.models.packed_attention import packed_attention
from rollmill.training.batching import MicroBatch
from rollmill.training.packed_pass import moved, token_logprobs, token_loss
from rollmill.training.parallel.collectives import share_rows, share_sum
from rollmill.training.parallel.context_parallel import ContextAttention
from rollmill.training.parallel.sharding import Sharding
from rollmill.training.parallel.token_split import Share, Split, share_of, split
from rollmill.training.parallelism import PolicyPass


def split_logprobs(model: Decoder, sharding: Sharding, part: MicroBatch, replay: Replay | None) -> PolicyPass:
    """See training.parallelism.Passes. Collective."""
    assert part.facts is not None, "sequences of sampled tokens carry their facts"
    cut = _split(sharding, part)
    share, hidden_mW, routings = _forward(model, sharding, part, replay, cut)
    facts = part.facts.picked(cut.rows[sharding.world.rank])
    temperatures_m = torch.from_numpy(facts.temperatures)
    found = token_logprobs(model, hidden_mW, share.targets_m, temperatures_m, facts.shapes)
    order = torch.from_numpy(np.argsort(np.concatenate(cut.rows), kind="stable")).to(hidden_mW.device)
    logprobs_M, entropies_M = (share_rows(each, cut.target_counts).index_select(0, order) for each in found)
    replayed = share.replay
    if replayed is not None:
        replayed = Replay(replayed.routes[: share.real], replayed.valid[: share.real], replayed.plausibility)
    return PolicyPass(logprobs_M, entropies_M, routings, replayed)


class SplitPasses:
    """Next-token passes over the ranks (training.parallelism.NextTokenPass). Collective."""

    def __init__(self, model: Decoder, sharding: Sharding, balance: float) -> None:
        self.model, self._sharding, self._balance = model, sharding, balance

    def __call__(self, part: MicroBatch, targets: int, tokens: int) -> tuple[Tensor, Tensor | None]:
        """The loss is that of the whole micro-batch; choices are those of this rank's tokens."""
        share, hidden_mW, routings = _forward(self.model, self._sharding, part, None, _split(self._sharding, part))
        loss = share_sum(token_loss(self.model, hidden_mW, share.targets_m, targets))
        whole = loss
        if routings and self._balance:
            whole = loss + self._balance * len(part.tokens_N) / tokens * _balance(routings, len(part.tokens_N))
        whole.backward()
        config = self.model.config
        load = [expert_counts(routing.chosen, config.experts).float() for routing in routings]
        return loss.detach(), torch.stack(load) if load else None


def _split(sharding: Sharding, part: MicroBatch) -> Split:
    data, context = sharding.meshes.tokens.shape
    return split(part.lengths, part.rows_M.numpy(), data, context)


def _forward(
    model: Decoder, sharding: Sharding, part: MicroBatch, replay: Replay | None, cut: Split
) -> tuple[Share, Tensor, list[Routing]]:
    """This rank's share, the rows that predict its targets, and the routings of its tokens."""
    share = share_of(part, replay, cut, sharding.world.rank)
    device = model.embedding.device
    output = model(
        moved(share.tokens_n, device),
        moved(share.positions_n, device),
        _attention(sharding, cut, model),
        None if share.replay is None else share.replay.to(device),
    )
    kept = [Routing(each.scores[: share.real], each.live[: share.real], each.chosen[: share.real])
            for each in output.routings]  # fmt: skip
    return share, output.hidden.index_select(0, moved(share.rows_m, device)), kept


def _attention(sharding: Sharding, cut: Split, model: Decoder) -> Attend:
    context, device = sharding.meshes.context, model.embedding.device
    if context == 1:
        lengths = [each.stop for each in cut.slices[sharding.world.rank]]
        return packed_attention(lengths or [1], device, model.embedding.dtype, model.exact)
    place = sharding.world.rank % context
    group = cut.slices[sharding.world.rank - place : sharding.world.rank - place + context]
    return ContextAttention(group, place, sharding.meshes.tokens.get_group("context"), device)


def _balance(routings: list[Routing], tokens: int) -> Tensor:
    """The balance loss of `router_stats`, over the tokens of all ranks."""
    experts = routings[0].scores.shape[1]
    counts = torch.stack([expert_counts(routing.chosen, experts) for routing in routings]).float()
    sums = torch.stack([(each.scores / each.scores.sum(-1, keepdim=True)).sum(0) for each in routings])
    counts_LE, sums_LE = share_sum(torch.stack((counts, sums))).unbind()
    shares_LE = counts_LE / (tokens * routings[0].chosen.shape[1])
    return (experts * (shares_LE * sums_LE / tokens).sum(1)).mean()
