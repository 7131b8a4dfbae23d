from __future__ import annotations

import pytest
import torch

from rollmill.errors import TrainingError
from rollmill.models.attention import PackedAttention, packed_positions
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder, DecoderOutput
from rollmill.models.moe import Replay, balance_loss, expert_counts, move_gate_biases
from tests.models.reference import TINY, make_decoder

LENGTHS = [30, 30]
TOKENS = sum(LENGTHS)


def _run(model: Decoder, replay: Replay | None = None) -> DecoderOutput:
    tokens = torch.randint(TINY.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(5))
    return model(tokens, packed_positions(LENGTHS), PackedAttention(LENGTHS), replay)


def _everywhere(routes: torch.Tensor) -> Replay:
    return Replay(routes, torch.ones(len(routes), dtype=torch.bool))


def test_replaying_its_own_routes_changes_no_bit() -> None:
    model = make_decoder()
    live = _run(model)
    assert live.routes is not None and live.routes.shape == (TOKENS, 2, 2)
    replayed = _run(model, _everywhere(live.routes.to(torch.uint8)))
    assert torch.equal(live.hidden, replayed.hidden)
    assert torch.equal(live.routes, replayed.routes)


def test_recorded_experts_are_used_where_valid_and_only_there() -> None:
    model = make_decoder()
    live = _run(model).routes
    forced = (live + 1) % TINY.experts
    valid = torch.arange(TOKENS) % 2 == 0
    output = _run(model, Replay(forced, valid))
    assert torch.equal(output.routes[valid], forced[valid])
    first_layer = output.routings[0]
    assert torch.equal(first_layer.chosen[~valid], first_layer.live[~valid])
    assert torch.equal(first_layer.live, live[:, 0]), "the live choice is still made, for comparison"


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
def test_the_gate_stays_live_under_replay(gate: str) -> None:
    """Gate weights are the normalised live scores of the recorded experts, so the gate also learns for experts that it
    would not have chosen."""
    model = make_decoder(TINY.model_copy(update={"gate": gate}))
    live = _run(model).routes
    forced = (live + 1) % TINY.experts  # often without any live expert
    output = _run(model, _everywhere(forced))
    output.hidden.sum().backward()
    for layer in model.layers:
        gradient = layer.mlp.router.weight.grad
        assert (gradient.abs().sum(-1) > 0).all(), "every expert's gate gets a gradient"


def test_router_gradient_under_replay_of_live_routes_is_the_live_gradient() -> None:
    gradients = []
    model = make_decoder()
    routes = _run(model).routes
    for replay in (None, _everywhere(routes)):
        model.zero_grad()
        _run(model, replay).hidden.pow(3).sum().backward()
        gradients.append(model.layers[0].mlp.router.weight.grad.clone())
    assert torch.equal(*gradients)


def test_balance_is_one_for_an_even_load_and_pulls_towards_it() -> None:
    model = make_decoder()
    for layer in model.layers:
        torch.nn.init.zeros_(layer.mlp.router.weight)
    output = _run(model)
    assert float(balance_loss(output.routings).detach()) == pytest.approx(1.0)
    skewed = make_decoder()
    with torch.no_grad():
        for layer in skewed.layers:
            layer.mlp.router.weight.mul_(20)
    balance = balance_loss(_run(skewed).routings)
    assert float(balance.detach()) > 1.05
    balance.backward()
    assert skewed.layers[0].mlp.router.weight.grad.abs().sum() > 0


def test_routes_of_another_model_are_refused() -> None:
    model = make_decoder()
    with pytest.raises(TrainingError, match="cannot replay"):
        _run(model, _everywhere(torch.zeros(TOKENS, 3, 2, dtype=torch.uint8)))


def test_gate_biases_move_by_the_sign_of_the_load() -> None:
    config = ModelConfig(
        vocab_size=64, layers=3, dense_layers=1, width=16, heads=2, kv_heads=2, head_dim=8, experts=4, gate_bias=True
    )
    model = Decoder(config)
    model.initialise(0)
    move_gate_biases(model, torch.tensor([[4, 0, 8, 4], [9, 9, 9, 9]]), 0.5)
    assert [layer.mlp.router.bias.tolist() for layer in model.layers[1:]] == [[0.0, 0.5, -0.5, 0.0], [0.0] * 4]
    plain = Decoder(config.model_copy(update={"gate_bias": False}))
    move_gate_biases(plain, torch.ones(2, 4), 0.5)
    assert all(layer.mlp.router.bias is None for layer in plain.layers[1:])


@pytest.mark.parametrize("rate", [0.0, 0.02])
def test_a_moving_bias_spreads_the_load(rate: float) -> None:
    """Without any loss for it: some experts would be chosen far too often."""
    config = ModelConfig(
        vocab_size=64, layers=1, width=16, heads=2, kv_heads=2, head_dim=8, experts=16, gate="sigmoid", gate_bias=True
    )
    model = Decoder(config)
    model.initialise(0)
    router, generator = model.layers[0].mlp.router, torch.Generator().manual_seed(0)
    skew = torch.randn(1, 16, generator=generator)
    for _ in range(100):
        routing, _ = router(skew + 0.3 * torch.randn(256, 16, generator=generator), None)
        load = expert_counts(routing.chosen, 16)
        move_gate_biases(model, load.unsqueeze(0), rate)
    assert (load.max() / load.float().mean() < 2) == (rate > 0), load
