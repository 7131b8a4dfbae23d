"""The plausibility filter: what is replaced, by what, and that no expert comes twice."""

import numpy as np
import pytest
import torch

from rollmill.models.moe import Replay
from rollmill.models.replay import plausible_routes
from tests.models.reference import TINY, make_decoder
from tests.models.test_moe import TOKENS, _run


def filtered(recorded: list[int], live: list[int], scores: dict[int, float], ratio: float) -> list[int]:
    row = torch.zeros(1, 12)
    for expert, score in scores.items():
        row[0, expert] = score
    return plausible_routes(torch.tensor([recorded]), torch.tensor([live]), row, ratio)[0].tolist()


def test_worked_out_by_hand() -> None:
    scores = {7: 0.40, 2: 0.30, 5: 0.10, 4: 0.06, 9: 0.01}
    live = [7, 2, 5]
    assert filtered([2, 9, 4], live, scores, 0.5) == [2, 7, 4], "9 is below .05; 7 is the best that is not there"
    assert filtered([2, 9, 4], live, scores, 0.9) == [2, 7, 5], "4 is below .09 as well; 2 is there, so 5 is next"
    assert filtered([2, 9, 4], live, scores, 0.09) == [2, 9, 4], "all are above .009"
    assert filtered([9, 11, 10], live, scores, 0.5) == [7, 2, 5], "nothing is left: the live choice in its order"
    assert filtered([5, 2, 7], live, scores, 1.0) == [5, 2, 7], "the live set in another order keeps its order"
    assert filtered([2, 2, 7], live, scores, 0.5) == [2, 5, 7], "of an expert recorded twice the first stays"


def test_agrees_with_the_rule_spelled_out_and_never_repeats_an_expert() -> None:
    draw = np.random.default_rng(0)
    experts, k, rows = 16, 4, 300
    scores = torch.from_numpy(draw.dirichlet(np.full(experts, 0.3), rows))
    live = scores.topk(k, dim=1).indices
    recorded = torch.from_numpy(np.array([draw.permutation(experts)[:k] for _ in range(rows)]))
    recorded[:50, 1] = recorded[:50, 0]  # damaged rows
    for ratio in (1e-3, 0.3, 1.0):
        chosen = plausible_routes(recorded, live, scores, ratio).tolist()
        for row in range(rows):
            least = ratio * min(float(scores[row, expert]) for expert in live[row])
            kept: list[int | None] = []
            for expert in recorded[row].tolist():
                kept.append(expert if float(scores[row, expert]) >= least and expert not in kept else None)
            spare = iter([expert for expert in live[row].tolist() if expert not in kept])
            assert chosen[row] == [next(spare) if expert is None else expert for expert in kept]
            assert len(set(chosen[row])) == k


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_in_the_decoder_honest_routes_pass_and_damaged_ones_do_not(gate: str) -> None:
    model = make_decoder(TINY.model_copy(update={"gate": gate}))
    everywhere = torch.ones(TOKENS, dtype=torch.bool)
    live = _run(model)
    assert live.routes is not None
    honest = _run(model, Replay(live.routes, everywhere, plausibility=1.0))
    assert torch.equal(honest.hidden, live.hidden), "not one bit changes"
    damaged = live.routes.clone()
    worst = live.routings[0].scores.argmin(1)
    damaged[:, 0, 0] = worst
    bound = live.routings[0].scores.gather(1, live.routings[0].live).amin(1)
    off = _run(model, Replay(damaged, everywhere))
    on = _run(model, Replay(damaged, everywhere, plausibility=1.0))
    assert torch.equal(off.routings[0].chosen[:, 0], worst)
    low = live.routings[0].scores.amin(1) < bound
    assert low.any() and (on.routings[0].chosen[low, 0] != worst[low]).all()
    on.hidden.pow(3).sum().backward()
    assert (model.layers[0].mlp.router.weight.grad.abs().sum(-1) > 0).any(), "the gate keeps its gradient"


def test_rows_without_a_record_route_live() -> None:
    model = make_decoder()
    nowhere = Replay(torch.zeros(TOKENS, 2, 2, dtype=torch.long), torch.zeros(TOKENS, dtype=torch.bool), 0.5)
    assert torch.equal(_run(model, nowhere).hidden, _run(model).hidden)
