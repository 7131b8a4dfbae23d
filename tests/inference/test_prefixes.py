"""Pages shared by content: a prefix is computed once, records stay complete, and no policy's KV is passed off as
another's."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from rollmill.errors import EngineError
from rollmill.inference.embedded.cache import KVCache
from rollmill.inference.embedded.pages import Pages, page_key, root_key
from rollmill.inference.embedded.scheduler import Scheduler
from rollmill.inference.engine import GenerateRequest
from rollmill.models.device import Device
from rollmill.types import PolicyRef, Sampling
from tests.inference.test_scheduler import CONFIG, POLICY, make_generation, run
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
    until,
    use_device,
)

LONG = [(7 * n + n // 5) % TINY.vocab_size for n in range(60)]  # 15 pages
ODD = LONG[:50]  # 12 pages and a half


@pytest.fixture(autouse=True, params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    return use_device(request.param, monkeypatch)


def check_record(one: Whole, prompt: list[int], number: int) -> None:
    """All routes are there, and the log-probs are those of a trainer that replays them."""
    tokens = prompt + one.tokens
    assert sorted(one.routes) == list(range(len(tokens) - 1))
    expected = trainer_logprobs(make_model(make_update(number)), tokens, one.routes)[len(prompt) - 1 :]
    np.testing.assert_allclose(one.logprobs, expected, atol=tolerance())


@pytest.mark.parametrize("prompt", [LONG, ODD, LONG[:3]], ids=["whole pages", "a part of a page", "short"])
async def test_a_group_that_starts_together_computes_its_prompt_once(prompt: list[int]) -> None:
    async with engine_at(make_update(0)) as engine:
        await engine.pause()
        group = [request(prompt, f"s{n}", seed=n, max_tokens=8) for n in range(8)]
        tasks = [asyncio.create_task(generate(engine, one)) for one in group]
        await until(lambda: engine.health()["waiting"] == 8)
        await engine.resume()
        got = [await task for task in tasks]
        metrics = engine.metrics()
    assert metrics["computed_tokens_total"] == len(prompt) + 8 * 7, "the others compute nothing of it"
    assert sorted(one.last.cached_tokens for one in got) == [0] + [len(prompt)] * 7
    assert (metrics["prefix_hits_total"], metrics["prefix_hit_tokens_total"]) == (7, 7 * len(prompt))
    for one in got:
        check_record(one, prompt, 0)
        assert one.last.oldest_kv_policy == make_update(0).policy
    assert len({tuple(one.tokens) for one in got}) > 1, "each with its own seed"


async def test_a_group_that_arrives_at_once_takes_one_step() -> None:
    """The decode loop waits for work meanwhile: it must not begin with the first request alone."""
    async with engine_at(make_update(0)) as engine:
        for turn in range(20):
            prompt, before = [turn, *PROMPT], engine.metrics()["steps_total"]
            group = [request(prompt, f"s{turn}.{n}", seed=None, max_tokens=1) for n in range(8)]
            await asyncio.gather(*(generate(engine, one) for one in group))
            assert engine.metrics()["steps_total"] == before + 1


async def test_sessions_share_a_prefix_and_go_on_alone() -> None:
    contexts = [[*LONG[:40], *tail] for tail in ([1], [2, 3], [*LONG[40:44], 5], LONG[40:60])]
    async with engine_at(make_update(0)) as engine:
        got = [await generate(engine, request(context, f"s{n}", seed=n)) for n, context in enumerate(contexts)]
    assert [one.last.cached_tokens for one in got] == [0, 40, 40, 44]
    for one, context in zip(got, contexts, strict=True):
        check_record(one, context, 0)


async def test_an_answer_is_a_prefix_too() -> None:
    async with engine_at(make_update(0)) as engine:
        first = await generate(engine, request(max_tokens=30))
        context = PROMPT + first.tokens + [9, 9]
        branches = [await generate(engine, request(context, session)) for session in ("s", "s2", "s3")]
    kept = len(PROMPT) + 30 - 1
    assert [one.last.cached_tokens for one in branches] == [kept, len(context) - 1, len(context) - 1]
    assert min(branches[0].routes) == kept, "its own session reported them in the first turn"
    check_record(branches[1], context, 0)
    check_record(branches[2], context, 0)


async def test_a_new_request_never_takes_keys_and_values_of_an_older_policy() -> None:
    async with engine_at(make_update(1)) as engine:
        await generate(engine, request(LONG, "own"))
        running = engine.generate(request(LONG, "running", max_tokens=100), stream=True)
        await anext(running)
        await engine.apply(make_update(2))
        await anext(running)
        other = await generate(engine, request(LONG, "other"))
        again = await generate(engine, request(LONG, "again"))
        await running.aclose()
    assert (other.last.cached_tokens, again.last.cached_tokens) == (0, len(LONG) - 1)
    for one in (other, again):
        assert one.last.oldest_kv_policy == make_update(2).policy
        check_record(one, LONG, 2)


async def test_requests_that_wait_for_a_prefix_when_weights_change_compute_it_themselves() -> None:
    slow = ENGINE.model_copy(update={"prefill_chunk": 4})
    async with engine_at(make_update(1), slow) as engine:
        tasks = [asyncio.create_task(generate(engine, request(LONG, f"s{n}", seed=n))) for n in range(3)]
        await until(lambda: engine.metrics()["computed_tokens_total"] >= 8)
        await engine.apply(make_update(2))
        got = [await task for task in tasks]
    assert all(len(one.tokens) == 12 for one in got)
    for one in got:
        if one.last.oldest_kv_policy == make_update(2).policy:
            check_record(one, LONG, 2)


async def test_a_client_that_leaves_does_not_hold_up_those_who_wait_for_its_pages() -> None:
    slow = ENGINE.model_copy(update={"prefill_chunk": 4})
    async with engine_at(make_update(0), slow) as engine:
        first = asyncio.create_task(generate(engine, request(LONG, "first")))
        others = [asyncio.create_task(generate(engine, request(LONG, f"s{n}"))) for n in range(2)]
        await until(lambda: engine.metrics()["computed_tokens_total"] >= 4)
        first.cancel()
        got = [await other for other in others]
        await until(lambda: engine.metrics()["cache_blocks_free"] == engine.metrics()["cache_blocks"])
    for one in got:
        check_record(one, LONG, 0)


async def test_a_preempted_rollout_goes_on_from_its_tokens_with_few_of_them_computed_again() -> None:
    """Its full pages stay until somebody needs them."""
    config = ENGINE.model_copy(update={"cache_tokens": 200})
    async with engine_at(make_update(0)) as roomy:
        expected = await generate(roomy, request(LONG, "r", max_tokens=60))
    async with engine_at(make_update(0), config) as engine:
        rollout = asyncio.create_task(generate(engine, request(LONG, "r", max_tokens=60)))
        await until(lambda: engine.metrics()["sampled_tokens_total"] > 30)
        user = GenerateRequest("user", [5] * 120, Sampling(max_tokens=4), "production")
        await generate(engine, user)
        got = await rollout
        metrics = engine.metrics()
    assert got.tokens == expected.tokens
    check_record(got, LONG, 0)
    if metrics["preemptions_total"]:  # the rollout may have ended before
        assert metrics["computed_tokens_total"] < 120 + 4 + 2 * len(LONG) + 60


async def test_a_nan_is_not_shared() -> None:
    context = [*LONG, 1]
    async with engine_at(make_update(0)) as engine:
        await generate(engine, request(LONG, "first"))
        pages, size = engine._decoding.scheduler.pages, TINY.kv_heads * ENGINE.block_size
        found = [pages.find(key) for key in _keys(LONG, make_update(0).policy)]
        for page in found:
            assert page is not None
            engine._decoding._cache.keys[:, page * size : (page + 1) * size] = torch.nan
        with pytest.raises(EngineError, match="not finite"):
            await generate(engine, request(context, "second"))
        third = await generate(engine, request(context, "third"))
    assert third.last.cached_tokens == 0, "nobody finds the bad pages any more"
    check_record(third, context, 0)


def _keys(tokens: list[int], policy: PolicyRef) -> list[bytes]:
    keys = [root_key(policy)]
    for start in range(0, len(tokens), ENGINE.block_size):
        keys.append(page_key(keys[-1], tokens[start : start + ENGINE.block_size]))
    return keys[1:]


# -- without an engine


def test_production_does_not_wait_for_a_rollouts_pages() -> None:
    scheduler = Scheduler(CONFIG.model_copy(update={"prefill_chunk": 4}))
    scheduler.add(make_generation(1, 12, first=0))
    run(scheduler, scheduler.schedule(POLICY))
    scheduler.add(make_generation(2, 12, traffic="production", first=0))
    scheduler.add(make_generation(3, 12, first=0))
    work = scheduler.schedule(POLICY)
    assert [(item.generation.number, item.start) for item in work] == [(2, 4)]


def test_two_contexts_have_the_same_key_only_if_they_are_the_same() -> None:
    root = root_key(POLICY)
    whole = page_key(page_key(root, [1, 2]), [3, 4])
    assert whole == page_key(page_key(root, [1, 2]), [3, 4])
    others = [page_key(root, [1, 2, 3, 4]), page_key(page_key(root, [2, 1]), [3, 4]), page_key(root, [3, 4])]
    others.append(page_key(page_key(root_key(PolicyRef("main", 1, "bf16", "digest")), [1, 2]), [3, 4]))
    assert whole not in others and len(set(others)) == 4


def test_one_of_a_group_that_comes_later_takes_the_keys_of_its_pages() -> None:
    size = CONFIG.block_size
    first, later, other = (make_generation(number, 4 * size + 1, first=number // 3) for number in (1, 2, 3))
    expected = first.full_keys(0, 4, POLICY, size)
    first.tokens += [1] * size  # it has sampled; its next page is none of theirs
    first.full_keys(0, 5, POLICY, size)
    for one in (later, other):
        own = one.full_keys(0, 1, POLICY, size)
        one.take_keys(first, size)
        assert one.full_keys(0, 1, POLICY, size) == own
    assert len(later._keys) == 5 and len(other._keys) == 2, "with that of an empty context"
    assert later.full_keys(0, 4, POLICY, size) == expected
    later.tokens += [2] * size
    assert later.full_keys(4, 1, POLICY, size) != first.full_keys(4, 1, POLICY, size)


def test_condemned_pages_are_cleaned_when_the_last_holder_leaves() -> None:
    pages = Pages(2, 4)
    (page,) = pages.take(1)
    pages.name(page, b"key")
    pages.hold([page])
    pages.condemn([page])
    pages.give([page])
    assert pages.find(b"key") is None and pages.unclean == [] and pages.available == 1
    pages.give([page])
    assert pages.unclean == [page] and pages.available == 1
    pages.cleaned()
    assert pages.available == 2 and pages.unclean == []


def test_a_page_is_copied_whole() -> None:
    cache = KVCache(TINY, 3, 4)
    cache.keys.copy_(torch.randn(cache.keys.shape))
    cache.values.copy_(torch.randn(cache.values.shape))
    before, size = cache.keys.clone(), TINY.kv_heads * 4
    cache.copy([(0, 1), (1, 2)])
    for target in (1, 2):
        assert torch.equal(cache.keys[:, target * size : (target + 1) * size], before[:, :size])
        assert torch.equal(cache.values[:, target * size : (target + 1) * size], cache.values[:, :size])
