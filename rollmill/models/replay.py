"""The plausibility filter of router replay: recorded experts that make no sense to the live router are not replayed.

A recorded expert stays if its live score is at least `ratio` times the weakest score among the live choice. Another is
replaced by the best live expert not chosen yet. With k = 3 and ratio .5 (scores in brackets, live choice 7 2 5):

    live        7 [.40]   2 [.30]   5 [.10]          the weakest is .10, so .05 is the least that is plausible
    recorded    2 [.30]   9 [.01]   4 [.06]
    chosen      2         7         4                9 gives way to 7, the best not there yet; others keep their place

The scores are those the gate weighs experts with, without the bias that only helps to choose: they are positive, so a
ratio of them means something. Order matters because a sum of experts in another order has other bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def plausible_routes(recorded_Nk: Tensor, live_Nk: Tensor, scores_NE: Tensor, ratio: float) -> Tensor:
    """int64 [N, k]: the recorded experts, implausible ones replaced; no expert twice. `ratio` is at most 1."""
    weakest_N1 = scores_NE.gather(1, live_Nk).amin(1, keepdim=True)
    keep_Nk = scores_NE.gather(1, recorded_Nk) >= ratio * weakest_N1
    twice_Nkk = recorded_Nk.unsqueeze(2) == recorded_Nk.unsqueeze(1)
    keep_Nk &= ~twice_Nkk.tril(-1).any(2)  # of an expert recorded twice the first stays
    taken_Nk = ((live_Nk.unsqueeze(2) == recorded_Nk.unsqueeze(1)) & keep_Nk.unsqueeze(1)).any(2)
    # live experts that are free come first, best first; there are never fewer of them than places to fill
    free_Nk = live_Nk.gather(1, taken_Nk.to(torch.uint8).argsort(dim=1, stable=True))
    place_Nk = ((~keep_Nk).cumsum(1) - 1).clamp(min=0)
    return torch.where(keep_Nk, recorded_Nk, free_Nk.gather(1, place_Nk))
