"""kill -9 of the gateway process at several moments, and a restart on the same port and directory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rollmill.chat.tokenizer import Tokenizer
from rollmill.gateway.recording.sealing import payload_key
from rollmill.storage.objects import Objects
from rollmill.trajectories.trajectory_store import TrajectoryStore
from tests.chat.conftest import TOOLS
from tests.gateway import serve
from tests.gateway.conftest import USER, Answers, Door, Mill, until
from tests.gateway.stand_in import StandIn
from tests.processes import SERVER, free_port


class Process:
    def __init__(self, mill: Mill, engine: str, workers: int = 1, port: int = 0, ports: Sequence[int] = ()) -> None:
        """`ports`: those of all gateways, if there are several."""
        self.port = port or free_port()
        self._settings = mill.directory, self.port, engine, workers, *ports
        self._process: BaseProcess | None = None

    def start(self) -> None:
        self._process = SERVER.Process(target=serve.main, args=self._settings)
        self._process.start()

    @property
    def workers(self) -> list[int]:
        """The ids of its worker processes."""
        assert self._process is not None
        pid = self._process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    def stop(self) -> None:
        assert self._process is not None
        self._process.terminate()
        self._process.join()
        assert self._process.exitcode == 0

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()


@contextlib.asynccontextmanager
async def process(
    mill: Mill, tokenizer: Tokenizer, engine: StandIn, workers: int = 1
) -> AsyncIterator[tuple[Process, Door]]:
    tokenizer.save(mill.directory / "tokenizer.json")
    trajectories = TrajectoryStore(mill.database(), Objects.open(mill.directory / "store"))
    running = Process(mill, (await mill.engine(engine)).url, workers)
    running.start()
    try:
        # with several workers: a connection per request, so that it reaches any of them
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=workers > 1)) as http:
            door = Door(f"http://127.0.0.1:{running.port}", trajectories, http)
            await up(door)
            yield running, door
    finally:
        running.kill()


async def up(door: Door) -> None:
    async def healthy() -> bool:
        with contextlib.suppress(aiohttp.ClientError):
            return bool((await door.health())["status"] == "ok")
        return False

    await until(healthy)


async def nothing_open(door: Door) -> bool:
    return await door.sessions() == 0


async def persistent(door: Door, key: str, messages: list[Any], **fields: Any) -> dict[str, Any]:
    """Asks like a harness: retries while the gateway is down."""
    while True:
        with contextlib.suppress(aiohttp.ClientError):
            return await door.say(key, messages, **fields)
        await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_a_session_survives_kills_between_turns_in_mid_answer_and_after_the_seal(
    mill: Mill, tokenizer: Tokenizer, answers: Answers
) -> None:
    turns = [answers.call("read", path="a.py"), answers.text("two " * 10), answers.text("three")]
    engine = StandIn([turns[0], turns[1], turns[1], turns[2]])
    mill.plan("a", "b")
    async with process(mill, tokenizer, engine) as (gateway, door):
        key = await door.open("a", run="run", task_id="t", group_id="g")
        await door.open("b")
        messages: list[Any] = [USER]
        await door.say(key, messages)
        gateway.kill()  # between two turns
        gateway.start()

        messages.append({"role": "tool", "content": "def add"})
        engine.token_delay_s = 0.05
        asked = asyncio.create_task(persistent(door, key, messages, max_tokens=200))
        await engine.asked(2)
        await asyncio.sleep(0.2)
        gateway.kill()  # in the middle of an answer
        torn = mill.directory / "gateway" / "sessions.log"
        torn.write_bytes(torn.read_bytes() + b"RMG1\x40\x00\x00\x00torn")  # and in the middle of a write
        engine.token_delay_s = 0
        gateway.start()
        await asked

        messages.append({"role": "user", "content": "and?"})
        await door.say(key, messages)
        trajectory = await door.seal("a")
        sealed = await door.admin("POST", "/sessions/a/seal", {"submission_key": None})
        gateway.kill()  # after the seal: it is not replayed
        gateway.start()
        await up(door)
        assert await door.admin("POST", "/sessions/a/seal", {"submission_key": None}) == sealed
        assert (await door.health())["sessions"] == 1  # b

    (segment,) = trajectory.segments
    tokens = mill.format.render_start([USER], TOOLS) + turns[0]
    tokens += mill.format.render_turn([messages[2]], TOOLS, answer_closed=True) + turns[1]
    tokens += mill.format.render_turn([messages[4]], TOOLS, answer_closed=True) + turns[2]
    assert segment.tokens.tolist() == tokens
    assert int(segment.sampled.sum()) == sum(map(len, turns))
    assert trajectory.messages == messages


async def test_a_seal_interrupted_at_any_point_is_finished_by_the_next_process(
    mill: Mill, tokenizer: Tokenizer, answers: Answers
) -> None:
    """The log is cut before its "close" records, for one session with the object in place, for one without."""
    mill.plan("stored", "unstored")
    async with process(mill, tokenizer, StandIn([answers.text("x")])) as (gateway, door):
        for trajectory in ("stored", "unstored"):
            await door.say(await door.open(trajectory), [USER])
            await door.seal(trajectory)
        gateway.kill()
        log = mill.directory / "gateway" / "sessions.log"
        data = log.read_bytes()
        entries = mill.log_entries()
        log.write_bytes(b"".join(data[begin:end] for begin, end, record in entries if record.op != "close"))
        payload = mill.directory / "store" / payload_key("unstored")
        content = payload.read_bytes()
        payload.unlink()
        gateway.start()
        await up(door)
        await until(lambda: nothing_open(door))
        assert payload.read_bytes() == content
        assert [len(door.trajectories.load(id).segments) for id in ("stored", "unstored")] == [1, 1]


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
async def test_kills_under_load_lose_no_acknowledged_answer(
    mill: Mill, tokenizer: Tokenizer, answers: Answers, kills: int
) -> None:
    """Four rollouts talk on while the gateway is killed again and again. What they got is in the record, in order."""
    engine = StandIn([answers.text(f"answer {number}") for number in range(10_000)], token_delay_s=0.002)
    ids = [f"rollout-{number}" for number in range(4)]
    mill.plan(*ids)
    told = {id: [dict(USER)] for id in ids}
    enough = asyncio.Event()

    async def talk(door: Door, id: str) -> None:
        key = await door.open(id)
        while not enough.is_set():
            await persistent(door, key, told[id], max_tokens=100)
            told[id].append({"role": "user", "content": f"go on {len(told[id])}"})

    def answered() -> int:
        return sum(len(messages) // 2 for messages in told.values())

    async with process(mill, tokenizer, engine) as (gateway, door):
        talks = [asyncio.create_task(talk(door, id)) for id in ids]
        for _ in range(kills):
            goal = answered() + len(ids)
            while answered() < goal:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            gateway.kill()
            gateway.start()
        enough.set()
        await asyncio.gather(*talks)
        await up(door)
        sealed = [await door.seal(id) for id in ids]
    for id, trajectory in zip(ids, sealed, strict=True):
        got = [message["content"] for message in told[id] if message["role"] == "assistant"]
        (segment,) = trajectory.segments  # every repeated request went on from the record: no branch
        recorded = [tokenizer.decode(segment.tokens[span.start : span.end].tolist()) for span in segment.spans]
        assert len(recorded) == len(got) and all(text in said for text, said in zip(got, recorded, strict=True))
        assert trajectory.messages == told[id][:-1]
