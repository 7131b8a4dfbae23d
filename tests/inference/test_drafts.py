"""Prompt lookup: guesses change how many steps an answer takes, and nothing else."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest

from rollmill.inference.embedded.drafts import Drafts, count_right
from rollmill.inference.engine import GenerateRequest
from rollmill.types import Sampling
from tests.inference.world import ENGINE, TINY, Whole, engine_at, generate, make_update, request, until

GUESSING = ENGINE.model_copy(update={"draft_tokens": 6})
UPDATE = make_update(1)


def test_the_guess_is_what_followed_the_last_three_tokens_last_time() -> None:
    drafts = Drafts()
    assert drafts.guess([1, 2], 4) == ()
    assert drafts.guess([1, 2, 3, 9, 8, 1, 2, 3, 7, 6, 5, 1, 2, 3], 4) == (7, 6)
    drafts.learn(2, 2, 4)
    assert drafts.guess([1, 2, 3, 9, 8, 1, 2, 3, 7, 6, 5, 1, 2, 3, 7, 6, 5], 4) == (1, 2, 3, 7)
    assert Drafts().guess([4, 4, 4, 4], 9) == (4, 4), "a guess that reaches the end goes on with itself"


def test_wrong_guesses_get_rarer() -> None:
    drafts, guesses = Drafts(), 0
    for length in range(4, 404):
        if drafts.guess([5] * length, 8):
            guesses += 1
            drafts.learn(1, 0, 8)
    assert guesses < 15


def test_a_right_guess_counts_up_to_the_stop_token() -> None:
    assert count_right([1, 2, 3, 4], [1, 2, 3], ()) == 3
    assert count_right([1, 7, 3, 4], [1, 2, 3], ()) == 1
    assert count_right([1, 2, 3, 4], [1, 2, 3], (2,)) == 1, "it is drawn and ends the answer"


def asked(number: int, random: np.random.Generator) -> dict[str, Any]:
    """Cold enough to repeat itself, in all the ways there are to ask."""
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.9, "min_p": 0.02},
        {"frequency_penalty": 0.02, "repetition_penalty": 1.02},
        {"stop_tokens": (int(random.integers(TINY.vocab_size)), int(random.integers(TINY.vocab_size)))},
        {"max_tokens": int(random.integers(1, 20))},
    ]
    return {"temperature": 0.15, "seed": number, "max_tokens": 60, **ways[number % len(ways)]}


async def answers(config: Any) -> tuple[list[Whole], dict[str, float]]:
    """Twelve sessions of two turns, two at a time."""
    random = np.random.default_rng(0)
    found: list[Whole] = []

    async def session(number: int) -> list[Whole]:
        prompt = [*random.integers(0, TINY.vocab_size, 5).tolist()] * 2
        first = await generate(engine, request(prompt, f"s{number}", **asked(number, random)), stream=number % 2 == 0)
        again = GenerateRequest(f"s{number}", [*prompt, *first.tokens, 3, 1], Sampling(0.15, max_tokens=30, seed=9))
        return [first, await generate(engine, again)]

    async with engine_at(UPDATE, config) as engine:
        for number in range(0, 12, 2):
            found += itertools.chain.from_iterable(await asyncio.gather(session(number), session(number + 1)))
        metrics = engine.metrics()
        assert metrics["sampled_tokens_total"] == sum(len(whole.tokens) for whole in found)
    return found, metrics


@pytest.mark.slow
async def test_answers_are_the_same_with_and_without_guesses() -> None:
    (guessed, with_guesses), (plain, without) = await answers(GUESSING), await answers(ENGINE)
    for mine, theirs in zip(guessed, plain, strict=True):
        assert mine.tokens == theirs.tokens and mine.kept == theirs.kept and mine.policies == theirs.policies
        np.testing.assert_allclose(mine.logprobs, theirs.logprobs, atol=1e-4)
        assert mine.last.finish == theirs.last.finish and mine.last.cached_tokens == theirs.last.cached_tokens
        assert mine.routes.keys() == theirs.routes.keys()
        assert all(np.array_equal(mine.routes[position], theirs.routes[position]) for position in mine.routes)
    assert 0 < with_guesses["draft_tokens_right_total"] < with_guesses["draft_tokens_total"]
    assert with_guesses["steps_total"] < without["steps_total"]
    assert without["draft_tokens_total"] == 0


async def test_a_full_batch_and_full_pages_are_not_guessed_for() -> None:
    wanted = [request([1, 2, 3, 4, 5] * 3, f"s{n}", seed=n, temperature=0.0, max_tokens=20) for n in range(8)]
    async with engine_at(UPDATE, GUESSING) as engine:
        await engine.pause()
        tasks = [asyncio.create_task(generate(engine, each)) for each in wanted]
        await until(lambda: engine.metrics()["waiting"] == 8)
        await engine.resume()
        await asyncio.gather(*tasks)
        assert engine.metrics()["draft_tokens_total"] == 0
    small = GUESSING.model_copy(update={"cache_tokens": 36})
    async with engine_at(UPDATE, small) as engine:
        whole = await generate(engine, request([1, 2, 3, 4, 5] * 3, temperature=0.0, max_tokens=100))
        assert whole.last.finish == "length" and len(whole.tokens) == 36 - 15


async def test_guesses_go_on_across_new_weights() -> None:
    async with engine_at(UPDATE, GUESSING) as engine:
        prompt = [1, 2, 3, 4, 5] * 3
        task = asyncio.create_task(generate(engine, request(prompt, temperature=0.1, max_tokens=200), stream=True))
        await until(lambda: engine.metrics()["sampled_tokens_total"] >= 20)
        await engine.apply(make_update(2))
        whole = await task
    numbers = [policy.number for policy in whole.policies]
    assert len(whole.tokens) == 200 and numbers == sorted(numbers) and set(numbers) == {1, 2}
    assert sorted(whole.routes) == list(range(len(prompt) + 199))
