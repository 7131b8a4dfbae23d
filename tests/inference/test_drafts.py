"""Prompt lookup: guesses change how many steps an answer takes, and nothing else.

Bursts are those of tests/inference/test_bursts.py, which stand in for CUDA.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollmill.inference.embedded.drafts import Drafts, count_right
from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.inference.embedded.scheduler import DRAFTING_BATCH
from rollmill.inference.engine import GenerateRequest
from rollmill.models.config import ModelConfig
from rollmill.types import Sampling
from tests.inference.test_bursts import check_pages, lengths, stepwise
from tests.inference.world import ENGINE, TINY, Whole, engine_at, generate, make_update, request, until
from tests.kernels import DEVICE, INTERPRETED, cuda, hopper
from tests.training.test_exact import DENSE, MIXTURE

__all__ = ["stepwise"]  # a fixture

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


def test_a_burst_looks_soon_after_a_right_guess_and_ever_less_often_after_that() -> None:
    drafts, tokens, looks = Drafts(), list(range(100)), []
    while len(tokens) < 1000:
        looks.append(len(tokens))
        assert drafts.guess(tokens, 8) == ()
        tokens += range(len(tokens), drafts.next_look)
    pauses = np.diff(looks).tolist()
    assert pauses[:3] == [4, 4, 4] and pauses == sorted(pauses) and pauses[-1] == 64 and len(pauses) < 40
    tokens += tokens[:3]
    assert drafts.guess(tokens, 8, grows=False) == tuple(range(3, 11))
    drafts.learn(8, 2, 8)
    tokens += [3, 4, 2000]
    assert drafts.guess(tokens, 8) == () and drafts.next_look == len(tokens) + 4
    tokens += tokens[:3]
    assert drafts.guess(tokens, 8)
    drafts.learn(3, 0, 8)
    assert drafts.next_look == len(tokens) + 1 + 2


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
@pytest.mark.parametrize("bursts", [False, True])
async def test_answers_are_the_same_with_and_without_guesses(bursts: bool, request: pytest.FixtureRequest) -> None:
    plain, without = await answers(ENGINE)
    lengths.clear()  # what other tests in this process left
    if bursts:
        request.getfixturevalue("stepwise")
    guessed, with_guesses = await answers(GUESSING)
    assert bool(lengths) == bursts
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


@pytest.mark.usefixtures("stepwise")
async def test_bursts_of_a_small_batch_end_where_a_context_is_looked_up() -> None:
    """Hot, so that nothing repeats itself: the burst after a look is known to be short, and to begin after the last."""
    patient = GUESSING.model_copy(update={"stream_seconds": 9.0})
    found = {}
    for config, batch in itertools.product((patient, patient.model_copy(update={"draft_tokens": 0})), (1, 4, 5)):
        lengths.clear()
        async with engine_at(UPDATE, config) as engine:
            await engine.pause()
            wanted = [request([n, 7, 9], f"s{n}", seed=n, temperature=20.0, max_tokens=64) for n in range(batch)]
            tasks = [asyncio.create_task(generate(engine, each)) for each in wanted]
            await until(lambda: engine.metrics()["waiting"] == batch)  # noqa: B023 - awaited here
            await engine.resume()
            await asyncio.gather(*tasks)
            found[config.draft_tokens, batch] = list(lengths)
            check_pages(engine)
    for batch in range(1, DRAFTING_BATCH + 1, 3):
        assert found[6, batch][:3] == [4, 4, 4] and max(found[6, batch]) > 4, "ever longer"
    assert found[6, 5] == found[0, 5], "for a larger batch nothing changes"
    assert max(found[0, 1]) == 16


@pytest.mark.usefixtures("stepwise")
async def test_guesses_beside_prompts_that_fill_whole_steps() -> None:
    """The next step is not launched before it is known how many guesses are right."""
    config = GUESSING.model_copy(update={"prefill_chunk": 8})
    asked = replace(request([1, 2, 3, 4, 5] * 3, temperature=0.1, max_tokens=120), traffic="production")
    prompts = [request([n, *range(1, 39)] * 4, f"p{n}", max_tokens=2) for n in range(3)]
    async with engine_at(UPDATE) as engine:
        expected = [await generate(engine, one) for one in (asked, *prompts)]
    async with engine_at(UPDATE, config) as engine:
        first = asyncio.create_task(generate(engine, asked, stream=True))
        await until(lambda: engine.metrics()["sampled_tokens_total"] > 10)
        got = await asyncio.gather(first, *(generate(engine, one) for one in prompts))
        assert engine.metrics()["draft_tokens_right_total"] > 0
        check_pages(engine)
    for one, other in zip(got, expected, strict=True):
        assert one.tokens == other.tokens and one.routes.keys() == other.routes.keys()
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


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


@hopper
@pytest.mark.parametrize(
    ("shape", "count"),
    [
        pytest.param(DENSE, 16 if INTERPRETED else 200, id="dense", marks=pytest.mark.kernels),
        pytest.param(MIXTURE, 200, id="mixture", marks=cuda),
    ],
)
async def test_with_exact_numerics_no_bit_depends_on_guesses(shape: ModelConfig, count: int) -> None:
    """The device's own kernels: bursts, and recorded steps with guesses."""
    # with tied embeddings a random model often repeats the last token
    model = shape.model_copy(update={"layers": 1 if INTERPRETED else 2, "tie_embeddings": True})
    update, found = make_update(1, model), {}
    for guesses in (0, 6):
        config = ENGINE.model_copy(update={"draft_tokens": guesses, "max_batch": 2 if INTERPRETED else 8})
        async with EmbeddedEngine(model, config, device=DEVICE, exact=True) as engine:
            await engine.apply(update)
            asked = [
                request([n, 2, 3, 4, 5] * 3, f"s{n}", seed=n, temperature=(0.1, 0.25)[n % 2], max_tokens=count)
                for n in range(1 if INTERPRETED else 4)
            ]
            alone = await generate(engine, asked[0])
            together = [] if INTERPRETED else await asyncio.gather(*(generate(engine, one) for one in asked))
            found[guesses] = [alone, *together]
            right = engine.metrics()["draft_tokens_right_total"]
            assert right > count // 4 if guesses else right == 0
    for one, other in zip(found[6], found[0], strict=True):
        assert one.tokens == other.tokens and one.logprobs == other.logprobs
        assert one.routes.keys() == other.routes.keys()
        assert all(np.array_equal(row, other.routes[position]) for position, row in one.routes.items())
