"""Router replay: train through the experts the engine chose, and count how often the live router would differ.

Routes are recorded per input token. Rows without a record (validity bit 0) route live; that is harmless for a prompt,
while a row moved by one token or one layer is not: misaligned routes show as sets with nothing in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollmill.models.moe import Replay, Routing, router_stats
from rollmill.training.batching import MicroBatch


def replay_of(batch: MicroBatch) -> Replay | None:
    """The recorded routes of a micro-batch, or None where nothing was recorded."""
    if batch.routes is None or batch.routes_valid is None or not batch.routes_valid.any():
        return None
    # int64 is what gather wants; uint16 has few torch kernels
    return Replay(torch.from_numpy(batch.routes.astype(np.int64)), torch.from_numpy(batch.routes_valid))


@dataclass
class RouterAgreement:
    """Live choice against the recorded one, summed over micro-batches and averaged over layers."""

    rows: int = 0
    flips: float = 0.0
    zero_overlap: float = 0.0

    @torch.no_grad()
    def add(self, routings: Sequence[Routing], replay: Replay | None) -> None:
        if replay is None or not routings:
            return
        rows = int(replay.valid.sum())
        stats = router_stats(list(routings), replay.valid)
        self.rows += rows
        self.flips += rows * float(stats.flip_rate.mean())
        self.zero_overlap += rows * float(stats.zero_overlap.mean())

    def figures(self) -> dict[str, float | None]:
        """None where nothing was replayed: no measurement is not the same as agreement."""
        return {
            "router_flip_rate": self.flips / self.rows if self.rows else None,
            "router_zero_overlap": self.zero_overlap / self.rows if self.rows else None,
        }
