"""The decoder with kernels, compared with the plain one in FP32. Recomputing layers changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import round_to_form_
from rollmill.models.kernels.fused import fuses
from rollmill.models.kernels.grouped import sort_by_expert
from rollmill.models.moe import Replay
from rollmill.models.packed_attention import packed_attention
from tests.kernels import DEVICE, INTERPRETED, devices, without_kernels

LAYERS, LENGTHS = (2, [5, 1, 3]) if INTERPRETED else (3, [70, 33, 70])
BF16_LIMIT = 6e-2 if INTERPRETED else 4e-2  # sums over fewer tokens have larger rounding errors
BASE = {"vocab_size": 96, "layers": LAYERS, "width": 64, "heads": 6, "kv_heads": 2, "head_dim": 16, "mlp_width": 144}
VARIANTS: dict[str, dict[str, Any]] = {
    "dense": {"experts": 0},
    "dense with norms of heads": {"experts": 0, "qk_norm": True},
    "dense with biases": {"experts": 0, "qkv_bias": True, "output_bias": True},
    "mixture": {"experts": 8, "experts_per_token": 3, "expert_width": 48, "qk_norm": True},
    "mixture with shared experts": {
        "experts": 8,
        "expert_width": 32,
        "gate": "sigmoid",
        "gate_bias": True,
        "shared_experts": 1,
        "dense_layers": 1,
    },
    "latent": {
        "experts": 0,
        "kv_heads": 6,
        "head_dim": 32,
        "latent": {"q_rank": 24, "kv_rank": 16, "plain_dim": 16, "rope_dim": 16, "value_dim": 24},
    },
}


def decoder(variant: str) -> Decoder:
    model = Decoder(ModelConfig.model_validate(BASE | VARIANTS[variant]))
    model.initialise(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms of 1 and biases of 0 would hide mistakes
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name))))
    round_to_form_(model.parameters(), "bf16")
    return model


def run(model: Decoder, replay: Replay | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns hidden rows, and the gradients of a loss on them."""
    device = model.embedding.device
    generator = torch.Generator().manual_seed(1)
    count = sum(LENGTHS)
    tokens = torch.randint(0, 96, (count,), generator=generator).to(device)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).to(device)
    slope = torch.randn(count, model.config.width, generator=generator).to(device)
    attend = packed_attention(LENGTHS, device, model.embedding.dtype)
    output = model(tokens, positions, attend, replay)
    loss = (output.hidden.float() * slope).sum() + sum(routing.scores.square().sum() for routing in output.routings)
    names = [name for name, parameter in model.named_parameters() if name != "head" or model.head is None]
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad(loss, [parameters[name] for name in names])
    return output.hidden.detach(), dict(zip(names, found, strict=True))


def recorded(model: Decoder) -> Replay | None:
    """Routes to replay, so that rounding cannot choose other experts."""
    config = model.config
    if not config.experts:
        return None
    generator = torch.Generator().manual_seed(2)
    shape = (sum(LENGTHS), config.moe_layers, config.experts)
    routes = torch.rand(shape, generator=generator).argsort(-1)[..., : config.experts_per_token]
    return Replay(routes, torch.ones(sum(LENGTHS), dtype=torch.bool))


def relative(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.cpu().float() - theirs.float()).norm() / (theirs.float().norm() + 1e-6))


def in_type(model: Decoder, dtype: torch.dtype) -> Decoder:
    """The same model in `dtype` on the kernels' device."""
    moved = Decoder(model.config, dtype)
    moved.load_state_dict(model.state_dict())
    return moved.to(DEVICE)


def test_the_cpu_runs_no_kernels_unless_they_are_interpreted():
    assert fuses(torch.zeros(1)) == INTERPRETED


@pytest.mark.kernels
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_kernels_compute_what_the_plain_decoder_does(variant: str, dtype: torch.dtype):
    model = decoder(variant)
    replay = recorded(model)
    with without_kernels():
        hidden, gradients = run(model, replay)
    ours, our_gradients = run(in_type(model, dtype), replay)
    limit = BF16_LIMIT if dtype == torch.bfloat16 else 1e-4
    assert relative(ours, hidden) < limit
    errors = {name: relative(our_gradients[name], gradient) for name, gradient in gradients.items()}
    assert max(errors.values()) < limit, {name: error for name, error in errors.items() if error >= limit}


@devices
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("variant", ["dense", "mixture"])
def test_recomputed_layers_give_the_same_bits(variant: str, every: int, device: str):
    model = decoder(variant).to(device)
    hidden, gradients = run(model)
    model.recompute_every = every
    again, gradients_again = run(model)
    assert torch.equal(hidden, again)
    assert all(torch.equal(gradient, gradients_again[name]) for name, gradient in gradients.items())


@pytest.mark.kernels
@pytest.mark.parametrize("variant", ["dense", "dense with biases", "mixture with shared experts"])
def test_a_recomputed_mlp_gives_the_same_bits(variant: str):
    model = in_type(decoder(variant), torch.bfloat16)
    hidden, gradients = run(model)
    model.recompute_mlp = True
    again, gradients_again = run(model)
    assert torch.equal(hidden, again)
    assert all(torch.equal(gradient, gradients_again[name]) for name, gradient in gradients.items())


@pytest.mark.parametrize("experts", [4, 300])
def test_rows_sorted_by_expert(experts: int):
    chosen = torch.stack([torch.randperm(experts)[:3] for _ in range(50)])
    chosen[chosen == 2] = 3 if experts == 4 else 2  # an expert without rows
    rows = sort_by_expert(chosen, experts)
    flat = chosen.flatten()
    assert torch.equal(flat[rows.order_R], flat.sort(stable=True).values)
    assert torch.equal(rows.token_R, rows.order_R // 3)
    assert torch.equal(rows.order_R[rows.place_Nk.flatten()], torch.arange(150))
    assert torch.equal(rows.ends_E.long(), torch.bincount(flat, minlength=experts).cumsum(0))
