"""An agent program in a machine, through the real gateway: its tokens are recorded, its work is graded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollmill.environments.harnesses.command import CommandConfig, CommandHarness
from rollmill.rollouts.hand_in import load_hand_in
from rollmill.rollouts.rollout import Outcome
from rollmill.types import TrajectoryState
from tests.environments.harnesses.test_command import ASK
from tests.rollouts.world import World, make_task

pytestmark = pytest.mark.asyncio(loop_scope="module")

SOLVE = "open('main.py', 'w').write('def f(x):\\n    return x + 7\\n')\n"


async def play(world: World, program: str, timeout_s: float = 100.0) -> Outcome:
    harness = CommandHarness(CommandConfig(argv=("python", "-c", ASK + program)))
    try:
        context = replace(world.context, harness=harness, timeout_s=timeout_s)
        return await world.play(make_task(), context=context)
    finally:
        await harness.close()


async def test_every_token_of_an_agent_program_is_recorded(world: World) -> None:
    world.says(world.tokenizer.encode("first"), world.tokenizer.encode("second"))
    program = (
        "messages = [{'role': 'user', 'content': sys.stdin.read()}]\n"
        "answer = json.loads(ask(messages=messages, temperature=0, user='me', metadata={})[1])\n"
        "messages += [answer['choices'][0]['message'], {'role': 'user', 'content': 'go on'}]\n"
        "status, events = ask(messages=messages, stream=True, stop=['never'])\n"
        "assert events.startswith('data: {') and 'second' in events and events.endswith('data: [DONE]\\n\\n'), events\n"
        + SOLVE
    )
    outcome = await play(world, program)
    assert outcome.solved and outcome.result is not None, outcome
    assert (outcome.result.stop, outcome.result.turns) == ("done", 2)
    trajectory = world.context.trajectories.load("t0")
    (segment,) = trajectory.segments  # the second request continues the first
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant", "user", "assistant"]
    assert trajectory.messages[0]["content"] == "fix main.py"
    assert segment.sampled.sum() == sum(map(len, world.engine.script))
    assert {span.sampling.temperature for span in segment.spans} == {1.0}  # the run's: the agent asked for 0


async def test_an_agent_that_never_calls_the_model_is_graded_as_it_stands(world: World) -> None:
    outcome = await play(world, SOLVE)
    assert outcome.solved and outcome.result is not None and outcome.result.turns == 0
    row = world.row()
    assert (row.state, row.tokens) == (TrajectoryState.graded, 0) and row.submission_key is not None
    handed_in = load_hand_in(world.context.objects, row.submission_key)
    assert handed_in.result is not None and "never got an answer" in handed_in.result.note


async def test_an_agent_that_runs_out_of_time_is_stopped_and_graded(world: World) -> None:
    outcome = await play(world, SOLVE + "ask()\nwhile True: pass", timeout_s=2.0)
    assert outcome.solved and outcome.result is not None and outcome.result.stop == "time"
    assert await world.open_sessions() == 0
