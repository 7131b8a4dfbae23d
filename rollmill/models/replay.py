"""The plausibility filter of router replay: recorded experts that make no sense to the live router are not replayed.

A recorded expert stays if its live score is at least `ratio` times the weakest score among the live choice. Another is
replaced by the best live expert not chosen yet. With k = 3 and ratio .5 (scores in brackets, live choice 7 2 5):

    live        7 [.40]   2 [.30]   5 [.10]          the weakest is .10, so .05 is the least that is plausible
    recorded    2 [.30]   9 [.01]   4 [.06]
    chosen      2         7         4                9 gives way to 7, the best not there yet; others keep their place

Where a bias b helps to choose, an expert is chosen by s + b and not by its score s. The score it would have needed is
then (weakest s + b of the live choice) − b, and `ratio` is a share of that:

    keep e   if   s_e ≥ ratio · (weakest_{i in live} (s_i + b_i) − b_e)

Without a bias that is the rule above. Scores are positive and what is needed may not be: an expert that the bias alone
carries into the choice is plausible whatever it scores, and the live choice itself always is. A ratio of s + b would
mean nothing, since such sums may be negative; scores alone would throw out an expert that the bias favours and that
lost by a hair. Groups do not come into it: a group that lost because of its other members says nothing against an
expert. The gate weighs with s in any case.

Order matters because a sum of experts in another order has other bits.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def plausible_routes(
    recorded_Nk: Tensor, live_Nk: Tensor, scores_NE: Tensor, ratio: float, bias_E: Tensor | None = None
) -> Tensor:
    """int64 [N, k]: the recorded experts, implausible ones replaced; no expert twice. `ratio` is at most 1."""
    ranks_NE = scores_NE if bias_E is None else scores_NE + bias_E
    weakest_N1 = ranks_NE.gather(1, live_Nk).amin(1, keepdim=True)
    needed_Nk = weakest_N1 if bias_E is None else weakest_N1 - bias_E[recorded_Nk]
    keep_Nk = scores_NE.gather(1, recorded_Nk) >= ratio * needed_Nk
    keep_Nk |= ranks_NE.gather(1, recorded_Nk) >= weakest_N1  # (s + b) − b may be more than s, by rounding
    twice_Nkk = recorded_Nk.unsqueeze(2) == recorded_Nk.unsqueeze(1)
    keep_Nk &= ~twice_Nkk.tril(-1).any(2)  # of an expert recorded twice the first stays
    taken_Nk = ((live_Nk.unsqueeze(2) == recorded_Nk.unsqueeze(1)) & keep_Nk.unsqueeze(1)).any(2)
    # live experts that are free come first, best first; there are never fewer of them than places to fill
    free_Nk = live_Nk.gather(1, taken_Nk.to(torch.uint8).argsort(dim=1, stable=True))
    place_Nk = ((~keep_Nk).cumsum(1) - 1).clamp(min=0)
    return torch.where(keep_Nk, recorded_Nk, free_Nk.gather(1, place_Nk))
