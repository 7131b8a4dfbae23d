"""What the vLLM engine does without a vLLM server: its process, its settings, its sampling parameters."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from rollmill.errors import ConfigError, EngineError, WeightsError
from rollmill.inference.config import EngineConfig
from rollmill.inference.engine import EngineUnavailable
from rollmill.inference.vllm.engine import VllmEngine
from rollmill.inference.vllm.generation import Generation, TokenSample, kept_tokens
from rollmill.inference.vllm.handover import NAME, Handover
from rollmill.inference.vllm.vllm_client import SOCKET, Client, _piece
from rollmill.inference.vllm.vllm_process import arguments, environment, find_python
from rollmill.types import PolicyRef, Sampling
from tests.inference.world import ENGINE, PROMPT, TINY, make_update, request

STARTER = """
import subprocess, sys
subprocess.Popen([sys.executable, "-m", "rollmill.inference.vllm.vllm_guard", *sys.argv[1:]], stdin=subprocess.PIPE,
                 process_group=0).wait()
"""
SERVER = "sleep 1000 & echo $! > {pids}.new && mv {pids}.new {pids}; wait"
POLICY = PolicyRef("main", 3, "bf16", "0" * 64)


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    """Ended, or waiting to be reaped by whoever has inherited it."""
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("end", ["engine killed", "server ended"])
def test_no_process_of_the_server_outlives_the_engine(end: str, tmp_path: Path) -> None:
    directory, pids = tmp_path / "server", tmp_path / "pid"
    directory.mkdir()
    server = SERVER.format(pids=pids) if end == "engine killed" else SERVER.format(pids=pids).replace("wait", "exit 3")
    engine = subprocess.Popen([sys.executable, "-c", STARTER, str(directory), "bash", "-c", server])
    wait_for(pids.exists)
    grandchild = int(pids.read_text())
    if end == "engine killed":
        assert not is_gone(grandchild)
        os.kill(engine.pid, signal.SIGKILL)
    engine.wait()
    wait_for(lambda: is_gone(grandchild) and not directory.exists())


def test_a_missing_vllm_is_said_with_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "venv"))
    with pytest.raises(ConfigError, match=r"\.venv-vllm.*\n.*scripts/setup-vllm"):
        find_python(None)
    python = tmp_path / ".venv-vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    assert find_python(None) == str(python)


def test_credentials_do_not_reach_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    passed = environment(tmp_path, EngineConfig())
    assert passed["CUDA_VISIBLE_DEVICES"] == "3" and "secret" not in passed.values()


def test_the_cache_has_room_for_the_tokens_that_were_asked_for(tmp_path: Path) -> None:
    given = arguments(tmp_path, TINY, EngineConfig(cache_tokens=1024, max_batch=2), "cuda")
    size = int(given[given.index("--kv-cache-memory-bytes") + 1])
    assert size == (1024 + 2 * 128) * TINY.layers * 2 * TINY.kv_heads * TINY.head_dim * 2
    assert "--kv-cache-dtype" not in given
    sizes = EngineConfig(cache_tokens=1024, max_batch=2, fp8_kv=True)
    rounded = arguments(tmp_path, TINY, sizes, "cuda")
    assert rounded[rounded.index("--kv-cache-dtype") + 1] == "fp8"
    memory = [int(each[each.index("--kv-cache-memory-bytes") + 1]) for each in (given, rounded)]
    assert memory[0] == 2 * memory[1]
    with pytest.raises(ConfigError, match="fp8_kv"):
        arguments(tmp_path, TINY, sizes, "cpu")
    assert "--enforce-eager" not in given and "--enforce-eager" in arguments(tmp_path, TINY, EngineConfig(), "cpu")


def generation(**sampling: object) -> Generation:
    wanted = request(**sampling)
    return Generation(1, wanted, False, len(PROMPT) + 12, lambda chunk: None, TINY.vocab_size)


def test_a_later_leg_asks_for_the_rest_with_another_seed() -> None:
    one = generation(seed=5)
    first = one.parameters()
    one.start()
    for token in (7, 8):
        one.add(TokenSample(token, -1.0, []), POLICY)
    one.requeue()
    second = one.parameters()
    assert (first["max_tokens"], second["max_tokens"]) == (12, 10)
    assert first["seed"] == 5 != second["seed"] and 0 <= second["seed"] < 2**63
    assert one.tokens == [*PROMPT, 7, 8]
    assert one.chunk("length").policies == [POLICY]


def test_penalties_of_an_interrupted_answer_are_not_known_to_the_trainer() -> None:
    one = generation(presence_penalty=0.5)
    one.start()
    one.add(TokenSample(7, -1.0, []), POLICY)
    assert one.chunk().missing == ""
    one.start()
    assert "penalties" in one.chunk("length").missing


def test_kept_tokens_are_known_only_if_they_are_all() -> None:
    cut = Sampling(top_k=3)
    assert kept_tokens(cut, TokenSample(4, -0.693147, [(4, -0.693147), (9, -0.693147), (2, -9999.0)]), 16) != b""
    assert kept_tokens(cut, TokenSample(4, -0.693147, [(4, -0.693147)]), 16) == b"", (
        "half of the probability is missing"
    )
    assert kept_tokens(Sampling(top_p=0.5), TokenSample(4, 0.0, [(4, 0.0)]), 16) == b""


def test_tokens_of_other_weights_are_refused() -> None:
    event = b'{"choices": [{"token_ids": [3], "finish_reason": "stop", "weight_versions": [{"version": "main@1"}], "logprobs": {"content": [{"token_id": 3, "logprob": -0.5, "top_logprobs": []}]}}]}'  # noqa: E501
    assert _piece(event, 0, "main@1").sampled == [TokenSample(3, -0.5, [])]
    with pytest.raises(EngineUnavailable, match="sampled by main@1"):
        _piece(event, 0, "main@2")
    for wrong in (b"{}", b"[]", b'{"choices": []}', event.replace(b"[3]", b"[4]"), b"\xff"):
        with pytest.raises(EngineUnavailable, match="cannot be read"):
            _piece(wrong, 0, "main@1")
    with pytest.raises(EngineUnavailable, match="out of memory"):
        _piece(b'{"error": "out of memory"}', 0, "main@1")


async def test_only_verified_bf16_is_handed_over(tmp_path: Path) -> None:
    handover, update = Handover(tmp_path), make_update(1)
    async with handover.written(update) as path:
        assert path.stat().st_size > sum(tensor.data.size for tensor in update.tensors.values())
    assert not (tmp_path / NAME).exists()
    for wrong in (
        replace(update, policy=replace(update.policy, form="fp8")),
        replace(update, policy=replace(update.policy, digest="0" * 64)),
        make_update(1, TINY.model_copy(update={"experts": 0})),
    ):
        with pytest.raises(WeightsError):
            async with handover.written(wrong):
                pass


async def test_a_full_disk_is_an_error_of_the_weights(tmp_path: Path) -> None:
    """The follower tries again, and the previous version is served meanwhile."""
    handover, update = Handover(tmp_path), make_update(1)
    (tmp_path / NAME).symlink_to("/dev/full")
    with pytest.raises(WeightsError, match=r"main@1: .* cannot be written: No space left") as raised:
        async with handover.written(update):
            pass
    assert "TMPDIR" in str(raised.value.hint)
    async with handover.written(update) as path:  # there is space again
        assert path.stat().st_size > 0


@contextlib.asynccontextmanager
async def simulated_server(directory: Path, answers: dict[str, web.Response]) -> AsyncIterator[Client]:
    """A simulation of vLLM's server: `answers` by the end of the path, 200 for all others. The client is not open."""

    async def answer(request: web.Request) -> web.Response:
        given = answers.get(request.path.rpartition("/")[2], web.Response())
        return web.Response(status=given.status, body=given.body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.UnixSite(runner, str(directory / SOCKET)).start()
    client = Client(directory)
    try:
        yield client
    finally:
        await client.close()
        await runner.cleanup()


def events(count: int) -> bytes:
    """A stream of one event with `count` tokens."""
    content = [{"token_id": 3, "logprob": -0.5, "top_logprobs": []}] * count
    choice = {"token_ids": [3] * count, "finish_reason": "length", "logprobs": {"content": content}}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\ndata: [DONE]\n\n"


async def test_an_event_may_be_longer_than_a_line(tmp_path: Path) -> None:
    stream = events(10_000)
    assert len(stream) > 2**19
    async with simulated_server(tmp_path, {"generate": web.Response(body=stream)}) as client:
        await client.open()
        [piece] = [piece async for piece in client.generate(generation(), "main@1")]
    assert len(piece.sampled) == 10_000 and piece.finish == "length"


async def test_a_server_that_does_not_pause_serves_what_it_has(tmp_path: Path) -> None:
    answers = {"generate": web.Response(body=events(12))}
    async with simulated_server(tmp_path, answers) as client, VllmEngine(client, TINY, ENGINE) as engine:
        await engine.apply(make_update(1))
        answers["pause"] = web.Response(status=500)
        for change in (engine.apply(make_update(2)), engine.pause()):
            with pytest.raises(EngineError, match="500 to /pause"):
                await change
            chunks = [chunk async for chunk in engine.generate(request())]
            assert chunks[-1].finish == "length" and [policy.number for policy in chunks[-1].policies] == [1]
        del answers["pause"]
        await engine.apply(make_update(2))
        assert engine.health()["policy"]["number"] == 2
