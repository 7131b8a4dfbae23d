"""Cuts, masks and penalties: the trainer finds the log-probs that the engine recorded, and the right gradients."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from rollmill.errors import TrajectoryError
from rollmill.models.shaping import Shape, pack_bits, unpack_bits
from rollmill.training.batching import TRUNCATED, MicroBatch, TokenRule, check_fits, pack, segment_sequence
from rollmill.training.lineage import Lineage
from rollmill.training.numerics.router_replay import replay_of
from rollmill.training.packed_pass import token_logprobs
from rollmill.training.single import SINGLE
from rollmill.trajectories.allowed_tokens import encode_kept, join_kept
from rollmill.types import Sampling, Segment, Span
from tests.inference.world import TINY, Whole, engine_at, generate, make_model, make_update, request

RULE = TokenRule(Lineage("main", {"main": 0}), 1, 0)


def random_sampling(random: np.random.Generator) -> dict[str, Any]:
    return {
        "temperature": float(random.uniform(0.5, 1.5)),
        "top_p": float(random.choice([1.0, 0.5, 0.95])),
        "top_k": int(random.choice([0, 5])),
        "min_p": float(random.choice([0.0, 0.1])),
        "presence_penalty": float(random.choice([0.0, 0.7])),
        "frequency_penalty": float(random.choice([0.0, 0.4, -0.4])),
        "repetition_penalty": float(random.choice([1.0, 1.4])),
        "logit_bias": ((3, 1.5), (7, -100.0)) if random.random() < 0.5 else (),
    }


def recorded(prompt: list[int], whole: Whole, sampling: Sampling, answered: int = 0) -> Segment:
    length, start = len(prompt) + len(whole.tokens), len(prompt)
    sampled = np.arange(length) >= start
    logprobs = np.full(length, np.nan, np.float32)
    logprobs[start:] = whole.logprobs
    routes = np.stack([whole.routes.get(position, np.zeros((2, 2), np.uint8)) for position in range(length)])
    span = Span(start, length, sampling, "stop", "e", "home", "rollout", 0.0, 1.0, 0, answered=answered)
    kept = join_kept([b""] * start + (whole.kept or [b""] * len(whole.tokens)))
    return Segment(
        id="s",
        tokens=np.array(prompt + whole.tokens, np.int32),
        sampled=sampled,
        logprobs=logprobs,
        policy=np.where(sampled, 0, -1).astype(np.int16),
        policies=[whole.policies[0]],
        spans=[span],
        routes=routes,
        routes_valid=np.array([position in whole.routes for position in range(length)]),
        kept_sizes=kept["kept_sizes"],
        kept=kept["kept"],
    )


async def sampled_segments(count: int) -> list[Segment]:
    random = np.random.default_rng(1)
    prompts = [random.integers(0, TINY.vocab_size, 6).tolist() for _ in range(count)]
    wanted = [request(prompts[n], f"s{n}", seed=n, max_tokens=24, **random_sampling(random)) for n in range(count)]
    for one in wanted[::3]:  # answers that began on another engine
        one.answered = 2
    async with engine_at(make_update(1)) as engine:
        wholes = await asyncio.gather(*(generate(engine, one) for one in wanted))
    return [recorded(one.tokens, whole, one.sampling, one.answered) for one, whole in zip(wanted, wholes, strict=True)]


def batch_of(segments: list[Segment], masked: Counter[str] | None = None) -> MicroBatch:
    check_fits(segments, TINY)
    found = [segment_sequence(each, 1.0, RULE, Counter() if masked is None else masked) for each in segments]
    (batch,) = pack([each for each in found if each is not None], 10**6)
    return batch


async def test_the_trainer_finds_the_log_probs_of_shaped_distributions() -> None:
    segments, masked, model = await sampled_segments(32), Counter[str](), make_model(make_update(1))
    batch = batch_of(segments, masked)
    assert batch.facts is not None and batch.facts.shapes is not None
    assert not +masked and len(batch.targets_M) == 32 * 24, "every token is trained on"
    logprobs_M = SINGLE.passes.recompute(model, batch, replay_of(batch)).logprobs_M.detach().numpy()
    np.testing.assert_allclose(logprobs_M, batch.facts.logprobs, atol=1e-4)
    # without its cut or its penalties, most tokens would get another log-prob
    temperatures_M = torch.from_numpy(batch.facts.temperatures)
    hidden_MW = torch.randn(len(batch.targets_M), TINY.width, generator=torch.Generator().manual_seed(0))
    plain_M, _ = token_logprobs(model, hidden_MW, batch.targets_M, temperatures_M)
    shaped_M, _ = token_logprobs(model, hidden_MW, batch.targets_M, temperatures_M, batch.facts.shapes)
    assert float((plain_M != shaped_M).float().mean()) > 0.9
    unshaped = np.flatnonzero(batch.facts.shapes == np.array(None))
    assert torch.equal(plain_M[unshaped], shaped_M[unshaped])


def test_gradients_are_those_of_the_masked_softmax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against plain autograd over a dense mask, for log-probs and entropies, in several chunks."""
    monkeypatch.setattr("rollmill.training.packed_pass.PIECE_ELEMENTS", TINY.vocab_size * 8 * 3)
    generator = torch.Generator().manual_seed(0)
    model, count, size = make_model(make_update(1)), 10, TINY.vocab_size
    hidden_MW = torch.randn(count, TINY.width, generator=generator, requires_grad=True)
    targets_M = torch.randint(0, size, (count,), generator=generator)
    temperatures_M = torch.linspace(0.5, 1.5, count)
    kept_MV = torch.rand(count, size, generator=generator) < 0.4
    kept_MV[torch.arange(count), targets_M] = True
    kept_MV[::4] = True
    sets = [encode_kept(bits) for bits in pack_bits(kept_MV).numpy()]
    sampling = Sampling(top_p=0.5, repetition_penalty=1.5, presence_penalty=0.3, frequency_penalty=0.2)
    context = np.array([1, 2, 2, 5, 5, 5], np.int32)
    shapes = np.full(count, None, object)
    for row in range(count):
        if row % 4:
            shapes[row] = Shape(sampling, context, 3, sets[row])
    weights = torch.randn(2, count, generator=generator)
    found = token_logprobs(model, hidden_MW, targets_M, temperatures_M, shapes)
    sum((weight * each).sum() for weight, each in zip(weights, found, strict=True)).backward()
    grads = [hidden_MW.grad, model.embedding.grad if model.head is None else model.head.grad]

    factors, minus = torch.ones(count, size), torch.zeros(count, size)
    shaped_M1 = torch.tensor([row % 4 > 0 for row in range(count)])[:, None]
    factors[:, [1, 2, 5]] = torch.where(shaped_M1, 1.5, 1.0)
    minus[:, 5] = torch.where(shaped_M1[:, 0], 0.3 + 3 * 0.2, 0.0)
    again_MW = hidden_MW.detach().clone().requires_grad_()
    weight_VW = (model.embedding if model.head is None else model.head).detach().clone().requires_grad_()
    logits_MV = again_MW @ weight_VW.T
    logits_MV = torch.where(logits_MV > 0, logits_MV / factors, logits_MV * factors) - minus
    logprobs_MV = (logits_MV / temperatures_M[:, None] + torch.where(kept_MV, 0.0, -1e30)).log_softmax(-1)
    entropies_M = -(logprobs_MV.exp() * logprobs_MV).sum(-1)
    expected = logprobs_MV.gather(1, targets_M[:, None])[:, 0], entropies_M
    sum((weight * each).sum() for weight, each in zip(weights, expected, strict=True)).backward()
    for mine, theirs in zip((*found, *grads), (*expected, again_MW.grad, weight_VW.grad), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


async def test_tokens_without_their_set_are_left_out() -> None:
    wanted = request(top_p=0.8, seed=1, max_tokens=8)
    async with engine_at(make_update(1)) as engine:
        whole = await generate(engine, wanted)
    whole.kept[2] = whole.kept[5] = b""
    segment = recorded(wanted.tokens, whole, wanted.sampling)
    masked: Counter[str] = Counter()
    assert len(batch_of([segment], masked).targets_M) == 6
    assert +masked == Counter({TRUNCATED: 2})


async def test_sets_that_cannot_be_are_refused() -> None:
    async with engine_at(make_update(1)) as engine:
        whole = await generate(engine, request(top_k=3))
    for wrong in (b"\1" + (TINY.vocab_size).to_bytes(4, "little"), b"\2damaged", b"\1"):
        segment = recorded(request().tokens, Whole(**{**vars(whole), "kept": [wrong, *whole.kept[1:]]}), Sampling())
        with pytest.raises(TrajectoryError, match="kept tokens"):
            check_fits([segment], TINY)
    other = (whole.tokens[0] + 1).to_bytes(4, "little")
    segment = recorded(request().tokens, Whole(**{**vars(whole), "kept": [b"\1" + other, *whole.kept[1:]]}), Sampling())
    with pytest.raises(TrajectoryError, match="not in its set"):
        check_fits([segment], TINY)


def test_bits_are_packed_and_unpacked() -> None:
    mask_MV = torch.rand(5, 83, generator=torch.Generator().manual_seed(0)) < 0.5
    assert torch.equal(unpack_bits(pack_bits(mask_MV), 83), mask_MV)
    assert np.array_equal(pack_bits(mask_MV).numpy(), np.packbits(mask_MV.numpy(), axis=1, bitorder="little"))
