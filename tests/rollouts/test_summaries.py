"""Long tasks in a short window, through the real gateway: an episode with summaries is recorded as a chain."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollmill.chat.format import assistant_message
from rollmill.chat.formats.compact import CompactFormat
from rollmill.demo.coding import CodingConfig, CodingHarness
from rollmill.demo.coding_tools import tool_schemas
from rollmill.environments.harnesses.summary import SummaryConfig
from rollmill.training.rl.credit import credit_of
from rollmill.types import Segment
from tests.rollouts.world import SOLUTION, World

pytestmark = pytest.mark.asyncio(loop_scope="module")


def script(world: World, *answers: tuple[str, dict[str, Any]] | str) -> list[list[int]]:
    """Set the answers of the only session, one after the other in whatever context. Returns their tokens."""
    format = CompactFormat(world.tokenizer)
    messages = [
        assistant_message(each, [])
        if isinstance(each, str)
        else assistant_message(None, [(each[0], json.dumps(each[1]))])
        for each in answers
    ]
    tokens = [format.render_answer(message, tool_schemas()) for message in messages]
    left = list(tokens)

    async def next_answer(session: str, turn: int) -> None:
        world.engine.script = [left.pop(0)] * turn

    world.engine.on_turn = next_answer
    return tokens


LOOK = ("read", {"path": "main.py"})
SUMMARIES = SummaryConfig(request="sum", resume=" {number} {summary}")


async def play(world: World, settings: SummaryConfig) -> list[Segment]:
    harness = CodingHarness(CodingConfig(max_turns=80, summaries=settings))
    outcome = await world.play(context=replace(world.context, harness=harness))
    await harness.close()
    assert outcome.solved and world.row().turns == outcome.result.turns  # type: ignore[union-attr]
    return world.context.trajectories.load("t0").segments


async def test_an_episode_with_summaries_is_a_chain_that_learns_as_a_whole(world: World) -> None:
    notes = ["line 2 is wrong", "", "edited, not yet run"]
    edit, run, done = SOLUTION
    tokens = script(world, LOOK, notes[0], edit, notes[1], run, notes[2], done)
    segments = await play(world, SUMMARIES.model_copy(update={"at": 1}))
    assert [segment.cause for segment in segments] == ["start", "summary", "summary", "summary"]
    parents = [segment.parent and segment.parent[0] for segment in segments]
    assert parents == [None, *(segment.id for segment in segments[:-1])]
    texts = [world.tokenizer.decode(segment.tokens.tolist()) for segment in segments]
    for number, (note, text) in enumerate(zip(notes, texts[1:], strict=True), 1):
        assert f"fix main.py {number} {note}" in text
    assert all("line 2" not in text for text in texts[2:]), "nothing but the last summary is left"
    sampled = np.concatenate([segment.tokens[segment.sampled] for segment in segments]).tolist()
    assert sampled == [token for answer in tokens for token in answer], "each answer once, in its own tokens"
    for segment, credit_T in zip(segments, credit_of(segments, "path"), strict=True):
        assert credit_T[segment.sampled].tolist() == [1.0] * int(segment.sampled.sum())


async def test_the_window_that_the_engines_tell_decides(world: World) -> None:
    world.engine.serves = {"kind": "line", "name": "main", "context": 60}
    health = {"engines": [{"context": None}]}
    while health["engines"][0]["context"] != 60:
        health = await world.context.gateway._call("GET", "/health", None)
    edit, run, done = SOLUTION
    script(world, LOOK, "a", edit, "b", run, "c", done)
    assert len(await play(world, SUMMARIES)) == 4, "a quarter of the window: two answers of 400 tokens do not fit"


async def test_without_a_window_only_a_full_context_is_summarised(world: World) -> None:
    script(world, LOOK, *SOLUTION)
    assert [segment.cause for segment in await play(world, SUMMARIES)] == ["start"]
