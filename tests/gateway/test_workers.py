"""A gateway of several worker processes: any of them answers for any session; one that is killed is started again."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from prometheus_client.parser import text_string_to_metric_families

from rollmill.chat.tokenizer import Tokenizer
from rollmill.errors import GatewayError
from rollmill.gateway.config import GatewayConfig
from rollmill.gateway.recording.entries import LogEntry, encode_open, encode_waited
from rollmill.gateway.recording.recorder import Recorder
from rollmill.gateway.recording.replaying import read_sessions
from rollmill.gateway.recording.workers_log import move_sessions
from rollmill.gateway.replicas import Gateways
from rollmill.gateway.sessions.sessions import SessionFacts
from rollmill.gateway.workers import Workers, log_directories, log_directory, opening, share
from tests.gateway.conftest import USER, Answers, Door, Mill, read_entries, until
from tests.gateway.serve import LIVE
from tests.gateway.stand_in import StandIn
from tests.gateway.test_crash import persistent, process, up

COUNT = 3


def names(prefix: str, per_worker: int, count: int = COUNT) -> list[str]:
    """Names of sessions, `per_worker` of each worker."""
    found: dict[int, list[str]] = {number: [] for number in range(count)}
    workers, number = Workers(0, [""] * count), 0
    while any(len(own) < per_worker for own in found.values()):
        own = found[workers.owner(f"{prefix}-{number}")]
        if len(own) < per_worker:
            own.append(f"{prefix}-{number}")
        number += 1
    return [name for own in found.values() for name in own]


async def talk(door: Door, key: str, turns: int, **fields: Any) -> list[Any]:
    messages: list[Any] = [dict(USER)]
    for turn in range(turns):
        await door.say(key, messages, **fields)
        messages.append({"role": "user", "content": f"go on {turn}"})
    return messages[:-1]


async def test_every_session_is_found_through_any_worker(mill: Mill, tokenizer: Tokenizer, answers: Answers) -> None:
    ids = names("rollout", 2)
    mill.plan(*ids)
    async with process(mill, tokenizer, StandIn([answers.text("one two three")]), COUNT) as (gateway, door):
        keys = [await door.open(id, run="run", group_id="g", task_id="t") for id in ids]
        told = await asyncio.gather(*[talk(door, key, 3) for key in keys])
        assert {session.facts.trajectory for session in read_sessions(mill.directory / "gateway")} == set(ids)
        assert [len(read_sessions_of(mill, worker)) for worker in range(COUNT)] == [2] * COUNT

        status, listed = await door.admin("GET", "/sessions")
        assert status == 200 and {session["trajectory"] for session in listed["sessions"]} == set(ids)
        assert await door.sessions() == len(ids)
        assert await counted(door, "requests_total") == 3 * len(ids)
        assert await counted(door, "request_seconds_count") == 3 * len(ids)  # one that is forwarded counts once

        for id, messages in zip(ids, told, strict=True):
            trajectory = await door.seal(id)
            assert trajectory.messages == messages
            assert [segment.cause for segment in trajectory.segments] == ["start"]
        status, _ = await door.ask(keys[0], [USER])
        assert status == 401  # its session has ended, whichever worker is asked
        gateway.stop()


def read_sessions_of(mill: Mill, worker: int) -> set[str]:
    log = log_directory(mill.directory / "gateway", worker) / "sessions.log"
    return {entry.session for _, _, entry in read_entries(log.read_bytes())}


async def counted(door: Door, name: str) -> float:
    families = text_string_to_metric_families(await door.metrics())
    return sum(
        sample.value for family in families for sample in family.samples if sample.name == f"rollmill_gateway_{name}"
    )


async def test_conversations_of_production_are_found_by_name_by_history_and_by_response(
    mill: Mill, tokenizer: Tokenizer, answers: Answers
) -> None:
    async with process(mill, tokenizer, StandIn([answers.text("one two three")]), COUNT) as (_, door):
        for number in range(2 * COUNT):
            named = {"x-rollmill-session": f"chat-{number}"}
            first = await said(door, [USER], named)
            assert await said(door, [USER, answer(first), USER], named) == first
            opened = [{"role": "user", "content": f"conversation {number}"}]
            status, body = await door.ask(LIVE, opened)  # nothing names it: its history does
            assert status == 200
            again = await said(door, [*opened, body["choices"][0]["message"], USER], {})
            assert again["trajectory"] == body["rollmill"]["trajectory"]

            status, response = await door.admin("POST", "/v1/responses", {"input": f"item {number}"}, token=LIVE)
            assert status == 200
            following = {"input": "more", "previous_response_id": response["id"]}
            status, second = await door.admin("POST", "/v1/responses", following, token=LIVE)
            assert status == 200
            assert second["rollmill"]["trajectory"] == response["rollmill"]["trajectory"]
            status, shown = await door.admin("GET", f"/v1/responses/{response['id']}", token=LIVE)
            assert (status, shown["id"]) == (200, response["id"])


def answer(about: dict[str, Any]) -> dict[str, str]:
    return {"role": "assistant", "content": "one two three"}


async def said(door: Door, messages: list[Any], headers: dict[str, str]) -> dict[str, Any]:
    """The trajectory and the segment of the answer."""
    status, body = await door.ask(LIVE, messages, headers)
    assert status == 200, body
    return {name: body["rollmill"][name] for name in ("trajectory", "segment")}


async def test_feedback_and_forgetting_reach_all_workers(mill: Mill, tokenizer: Tokenizer, answers: Answers) -> None:
    async with process(mill, tokenizer, StandIn([answers.text("one")]), COUNT) as (_, door):
        chats = names("chat", 2)
        for name in chats:
            early = {"session": name, "value": 1.0, "id": f"early-{name}"}
            status, body = await door.admin("POST", "/v1/feedback", early, token=LIVE)
            assert (status, body["feedback"]) == (202, None)
        found = [await said_by_ann(door, name) for name in chats]
        for name, about in zip(chats, found, strict=True):
            for what in ({"session": name}, {"segment": about["segment"]}, {"answer": about["segment"] + "/0"}):
                given = {**what, "value": 0.5, "id": f"{name} {next(iter(what))}"}
                status, body = await door.admin("POST", "/v1/feedback", given, token=LIVE)
                assert (status, body["trajectory"]) == (200, about["trajectory"])

        async def all_there() -> bool:
            return all(len(door.trajectories.feedback(about["trajectory"])) == 4 for about in found)

        await until(all_there)
        status, forgotten = await door.admin("POST", "/forget", {"user": "ann"})
        assert (status, forgotten["open"], forgotten["kept"]) == (200, len(chats), {})
        assert await door.sessions() == 0


async def said_by_ann(door: Door, name: str) -> dict[str, Any]:
    status, body = await door.ask(LIVE, [USER], {"x-rollmill-session": name}, user="ann")
    assert status == 200, body
    return dict(body["rollmill"])


async def test_streams_come_through_piece_by_piece_and_a_client_that_leaves_is_noticed(
    mill: Mill, tokenizer: Tokenizer, answers: Answers
) -> None:
    engine = StandIn([answers.text("one two three four " * 20)], token_delay_s=0.02)
    async with process(mill, tokenizer, engine, COUNT) as (_, door):
        headers = {"Authorization": f"Bearer {LIVE}"}
        for number, name in enumerate(names("chat", 1)):
            body = {"messages": [USER], "stream": True}
            url = f"{door.url}/s/{name}/v1/chat/completions"
            async with door.http.post(url, json=body, headers=headers) as response:
                assert response.headers["x-rollmill-session"] == name
                assert b"data: " in await response.content.readany()  # the engine has not ended yet
            while engine.cancelled <= number:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        engine.gate = asyncio.Event()
        for number, name in enumerate(names("waits", 1)):
            url = f"{door.url}/s/{name}/v1/chat/completions"
            asked = asyncio.create_task(door.http.post(url, json={"messages": [USER]}, headers=headers))
            await engine.asked(COUNT + number + 1)
            asked.cancel()
            await asyncio.wait([asked])
        await asyncio.sleep(0.3)  # the gateway hears that they left; until then it would take an answer for delivered
        engine.token_delay_s = 0
        engine.gate.set()
        for number, name in enumerate(names("waits", 1)):  # asks again until it gets the answer that nobody got
            for _ in range(50):
                if await counted(door, "answers_repeated_total") > number:
                    break
                status, _ = await door.ask(LIVE, [USER], {"x-rollmill-session": name}, tools=[])
                assert status == 200
            assert await counted(door, "answers_repeated_total") == number + 1


@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.slow)])
async def test_killed_workers_lose_nothing_and_new_connections_are_served(
    mill: Mill, tokenizer: Tokenizer, answers: Answers, kills: int
) -> None:
    """Rollouts talk on while a worker is killed again and again. After each kill new connections must be served."""
    engine = StandIn([answers.text(f"answer {number}") for number in range(20_000)], token_delay_s=0.002)
    ids = names("rollout", 2, 2)
    mill.plan(*ids)
    told = {id: [dict(USER)] for id in ids}
    enough = asyncio.Event()

    async def talking(door: Door, id: str) -> None:
        key = await door.open(id)
        while not enough.is_set():
            await persistent(door, key, told[id], max_tokens=100)
            told[id].append({"role": "user", "content": f"go on {len(told[id])}"})

    def answered() -> int:
        return sum(len(messages) // 2 for messages in told.values())

    async with process(mill, tokenizer, engine, 2) as (gateway, door):
        talks = [asyncio.create_task(talking(door, id)) for id in ids]
        chooser = random.Random(0)
        for kill in range(kills):
            goal = answered() + len(ids)
            while answered() < goal:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            os.kill(chooser.choice(gateway.workers), signal.SIGKILL)
            fresh = [door.ask(LIVE, [{"role": "user", "content": f"{kill} {number}"}]) for number in range(4)]
            assert Counter([status for status, _ in await asyncio.gather(*fresh)]) == {200: 4}
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


@pytest.mark.slow
async def test_sessions_move_when_the_number_of_workers_changes(
    mill: Mill, tokenizer: Tokenizer, answers: Answers
) -> None:
    engine, ids = StandIn([answers.text("one")]), names("rollout", 2)
    mill.plan(*ids)
    told: dict[str, list[Any]] = {id: [dict(USER)] for id in ids}
    chats, trajectories = names("chat", 1), set()
    chains: dict[int, list[dict[str, Any]]] = {number: [] for number in range(6)}  # stored responses
    opened = {"traffic": "production", "provenance": {"session": "theirs"}}
    for count in (1, 3, 2, 1):
        async with process(mill, tokenizer, engine, count) as (gateway, door):
            for id, messages in told.items():
                await door.say(await door.open(id), messages)
                messages.append({"role": "user", "content": "go on"})
            trajectories |= {(await said(door, [USER], {"x-rollmill-session": chat}))["trajectory"] for chat in chats}
            for id in names("opened", 1):
                await door.open(id, **opened)
            for number, chain in chains.items():
                before = {"previous_response_id": chain[-1]["id"]} if chain else {}
                status, body = await door.admin("POST", "/v1/responses", {"input": f"{number}", **before}, token=LIVE)
                assert status == 200, body
                chain.append(body)
                status, shown = await door.admin("GET", f"/v1/responses/{chain[0]['id']}", token=LIVE)
                assert status == 200 and shown["output"] == chain[0]["output"]
            assert await door.sessions() == len(ids) + 2 * len(chats) + len(chains)
            for id in (*trajectories, *names("opened", 1)):  # by the id that the gateway gave it, too
                assert (await door.admin("GET", f"/sessions/{id}"))[0] == 200
            if count == 1 and len(told[ids[0]]) > 3:
                for id, messages in told.items():
                    assert (await door.seal(id)).messages == messages[:-1]
            gateway.stop()
    assert len(trajectories) == len(chats)
    for chain in chains.values():
        assert len({response["rollmill"]["segment"] for response in chain}) == 1
    assert len(log_directories(mill.directory / "gateway")) == 3


@pytest.mark.parametrize("count", [1, 2])
async def test_a_move_that_was_interrupted_loses_no_entry(tmp_path: Path, count: int) -> None:
    """The new log has a part of the session, and the old one all of it, whichever of them it belongs to now."""
    session = next(name for name in names("rollout", 1, 2) if Workers(0, [""] * 2).owner(name) == 1)
    entries = [encode_open(SessionFacts(session, "rollout")), *(encode_waited(session, float(at)) for at in range(3))]
    for worker, written in ((0, entries), (1, entries[:2])):
        await write_log(log_directory(tmp_path, worker), session, b"".join(written))
    await asyncio.to_thread(move_sessions, tmp_path, count)
    left = [read_open(log_directory(tmp_path, worker)) for worker in range(2)]
    assert [[entry.op for entry in log] for log in left if log] == [["open", "waited", "waited", "waited"]]
    assert left[count - 1]


async def write_log(directory: Path, session: str, data: bytes) -> None:
    recorder = Recorder(directory, compact_bytes=1 << 62)
    recorder.start()
    await recorder.append(session, data)
    recorder.close()


def read_open(directory: Path) -> list[LogEntry]:
    recorder = Recorder(directory, compact_bytes=1 << 62)
    try:
        return list(recorder.replay())
    finally:
        recorder.close()


async def test_compressed_requests_are_forwarded(mill: Mill, tokenizer: Tokenizer, answers: Answers) -> None:
    async with process(mill, tokenizer, StandIn([answers.text("one")]), COUNT) as (_, door):
        headers = {"Authorization": f"Bearer {LIVE}", "Content-Type": "application/json", "Content-Encoding": "gzip"}
        body = gzip.compress(json.dumps({"messages": [USER]}).encode())
        for name in names("chat", 2):  # whichever worker accepts one, most are another's
            url = f"{door.url}/s/{name}/v1/chat/completions"
            async with door.http.post(url, data=body, headers=headers) as response:
                assert response.status == 200, await response.text()


async def test_only_who_has_a_key_learns_what_is_wrong_with_a_request(
    mill: Mill, tokenizer: Tokenizer, answers: Answers
) -> None:
    async with process(mill, tokenizer, StandIn([answers.text("one")]), COUNT) as (_, door):
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"):
            for token, status in (("wrong", 401), (LIVE, 400)):
                assert (await door.admin("POST", path, ["nonsense"], token=token))[0] == status, path


async def test_prompts_without_a_name_stay_where_they_arrive(
    mill: Mill, tokenizer: Tokenizer, answers: Answers
) -> None:
    async with process(mill, tokenizer, StandIn([answers.text("one")]), COUNT) as (_, door):
        for _ in range(50):
            asked = [door.admin("POST", "/v1/completions", {"prompt": "p"}, token=LIVE) for _ in range(12)]
            assert {status for status, _ in await asyncio.gather(*asked)} == {200}
            serving = [worker for worker in range(COUNT) if read_sessions_of(mill, worker)]
            if len(serving) > 1:
                break
        assert len(serving) > 1, "one worker serves them all"


async def test_workers_share_the_limits_of_keys(mill: Mill, tokenizer: Tokenizer, answers: Answers) -> None:
    _, secret = mill.keys.create(["production"], requests_per_minute=5)
    async with process(mill, tokenizer, StandIn([answers.text("one")]), COUNT) as (_, door):
        asked = [door.ask(secret, [{"role": "user", "content": f"{number}"}]) for number in range(12)]
        assert Counter([status for status, _ in await asyncio.gather(*asked)]) == {200: 5, 429: 7}


class DyingWorker:
    """The socket of a worker that dies: it closes the connections of its first requests, by path, without an answer, or
    in the middle of one."""

    def __init__(self, deaths: int) -> None:
        self.requests: Counter[str] = Counter()
        self._deaths = deaths

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError):
            path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
            self.requests[path] += 1
            if path == "/begun":
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n")
                await writer.drain()
            elif self.requests[path] > self._deaths:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nyes")
                await writer.drain()
        writer.close()


async def test_a_worker_that_dies_is_asked_again_but_not_for_feedback_or_a_begun_answer(tmp_path: Path) -> None:
    workers, worker = Workers(0, ["", str(tmp_path / "1")]), DyingWorker(deaths=2)
    name = next(name for name in ("a", "b", "c", "d") if workers.owner(name) == 1)

    async def forward(http: web.Request) -> web.StreamResponse:
        try:
            return await workers.forward(http, name)
        except GatewayError as error:
            return web.Response(status=error.status)

    app = web.Application()
    app.router.add_post("/{path:.*}", forward)
    async with (
        await asyncio.start_unix_server(worker.serve, tmp_path / "1"),
        workers.running(),
        TestServer(app) as server,
        aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60)) as http,  # it would wait for ever
    ):
        async with http.post(server.make_url("/v1/chat/completions")) as response:
            assert (response.status, await response.text()) == (200, "yes")
        async with http.post(server.make_url("/v1/feedback")) as response:
            assert response.status == 503
        with pytest.raises(aiohttp.ClientPayloadError):  # that it ends early shows
            async with http.post(server.make_url("/begun")) as response:
                assert response.status == 200
                await response.read()
    assert worker.requests == {"/v1/chat/completions": 3, "/v1/feedback": 1, "/begun": 1}


def test_workers_and_gateways_divide_places_and_one_of_them_deletes_what_is_old() -> None:
    config = GatewayConfig(engine_requests=10, queue_requests=7, retention_days=3.0)

    def divided(workers: Workers) -> tuple[int, int, float | None]:
        own = share(config, workers)
        return own.engine_requests, own.queue_requests, own.retention_days

    assert divided(Workers()) == (10, 7, 3.0)
    assert [divided(Workers(number, [""] * 3)) for number in range(3)] == [(4, 3, 3.0), (4, 3, None), (4, 3, None)]
    both = [Gateways(number, [lambda: None] * 2, "secret") for number in range(2)]
    assert [divided(Workers(0, [""] * 2, gateways=each)) for each in both] == [(3, 4, 3.0), (3, 4, None)]


ORPHAN = """
import mmap, os, time
from rollmill.launch.gateway_workers import _Supervisor

def fork(real=os.fork, parent=os.getpid()):
    if real():
        os._exit(0)  # killed, before the worker has run a line
    while os.getppid() == parent:
        time.sleep(0.01)
    return 0

os.fork = fork
_Supervisor(mmap.mmap(-1, 1), lambda number: print("it serves", flush=True)).run()
"""


def test_a_worker_whose_parent_dies_at_once_ends_too() -> None:
    ran = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True)  # reads until both have ended
    assert (ran.stdout, ran.stderr) == ("", "")


STOPPED = """
import mmap, os, signal
from rollmill.launch.gateway_workers import _Supervisor

def wait(real=os.wait):
    ended = real()
    signal.raise_signal(signal.SIGTERM)  # before its pid is removed
    return ended

os.wait = wait
_Supervisor(mmap.mmap(-1, 1), lambda number: None).run()
"""


def test_it_stops_cleanly_when_a_worker_has_just_ended() -> None:
    ran = subprocess.run([sys.executable, "-c", STOPPED], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


SIGNALLED = """
import mmap, os, signal, sys, time
from rollmill.launch.gateway_workers import _Supervisor

forks = 0
def before():
    global forks
    forks += 1

def in_child():
    if forks == 2:  # the first start of worker 1 gets it between the fork and its first line
        os.kill(os.getpid(), signal.SIGTERM)

os.register_at_fork(before=before, after_in_child=in_child)

def work(number):
    print(number, flush=True)
    if number == 1:  # its second start: worker 0 must still be there
        os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(60)

_Supervisor(mmap.mmap(-1, 2), work).run()
print("stopped", forks, flush=True)
"""


def test_a_signal_between_the_fork_and_the_first_line_of_a_worker_ends_this_worker_only() -> None:
    ran = subprocess.run([sys.executable, "-c", SIGNALLED], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, sorted(ran.stdout.split())) == (0, ["0", "1", "3", "stopped"]), ran.stderr


COUNTING = """
import os, signal, sys
from pathlib import Path
from rollmill.gateway.watching.metrics import Metrics

shared = Path(sys.argv[1])
for number in (0, 1, 0):  # worker 0 dies and is started again
    pid = os.fork()
    if pid == 0:
        metrics = Metrics(number, shared)
        metrics.count("requests_total", 1 + number, traffic="production")
        metrics.count("errors_total", status=400 + number)
        metrics.observe("queue_seconds", 0.01, (("traffic", "rollout"), ("model", "m"), ("dialect", "d")))
        metrics.follow("sessions", 5 + number)
        metrics.follow("log_fsyncs_total", 3)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
print(Metrics(0, shared).render([("u", True, False)]).decode())
"""


def test_metrics_of_workers_add_up_also_of_one_that_died(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-c", COUNTING, tmp_path], capture_output=True, text=True, check=True)
    families = {family.name: family for family in text_string_to_metric_families(ran.stdout)}
    samples = {
        (sample.name.removeprefix("rollmill_gateway_"), sample.labels.get("le", "")): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert samples["requests_total", ""] == 4 and samples["sessions", ""] == 11 and samples["engine_alive", ""] == 1
    assert samples["queue_seconds_count", ""] == 3 and samples["queue_seconds_bucket", "0.01"] == 3
    assert samples["log_fsyncs_total", ""] == 9 and len(families["rollmill_gateway_errors"].samples) == 2
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [f"{kind}_{number}.db" for kind in ("counter", "gauge_livesum", "histogram") for number in (0, 1)]
    assert all(path.stat().st_size <= 1 << 16 for path in tmp_path.iterdir())


def test_an_opening_is_the_same_in_all_requests_of_a_conversation() -> None:
    said = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    later = [*said, {"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]
    assert opening(said) == opening(later) != opening(said[1:])
