"""The engine's contract over a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollmill.inference.embedded.engine import EmbeddedEngine
from rollmill.inference.engine import METRICS
from rollmill.inference.engine_wire import chunk_from_json, request_to_json
from rollmill.inference.follower import EngineFollower, PinnedSource
from rollmill.inference.server import make_app, serving
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights.reading.weight_store import WeightStore
from tests.inference.world import ENGINE, PROMPT, engine_at, generate, make_update, request, until


@asynccontextmanager
async def client_of(engine: EmbeddedEngine, token: str | None = None) -> AsyncIterator[aiohttp.ClientSession]:
    source = PinnedSource(WeightStore(Objects.open("memory://")), Version("main", 9), "bf16")
    source.poll()
    async with serving(make_app(engine, EngineFollower(engine, source, 0.1), token), "127.0.0.1", 0) as runner:
        host, port = runner.addresses[0][:2]
        async with aiohttp.ClientSession(f"http://{host}:{port}") as client:
            yield client


async def test_generate_answers_in_one_line_or_as_a_stream() -> None:
    async with engine_at(make_update(0)) as engine, client_of(engine) as client:
        expected = await generate(engine, request())
        async with client.post("/generate", data=request_to_json(request(session="a"))) as response:
            assert response.status == 200
            lines = (await response.read()).splitlines()
        async with client.post("/generate", data=request_to_json(request(session="b"), stream=True)) as response:
            pieces = [chunk_from_json(line) async for line in response.content]
    assert len(lines) == 1
    whole = chunk_from_json(lines[0])
    assert (whole.tokens, whole.finish) == (expected.tokens, "length")
    # its prompt was found in the cache, and the last position alone may round otherwise
    assert whole.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert whole.routes is not None and len(whole.routes) == len(PROMPT) + len(whole.tokens) - 1
    assert whole.policies == [make_update(0).policy] == [whole.oldest_kv_policy]
    assert len(pieces) > 1 and pieces[-1].finish == "length"
    assert [token for piece in pieces for token in piece.tokens] == whole.tokens


async def test_health_and_metrics() -> None:
    update = make_update(3)
    async with engine_at(update) as engine, client_of(engine) as client:
        await generate(engine, request())
        health = await (await client.get("/health")).json()
        metrics = await (await client.get("/metrics")).text()
    assert health == {
        "engine": "engine-test",
        "region": "home",
        "policy": {"line": "main", "number": 3, "form": "bf16", "digest": update.policy.digest},
        "running": 0,
        "waiting": 0,
        "paused": False,
        "draining": False,
        "problem": health["problem"],
        "lent": None,
        "loan": None,
        "serves": None,
        "capabilities": {
            "kind": "embedded",
            "routes": True,
            "grammars": False,
            "seeds_by_position": True,
            "keeps_cache": True,
        },
    }
    assert "main@9 (bf16) does not exist" in health["problem"]
    assert 'rollmill_engine_version{engine="engine-test",region="home"} 3.0' in metrics.splitlines()
    assert 'rollmill_engine_sampled_tokens_total{engine="engine-test",region="home"} 12.0' in metrics.splitlines()
    assert "# TYPE rollmill_engine_sampled_tokens_total counter" in metrics
    parsed = {family.name: family for family in text_string_to_metric_families(metrics)}
    assert parsed["rollmill_engine_first_token_seconds"].type == "histogram"
    counts = {sample.name: sample.value for family in parsed.values() for sample in family.samples}
    assert counts["rollmill_engine_first_token_seconds_count"] == counts["rollmill_engine_pause_seconds_count"] == 1
    assert counts["rollmill_engine_between_tokens_seconds_count"] == 12
    named = {line.split()[2] for line in metrics.splitlines() if line.startswith("# HELP ")}
    assert named == {f"rollmill_engine_{name}" for name in METRICS}  # the table in inference/engine.py is complete


@pytest.mark.parametrize("given", [None, "Bearer wrong", "Bearer ", "secret", "Bearer secret2", "Bearer \u20ac"])
async def test_every_command_needs_the_token_and_health_does_not(given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given}
    async with engine_at(make_update(0)) as engine, client_of(engine, "secret") as client:
        for path in ("/generate", "/pause", "/resume", "/drain", "/hint", "/lend", "/recall", "/nothing"):
            response = await client.post(path, data=request_to_json(request()), headers=headers)
            body = await response.json()
            assert response.status == 401 and "token" in body["error"] and "run.json" in body["hint"]
        assert not engine.health()["paused"]
        assert (await client.get("/health")).status == (await client.get("/metrics")).status == 200


async def test_the_right_token_is_accepted() -> None:
    async with engine_at(make_update(0)) as engine, client_of(engine, "secret") as client:
        headers = {"Authorization": "Bearer secret"}
        response = await client.post("/generate", data=request_to_json(request()), headers=headers)
        assert chunk_from_json(await response.read()).finish == "length"
        assert (await client.post("/pause", headers=headers)).status == 200 and engine.health()["paused"]


async def test_pause_and_resume() -> None:
    async with engine_at(make_update(0)) as engine, client_of(engine) as client:
        assert (await (await client.post("/pause")).json())["paused"]
        task = asyncio.create_task(client.post("/generate", data=request_to_json(request())))
        await until(lambda: engine.health()["waiting"] == 1)
        assert not (await (await client.post("/resume")).json())["paused"]
        assert chunk_from_json(await (await task).read()).finish == "length"


async def test_a_full_queue_answers_429_and_counts_production_apart() -> None:
    config = ENGINE.model_copy(update={"max_waiting": 2})
    async with engine_at(make_update(0), config) as engine, client_of(engine) as client:
        await engine.pause()
        rollouts = [asyncio.create_task(client.post("/generate", data=request_to_json(request()))) for _ in range(2)]
        await until(lambda: engine.health()["waiting"] == 2)
        refused = await client.post("/generate", data=request_to_json(request()))
        assert (refused.status, refused.headers["Retry-After"]) == (429, "1")
        assert "max_waiting" in (await refused.json())["hint"]
        body = request_to_json(replace(request(), traffic="production"))
        production = asyncio.create_task(client.post("/generate", data=body))
        await until(lambda: engine.health()["waiting"] == 3)
        assert engine.metrics()["refused_total"] == 1
        await engine.resume()
        for task in (*rollouts, production):
            assert chunk_from_json(await (await task).read()).finish == "length"


async def test_drain_finishes_what_runs_and_waits_and_takes_nothing_new() -> None:
    config = ENGINE.model_copy(update={"max_batch": 1})
    async with engine_at(make_update(0), config) as engine, client_of(engine) as client:
        await engine.pause()
        tasks = [asyncio.create_task(client.post("/generate", data=request_to_json(request()))) for _ in range(2)]
        await until(lambda: engine.health()["waiting"] == 2)
        assert (await (await client.post("/drain")).json())["draining"]
        refused = await client.post("/generate", data=request_to_json(request()))
        assert refused.status == 503 and "drains" in (await refused.json())["error"]
        engine._decoding.post(lambda: setattr(engine._decoding, "paused", False))  # /resume would end the draining
        for task in tasks:
            assert chunk_from_json(await (await task).read()).finish == "length"
        health = await (await client.get("/health")).json()
        assert (health["running"], health["waiting"], health["draining"]) == (0, 0, True)
        assert not (await (await client.post("/resume")).json())["draining"]
        assert (await client.post("/generate", data=request_to_json(request()))).status == 200


async def test_an_engine_pinned_to_a_version_is_not_lent() -> None:
    async with engine_at(make_update(0)) as engine, client_of(engine) as client:
        for path, body in (
            ("/lend", b'{"line": "rl"}'),
            ("/lend", b"[]"),
            ("/lend", b"{"),
            ("/recall", b""),
            ("/lend", b'{"line": "rl", "seconds": "long"}'),
        ):
            response = await client.post(path, data=body)
            assert response.status == 400 and (await response.json(content_type=None))["error"]
        assert (await client.post("/hint", data=b'{"version": 3}')).status == 200


@pytest.mark.parametrize("body", [b"nonsense", request_to_json(request([999])), request_to_json(request([]))])
async def test_a_wrong_request_gets_a_400_with_the_reason(body: bytes) -> None:
    async with engine_at(make_update(0)) as engine, client_of(engine) as client:
        response = await client.post("/generate", data=body)
        assert response.status == 400
        assert (await response.json())["error"]


async def test_a_broken_engine_answers_503() -> None:
    async with engine_at(make_update(0)) as engine, client_of(engine) as client:
        engine._decoding._runner.run = lambda work: 1 / 0  # type: ignore[assignment, method-assign]
        for _ in range(2):
            response = await client.post("/generate", data=request_to_json(request()))
            assert response.status == 503


async def test_an_interrupted_answer_has_no_finish() -> None:
    async with engine_at(make_update(0)) as engine, client_of(engine) as client:
        lines = []
        async with client.post("/generate", data=request_to_json(request(max_tokens=9999), stream=True)) as response:
            with pytest.raises(aiohttp.ClientError):
                async for line in response.content:
                    lines.append(json.loads(line))
                    engine._decoding._runner.run = lambda work: 1 / 0  # type: ignore[assignment, method-assign]
    assert lines and all(line["finish"] is None for line in lines)


async def test_a_client_that_disconnects_frees_its_pages() -> None:
    async with engine_at(make_update(0)) as engine:
        async with client_of(engine) as client:
            streaming = await client.post("/generate", data=request_to_json(request(max_tokens=9999), stream=True))
            await streaming.content.readline()
            await engine.pause()  # so that it cannot finish by itself
            body = request_to_json(replace(request(session="w"), min_version=99))
            waiting = asyncio.create_task(client.post("/generate", data=body))
            await until(lambda: engine.metrics()["waiting"] == 1)
            assert engine.metrics()["cache_blocks_free"] < engine.metrics()["cache_blocks"]
            streaming.close()
            waiting.cancel()
            await until(lambda: engine.metrics()["cache_blocks_free"] == engine.metrics()["cache_blocks"])
            await until(lambda: engine.metrics()["waiting"] == 0)
        assert engine.metrics()["running"] == 0
