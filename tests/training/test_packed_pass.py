"""One step on packed tokens: micro-batches, chunks of the head and recorded graphs do not change the result."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.train_step import NextTokenStep
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.kernels.heads import head
from rollmill.training import packed_pass
from rollmill.training.batching import MicroBatch, PackedSequence, pack
from rollmill.training.config import OptimizerConfig
from rollmill.training.numerics.next_token import NextTokenPasses
from rollmill.training.optimizers.master_optimizer import MasterOptimizer
from rollmill.training.packed_pass import forward_packed, target_logprobs, token_logprobs, token_loss
from tests.kernels import DEVICE, INTERPRETED

VOCABULARY = 120


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return request.param


def decoder(device: str, head_dim: int = 16, form: str = "bf16") -> Decoder:
    config = ModelConfig(
        vocab_size=VOCABULARY,
        width=64,
        head_dim=head_dim,
        expert_width=32,
        mlp_width=96,
        dense_layers=1,
        max_context=64,
    )
    model = Decoder(config, torch.bfloat16 if device == "cuda" else torch.float32, form)
    model.initialise(0)
    return model.to(device)


def sequences(lengths: list[int], seed: int = 0) -> list[PackedSequence]:
    rng = np.random.default_rng(seed)
    found = []
    for length in lengths:
        tokens = rng.integers(0, VOCABULARY, length + 1)
        rows = np.flatnonzero(rng.random(length) < 0.7)
        rows = rows if rows.size else np.array([0])
        found.append(PackedSequence(tokens=tokens[:-1], rows=rows, targets=tokens[rows + 1]))
    return found


def losses(
    device: str, parts: list[list[MicroBatch]], head_dim: int = 16, form: str = "bf16", **options: Any
) -> tuple[list[float], Decoder]:
    model = decoder(device, head_dim, form)
    model.recompute_mlp = True
    step = NextTokenStep(model, MasterOptimizer(model, OptimizerConfig(), form), **options)
    return [step(each, 1e-3)[0] for each in parts], model


def test_micro_batches_make_no_difference(device: str):
    drawn = sequences([40, 17, 40, 3])
    whole, first = losses(device, [pack(drawn, 1000)] * 3)
    parts, second = losses(device, [pack(drawn, 45)] * 3)
    assert len(pack(drawn, 45)) > 1
    assert parts == pytest.approx(whole, rel=1e-2 if device == "cuda" else 1e-4)
    for name, parameter in first.named_parameters():
        other = second.get_parameter(name)
        assert float((parameter - other).detach().float().norm() / parameter.detach().float().norm()) < 1e-2, name


def test_the_loss_falls(device: str):
    found, _ = losses(device, [pack(sequences([40, 40]), 1000)] * 12)
    assert found[-1] < found[0] - 0.2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("form", ["bf16", "fp8", "nvfp4"])
def test_replayed_passes_give_the_same_weights(form: str):
    batches = [pack(sequences([32, 32], seed), 1000) for seed in range(6)]
    for batch in batches:  # one shape for all batches
        assert len(batch) == 1
    alike = [[_with_targets(batch[0])] for batch in batches]
    recorded, first = losses("cuda", alike, form=form, balance=0.01, graphs=True)
    plain, second = losses("cuda", alike, form=form, balance=0.01, graphs=False)
    assert recorded == pytest.approx(plain, rel=2e-3)
    for name, parameter in first.named_parameters():
        other = second.get_parameter(name)
        assert float((parameter - other).detach().float().norm() / parameter.detach().float().norm()) < 2e-2, name


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("head_dim", [16, 32])  # torch's attention, and ours
def test_replayed_passes_of_several_shapes_do_not_disturb_each_other(head_dim: int):
    """Their graphs share memory, and their gradients are summed."""
    steps = [[_with_targets(part) for part in pack(sequences([32, 32, 20, 7], seed), 70)] for seed in range(6)]
    assert [[len(part.lengths) for part in parts] for parts in steps] == [[2, 2]] * 6
    recorded, first = losses("cuda", steps, head_dim, graphs=True)
    plain, second = losses("cuda", steps, head_dim, graphs=False)
    assert recorded == pytest.approx(plain, rel=2e-3)
    for name, parameter in first.named_parameters():
        other = second.get_parameter(name)
        assert float((parameter - other).detach().float().norm() / parameter.detach().float().norm()) < 2e-2, name


def recomputed_gradients(form: str, every: int, gate_up: bool) -> list[Tensor]:
    config = ModelConfig(vocab_size=VOCABULARY, width=64, head_dim=16, experts=0, mlp_width=96, max_context=64)
    model = Decoder(config, torch.bfloat16, form)
    model.initialise(0)
    model.to(DEVICE)
    model.recompute_every, model.recompute_mlp = every, gate_up
    (part,) = pack(sequences([6, 2] if INTERPRETED else [20, 7]), 1000)
    NextTokenPasses(model, 0.0, graphs=False)(part, len(part.targets_M), len(part.tokens_N))
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


kept_gradients = functools.cache(functools.partial(recomputed_gradients, every=0, gate_up=False))


@pytest.mark.kernels
@pytest.mark.parametrize("every", [0, 1, 2])
@pytest.mark.parametrize("gate_up", [False, True])
@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_recomputation_changes_no_gradient(every: int, gate_up: bool, form: str):
    """The two settings that out-of-memory errors suggest, one after the other."""
    kept, again = kept_gradients(form), recomputed_gradients(form, every, gate_up)
    assert kept and all(torch.equal(mine, other) for mine, other in zip(kept, again, strict=True))


def _with_targets(part: MicroBatch) -> MicroBatch:
    rows = torch.arange(0, len(part.tokens_N), 2)
    return MicroBatch(part.tokens_N, part.positions_N, part.lengths, rows, part.tokens_N[rows], None, None, None)


def test_head_in_chunks(device: str, monkeypatch: pytest.MonkeyPatch):
    model = decoder(device)
    (part,) = pack(sequences([40, 17]), 1000)
    _, hidden_MW = forward_packed(model, part)
    logits_MV, targets_M = model.logits(hidden_MW), part.targets_M.to(device)
    temperatures_M = torch.linspace(0.5, 1.5, len(targets_M))
    expected = target_logprobs(logits_MV, targets_M, temperatures_M.to(device))
    monkeypatch.setattr(packed_pass, "PIECE_ELEMENTS", 1)
    monkeypatch.setattr(head, "PIECE_ELEMENTS", 1)
    for ours, theirs in zip(token_logprobs(model, hidden_MW, targets_M, temperatures_M), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    loss = -target_logprobs(logits_MV, targets_M)[0].mean()
    torch.testing.assert_close(token_loss(model, hidden_MW, targets_M, len(targets_M)), loss)
