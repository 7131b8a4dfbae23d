"""The engine server under random load: no page is lost, no request is lost, no answer is wrong.

    python -m benchmarks.soak [--minutes 30] [--seed 1] [--quick]

Clients talk to a real server over HTTP. They share prefixes, continue sessions, stream, leave in the middle, and send
malformed requests. Meanwhile weights change, the engine is paused, resumed and drained, its queue overflows, and its KV
cache is too small for everybody. Answers of one version are checked against the trainer's forward pass.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp
import torch

from benchmarks.output import at_least, at_most, finish
from rollmill.errors import EngineError
from rollmill.inference.config import EngineConfig
from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.inference.engine import GenerateChunk, GenerateRequest
from rollmill.inference.engine_wire import chunk_from_json, request_to_json
from rollmill.inference.server import make_app, serving
from rollmill.models.attention import packed_positions
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import load_host, to_host
from rollmill.models.packed_attention import packed_attention
from rollmill.types import PolicyRef, Sampling
from rollmill.weights.format.manifest import describe, root_digest
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.reading.line_follower import Update

MODEL = ModelConfig(vocab_size=64, layers=2, width=32, heads=4, kv_heads=2, head_dim=8, experts=0, max_context=256)
ENGINE = EngineConfig(
    max_batch=10, max_waiting=8, block_size=8, cache_tokens=768, prefill_chunk=32, stream_seconds=0.0, threads=1
)
CLIENTS, SESSIONS, VERSIONS = 24, 10, 4
USERS = 6  # clients of production: fewer than `max_batch`, so that rollouts, which come after them, get places too
ANSWER_SECONDS = 120.0  # an answer that takes longer is lost
CHECKED = 0.3  # share of the answers that are checked against the trainer's forward pass
TOLERANCE = 2e-3
MALFORMED = (b"", b"{", b"[1, 2]", b'{"session": "s"}', b'{"session": "s", "tokens": [1], "sampling": {"top_p": 7}}')


@dataclass
class Soak:
    engine: EmbeddedEngine
    client: aiohttp.ClientSession
    draws: random.Random
    ends: float
    models: dict[str, Decoder]  # by digest
    tensors: list[dict[str, HostTensor]]
    contexts: dict[str, list[int]] = field(default_factory=dict)  # of the last turn, by session
    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    version: int = 0
    asked: bool = False  # all clients have ended

    @property
    def over(self) -> bool:
        return time.monotonic() > self.ends


async def soak(seconds: float, seed: int) -> tuple[dict[str, float], list[str]]:
    """Figures, and what went wrong in words."""
    torch.set_num_threads(1)
    tensors = [_weights(number) for number in range(VERSIONS)]
    models = {root_digest(describe(each)): _model(each) for each in tensors}
    async with EmbeddedEngine(MODEL, ENGINE) as engine, serving(make_app(engine), "127.0.0.1", 0) as runner:
        host, port = runner.addresses[0][:2]
        connections = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(f"http://{host}:{port}", connector=connections) as client:
            run = Soak(engine, client, random.Random(seed), time.monotonic() + seconds, models, tensors)
            await _apply(run)
            others = [asyncio.create_task(_update_often(run)), asyncio.create_task(_stop_often(run))]
            await asyncio.gather(*(_ask_often(run, number) for number in range(CLIENTS)))
            run.asked = True  # until then weights must come: requests wait for them
            await asyncio.gather(*others)
            figures = {**run.counts, **await _rest(run)}
    return {f"soak_{name}": float(value) for name, value in sorted(figures.items())}, run.wrong


async def _rest(run: Soak) -> dict[str, float]:
    """What is left when nobody asks any more: it must be nothing."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(30):
            while run.engine.metrics()["running"] or run.engine.metrics()["waiting"]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    metrics, scheduler = run.engine.metrics(), run.engine._decoding.scheduler
    names = ("sampled_tokens_total", "preemptions_total", "prefix_hits_total", "prefix_hit_tokens_total")
    return {
        "lost_pages": metrics["cache_blocks"] - metrics["cache_blocks_free"],
        "left_requests": metrics["running"] + metrics["waiting"],
        "left_promises": len(scheduler.prefixes._promises),
        "lost": run.counts["lost"],
        "wrong": len(run.wrong),
        "checked": run.counts["checked"],
        "updates": metrics["applied_total"],
        **{name.removesuffix("_total"): metrics[name] for name in names},
    }


async def _ask_often(run: Soak, number: int) -> None:
    while not run.over:
        run.counts["requests"] += 1
        chance = run.draws.random()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                if chance < 0.05:
                    await _ask_malformed(run)
                else:
                    await _ask(run, number, leaves=chance < 0.25)
        except TimeoutError:
            run.counts["lost"] += 1
            run.wrong.append(f"a request of client {number} did not end in {ANSWER_SECONDS:g} s: {run.engine.health()}")
        except (aiohttp.ClientError, EngineError) as error:
            run.counts["lost"] += 1
            run.wrong.append(f"client {number}: {error!r}")


async def _ask_malformed(run: Soak) -> None:
    body = run.draws.choice((*MALFORMED, request_to_json(GenerateRequest("s", [999], Sampling()))))
    async with run.client.post("/generate", data=body) as response:
        run.counts["malformed"] += 1
        if response.status != 400:
            run.wrong.append(f"a malformed request got status {response.status}: {body[:60]!r}")


async def _ask(run: Soak, client: int, *, leaves: bool) -> None:
    request = _request(run, client)
    stream = run.draws.random() < 0.5
    chunks: list[GenerateChunk] = []
    leave_after = run.draws.randrange(8) if leaves else -1
    async with run.client.post("/generate", data=request_to_json(request, stream=stream)) as response:
        if response.status in (429, 503):
            run.counts["refused" if response.status == 429 else "drained"] += 1
            await asyncio.sleep(0.02)
            return
        if response.status != 200:
            run.wrong.append(f"status {response.status}: {await response.text()}")
            return
        async for line in response.content:
            chunks.append(chunk_from_json(line))
            if len(chunks) == leave_after and chunks[-1].finish is None:
                run.counts["left"] += 1
                response.close()
                return
    _check(run, request, chunks)


def _request(run: Soak, client: int) -> GenerateRequest:
    draws, session = run.draws, f"session {run.draws.randrange(SESSIONS)}"
    if session in run.contexts and draws.random() < 0.5:  # the next turn
        tokens = run.contexts[session] + [draws.randrange(64) for _ in range(draws.randrange(1, 9))]
    else:
        shared = random.Random(draws.randrange(4))
        tokens = [shared.randrange(64) for _ in range(draws.randrange(1, 90))]
    return GenerateRequest(
        session,
        tokens[:200],
        Sampling(max_tokens=draws.randrange(1, 50), stop_tokens=(0,), seed=draws.randrange(1000)),
        "production" if client < USERS else "rollout",
        min_version=max(0, run.version + draws.choice((-5, -1, 0, 1))),
    )


def _check(run: Soak, request: GenerateRequest, chunks: list[GenerateChunk]) -> None:
    run.counts["answers"] += 1
    tokens = [token for chunk in chunks for token in chunk.tokens]
    logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
    policies = [chunk.policies[index] for chunk in chunks for index in chunk.policy]
    numbers = [policy.number for policy in policies]
    last = chunks[-1] if chunks else None
    if last is None or last.finish not in ("stop", "length") or not tokens:
        run.wrong.append(f"an answer of {len(tokens)} tokens has no end")
        return
    if numbers != sorted(numbers) or numbers[0] < request.min_version or len(tokens) > request.sampling.max_tokens:
        run.wrong.append(f"an answer has versions {numbers}, and asked for {request.min_version}")
    run.contexts[request.session] = request.tokens + tokens
    run.counts["cached"] += last.cached_tokens > 0
    if {last.oldest_kv_policy} == set(policies) and run.draws.random() < CHECKED:
        run.counts["checked"] += 1
        expected = _logprobs(run.models[policies[0].digest], request.tokens + tokens)[len(request.tokens) - 1 :]
        worst = float((expected - torch.tensor(logprobs)).abs().max())
        if not worst < TOLERANCE:
            run.wrong.append(f"log-probs differ by {worst} with {last.cached_tokens} cached tokens")


async def _update_often(run: Soak) -> None:
    while not run.asked:
        await asyncio.sleep(run.draws.uniform(0.05, 1.5))
        await _apply(run)


async def _apply(run: Soak) -> None:
    tensors = run.tensors[run.version % VERSIONS]
    policy = PolicyRef("main", run.version, "bf16", root_digest(describe(tensors)))
    await run.engine.apply(Update(policy, tensors, None, None, 0, {}, time.time()))
    run.version += 1


async def _stop_often(run: Soak) -> None:
    """Pauses and drains, and always resumes."""
    while not run.asked:
        await asyncio.sleep(run.draws.uniform(0.5, 3))
        path = run.draws.choice(("/pause", "/drain"))
        for each in (path, "/resume"):
            async with run.client.post(each) as response:
                json.loads(await response.read())
            await asyncio.sleep(run.draws.uniform(0, 0.1))


def _weights(number: int) -> dict[str, HostTensor]:
    model = Decoder(MODEL)
    model.initialise(number)
    return dict(to_host(model.state_dict()))


def _model(tensors: dict[str, HostTensor]) -> Decoder:
    model = Decoder(MODEL)
    load_host(model, tensors)
    return model


@torch.no_grad()
def _logprobs(model: Decoder, tokens: list[int]) -> torch.Tensor:
    """Of tokens[1:], by the trainer's forward pass."""
    lengths, device = [len(tokens)], torch.device("cpu")
    attend = packed_attention(lengths, device, model.embedding.dtype)
    hidden = model(torch.tensor(tokens), packed_positions(lengths, device), attend).hidden
    logprobs = model.logits(hidden)[:-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(tokens[1:]).unsqueeze(1)).squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="20 seconds")
    arguments = parser.parse_args()
    figures, wrong = asyncio.run(soak(20.0 if arguments.quick else arguments.minutes * 60, arguments.seed))
    for line in wrong[:20]:
        print(line)
    for name, value in figures.items():
        print(f"{name:32} {value:12g}")
    zero = ("soak_lost", "soak_lost_pages", "soak_left_requests", "soak_wrong")
    bars = {name: at_most(figures[name], 0) for name in zero}
    bars["soak_preemptions"] = at_least(figures["soak_preemptions"], 1)
    finish("soak", figures, bars)


if __name__ == "__main__":
    main()
