"""The embedded engine, compared with the trainer's forward pass, and its handling of requests."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from rollmill.errors import EngineError
from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.inference.engine import EngineUnavailable, GenerateRequest
from rollmill.models.device import Device
from tests.inference.world import (
    ENGINE,
    PROMPT,
    TINY,
    Whole,
    engine_at,
    generate,
    make_model,
    make_update,
    request,
    tolerance,
    trainer_logprobs,
    trainer_pass,
    until,
    use_device,
)


@pytest.fixture(autouse=True, params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    return use_device(request.param, monkeypatch)


async def settle(engine: EmbeddedEngine, **expected: float) -> None:
    """Waits until the engine's metrics have these values."""
    await until(lambda: all(engine.metrics()[name] == value for name, value in expected.items()))


@pytest.mark.parametrize("experts", [6, 0], ids=["mixture", "dense"])
async def test_logprobs_are_the_trainers(experts: int) -> None:
    config = TINY.model_copy(update={"experts": experts})
    update = make_update(0, config)
    async with engine_at(update, model=config) as engine:
        wanted = [request([seed + 1, *PROMPT[: 3 + seed]], f"s{seed}", seed=seed, max_tokens=60) for seed in range(8)]
        answers = await asyncio.gather(*(generate(engine, one) for one in wanted))
    model, worst = make_model(update, config), 0.0
    for one, got in zip(wanted, answers, strict=True):
        expected = trainer_logprobs(model, one.tokens + got.tokens, got.routes if experts else None)
        worst = max(worst, float((expected[len(one.tokens) - 1 :] - torch.tensor(got.logprobs)).abs().max()))
    print(f"largest log-prob difference, engine against trainer: {worst:.1e}")
    assert worst < tolerance()


async def test_the_most_likely_tokens_are_told_to_who_asks() -> None:
    """Under the distribution that is sampled from: top-k leaves three tokens. Other requests get none."""
    wanted = request(top_k=3, max_tokens=6)
    wanted.top_logprobs = 5
    async with engine_at(make_update(0)) as engine:
        chunks, plain = [], generate(engine, request(session="other"))
        running = asyncio.create_task(plain)
        async for chunk in engine.generate(wanted, stream=True):
            chunks.append(chunk)
        assert (await running).last.top_logprobs == []
    told = [best for chunk in chunks for best in chunk.top_logprobs]
    sampled = [pair for chunk in chunks for pair in zip(chunk.tokens, chunk.logprobs, strict=True)]
    assert len(told) == len(sampled) == 6
    for best, (token, logprob) in zip(told, sampled, strict=True):
        assert len(best) == 3 and dict(best)[token] == pytest.approx(logprob, abs=1e-6)
        assert [value for _, value in best] == sorted((value for _, value in best), reverse=True)
        assert sum(np.exp([value for _, value in best])) == pytest.approx(1, abs=1e-5)


async def test_every_computed_position_has_routes(device: Device) -> None:
    update = make_update(0)
    async with engine_at(update) as engine:
        got = await generate(engine, request(), stream=True)
    assert sorted(got.routes) == list(range(len(PROMPT) + len(got.tokens) - 1)), "all but the last token were inputs"
    tokens = PROMPT + got.tokens[:-1]
    live = trainer_pass(make_model(update), tokens).routes.cpu().numpy()
    same = np.stack([got.routes[position] for position in sorted(got.routes)]) == live
    assert same.all() if device == "cpu" else same.mean() > 0.9, "bf16 sometimes flips a near-tie"
    assert got.routes[0].dtype == np.uint8


async def test_many_experts_need_two_bytes() -> None:
    config = TINY.model_copy(update={"experts": 300, "expert_width": 2})
    async with engine_at(make_update(0, config), model=config) as engine:
        got = await generate(engine, request())
    assert got.routes[0].dtype == np.uint16


async def test_a_batch_gives_the_same_answers_as_single_requests() -> None:
    update = make_update(0)
    wanted = [request(PROMPT[:length], f"s{length}", seed=length, max_tokens=20) for length in range(1, 12)]
    async with engine_at(update) as engine:
        together = await asyncio.gather(*(generate(engine, one) for one in wanted))
    for one, batched in zip(wanted, together, strict=True):
        async with engine_at(update) as engine:
            alone = await generate(engine, one)
        assert alone.tokens == batched.tokens
        np.testing.assert_allclose(alone.logprobs, batched.logprobs, atol=1e-5)


async def test_a_seed_gives_the_same_tokens_again_and_on_another_engine_from_the_middle() -> None:
    update, wanted = make_update(0), request(seed=11, max_tokens=30)
    runs = []
    for _ in range(2):
        async with engine_at(update) as engine:
            runs.append(await generate(engine, wanted))
    assert (runs[0].tokens, runs[0].logprobs) == (runs[1].tokens, runs[1].logprobs)
    async with engine_at(update) as engine:
        other = await generate(engine, request(seed=12, max_tokens=30))
        rest = await generate(engine, request(PROMPT + runs[0].tokens[:10], "rest", seed=11, max_tokens=20))
    assert other.tokens != runs[0].tokens
    assert rest.tokens == runs[0].tokens[10:]


async def test_streaming_sends_the_same_answer_in_pieces() -> None:
    async with engine_at(make_update(0)) as engine:
        whole = [chunk async for chunk in engine.generate(request())]
        pieces = [chunk async for chunk in engine.generate(request(session="other"), stream=True)]
    assert len(whole) == 1 and len(pieces) > 3
    assert [token for piece in pieces for token in piece.tokens] == whole[0].tokens
    assert [piece.finish for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]
    assert whole[0].oldest_kv_policy == make_update(0).policy
    assert whole[0].timing["queue_seconds"] <= whole[0].timing["first_token_seconds"]
    assert whole[0].timing["first_token_seconds"] <= whole[0].timing["total_seconds"]


async def test_generation_ends_at_a_stop_token_the_token_limit_or_the_context_limit() -> None:
    async with engine_at(make_update(0)) as engine:
        free = await generate(engine, request(max_tokens=10))
        stopped = await generate(engine, request(stop_tokens=(free.tokens[3],), max_tokens=10))
        never_ending = await generate(engine, request(max_tokens=10**9))
        full = await generate(engine, request([1] * TINY.max_context))
    assert (free.last.finish, len(free.tokens)) == ("length", 10)
    assert stopped.last.finish == "stop"
    assert stopped.tokens == free.tokens[: free.tokens.index(free.tokens[3]) + 1], (
        "the stop token is part of the answer"
    )
    assert never_ending.last.finish == "length" and len(PROMPT) + len(never_ending.tokens) == TINY.max_context
    assert full.last.finish == "length" and full.tokens == []


@pytest.mark.parametrize("tokens", [[], [40], [-1]])
async def test_a_context_the_model_cannot_read_is_refused(tokens: list[int]) -> None:
    async with engine_at(make_update(0)) as engine:
        with pytest.raises(EngineError):
            await generate(engine, request(tokens))
        assert (await generate(engine, request())).tokens, "the engine continues"


# -- sessions


async def test_a_next_turn_computes_only_what_is_new() -> None:
    update = make_update(0)
    async with engine_at(update) as engine, engine_at(update) as fresh:
        first = await generate(engine, request(temperature=0.0))
        context = PROMPT + first.tokens + [8, 8, 8]
        second = await generate(engine, request(context, temperature=0.0))
        without = await generate(fresh, request(context, temperature=0.0))
    assert first.last.cached_tokens == 0
    assert second.last.cached_tokens == len(PROMPT) + len(first.tokens) - 1
    assert min(second.routes) == second.last.cached_tokens, (
        "routes of cached positions were reported by the turn before"
    )
    assert second.tokens == without.tokens
    np.testing.assert_allclose(second.logprobs, without.logprobs, atol=1e-5)


async def test_a_changed_history_is_computed_from_the_first_page_with_a_change() -> None:
    async with engine_at(make_update(0)) as engine:
        first = await generate(engine, request(temperature=0.0))
        edited = [*PROMPT[:-1], 7, *first.tokens, 8]
        second = await generate(engine, request(edited, temperature=0.0))
    async with engine_at(make_update(0)) as engine:
        fresh = await generate(engine, request(edited, "other", temperature=0.0))
    assert second.last.cached_tokens == 8, "two full pages before the change"
    assert second.tokens == fresh.tokens
    assert sorted(second.routes) == sorted(fresh.routes), "this is another context: all its routes are reported"


async def test_two_requests_of_one_session_at_once_do_not_share_pages() -> None:
    async with engine_at(make_update(0)) as engine:
        alone = await generate(engine, request(temperature=0.0, max_tokens=30))
        both = await asyncio.gather(*(generate(engine, request(temperature=0.0, max_tokens=30)) for _ in range(2)))
    assert [one.tokens for one in both] == [alone.tokens] * 2


# -- pages


async def test_running_out_of_pages_delays_answers_but_changes_none() -> None:
    update = make_update(0)
    small = ENGINE.model_copy(update={"cache_tokens": 96})
    wanted = [request([n + 1, *PROMPT], f"s{n}", seed=n, max_tokens=40) for n in range(8)]
    async with engine_at(update) as roomy:
        expected = await asyncio.gather(*(generate(roomy, one) for one in wanted))
    async with engine_at(update, small) as engine:
        got = await asyncio.gather(*(generate(engine, one) for one in wanted))
        metrics = engine.metrics()
    assert metrics["preemptions_total"] > 0
    assert metrics["cache_blocks_free"] == metrics["cache_blocks"]
    for one, other in zip(got, expected, strict=True):
        assert one.tokens == other.tokens
        assert sorted(one.routes) == sorted(other.routes)


async def test_a_context_as_large_as_the_cache_still_finishes() -> None:
    small = ENGINE.model_copy(update={"cache_tokens": 40})
    async with engine_at(make_update(0), small) as engine:
        got = await asyncio.gather(*(generate(engine, request(session=f"s{n}", max_tokens=10**6)) for n in range(3)))
    assert all(len(PROMPT) + len(one.tokens) == 40 and one.last.finish == "length" for one in got)


async def test_a_client_that_leaves_frees_its_pages() -> None:
    async with engine_at(make_update(0)) as engine:
        running = engine.generate(request(max_tokens=10**6), stream=True)
        await anext(running)
        await engine.pause()
        assert engine.metrics()["cache_blocks_free"] < engine.metrics()["cache_blocks"]
        waiting = asyncio.create_task(generate(engine, replace(request(session="w"), min_version=99)))
        await settle(engine, waiting=1)
        await running.aclose()
        waiting.cancel()
        await settle(engine, running=0, waiting=0, cache_blocks_free=engine.metrics()["cache_blocks"])


# -- order


async def test_production_preempts_a_rollout_without_changing_its_answer() -> None:
    update = make_update(0)
    single = ENGINE.model_copy(update={"max_batch": 1})
    long = request(session="rollout", max_tokens=100)
    async with engine_at(update) as engine:
        expected = await generate(engine, long)
    async with engine_at(update, single) as engine:
        order: list[str] = []

        async def timed(name: str, one: GenerateRequest) -> Whole:
            got = await generate(engine, one)
            order.append(name)
            return got

        rollouts = [asyncio.create_task(timed(f"rollout {n}", replace(long, session=f"r{n}"))) for n in range(2)]
        await until(lambda: engine.metrics()["sampled_tokens_total"] > 0)
        await engine.pause()
        user = asyncio.create_task(timed("production", replace(request(session="user"), traffic="production")))
        await settle(engine, waiting=2)
        await engine.resume()
        got = [await rollout for rollout in rollouts]
        await user
    assert order[0] == "production"
    assert [one.tokens for one in got] == [expected.tokens] * 2


async def test_a_request_waits_for_its_version_and_others_overtake_it() -> None:
    async with engine_at(make_update(1)) as engine:
        waiting = asyncio.create_task(generate(engine, replace(request(session="w"), min_version=3)))
        await settle(engine, waiting=1)
        await generate(engine, request(session="other"))
        await engine.apply(make_update(2))
        await generate(engine, request(session="other"))
        assert not waiting.done()
        await engine.apply(make_update(3))
        got = await waiting
    assert {policy.number for policy in got.policies} == {3}


async def test_requests_before_the_first_weights_wait() -> None:
    async with engine_at(None) as engine:
        early = asyncio.create_task(generate(engine, request()))
        await settle(engine, waiting=1)
        assert engine.health()["policy"] is None
        await engine.apply(make_update(0))
        assert len((await early).tokens) == 12


async def test_pause_keeps_requests_and_resume_continues_them() -> None:
    async with engine_at(make_update(0)) as engine:
        expected = await generate(engine, request(max_tokens=100))
        task = asyncio.create_task(generate(engine, request(session="p", max_tokens=100)))
        await settle(engine, running=1)
        await engine.pause()
        before = engine.metrics()["sampled_tokens_total"]
        assert engine.health()["paused"]
        await asyncio.sleep(0.05)
        assert engine.metrics()["sampled_tokens_total"] == before
        await engine.resume()
        assert (await task).tokens == expected.tokens


# -- ends


async def test_requests_fail_when_the_engine_breaks() -> None:
    async with engine_at(make_update(0)) as engine:
        engine._decoding._runner.run = lambda work: 1 / 0  # type: ignore[assignment, method-assign]
        with pytest.raises(EngineUnavailable, match="ZeroDivisionError"):
            await generate(engine, request())
        with pytest.raises(EngineUnavailable, match="has stopped"):
            await generate(engine, request())
        assert isinstance(engine.ended.exception(), ZeroDivisionError)


async def test_closing_ends_open_requests() -> None:
    async with engine_at(make_update(0)) as engine:
        await engine.pause()
        task = asyncio.create_task(generate(engine, request()))
        await settle(engine, waiting=1)
    with pytest.raises(EngineUnavailable, match="shutting down"):
        await task


def test_the_config_requires_whole_pages() -> None:
    with pytest.raises(ValueError, match="multiple of block_size"):
        type(ENGINE)(cache_tokens=100, block_size=16)


async def test_a_command_is_answered_when_recording_before_it_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks() -> None:
        raise ZeroDivisionError("a token could not be recorded")

    async with engine_at(make_update(0)) as engine:
        monkeypatch.setattr(engine._decoding, "_record_all", breaks)
        with pytest.raises(EngineUnavailable, match="could not be recorded"):
            await asyncio.wait_for(engine.pause(), 20)


async def test_a_request_that_arrives_while_the_decode_loop_breaks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine_at(make_update(0)) as engine:
        stepping, arrived = threading.Event(), threading.Event()

        def breaks() -> bool:
            stepping.set()
            arrived.wait(10)
            raise RuntimeError("a step failed")

        monkeypatch.setattr(engine._decoding, "_step", breaks)
        first = asyncio.create_task(generate(engine, request(session="first")))
        await asyncio.to_thread(stepping.wait, 10)
        second = asyncio.create_task(generate(engine, request(session="second")))
        await until(lambda: not engine._decoding._inbox.empty())
        arrived.set()
        for each in (first, second):
            with pytest.raises(EngineUnavailable, match="a step failed"):
                await asyncio.wait_for(each, 10)
