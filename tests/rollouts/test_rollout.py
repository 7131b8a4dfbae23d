"""Promise 8 for one rollout: what the policy did is graded; any other fault is a reason and never a reward."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer, unused_port

from rollmill import telemetry
from rollmill.demo.coding import CodingConfig, CodingHarness
from rollmill.environments.episode import Episode
from rollmill.environments.harness import HarnessResult
from rollmill.environments.reward import Reward
from rollmill.environments.rewards.calls import Calls, CallsConfig
from rollmill.errors import GatewayError, RewardUnavailable, StorageError
from rollmill.machines.namespace.client import NamespaceHost, NamespaceMachine
from rollmill.rollouts import rollout
from rollmill.rollouts.gateway_client import GatewayClient
from rollmill.rollouts.hand_in import hand_in_key, load_hand_in, with_counts
from rollmill.rollouts.rollout import seal_again
from rollmill.types import Grade, TrajectoryState
from tests.rollouts.world import (
    ADMIN,
    RUN,
    SOLUTION,
    FailingHost,
    StandInLostGateway,
    World,
    make_task,
    real_engine,
    regrade,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")
NO_TOKENS: dict[str, Any] = {"tokens": 0, "sampled_tokens": 0, "segments": 0}


async def test_an_episode_ends_graded_with_its_submission_stored_and_its_record_sealed(world: World) -> None:
    outcome = await world.play()
    assert outcome.solved and outcome.result is not None
    assert (outcome.result.stop, outcome.result.turns) == ("done", 3)
    row = world.row()
    assert (row.state, row.reward, row.tokens) == (TrajectoryState.graded, 1.0, outcome.tokens)
    assert row.submission_key is not None
    assert load_hand_in(world.context.objects, row.submission_key).files == {
        "main.py": b"def f(x):\n    return x + 7\n"
    }
    (segment,) = world.context.trajectories.load("t0").segments
    assert len(segment.spans) == 3 and segment.sampled.sum() == sum(map(len, world.engine.script))
    assert world.tool_results() == ["ok", "ok"]
    assert await world.open_sessions() == 0


async def test_a_random_model_on_the_real_engine_is_graded(world: World) -> None:
    """Random weights produce all kinds of nonsense, which is graded like any answer."""
    async with real_engine(world) as context:
        outcomes = await asyncio.gather(*(world.play(id=f"t{index}", context=context) for index in range(4)))
    for outcome in outcomes:
        assert outcome.reward is not None and outcome.reward.value == 0.0
        trajectory = world.context.trajectories.load(outcome.trajectory)
        assert {policy.number for segment in trajectory.segments for policy in segment.policies} == {1}


# the policy's own faults


def write(source: str) -> tuple[str, dict[str, Any]]:
    return "write", {"path": "main.py", "content": source}


FLOOD = "import os\nfor _ in range(1600):\n    os.write(1, b'x' * 65536)\ndef f(x):\n    return x\n"
FORKS = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n"
LIMITS = (
    "import resource\n"
    "for which in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_AS):\n"
    "    resource.prlimit(1, which, (0, 0))\n"
)
FAULTS: dict[str, tuple[list[Any], str]] = {
    "limits of the machine's first process": ([write(LIMITS), ("run", {}), ("done", {})], "error PermissionError"),
    "a path that is no text": ([write("x"), ("read", {"path": "\ud800"}), ("done", {})], "error no such file"),
    "deletes its work": (
        [("write", {"path": "test.py", "content": "import os\nos.remove('main.py')\n"}), ("run", {}), ("done", {})],
        "ok",
    ),
    "output of 100 MB": ([write(FLOOD), ("run", {}), ("done", {})], "characters cut"),
    "fork bomb": ([write(FORKS), ("run", {}), ("done", {})], "limit"),
    "a call that does not end": ([write("while True: pass\n"), ("run", {}), ("done", {})], "error time limit"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_faults_of_the_policy_are_graded_0_and_harm_no_other_rollout(world: World, name: str) -> None:
    script, seen = FAULTS[name]
    world.says(*script)
    outcome = await world.play()
    assert outcome.reward is not None and outcome.reward.value == 0.0, outcome
    assert world.row().state == TrajectoryState.graded and world.row().reward == 0.0
    assert seen in world.tool_results()[-1]
    world.says(*SOLUTION)
    assert (await world.play(id="t1")).solved


async def test_a_model_that_never_stops_is_cut_off(world: World) -> None:
    world.says(world.tokenizer.encode("def f(a, b): " * 400))
    outcome = await world.play()
    assert outcome.reward is not None and outcome.reward.value == 0.0
    assert outcome.result is not None and outcome.result.stop == "length"
    assert world.row().sampled_tokens == 400


async def test_a_model_that_takes_too_long_is_graded_on_what_it_left(world: World) -> None:
    """The time of an answer that comes whole is known when it is there. The next one is not waited for."""
    world.engine.token_delay_s = 2.0  # the seal waits for the answer, which belongs to the record
    world.says(("run", {}), *SOLUTION)
    outcome = await world.play(context=replace(world.context, timeout_s=0.5))
    assert outcome.reward is not None and outcome.reward.value == 0.0
    assert outcome.result is not None and outcome.result.stop == "time"
    assert outcome.result.turns >= 1 and outcome.result.tool_calls >= 1  # what happened until then
    assert world.row().state == TrajectoryState.graded and await world.open_sessions() == 0


async def test_examples_in_a_task_are_not_turns_of_an_episode_that_was_cut_off(world: World) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "run", "arguments": "{}"}}
    shown = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello", "tool_calls": [call]}]
    bad = {"role": "assistant", "tool_calls": [call, {"function": {"name": "run", "arguments": "{"}}]}
    episode = Episode(
        make_task(instruction=shown),
        {},
        world.context.machines,
        messages=[*shown, {"role": "tool", "content": "ok"}, bad, {"role": "assistant", "content": "done"}],
        result=HarnessResult("time", turns=0, tool_calls=0),
    )
    assert with_counts(episode).result == HarnessResult("time", turns=2, tool_calls=2, bad_tool_calls=1)


@pytest.mark.slow
async def test_a_command_that_takes_too_long_is_graded_on_what_it_left(world: World) -> None:
    solution = write("def f(x):\n    return x + 7\n")
    world.says(solution, ("write", {"path": "test.py", "content": "while True: pass\n"}), ("run", {}))
    outcome = await world.play(context=replace(world.context, timeout_s=5.0))
    assert outcome.solved and outcome.result is not None
    assert outcome.result.stop in ("time", "max_turns")


@pytest.mark.parametrize("killed", [False, True])
async def test_a_machine_that_is_lost_is_the_agents_doing_unless_someone_outside_killed_it(
    world: World, killed: bool
) -> None:
    """Its first process ends after a command. If nobody killed it, nothing was handed in, and that is graded."""
    host = RecordingHost()

    async def lose(session: str, turn: int) -> None:
        if turn == 3:  # edited and tested
            if not killed:
                return host.made[0]._connection.shutdown(socket.SHUT_RDWR)
            assert host._process is not None
            for pid in Path(f"/proc/{host._process.pid}/task/{host._process.pid}/children").read_text().split():
                os.kill(int(pid), signal.SIGKILL)

    world.engine.on_turn = lose
    try:
        outcome = await world.play(context=replace(world.context, machines=host))
    finally:
        await host.close()
    if killed:
        return world.check_failed(outcome, "someone killed its first process")
    assert outcome.reward is not None and outcome.reward.value == 0.0
    assert outcome.reward.evidence["missing"] == "main.py" and world.row().state == TrajectoryState.graded


class RecordingHost(NamespaceHost):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[NamespaceMachine] = []

    async def create(self, *arguments: Any, **options: Any) -> NamespaceMachine:
        self.made.append(await super().create(*arguments, **options))
        return self.made[-1]


async def test_a_tool_call_that_is_not_json_is_answered_and_the_episode_goes_on(world: World) -> None:
    argument, end = world.tokenizer.token_id("<arg>"), world.tokenizer.token_id("<end>")
    world.says([*world.tokenizer.encode("run"), argument, *world.tokenizer.encode("{x"), end], *SOLUTION)
    outcome = await world.play()
    assert outcome.solved and outcome.result is not None and outcome.result.bad_tool_calls == 1
    assert world.tool_results()[0] == "error not json"


# everybody else's faults


async def test_a_missing_image(world: World) -> None:
    outcome = await world.play(make_task(image="absent"))
    world.check_failed(outcome, "image 'absent' does not exist")


async def test_a_gateway_that_cannot_be_reached(world: World) -> None:
    async with GatewayClient(f"http://127.0.0.1:{unused_port()}", ADMIN, patience_s=0.2) as gateway:
        outcome = await world.play(context=replace(world.context, gateway=gateway))
    world.check_failed(outcome, "cannot be reached")


async def test_an_address_that_is_no_gateway(world: World) -> None:
    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="hi", content_type="text/html")

    app = web.Application()
    app.router.add_route("*", "/sessions", hello)
    async with TestServer(app) as server:
        async with GatewayClient(str(server.make_url("")).rstrip("/"), ADMIN, patience_s=0.2) as gateway:
            outcome = await world.play(context=replace(world.context, gateway=gateway))
    world.check_failed(outcome, "is not a gateway")


async def test_the_client_waits_for_the_first_version() -> None:
    asked = 0

    async def health(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        engines = [{"alive": True, "policy": {"number": 0}}]
        return web.json_response({"engines": engines}, status=200 if asked > 4 else 503)

    app = web.Application()
    app.router.add_get("/health", health)
    async with TestServer(app) as server:
        async with GatewayClient(str(server.make_url("")).rstrip("/"), ADMIN, patience_s=0.2) as gateway:
            with pytest.raises(GatewayError, match=r"answered 503.*tried for 0 s"):
                await gateway.wait_until_serving(0)
            await gateway.wait_until_serving(0, patience_s=60.0)
            assert asked > 4


async def test_engines_that_are_gone(world: World) -> None:
    world.engine.refuse = (500, "out of order")
    harness = type(world.context.harness)(world.context.harness.config.model_copy(update={"request_deadline_s": 0.5}))
    outcome = await world.play(context=replace(world.context, harness=harness))
    await harness.close()
    world.check_failed(outcome, "harness: ")
    assert await world.open_sessions() == 0


async def test_a_machine_host_killed_in_the_middle(world: World) -> None:
    host = NamespaceHost()
    harness, grader = CodingHarness(CodingConfig(tool_timeout_s=60.0)), Calls(CallsConfig(timeout_s=60.0))
    context = replace(world.context, machines=host, grading_machines=host, harness=harness, grader=grader)

    async def kill(session: str, turn: int) -> None:
        if turn == 2:
            assert host._process is not None
            os.kill(host._process.pid, signal.SIGKILL)

    world.engine.on_turn = kill
    try:
        outcome = await world.play(context=context)
        world.check_failed(outcome, "machine")
        assert await world.open_sessions() == 0
        world.engine.on_turn = None
        assert (await world.play(id="t1", context=context)).solved  # the next one finds a new machine host
    finally:
        await harness.close()
        await host.close()


async def test_a_grading_machine_that_fails(world: World) -> None:
    context = replace(world.context, grading_timeout_s=2.0)
    outcome = await world.play(context=replace(context, grading_machines=FailingHost(lambda asked: True)))
    world.check_failed(outcome, "out of machines\nhint: buy more")
    host = FailingHost(lambda asked: asked < 3, world.context.grading_machines)
    assert (await world.play(id="t1", context=replace(context, grading_machines=host))).solved and host.asked == 3


async def test_grading_that_does_not_end(world: World) -> None:
    async def hang() -> Grade:
        return await asyncio.Future()

    outcome = await world.play(context=replace(world.context, grading_timeout_s=0.5, grader=StandInGrader(hang)))
    world.check_failed(outcome, "no grade after 0.5 s: grading does not end")
    assert not outcome.lost, "the episode is finished: another one would not be graded either"


async def test_grading_has_a_time_limit_of_its_own(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was cut off after the episode's time and a minute, whatever the reward's own limit was."""

    async def slow() -> Grade:
        await asyncio.sleep(0.5)
        return Grade(1.0)

    monkeypatch.setattr(rollout, "GRACE_S", 0.25)
    context = replace(world.context, timeout_s=0.2, grading_timeout_s=60.0, grader=StandInGrader(slow))
    world.says(("done", {}))
    assert (await world.play(context=context)).solved


async def test_a_judge_that_is_down_is_asked_again_and_the_stall_is_shown(world: World) -> None:
    telemetry.open_events(world.directory / "events", "dispatcher")
    asked = 0

    async def recover() -> Grade:
        nonlocal asked
        asked += 1
        if asked < 3:
            raise RewardUnavailable("the judge is down")
        return Grade(1.0)

    context = replace(world.context, grading_timeout_s=1.0, grader=StandInGrader(recover))
    assert (await world.play(context=context)).solved

    async def down() -> Grade:
        raise RewardUnavailable("the judge is down")

    outcome = await world.play(id="t1", context=replace(context, grader=StandInGrader(down)))
    world.check_failed(outcome, "no grade after 1 s: the judge is down")  # and never a zero
    events = telemetry.read_events(world.directory / "events")
    stalls = [(event["trajectory"], event["reason"]) for event in events if event["kind"] == "stall"]
    assert stalls == [(id, reason) for id in ("t0", "t1") for reason in ("the judge is down", None)]
    assert [event["text"] for event in events if event["kind"] == "warning"] == ["grading waits: the judge is down"]


class StandInGrader(Reward):
    name = "stand-in"

    def __init__(self, act: Callable[[], Any]) -> None:
        self._act = act

    async def grade(self, *_: Any) -> Grade:
        return await self._act()


async def test_an_unexpected_error_fails_the_trajectory_and_is_logged(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async def stumble() -> Grade:
        raise KeyError("surprise")

    outcome = await world.play(context=replace(world.context, grader=StandInGrader(stumble)))
    world.check_failed(outcome, "KeyError: 'surprise'")
    assert "in stumble" in caplog.text  # the log has the traceback


UNWRITABLE: dict[str, Any] = {
    "infinite value": Grade(math.inf),
    "value beyond a float": Grade(10**400),
    "no number": Grade("much"),  # type: ignore[arg-type]
    "nan in the parts": Grade(0.0, parts={"cases": math.nan}),
    "infinity in the evidence": Grade(0.0, evidence={"first_wrong": {"outcome": {"value": -math.inf}}}),
    "evidence that is no JSON": Grade(0.0, evidence={"output": b"bytes"}),
    "no reward": None,
}


@pytest.mark.parametrize("name", UNWRITABLE)
async def test_a_reward_that_cannot_be_stored_fails_its_own_trajectory(world: World, name: str) -> None:
    """It must not stop the dispatcher: a restart would regrade the same submission and stop again."""

    async def grade() -> Grade:
        return UNWRITABLE[name]

    context = replace(world.context, grader=StandInGrader(grade))
    outcome = await world.play(context=context)
    world.check_failed(outcome, "")
    assert outcome.reason and world.row().submission_key is not None
    # the same after a crash between seal and grade
    world.context.trajectories.create(RUN, "g", "train/0", ["t1"], {})
    world.context.trajectories.finish("t1", "payload", world.row().submission_key, **NO_TOKENS)
    world.check_failed(await regrade(context, make_task(), "t1", str(world.row().submission_key), facts={}), "")


async def test_surrogates_and_nul_in_the_evidence_are_stored(world: World) -> None:
    """Lone surrogates and NUL characters: code that was graded can return them."""
    evidence = {"output": "\ud800 \0", "first_wrong": {"outcome": {"\udfff": ["\ud800"]}}}

    async def grade() -> Grade:
        return Grade(0.0, evidence=evidence, grader="\ud800\0")

    outcome = await world.play(context=replace(world.context, grader=StandInGrader(grade)))
    assert outcome.reward is not None and world.row().state == TrajectoryState.graded
    ((_, stored),) = world.context.trajectories.rewards(["t0"])["t0"]
    assert set(stored.evidence) == set(evidence)


async def test_a_trajectory_deleted_in_flight_ends_only_itself(world: World) -> None:
    async def delete() -> Grade:
        world.context.trajectories.delete("t0")
        return Grade(1.0)

    outcome = await world.play(context=replace(world.context, grader=StandInGrader(delete)))
    assert outcome.reward is None and "deleted" in str(outcome.reason)
    assert world.row().state == TrajectoryState.deleted
    assert (await world.play(id="t1")).solved


async def test_a_store_that_is_down_is_no_failure_of_the_rollout(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: Any) -> int:
        raise StorageError("the disk is full")

    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(world.context.trajectories, "grade", full_disk)
        await world.play()
    row = world.row()
    assert row.state == TrajectoryState.finished and row.submission_key is not None  # to be graded when there is room
    assert (await regrade(world.context, make_task(), "t0", row.submission_key, facts={})).solved


async def test_a_gateway_lost_between_the_seal_and_its_answer_loses_nothing(world: World) -> None:
    async with StandInLostGateway(world.context.gateway.base_url) as gateway:
        outcome = await world.play(context=replace(world.context, gateway=gateway))
    assert outcome.solved and gateway.sealed == ["t0"] and world.row().state == TrajectoryState.graded


# grading again


async def test_regrading_a_stored_submission_gives_the_same_reward(world: World) -> None:
    outcome = await world.play()
    key = world.row().submission_key
    assert key is not None
    again = await regrade(world.context, make_task(), "t0", key, facts={})
    assert again.reward == outcome.reward
    (first, _), (second, _) = world.context.trajectories.rewards(["t0"])["t0"]
    assert world.row().reward_id == second > first


async def test_a_rollout_whose_process_died_while_grading_is_graded_later(world: World) -> None:
    grading = asyncio.Event()

    async def hang() -> Grade:
        grading.set()
        return await asyncio.Future()

    work = asyncio.create_task(world.play(context=replace(world.context, grader=StandInGrader(hang))))
    await grading.wait()
    work.cancel()
    await asyncio.wait([work])
    key = world.row().submission_key
    assert world.row().state == TrajectoryState.finished and key is not None
    assert (await regrade(world.context, make_task(), "t0", key, facts={})).solved
    assert world.row().state == TrajectoryState.graded


DAMAGED = {
    "gone": None,
    "empty": b"",
    "no JSON": b"\xff{",
    "no object": b"[]",
    "no base64": b'{"files": {"main.py": "\xc3\xa4"}}',
    "no text": b'{"files": {"main.py": 1}}',
    "of another format": b'{"main.py": ""}',
}


@pytest.mark.parametrize("name", DAMAGED)
async def test_a_submission_that_cannot_be_read_fails_its_trajectory(world: World, name: str) -> None:
    key = hand_in_key("t0")
    if (body := DAMAGED[name]) is not None:
        world.context.objects.create(key, body)
    world.context.trajectories.create(RUN, "g", "train/0", ["t0"], {})
    world.context.trajectories.finish("t0", "payload", key, **NO_TOKENS)
    world.check_failed(await regrade(world.context, make_task(), "t0", key, facts={}), key)


async def test_a_graded_trajectory_keeps_its_reward_when_grading_again_fails(world: World) -> None:
    await world.play()
    context = replace(world.context, grading_machines=FailingHost(lambda asked: True))
    again = await regrade(context, make_task(), "t0", str(world.row().submission_key), facts={})
    assert again.reward is None and "out of machines" in str(again.reason)
    assert (world.row().state, world.row().reward) == (TrajectoryState.graded, 1.0)


async def test_a_store_that_cannot_be_read_is_no_failure_of_a_finished_rollout(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.play()

    def unreachable(*_: Any) -> bytes:
        raise StorageError("cannot be reached")

    world.context.trajectories.create(RUN, "g", "train/0", ["t1"], {})
    world.context.trajectories.finish("t1", "payload", world.row().submission_key, **NO_TOKENS)
    with monkeypatch.context() as patch, pytest.raises(StorageError):
        patch.setattr(type(world.context.objects), "get", unreachable)
        await regrade(world.context, make_task(), "t1", str(world.row().submission_key), facts={})
    assert world.row("t1").state == TrajectoryState.finished  # to be graded when the store is back


async def test_sealing_again(world: World) -> None:
    await world.play()
    assert await seal_again(world.context, "t0") == world.row().submission_key  # sealed before: the same answer
    assert await seal_again(world.context, "unknown") is None  # never handed in
    world.context.objects.create("submissions/t9", b"{}")
    assert await seal_again(world.context, "t9") is None  # handed in, but the gateway has no such session
