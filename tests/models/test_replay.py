"""The plausibility filter: which experts are replaced, by which, and that no expert occurs twice."""

import numpy as np
import pytest
import torch

from rollmill.models.moe import Replay
from rollmill.models.replay import plausible_routes
from tests.models.reference import TINY, make_decoder
from tests.models.test_moe import TOKENS, _run


def filtered(
    recorded: list[int], live: list[int], scores: dict[int, float], ratio: float, bias: dict[int, float] | None = None
) -> list[int]:
    row, added = torch.zeros(1, 12), torch.zeros(12)
    for expert, score in scores.items():
        row[0, expert] = score
    for expert, amount in (bias or {}).items():
        added[expert] = amount
    routes = torch.tensor([recorded]), torch.tensor([live])
    return plausible_routes(*routes, row, ratio, None if bias is None else added)[0].tolist()


def test_an_example_by_hand() -> None:
    scores = {7: 0.40, 2: 0.30, 5: 0.10, 4: 0.06, 9: 0.01}
    live = [7, 2, 5]
    assert filtered([2, 9, 4], live, scores, 0.5) == [2, 7, 4], "9 is below .05; 7 is the best one not yet chosen"
    assert filtered([2, 9, 4], live, scores, 0.9) == [2, 7, 5], "4 is below .09 as well; 2 is chosen, so 5 is next"
    assert filtered([2, 9, 4], live, scores, 0.09) == [2, 9, 4], "all are above .009"
    assert filtered([9, 11, 10], live, scores, 0.5) == [7, 2, 5], "none is kept: the live choice in its order"
    assert filtered([5, 2, 7], live, scores, 1.0) == [5, 2, 7], "the live set in another order keeps its order"
    assert filtered([2, 2, 7], live, scores, 0.5) == [2, 5, 7], "of an expert recorded twice the first stays"


def test_an_example_with_a_bias_by_hand() -> None:
    """The live choice by score + bias is 7 [.90 − .50 = .40] and 2 [.05 + .35 = .40], so .40 is needed."""
    scores = {7: 0.90, 2: 0.05, 5: 0.10, 4: 0.30, 9: 0.60, 8: 0.02}
    bias = {7: -0.50, 2: 0.35, 5: 0.295, 9: -0.30, 8: 0.45}
    live = [7, 2]
    assert filtered([5, 7], live, scores, 0.9, bias) == [5, 7], "5 needs .105 and has .10: it was nearly chosen"
    assert filtered([5, 7], live, scores, 0.96, bias) == [2, 7], "and .96 of .105 is more than .10"
    assert filtered([5, 7], [7, 9], scores, 0.5) == [9, 7], "by scores alone, half of .60 would be needed"
    assert filtered([4, 7], live, scores, 0.7, bias) == [4, 7], "without a bias 4 needs .40, and has .30"
    assert filtered([9, 7], live, scores, 0.9, bias) == [2, 7], "9 has twice the score of 4, and needs .70"
    assert filtered([8, 7], live, scores, 1.0, bias) == [8, 7], (
        "the bias alone selects 8: the score it needs is negative"
    )
    assert filtered([2, 7], live, scores, 1.0, bias) == [2, 7], "the live choice is always plausible"


def test_a_bias_that_makes_every_sum_negative_leaves_the_live_choice_alone() -> None:
    scores = {7: 0.40, 2: 0.30, 5: 0.10, 4: 0.06}
    bias = dict.fromkeys(range(12), -2.0)
    assert filtered([2, 7, 5], [7, 2, 5], scores, 0.99, bias) == [2, 7, 5]
    assert filtered([2, 4, 9], [7, 2, 5], scores, 0.5, bias) == [2, 4, 7], (
        "a bias that is the same for all changes nothing"
    )


def test_with_any_bias_the_live_choice_is_kept() -> None:
    """After rounding, (s + b) − b may differ from s. The live choice must not lose an expert because of that."""
    generator = torch.Generator().manual_seed(0)
    scores, bias = torch.rand(2000, 16, generator=generator), torch.randn(16, generator=generator)
    live = (scores + bias).topk(4, dim=1).indices
    assert torch.equal(plausible_routes(live, live, scores, 1.0, bias), live)
    worst = (scores + bias).topk(3, dim=1, largest=False).indices
    recorded = torch.cat((live[:, 3:], worst), 1)
    expected = torch.cat((live[:, 3:], live[:, :3]), 1)
    assert torch.equal(plausible_routes(recorded, live, scores, 1.0, bias), expected), "the weakest keeps its place"


@pytest.mark.parametrize("groups", [1, 3])
def test_in_the_decoder_the_filter_uses_the_bias(groups: int) -> None:
    model = make_decoder(
        TINY.model_copy(update={"gate": "sigmoid", "gate_bias": True, "experts": 6, "gate_groups": groups})
    )
    bias = torch.tensor([0.3, -0.1, 0.2, -0.1, 0.0, 0.1])
    for layer in model.layers:
        layer.mlp.router.bias.copy_(bias)
    everywhere = torch.ones(TOKENS, dtype=torch.bool)
    live = _run(model)
    assert live.routes is not None
    honest = _run(model, Replay(live.routes.to(torch.uint16), everywhere, plausibility=1.0))
    assert torch.equal(honest.hidden, live.hidden) and torch.equal(honest.routes, live.routes)
    damaged = live.routes.clone()
    damaged[:, 0] = torch.tensor([3, 1])
    routing = _run(model, Replay(damaged, everywhere, plausibility=0.9)).routings[0]
    needed = (routing.scores + bias).gather(1, routing.live).amin(1, keepdim=True) - bias
    kept = routing.scores[:, [3, 1]] >= 0.9 * needed[:, [3, 1]]
    assert kept.any() and not kept.all()
    assert (routing.chosen == torch.tensor([3, 1]))[kept].all(), "plausible experts keep their place"
    replaced = routing.chosen[~kept.any(1)]
    assert torch.equal(replaced, routing.live[~kept.any(1)]), "if none is plausible, the live choice is used"
    assert torch.equal(routing.scores, live.routings[0].scores), "the gate's scores do not contain the bias"


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
def test_in_the_decoder_correct_routes_are_kept_and_damaged_ones_replaced(gate: str) -> None:
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
