"""The plausibility filter of router replay: recorded experts with a very low live score are not replayed.

A recorded expert is kept if its live score is at least `ratio` times the lowest score in the live choice. Otherwise the
best live expert not yet chosen replaces it. With k = 3 and ratio .5 (scores in brackets, live choice 7 2 5):

    live        7 [.40]   2 [.30]   5 [.10]          the lowest is .10, so the threshold is .05
    recorded    2 [.30]   9 [.01]   4 [.06]
    chosen      2         7         4                7, the best one left, replaces 9; the others keep their place

With a bias b, experts are chosen by s + b, not by their score s. The score an expert would have needed is then (lowest
s + b of the live choice) − b, and the threshold is `ratio` times that:

    keep e   if   s_e ≥ ratio · (lowest_{i in live} (s_i + b_i) − b_e)

Without a bias this is the rule above. Scores are positive, but the needed score may be negative: an expert that the
bias alone brings into the choice is always kept, and so is the live choice itself. A ratio of s + b would have no
meaning, since such sums may be negative. A ratio of scores alone would drop an expert that the bias favours and that
was nearly chosen. Groups are ignored: a group that lost because of its other members says nothing about an expert. The
gate weights use s in any case.

Order matters, because a sum of experts in another order has other bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def plausible_routes(
    recorded_Nk: Tensor, live_Nk: Tensor, scores_NE: Tensor, ratio: float, bias_E: Tensor | None = None
) -> Tensor:
    """int64 [N, k]: the recorded experts, with implausible ones replaced, and no expert twice. `ratio` is at most 1."""
    ranks_NE = scores_NE if bias_E is None else scores_NE + bias_E
    weakest_N1 = ranks_NE.gather(1, live_Nk).amin(1, keepdim=True)
    needed_Nk = weakest_N1 if bias_E is None else weakest_N1 - bias_E[recorded_Nk]
    keep_Nk = scores_NE.gather(1, recorded_Nk) >= ratio * needed_Nk
    keep_Nk |= ranks_NE.gather(1, recorded_Nk) >= weakest_N1  # by rounding, (s + b) − b may exceed s
    twice_Nkk = recorded_Nk.unsqueeze(2) == recorded_Nk.unsqueeze(1)
    keep_Nk &= ~twice_Nkk.tril(-1).any(2)  # if an expert is recorded twice, the first stays
    taken_Nk = ((live_Nk.unsqueeze(2) == recorded_Nk.unsqueeze(1)) & keep_Nk.unsqueeze(1)).any(2)
    # free live experts first, best first; there are always enough for the places to fill
    free_Nk = live_Nk.gather(1, taken_Nk.to(torch.uint8).argsort(dim=1, stable=True))
    place_Nk = ((~keep_Nk).cumsum(1) - 1).clamp(min=0)
    return torch.where(keep_Nk, recorded_Nk, free_Nk.gather(1, place_Nk))
