"""Rewards that read the transcript: length and behaviour. A model writes transcripts, so nonsense is among them."""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest

from rollmill.environments.episode import Episode
from rollmill.environments.harness import HarnessResult
from rollmill.environments.rewards.behaviour import Behaviour, BehaviourConfig
from rollmill.environments.rewards.length import Length, LengthConfig, concave
from rollmill.environments.task import Task
from rollmill.machines.namespace.client import NamespaceHost

pytestmark = pytest.mark.asyncio(loop_scope="module")


def call(name: str, arguments: Any = None) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return {"id": "c", "type": "function", "function": {"name": name, "arguments": text}}


def says(text: Any = None, *calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {})}


def episode(*messages: Any, tokens: int = 0, result: HarnessResult | None = None) -> Episode:
    """Neither reward needs a machine: this host is never started."""
    start = {"role": "user", "content": "fix it?"}
    return Episode(Task("t", "fix it?"), {}, NamespaceHost(), [start, *messages], result, tokens)


async def test_length_grows_ever_more_slowly() -> None:
    for q in (0.0, 0.5, 1.0, 2.0):
        costs = [concave(x, 0.5, q) for x in range(20)]
        steps = [after - before for before, after in itertools.pairwise(costs)]
        assert costs[0] == 0.0 and all(step > 0 for step in steps)
        assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(steps))
        assert concave(7.0, 0.5, q + 1e-9) == pytest.approx(concave(7.0, 0.5, q), rel=1e-6)
    assert concave(7.0, 0.5, 0.0) == pytest.approx(7.0) and concave(7.0, 0.5, 1.0) == math.log(4.5) / 0.5
    assert concave(7.0, 2.0, 0.5) == pytest.approx((math.sqrt(15.0) - 1.0) / (2.0 * 0.5))  # as the report writes it


async def test_length_weighs_tokens_calls_and_turns() -> None:
    config = LengthConfig(tokens_weight=0.01, tool_calls_weight=0.5, turns_weight=2.0, q=0.0, scale=0.1)
    played = episode(says(None, call("a"), call("b")), {"role": "tool"}, says("ready"), tokens=300)
    reward = await Length(config).grade(played)
    assert reward.value == pytest.approx(-0.1 * (3.0 + 1.0 + 4.0))
    assert reward.evidence == {"tokens": 300, "tool_calls": 2, "turns": 2, "x": 8.0} and not reward.solved
    ended = HarnessResult("done", turns=5, tool_calls=7)  # a transcript that was summarised has fewer
    assert (await Length(config).grade(episode(result=ended))).evidence["turns"] == 5
    assert (await Length(config).grade(episode())).value == 0.0


TODOS = {"todos": [{"content": "a", "status": "completed"}, {"content": "b", "status": "pending"}, "nonsense"]}


@pytest.mark.parametrize(
    ("played", "counts"),
    [
        (episode(says("ready")), (0, 0, 0)),
        (episode(says(None, call("run", "{x"), call("run"), {}, "nonsense"), says("ready")), (3, 0, 0)),
        (episode(says("ready"), result=HarnessResult("answer", 1, 4, bad_tool_calls=4)), (4, 0, 0)),
        (episode(says("Shall I go on? \n")), (0, 1, 0)),
        (episode(says("Shall I?", call("run"))), (0, 0, 0)),  # it goes on
        (episode(says([{"type": "text", "text": "Which one?"}, 3])), (0, 1, 0)),
        (episode(says(None, call("todo_write", TODOS)), says("ready")), (0, 0, 1)),
        (episode(says(None, call("todo_write", TODOS), call("todo_write", {"todos": []})), says("ready")), (0, 0, 0)),
        (episode(says("done:\n- [x] a\n- [ ] b\n* [ ] c\n")), (0, 0, 2)),
        (episode(), (0, 0, 0)),
        (episode("nonsense", 3, None, {"role": "assistant", "content": 3, "tool_calls": 4}), (0, 0, 0)),
        (episode(says(None, call("run", "[" * 100_000)), says(None, {"function": {"arguments": 3}})), (2, 0, 0)),
    ],
)
async def test_behaviour_counts(played: Episode, counts: tuple[int, int, int]) -> None:
    reward = await Behaviour().grade(played)
    assert tuple(reward.parts[name] for name in ("malformed", "asking", "todos")) == counts
    assert reward.value == pytest.approx(-(0.1 * counts[0] + 0.5 * counts[1] + 0.1 * counts[2]))


async def test_behaviour_is_bounded() -> None:
    played = episode(says(None, *[call("run", "{")] * 1000), says("x" * 10_000 + "?"))
    reward = await Behaviour(BehaviourConfig(limit=0.7)).grade(played)
    assert reward.value == -0.7 and len(json.dumps(reward.evidence)) < 1000
