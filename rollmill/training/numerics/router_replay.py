"""Router replay: train through the experts the engine chose, and measure how the live router sees them.

Routes are recorded per input token. Rows without a record (validity bit 0) route live, which is harmless for a prompt.
Rows that are moved by one token or one layer are not harmless: they show as choices with no expert in common. Those are
also compared with the record moved by one place, which shows what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollmill.models.decoder import Decoder
from rollmill.models.moe import Replay, Routing, expert_counts, move_gate_biases
from rollmill.training.batching import MicroBatch
from rollmill.training.packed_pass import moved
from rollmill.training.parallelism import Ranks

ZERO_OVERLAP = 0.01  # healthy runs have none at all
ENOUGH_CHOICES = 30  # mean choices per expert; with an even router one expert gets none with probability e^−30

# how the record may be misaligned → (tokens, layers) that would move it back
MOVES = {
    "one token early": (1, 0),
    "one token late": (-1, 0),
    "one layer early": (0, 1),
    "one layer late": (0, -1),
}


def replay_of(batch: MicroBatch, plausibility: float = 0.0) -> Replay | None:
    """The recorded routes of a micro-batch; None if nothing was recorded."""
    if batch.routes is None or batch.routes_valid is None or not batch.routes_valid.any():
        return None
    # gather needs int64; torch has few kernels for uint16
    routes = torch.from_numpy(batch.routes.astype(np.int64))
    return Replay(routes, torch.from_numpy(batch.routes_valid), plausibility)


class RouterMeasures:
    """What the routers of each layer did, summed over micro-batches.

    The live choice is compared with the whole record, before the plausibility filter: a filter must not hide that the
    record is wrong. Counts stay on the device until `figures`, so that nothing waits for it.
    """

    def __init__(self) -> None:
        self._tokens = 0  # all inputs, replayed or not
        self._rows = 0  # inputs with a record
        self._load: Tensor | float = 0.0  # [layers, experts] choices
        self._counts: Tensor | float = 0.0  # [3, layers]: rows whose set differs, that share nothing, choices replaced
        self._k = 1
        self._moved: Tensor | float = 0.0  # [1 + moves]: choices with no expert in common; and in common after a move

    @torch.no_grad()
    def add(self, routings: Sequence[Routing], replay: Replay | None) -> None:
        """`replay` as `replay_of` made it, on the host: that is where the rows with a record are known."""
        if not routings:
            return
        self.add_load(len(routings[0].chosen), expert_load(routings))
        if replay is None:
            return
        rows = replay.valid.nonzero().flatten()
        device = routings[0].chosen.device
        recorded_NLk, rows_N = moved(replay.routes.index_select(0, rows).long(), device), moved(rows, device)
        live_NLk, chosen_NLk = (
            torch.stack([getattr(routing, choice) for routing in routings], 1).index_select(0, rows_N)
            for choice in ("live", "chosen")
        )
        self._rows += len(rows)
        self._k = live_NLk.shape[2]
        common_NL = _common(live_NLk, recorded_NLk)
        counts = [(common_NL < self._k).sum(0), (common_NL == 0).sum(0), (chosen_NLk != recorded_NLk).sum((0, 2))]
        self._counts = self._counts + torch.stack(counts)
        self._compare_moved(live_NLk, recorded_NLk, common_NL == 0)

    def add_load(self, tokens: int, load_LE: Tensor) -> None:
        self._tokens += tokens
        self._load = self._load + load_LE

    def _compare_moved(self, live_NLk: Tensor, recorded_NLk: Tensor, apart_NL: Tensor) -> None:
        """Count only if too many rows share nothing. The GPU always computes it: to ask first would wait for it."""
        many = apart_NL.sum() > ZERO_OVERLAP * apart_NL.numel()
        if not many.is_cuda and not many:
            return
        fits = [(_common(live_NLk, recorded_NLk.roll(move, (0, 1))) * apart_NL).sum() for move in MOVES.values()]
        self._moved = self._moved + torch.stack([apart_NL.sum() * self._k, *fits]) * many

    def over_ranks(self, ranks: Ranks) -> RouterMeasures:
        """The sums over all ranks, each of which has measured its own tokens. Collective."""
        counts = (self._load, self._counts, self._moved)
        on_host = [count.cpu() if isinstance(count, Tensor) else count for count in counts]
        columns = zip(*ranks.gather([self._tokens, self._rows, *on_host]), strict=True)
        self._tokens, self._rows, self._load, self._counts, self._moved = (sum(column) for column in columns)
        return self

    def move_gate_biases(self, model: Decoder, rate: float) -> None:
        """After `over_ranks`: by the load of the whole step, on every rank alike."""
        if rate and isinstance(self._load, Tensor):
            move_gate_biases(model, self._load, rate)

    def figures(self) -> dict[str, Any]:
        """Values are None if nothing was replayed: no measurement is not agreement."""
        return {**self._agreement(), **self.load_figures()}

    def _agreement(self) -> dict[str, Any]:
        names = ("router_flip_rate", "router_zero_overlap", "router_replaced")
        if not isinstance(self._counts, Tensor) or self._rows == 0:
            layers: dict[str, list[float]] = {f"{name}_by_layer": [] for name in names[:2]}
            return {**dict.fromkeys(names), **layers, "router_live_rows": 1.0 if self._tokens else None}
        flips, zeros, replaced = (self._counts.cpu().double() / self._rows).tolist()
        found = {
            "router_flip_rate": _mean(flips),
            "router_zero_overlap": _mean(zeros),
            "router_replaced": _mean(replaced) / self._k,
            "router_flip_rate_by_layer": flips,
            "router_zero_overlap_by_layer": zeros,
            "router_live_rows": 1 - self._rows / self._tokens,
        }
        compared, *fits = self._moved.tolist() if isinstance(self._moved, Tensor) else [0]
        if compared:
            found["router_fit"] = {name: fit / compared for name, fit in zip(MOVES, fits, strict=True)}
        return found

    def load_figures(self) -> dict[str, Any]:
        """The largest load of an expert over the mean load, and the share of experts that got no token."""
        if not isinstance(self._load, Tensor):
            return {"expert_load_max": None, "expert_load_by_layer": [], "experts_dead": None}
        load_LE = self._load.cpu().double()
        by_layer = (load_LE.amax(1) / load_LE.mean(1)).tolist()
        dead = int((load_LE == 0).sum())
        # with few choices an expert may get none by chance
        enough = float(load_LE.mean()) >= ENOUGH_CHOICES
        return {
            "expert_load_max": max(by_layer),
            "expert_load_by_layer": by_layer,
            "experts_dead": dead / load_LE.numel() if enough else None,
        }


def expert_load(routings: Sequence[Routing]) -> Tensor:
    """int64 [layers, experts]: how often each expert was chosen."""
    return torch.stack([expert_counts(routing.chosen, routing.scores.shape[1]) for routing in routings])


def _common(left_NLk: Tensor, right_NLk: Tensor) -> Tensor:
    """[N, layers]: how many experts two choices have in common."""
    columns = left_NLk.split(1, dim=2)  # one at a time: [N, layers, k, k] would be the largest tensor of a step
    return torch.stack([(column == right_NLk).any(2) for column in columns]).sum(0)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
