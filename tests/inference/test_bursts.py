"""Bursts: several decode steps without the host. What they sample is what single steps sample, whoever comes or goes.

CUDA does not exist on every machine that runs tests. `Stepwise` stands in for it: it computes a burst with the CPU's
runner, one step after the other, when it is launched. It computes the steps after a stop token too, as a device does.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.cache import KVCache
from rollmill.inference.embedded.decode_loop import DecodeLoop
from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.inference.embedded.generation import Generation
from rollmill.inference.embedded.outputs import BurstOutput, StepOutput
from rollmill.inference.embedded.runner import Runner
from rollmill.inference.embedded.sampler import sample
from rollmill.inference.embedded.scheduler import Scheduler, Work
from rollmill.inference.engine import GenerateRequest
from rollmill.inference.garbage_collection import collect_as_usual, collect_rarely
from rollmill.models.decoder import Decoder
from rollmill.types import Sampling
from tests.inference.test_switch import changed
from tests.inference.world import (
    ENGINE,
    PROMPT,
    Whole,
    engine_at,
    generate,
    make_model,
    make_update,
    request,
    trainer_logprobs,
    until,
)

CONFIG = ENGINE.model_copy(update={"stream_seconds": 0.01})
lengths: list[int] = []  # of the bursts that were launched


@dataclass
class Row:
    """A generation as the device sees it: pages of the launch, and a position of its own."""

    request: GenerateRequest
    seed: int
    blocks: list[int]
    tokens: list[int]
    last: int
    grammar: None = None


class Stepwise:
    def __init__(self, model: Decoder, cache: KVCache, longest: int) -> None:
        self.model, self._runner, self._spare = model, Runner(model, cache), cache.spare
        self._rows: list[Row | None] = []
        self._given: list[np.ndarray] = []  # routes of the last launches

    def warm_up(self, rows: int, tokens: int, guessed: int) -> None:
        pass

    def run(self, work: Sequence[Work]) -> StepOutput:
        return self._runner.run(work)

    def launch(
        self, rows: Sequence[Generation | None], starts: Sequence[int] | None, steps: int
    ) -> Callable[[], BurstOutput]:
        lengths.append(steps)
        before = self._rows
        self._rows = []
        for number, one in enumerate(rows):
            if one is None:
                self._rows.append(None)
                continue
            own = before[number] if starts is None else None
            tokens = own.tokens if own else one.tokens[: starts[number] + 1] if starts else []
            blocks = one.blocks + [self._spare] * 64
            self._rows.append(Row(one.request, one.seed, blocks, list(tokens), one.limit - 1))
        drawn = [self._step() for _ in range(steps)]
        tokens_KB, logprobs_KB, routes = (
            np.stack(each) if each[0] is not None else None for each in zip(*drawn, strict=True)
        )
        assert tokens_KB is not None and logprobs_KB is not None
        if routes is not None:  # as a device writes into the memory of the launch before the last
            self._given = [*self._given[-2:], routes]
            if len(self._given) == 3:
                self._given[0][:] = 255
        return lambda: BurstOutput(tokens_KB, logprobs_KB, routes, 0.0)

    def _step(self) -> tuple[Any, ...]:
        live = [(place, row) for place, row in enumerate(self._rows) if row is not None]
        work = [Work(row, len(row.tokens) - 1, 1) for _, row in live]  # type: ignore[arg-type]
        output = self._runner.run(work)
        places = {id(row): place for place, row in live}
        order = [places[id(item.generation)] for item in output.work]
        drawn, routes = sample(output.logits, [item.draw for item in output.work]), output.host_routes()
        tokens, logprobs = np.zeros(len(self._rows), np.int32), np.zeros(len(self._rows), np.float32)
        tokens[order], logprobs[order] = drawn.tokens, drawn.logprobs
        for place, token in zip(order, drawn.tokens, strict=True):
            row = self._rows[place]
            assert row is not None
            row.tokens = [*row.tokens, token][: row.last] + [token] * (len(row.tokens) >= row.last)
        placed = None if routes is None else np.zeros((len(self._rows), *routes.shape[1:]), routes.dtype)
        if placed is not None:
            placed[order] = routes
        return tokens, logprobs, placed


@pytest.fixture
def stepwise(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths.clear()
    monkeypatch.setattr("rollmill.inference.embedded.decode_loop.make_runner", Stepwise)

    def as_on_cuda(config: EngineConfig, drafts: int, **_: bool) -> Scheduler:
        return Scheduler(config, drafts, prompts_first=True, long_guesses=True)

    monkeypatch.setattr("rollmill.inference.embedded.decode_loop.Scheduler", as_on_cuda)


def check_pages(engine: EmbeddedEngine) -> None:
    pages = engine._decoding.scheduler.pages
    assert pages.available == pages.size and not any(pages._references)


async def traffic(engine: EmbeddedEngine) -> list[Whole]:
    """Stop tokens, limits inside bursts, a cut, two turns of a session, a stream, and a client that leaves."""
    wanted = [
        request(PROMPT[: 3 + n], f"s{n}", seed=n, max_tokens=5 + 13 * n, stop_tokens=(n, n + 1) if n % 2 else ())
        for n in range(6)
    ]
    wanted.append(request(session="cut", top_k=3, max_tokens=9))
    leaving = asyncio.create_task(generate(engine, request(session="leaves", seed=77, max_tokens=200)))
    got = await asyncio.gather(*(generate(engine, one, stream=n == 3) for n, one in enumerate(wanted)))
    leaving.cancel()
    for first, one in zip(list(got), wanted[:6], strict=False):
        tokens = [*one.tokens, *first.tokens, 7, 8]
        got.append(await generate(engine, GenerateRequest(one.session, tokens, Sampling(max_tokens=70, seed=5))))
    await until(lambda: not engine._decoding.scheduler.everyone())
    return got


async def test_bursts_sample_what_single_steps_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    update = make_update(0)
    async with engine_at(update, CONFIG) as engine:
        expected = await traffic(engine)
        check_pages(engine)
    lengths.clear()
    monkeypatch.setattr("rollmill.inference.embedded.decode_loop.make_runner", Stepwise)
    async with engine_at(update, CONFIG) as engine:
        got = await traffic(engine)
        check_pages(engine)
        metrics = engine.metrics()
    assert max(lengths) > 4 and metrics["sampled_tokens_total"] >= sum(len(one.tokens) for one in got)
    for one, other in zip(got, expected, strict=True):
        assert one.tokens == other.tokens and one.last.finish == other.last.finish and one.kept == other.kept
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        assert one.routes.keys() == other.routes.keys()
        assert all(np.array_equal(row, other.routes[position]) for position, row in one.routes.items())


@pytest.mark.usefixtures("stepwise")
async def test_weights_change_between_bursts_and_each_token_names_its_own() -> None:
    first = make_update(0)
    second, _ = changed(first, 1)
    async with engine_at(first, CONFIG.model_copy(update={"recompute_kv": True})) as engine:
        tasks = [
            asyncio.create_task(generate(engine, request(session=f"s{n}", seed=n, max_tokens=150))) for n in range(4)
        ]
        await until(lambda: engine.metrics()["sampled_tokens_total"] > 100)
        await engine.pause()
        sampled = engine.metrics()["sampled_tokens_total"]
        await engine.apply(second)
        await asyncio.sleep(0.02)
        assert engine.metrics()["sampled_tokens_total"] == sampled, "nothing is computed in a pause"
        await engine.resume()
        got = [await task for task in tasks]
        check_pages(engine)
    models = {update.policy.digest: make_model(update) for update in (first, second)}
    for one in got:
        assert [policy.number for policy in one.policies] == sorted(policy.number for policy in one.policies)
        assert {policy.number for policy in one.policies} == {0, 1}
        both = {digest: trainer_logprobs(model, PROMPT + one.tokens) for digest, model in models.items()}
        for index, (logprob, policy) in enumerate(zip(one.logprobs, one.policies, strict=True)):
            # routes are those of the sampling pass; the live ones agree on these models but for near-ties
            assert abs(float(both[policy.digest][len(PROMPT) - 1 + index]) - logprob) < 1e-3


@pytest.mark.usefixtures("stepwise")
async def test_steps_of_prompts_are_launched_before_the_last_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts fill several steps, and some clients leave. Tokens are those of requests that came one by one."""
    update, ahead = make_update(2), []
    launch = DecodeLoop._launch

    def counted(loop: DecodeLoop, *given: Any) -> Callable[[], None]:
        ahead.append(loop._ahead is not None)
        return launch(loop, *given)

    monkeypatch.setattr(DecodeLoop, "_launch", counted)
    wanted = [request([n, *range(1, 24)], f"s{n}", seed=n, max_tokens=9) for n in range(12)]
    wanted += [request([39 - n // 5, *range(1, 20 + n // 5)], f"g{n}", seed=n, max_tokens=9) for n in range(10)]
    async with engine_at(update) as engine:
        expected = [await generate(engine, one) for one in wanted]
    ahead.clear()
    async with engine_at(update, CONFIG.model_copy(update={"prefill_chunk": 32})) as engine:
        await engine.pause()
        tasks = [asyncio.create_task(generate(engine, one)) for one in wanted]
        leaving = [asyncio.create_task(generate(engine, request([n, 2, 3] * 8, f"l{n}"))) for n in range(6)]
        await until(lambda: engine.health()["waiting"] == 28)
        await engine.resume()
        for task in leaving:
            await asyncio.sleep(0)
            task.cancel()
        got = [await task for task in tasks]
        await until(lambda: engine.metrics()["running"] + engine.metrics()["waiting"] == 0)
        check_pages(engine)
    assert sum(ahead) > 5
    for one, other in zip(got, expected, strict=True):
        assert one.tokens == other.tokens and sorted(one.routes) == sorted(other.routes)


@pytest.mark.usefixtures("stepwise")
async def test_bursts_when_pages_run_out_and_requests_wait() -> None:
    """Twelve requests of 60 tokens on 48 pages of 4, at most five at once: some lose their pages and start again."""
    config = CONFIG.model_copy(update={"cache_tokens": 192, "max_batch": 5})
    update = make_update(2)
    async with engine_at(update) as engine:
        expected = [await generate(engine, request([n, 1, 2], f"s{n}", seed=n, max_tokens=60)) for n in range(12)]
    async with engine_at(update, config) as engine:
        wanted = [request([n, 1, 2], f"s{n}", seed=n, max_tokens=60) for n in range(12)]
        got = await asyncio.gather(*(generate(engine, one) for one in wanted))
        assert engine.metrics()["preemptions_total"] > 0 and max(lengths) > 1
        check_pages(engine)
    for one, other in zip(got, expected, strict=True):
        assert one.tokens == other.tokens and len(one.routes) == 62


def test_garbage_is_collected_rarely_while_an_engine_decodes_and_as_usual_after_it() -> None:
    usual = gc.get_threshold()
    collect_rarely()
    assert gc.get_threshold() > usual and gc.get_freeze_count() > 0
    collect_as_usual()
    assert gc.get_threshold() == usual and gc.get_freeze_count() == 0
