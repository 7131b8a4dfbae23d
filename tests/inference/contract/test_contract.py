"""The contract of an Engine, see rollmill/inference/engine.py. Every engine is tested as a whole, with real weights.

Log-probs are compared with the trainer's forward pass under the version that each token names.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rollmill.errors import EngineError, WeightsError
from rollmill.inference.engine import Engine, EngineBusy, EngineUnavailable, GenerateRequest
from rollmill.models.decoder import Decoder
from rollmill.trajectories.allowed_tokens import decode_kept
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.reading.line_follower import Update
from tests.inference.contract.conftest import DENSE, MIXTURE, Open
from tests.inference.test_switch import changed
from tests.inference.world import (
    PROMPT,
    Whole,
    generate,
    make_model,
    make_update,
    request,
    trainer_pass,
    until,
)

TOLERANCE = 1e-4  # FP32 rounding


@asynccontextmanager
async def serving(open_engine: Open, update: Update | None, **settings: Any):  # type: ignore[no-untyped-def]
    model = settings.pop("model", DENSE)
    async with open_engine(model, **settings) as engine:
        if update is not None:
            await engine.apply(update)
        yield engine


async def settle(engine: Engine, **expected: float) -> None:
    """Waits until the engine's metrics have these values."""
    await until(lambda: all(engine.metrics()[name] == value for name, value in expected.items()))


def sampled(engine: Engine) -> float:
    return engine.metrics()["sampled_tokens_total"]


def logprobs_of(model: Decoder, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """[tokens, vocabulary]: row i is the distribution of the token after tokens[i]."""
    with torch.no_grad():
        return (model.logits(trainer_pass(model, tokens).hidden) / temperature).log_softmax(-1)


def differences(model: Decoder, wanted: GenerateRequest, got: Whole) -> np.ndarray:
    """Per sampled token: the engine's log-prob less the trainer's."""
    tokens = wanted.tokens + got.tokens
    expected = logprobs_of(model, tokens, wanted.sampling.temperature)[len(wanted.tokens) - 1 : -1]
    return np.abs(expected.gather(1, torch.tensor(got.tokens)[:, None]).squeeze(1).numpy() - np.array(got.logprobs))


# -- tokens


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_tokens_in_tokens_and_their_logprobs_out(open_engine: Open, temperature: float) -> None:
    update = make_update(1, DENSE)
    async with serving(open_engine, update) as engine:
        wanted = [request([seed, *PROMPT], f"s{seed}", seed=seed, max_tokens=40, temperature=temperature)
                  for seed in range(6)]  # fmt: skip
        answers = await asyncio.gather(*(generate(engine, one) for one in wanted))
    worst = 0.0
    for one, got in zip(wanted, answers, strict=True):
        assert len(got.tokens) == 40 and got.last.finish == "length"
        assert set(got.policies) == {update.policy}
        assert got.last.oldest_kv_policy == update.policy and got.last.missing == ""
        worst = max(worst, float(differences(make_model(update, DENSE), one, got).max()))
    print(f"largest log-prob difference, engine against trainer: {worst:.1e}")
    assert worst < TOLERANCE
    assert len({tuple(got.tokens) for got in answers}) == len(answers), "the seeds differ"


async def test_at_temperature_zero_the_most_likely_token_is_taken(open_engine: Open) -> None:
    update = make_update(1, DENSE)
    async with serving(open_engine, update) as engine:
        got = await generate(engine, request(temperature=0.0))
    best = logprobs_of(make_model(update, DENSE), PROMPT + got.tokens)[len(PROMPT) - 1 : -1].argmax(-1)
    assert got.tokens == best.tolist()


async def test_a_mixture_reports_routes_or_declares_that_it_does_not(open_engine: Open) -> None:
    update, wanted = make_update(1, MIXTURE), request(max_tokens=30)
    async with serving(open_engine, update, model=MIXTURE) as engine:
        got, declared = await generate(engine, wanted), engine.capabilities
    assert differences(make_model(update, MIXTURE), wanted, got).max() < TOLERANCE
    if declared.routes:
        assert sorted(got.routes) == list(range(len(PROMPT) + len(got.tokens) - 1))
        assert got.routes[0].shape == (MIXTURE.layers, MIXTURE.experts_per_token)
    else:
        assert got.routes == {}


async def test_what_a_cut_kept_is_recorded(open_engine: Open) -> None:
    wanted = request(top_k=5, top_p=0.9, max_tokens=20)
    async with serving(open_engine, make_update(1, DENSE)) as engine:
        got = await generate(engine, wanted)
    assert got.last.missing == "" and len(got.kept) == len(got.tokens)
    rows = logprobs_of(make_model(make_update(1, DENSE), DENSE), PROMPT + got.tokens)[len(PROMPT) - 1 : -1]
    for row, token, logprob, kept in zip(rows, got.tokens, got.logprobs, got.kept, strict=True):
        ids = np.flatnonzero(np.unpackbits(decode_kept(kept, DENSE.vocab_size), bitorder="little"))
        assert token in ids and 1 <= len(ids) <= 5
        assert float(row[token] - row[ids].logsumexp(0)) == pytest.approx(logprob, abs=TOLERANCE)


async def test_a_cut_that_is_not_recorded_is_told(open_engine: Open) -> None:
    async with serving(open_engine, make_update(1, DENSE)) as engine:
        got = await generate(engine, request(top_p=0.5, max_tokens=5))
    assert bool(got.last.missing) != (len(got.kept) == 5)


async def test_the_most_likely_tokens_are_told_to_who_asks(open_engine: Open) -> None:
    wanted = replace(request(max_tokens=6), top_logprobs=4)
    async with serving(open_engine, make_update(1, DENSE)) as engine:
        got, plain = await generate(engine, wanted), await generate(engine, request(max_tokens=6))
    rows = logprobs_of(make_model(make_update(1, DENSE), DENSE), PROMPT + got.tokens)[len(PROMPT) - 1 : -1]
    assert plain.last.top_logprobs == [] and plain.tokens == got.tokens
    for row, best in zip(rows, got.last.top_logprobs, strict=True):
        values, tokens = row.topk(4)
        assert [token for token, _ in best] == tokens.tolist()
        np.testing.assert_allclose([value for _, value in best], values, atol=TOLERANCE)


async def test_an_answer_ends_at_a_stop_token_its_limit_or_the_context_limit(open_engine: Open) -> None:
    async with serving(open_engine, make_update(1, DENSE)) as engine:
        free = await generate(engine, request(max_tokens=10))
        stopped = await generate(engine, request(stop_tokens=(free.tokens[3],), max_tokens=10))
        endless = await generate(engine, request(max_tokens=10**9))
        full = await generate(engine, request([1] * DENSE.max_context))
    assert (free.last.finish, len(free.tokens)) == ("length", 10)
    assert stopped.last.finish == "stop"
    assert stopped.tokens == free.tokens[: free.tokens.index(free.tokens[3]) + 1], "it ends with the stop token"
    assert endless.last.finish == "length" and len(PROMPT) + len(endless.tokens) == DENSE.max_context
    assert full.last.finish == "length" and full.tokens == []


async def test_streaming_sends_the_same_answer_in_pieces(open_engine: Open) -> None:
    async with serving(open_engine, make_update(1, DENSE)) as engine:
        whole = [chunk async for chunk in engine.generate(request())]
        pieces = [chunk async for chunk in engine.generate(request(session="other"), stream=True)]
    assert len(whole) == 1 and len(pieces) > 1
    assert [token for piece in pieces for token in piece.tokens] == whole[0].tokens
    assert [piece.finish for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    timing = whole[0].timing
    assert timing["queue_seconds"] <= timing["first_token_seconds"] <= timing["total_seconds"]


@pytest.mark.parametrize("tokens", [[], [DENSE.vocab_size], [-1]])
async def test_a_context_the_model_cannot_read_is_refused(open_engine: Open, tokens: list[int]) -> None:
    async with serving(open_engine, make_update(1, DENSE)) as engine:
        with pytest.raises(EngineError):
            await generate(engine, request(tokens))
        assert (await generate(engine, request())).tokens, "the engine continues"


async def test_a_grammar_is_refused_where_there_are_none(open_engine: Open) -> None:
    async with serving(open_engine, make_update(1, DENSE)) as engine:
        with pytest.raises(EngineError, match="grammar"):
            await generate(engine, request(grammar='start: "a"', stop_tokens=(2,)))


# -- weights


@pytest.mark.parametrize("recompute_kv", [False, True])
async def test_each_token_names_the_weights_that_sampled_it(open_engine: Open, recompute_kv: bool) -> None:
    """Deltas arrive in the middle of answers."""
    versions = [make_update(1, DENSE)]
    for number in range(2, 5):
        versions.append(changed(versions[-1], number)[0])
    wanted = [request([seed, *PROMPT], f"s{seed}", seed=seed, max_tokens=200) for seed in range(4)]
    async with serving(open_engine, versions[0], recompute_kv=recompute_kv) as engine:
        running = [asyncio.create_task(generate(engine, one, stream=True)) for one in wanted]
        for update in versions[1:]:
            before = sampled(engine)
            await until(lambda: sampled(engine) > before + 40)  # noqa: B023
            applied = await engine.apply(update)
            assert applied.pause_seconds > 0 and applied.running == len(wanted)
            assert engine.health()["policy"] == vars(update.policy)
        answers, keeps = await asyncio.gather(*running), engine.capabilities.keeps_cache
    for one, got in zip(wanted, answers, strict=True):
        numbers = [policy.number for policy in got.policies]
        assert len(numbers) == 200 and numbers == sorted(numbers) and set(numbers) == {1, 2, 3, 4}
        assert got.last.oldest_kv_policy == versions[0].policy
        for update in versions[:1] if keeps else versions:  # with a kept cache, later tokens attend to older keys
            off = differences(make_model(update, DENSE), one, got)
            assert off[[number == update.policy.number for number in numbers]].max() < TOLERANCE


async def test_all_weights_are_replaced(open_engine: Open) -> None:
    """Nothing of the version before is left, in packed copies or in caches: other weights, the same context."""
    for model in (DENSE, MIXTURE):
        async with serving(open_engine, None, model=model) as engine:
            for number in (1, 2, 3):
                update, wanted = make_update(number, model), request(session=f"s{number}")
                await engine.apply(update)
                got = await generate(engine, wanted)
                assert differences(make_model(update, model), wanted, got).max() < TOLERANCE, (model, number)


async def test_a_request_waits_for_its_version(open_engine: Open) -> None:
    first, second = make_update(1, DENSE), make_update(2, DENSE)
    async with serving(open_engine, first) as engine:
        waits = asyncio.create_task(generate(engine, replace(request(), min_version=2)))
        await settle(engine, waiting=1)
        assert set((await generate(engine, request(session="other"))).policies) == {first.policy}
        assert not waits.done()
        await engine.apply(second)
        assert set((await waits).policies) == {second.policy}


async def test_before_the_first_weights_requests_wait(open_engine: Open) -> None:
    async with serving(open_engine, None) as engine:
        assert engine.health()["policy"] is None
        waits = asyncio.create_task(generate(engine, request()))
        await settle(engine, waiting=1)
        await engine.apply(make_update(3, DENSE))
        assert {policy.number for policy in (await waits).policies} == {3}


async def test_a_request_that_names_a_line_is_not_served_by_another_one(open_engine: Open) -> None:
    first, other = make_update(1, DENSE), make_update(2, DENSE)
    other = replace(other, policy=replace(other.policy, line="other"))
    async with serving(open_engine, first) as engine:
        waits = asyncio.create_task(generate(engine, replace(request(), line="main", min_version=9)))
        await settle(engine, waiting=1)
        await engine.apply(other)
        with pytest.raises(EngineUnavailable, match="serves line other"):
            await waits
        with pytest.raises(EngineUnavailable, match="serves line other"):
            await generate(engine, replace(request(), line="main"))
        assert set((await generate(engine, replace(request(), line="other"))).policies) == {other.policy}


async def test_bytes_that_do_not_match_are_never_served(open_engine: Open) -> None:
    good, bad = make_update(1, DENSE), make_update(2, DENSE)
    flipped = bad.tensors["embedding"].data.copy()
    flipped[10] ^= 1
    bad.tensors["embedding"] = HostTensor("bf16", bad.tensors["embedding"].shape, flipped)
    async with serving(open_engine, good) as engine:
        with pytest.raises(WeightsError, match="digest"):
            await engine.apply(bad)
        await engine.apply(make_update(3, DENSE))
        assert {policy.number for policy in (await generate(engine, request())).policies} == {3}


async def test_weights_of_another_model_leave_the_served_ones_in_place(open_engine: Open) -> None:
    good, other = make_update(1, DENSE), make_update(2, DENSE)
    del other.tensors["norm"]
    async with serving(open_engine, good) as engine:
        with pytest.raises(WeightsError, match="another model"):
            await engine.apply(other)
        assert {policy.number for policy in (await generate(engine, request())).policies} == {1}


# -- service


async def test_a_pause_stops_tokens_and_keeps_requests(open_engine: Open) -> None:
    update = make_update(1, DENSE)
    wanted = [request([seed, *PROMPT], f"s{seed}", seed=seed, max_tokens=240) for seed in range(8)]
    async with serving(open_engine, update) as engine:
        running = [asyncio.create_task(generate(engine, one)) for one in wanted]
        await until(lambda: sampled(engine) > 20)
        await engine.pause()
        assert engine.health()["paused"]
        before = sampled(engine)
        late = asyncio.create_task(generate(engine, request(session="late")))
        await asyncio.sleep(0.3)
        assert sampled(engine) == before < 8 * 240 and not late.done() and not all(task.done() for task in running)
        await engine.resume()
        answers = await asyncio.gather(*running)
        assert len((await late).tokens) == 12
    for one, got in zip(wanted, answers, strict=True):
        assert len(got.tokens) == 240
        assert differences(make_model(update, DENSE), one, got).max() < TOLERANCE


async def test_weights_may_change_during_a_pause(open_engine: Open) -> None:
    first, second = make_update(1, DENSE), make_update(2, DENSE)
    wanted = [request([seed, *PROMPT], f"s{seed}", seed=seed, max_tokens=240) for seed in range(8)]
    async with serving(open_engine, first) as engine:
        running = [asyncio.create_task(generate(engine, one)) for one in wanted]
        await until(lambda: sampled(engine) > 10)
        await engine.pause()
        await engine.apply(second)
        before = sampled(engine)
        await asyncio.sleep(0.2)
        assert engine.health()["paused"] and sampled(engine) == before
        await engine.resume()
        used = {policy for got in await asyncio.gather(*running) for policy in got.policies}
    assert used == {first.policy, second.policy}


async def test_a_client_that_goes_away_frees_its_place(open_engine: Open) -> None:
    async with serving(open_engine, make_update(1, DENSE), max_batch=1) as engine:
        stream = engine.generate(request(max_tokens=240), stream=True)
        await anext(stream)
        waits = asyncio.create_task(generate(engine, request(session="next")))
        await settle(engine, running=1, waiting=1)
        await stream.aclose()
        assert len((await waits).tokens) == 12
        gone = asyncio.create_task(generate(engine, request(session="gone", max_tokens=240)))
        await settle(engine, running=1)
        gone.cancel()
        await settle(engine, running=0, waiting=0)
        assert engine.metrics()["finished_abort_total"] == 2


async def test_a_drain_finishes_what_there_is(open_engine: Open) -> None:
    async with serving(open_engine, make_update(1, DENSE), max_batch=1) as engine:
        tasks = [asyncio.create_task(generate(engine, request(session=f"s{n}", max_tokens=60))) for n in range(3)]
        await settle(engine, running=1, waiting=2)
        await engine.drain()
        with pytest.raises(EngineUnavailable, match="drains"):
            await generate(engine, request(session="new"))
        assert [len(got.tokens) for got in await asyncio.gather(*tasks)] == [60] * 3
        await settle(engine, running=0, waiting=0)
        assert engine.health()["draining"]
        await engine.resume()
        assert (await generate(engine, request())).tokens


async def test_production_goes_before_rollouts(open_engine: Open) -> None:
    """A rollout loses its place to production, and goes on later from its tokens."""
    update, ended = make_update(1, DENSE), list[str]()

    async def ask(wanted: GenerateRequest) -> Whole:
        got = await generate(engine, wanted)
        ended.append(wanted.session)
        return got

    long = [request([n, *PROMPT], f"rollout{n}", seed=n, max_tokens=200) for n in range(3)]
    async with serving(open_engine, update, max_batch=2) as engine:
        rollouts = [asyncio.create_task(ask(one)) for one in long]
        await settle(engine, running=2, waiting=1)
        await until(lambda: sampled(engine) > 10)
        live = [replace(request(session=f"live{n}"), traffic="production") for n in range(2)]
        await asyncio.gather(*(ask(one) for one in live))
        answers = await asyncio.gather(*rollouts)
        assert engine.metrics()["preemptions_total"] >= 1
    assert sorted(ended[:2]) == ["live0", "live1"]
    for one, got in zip(long, answers, strict=True):
        assert len(got.tokens) == 200
        assert differences(make_model(update, DENSE), one, got).max() < TOLERANCE


async def test_too_many_waiting_requests_are_refused(open_engine: Open) -> None:
    async with serving(open_engine, None, max_waiting=2) as engine:
        tasks = [asyncio.create_task(generate(engine, request(session=f"s{n}"))) for n in range(2)]
        await settle(engine, waiting=2)
        with pytest.raises(EngineBusy):
            await generate(engine, request(session="more"))
        live = asyncio.create_task(generate(engine, replace(request(session="live"), traffic="production")))
        await settle(engine, waiting=3, refused_total=1)
        await engine.apply(make_update(1, DENSE))
        for got in await asyncio.gather(*tasks, live):
            assert got.tokens


async def test_metrics_and_health_say_what_is_served(open_engine: Open, kind: str) -> None:
    async with serving(open_engine, make_update(7, DENSE)) as engine:
        await generate(engine, request())
        metrics, health = engine.metrics(), engine.health()
    assert metrics["version"] == 7 and metrics["applied_total"] == 1 and metrics["finished_length_total"] == 1
    assert metrics["sampled_tokens_total"] == 12
    assert health["engine"] == "engine-test" and health["capabilities"]["kind"] == kind
