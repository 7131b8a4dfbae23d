"""Prompt lookup with random weights, for `benchmarks.drafts` where there is no checkpoint: on CUDA.

A random model does not repeat its prompt. So the layers are made to add little to the embedding of the last token
(LAYERS). Embeddings are tied, so the most likely next token is the last one again, and the temperature decides how long
the model stays with it. That gives three kinds of answers:

    cycle   greedy: one token again and again. All guesses are right: the most that prompt lookup can bring
    runs    the temperature is searched at which 97 of 100 tokens are the one before: something changes every 33 tokens,
            as when a text is written again with changes
    new     a high temperature, nothing repeats itself: what looking costs

An answer of text is none of these. Engines with and without guesses get the same requests in turn. Numerics are fast,
so now and then their answers differ from some token on.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.output import at_least
from benchmarks.train_step_shapes import LLAMA_1B, SMOLLM2, draw_
from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.inference.engine import GenerateRequest
from rollmill.models.config import ModelConfig
from rollmill.models.device import Device, decoder_on
from rollmill.models.host_tensors import to_host
from rollmill.types import PolicyRef, Sampling
from rollmill.weights.format.manifest import describe, root_digest
from rollmill.weights.reading.line_follower import Update

SMALL = SMOLLM2 | {"vocab_size": 4096, "layers": 4, "width": 192, "heads": 3, "kv_heads": 1, "mlp_width": 512}
BATCHES, PROMPT, STAYS, NEW_TEMPERATURE = (1, 4), 32, 0.97, 100.0
LAYERS = 0.1  # the outputs of attention and MLP are multiplied by it


class Run(NamedTuple):
    tokens_per_s: float
    steps: float  # per answer
    guessed: float
    right: float
    repeats: float  # share of tokens that are the one before
    answers: list[list[int]]


async def measure(device: Device, quick: bool, guesses: int) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    shapes = {"dense": SMOLLM2, "llama-1b": LLAMA_1B} if device == "cuda" else {"small": SMALL}
    figures: dict[str, float] = {}
    bars: dict[str, dict[str, Any]] = {}
    for name, shape in shapes.items():
        async with AsyncExitStack() as stack:
            plain, guessing = await _engines(ModelConfig.model_validate(shape), device, guesses, stack)
            temperature = await _temperature(plain)
            texts = {"cycle": 0.0, "runs": temperature, "new": NEW_TEMPERATURE}
            for text, batch in ((text, batch) for text in texts for batch in BATCHES):
                sampling = Sampling(texts[text], max_tokens=64 if quick else 192)
                faster = await _compare(f"{name}_{batch}_{text}", (plain, guessing), batch, sampling, figures)
                if text != "runs":
                    bars[f"{name}_{batch}_{text}_speed_up"] = at_least(faster, 1.5 if text == "cycle" else 0.95)
    return figures, bars


async def _engines(
    model: ModelConfig, device: Device, guesses: int, stack: AsyncExitStack
) -> tuple[EmbeddedEngine, EmbeddedEngine]:
    """Without and with guesses."""
    drawn = decoder_on(torch.device(device), model)
    draw_(drawn, 1)
    with torch.no_grad():
        for name, each in drawn.named_parameters():
            if name.endswith(("output", "down")):
                each.mul_(LAYERS)
    tensors = dict(to_host(drawn.state_dict()))
    update = Update(PolicyRef("base", 0, "bf16", root_digest(describe(tensors))), tensors, None, None, 0, {}, 0.0)
    engines = []
    for count in (0, guesses):
        config = EngineConfig(draft_tokens=count, max_batch=4, cache_tokens=4096)
        engines.append(await stack.enter_async_context(EmbeddedEngine(model, config, device=device)))
        started = time.perf_counter()
        await engines[-1].apply(update)
        for turn, batch in ((turn, batch) for turn in range(4) for batch in BATCHES):  # then prompts are recorded too
            await _run(engines[-1], batch, Sampling(0.0, max_tokens=24), 200 + turn)
        print(f"draft_tokens {count}: ready after {time.perf_counter() - started:.1f} s", flush=True)
    return engines[0], engines[1]


async def _temperature(engine: EmbeddedEngine) -> float:
    """At which STAYS of the tokens are the one before."""
    low, high = 0.2, 20.0
    for turn in range(8):
        middle = (low * high) ** 0.5
        run = await _run(engine, 4, Sampling(middle, max_tokens=64), 100 + turn)
        low, high = (middle, high) if run.repeats > STAYS else (low, middle)
    return (low * high) ** 0.5


async def _compare(
    key: str, engines: tuple[EmbeddedEngine, EmbeddedEngine], batch: int, sampling: Sampling, figures: dict[str, float]
) -> float:
    """How many times as fast the second engine is: the median of three rounds after one that is not counted."""
    rounds = [[await _run(engine, batch, sampling, turn) for engine in engines] for turn in range(4)][1:]
    plain, guessing = ([each[place] for each in rounds] for place in (0, 1))
    speeds = [float(np.median([run.tokens_per_s for run in runs])) for runs in (plain, guessing)]
    guessed, right = (sum(getattr(run, what) for run in guessing) for what in ("guessed", "right"))
    pairs = [pair for one, other in rounds for pair in zip(one.answers, other.answers, strict=True)]
    same = float(np.mean([mine == theirs for mine, theirs in pairs]))
    steps = [float(np.median([run.steps for run in runs])) for runs in (plain, guessing)]
    print(
        f"{key:18} temperature {sampling.temperature:5.2f}, repeats {np.mean([run.repeats for run in guessing]):4.0%}: "
        f"{speeds[0]:7.1f} tokens/s in {steps[0]:.0f} steps; with guesses {speeds[1]:7.1f} in {steps[1]:.0f}, "
        f"{right:.0f} of {guessed:.0f} guesses right, {same:.0%} same answers",
        flush=True,
    )
    figures |= {
        f"{key}_tokens_per_s": round(speeds[0], 1),
        f"{key}_guessing_tokens_per_s": round(speeds[1], 1),
        f"{key}_steps": steps[0],
        f"{key}_guessing_steps": steps[1],
        f"{key}_guessed": guessed,
        f"{key}_right": right,
        f"{key}_same_answers": round(same, 2),
        f"{key}_speed_up": round(speeds[1] / speeds[0], 2),
    }
    return round(speeds[1] / speeds[0], 2)


async def _run(engine: EmbeddedEngine, batch: int, sampling: Sampling, turn: int) -> Run:
    """`batch` requests at once."""
    random, before = np.random.default_rng(turn), engine.metrics()
    prompts = random.integers(1, 4096, (batch, PROMPT)).tolist()
    found = await asyncio.gather(*(_ask(engine, prompt, replace(sampling, seed=n)) for n, prompt in enumerate(prompts)))
    after, answers = engine.metrics(), [answer for answer, _ in found]
    counted = [after[name] - before[name] for name in ("steps_total", "draft_tokens_total", "draft_tokens_right_total")]
    repeats = np.mean([last == token for answer in answers for last, token in itertools.pairwise(answer)])
    return Run(sum(speed for _, speed in found), *counted, float(repeats), answers)


async def _ask(engine: EmbeddedEngine, tokens: list[int], sampling: Sampling) -> tuple[list[int], float]:
    """The answer, and its tokens per second after the first."""
    answer: list[int] = []
    async for chunk in engine.generate(GenerateRequest(f"s{time.perf_counter()}", tokens, sampling)):
        answer += chunk.tokens
    return answer, (len(answer) - 1) / (chunk.timing["total_seconds"] - chunk.timing["first_token_seconds"])
