"""Agents and clients of others, unmodified, against the gateway with a scripted engine: the wire and the record.

Every sampled token is in the sealed trajectory exactly once, and no turn is tokenised again: a conversation is one
segment, and a branch has the agent's own edit as its cause.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from rollmill.chat.format import assistant_message
from rollmill.chat.formats.choice import format_of
from rollmill.chat.tokenizer import Tokenizer
from rollmill.types import Trajectory
from tests.chat.conftest import HERMES_TOKENS
from tests.chat.test_streaming import KINDS
from tests.gateway.conftest import Door, Mill
from tests.gateway.stand_in import StandIn

pytestmark = pytest.mark.slow
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # no look for prices of models
os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", "/nonexistent")
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object", "properties": {}}}}


class Stage:
    """A gateway in front of an engine that answers as `script` says: texts, and (name, arguments) of calls."""

    def __init__(self, mill: Mill, *script: str | list[tuple[str, dict[str, Any]]]) -> None:
        mill.tokenizer = Tokenizer(KINDS["byte-level"](HERMES_TOKENS))
        mill.format = format_of(mill.tokenizer)  # type: ignore[assignment]
        self.mill = mill
        self.tokens = [self._answer(each) for each in script]
        self.engine = StandIn(list(self.tokens))

    def _answer(self, each: str | list[tuple[str, dict[str, Any]]]) -> list[int]:
        calls = [] if isinstance(each, str) else [(name, json.dumps(arguments)) for name, arguments in each]
        message = assistant_message(each if isinstance(each, str) else None, calls)
        return self.mill.format.render_answer(message, [])

    async def open(self) -> tuple[Door, str]:
        door = await self.mill.gateway(await self.mill.engine(self.engine))
        self.mill.plan("a")
        return door, await door.open("a")

    def check(self, trajectory: Trajectory, *causes: str) -> None:
        """Each sampled token is recorded once, behind the very tokens that the engine got."""
        segments = trajectory.segments
        assert [segment.cause for segment in segments] == list(causes)
        recorded = [
            (segment.tokens[: span.start].tolist(), segment.tokens[span.start : span.end].tolist())
            for segment in segments
            for span in segment.spans
        ]
        asked = [request["tokens"] for request in self.engine.requests]
        assert sorted(recorded) == sorted(zip(asked, self.tokens, strict=True))
        assert sum(int(segment.sampled.sum()) for segment in segments) == sum(map(len, self.tokens))


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
@pytest.mark.parametrize("stream", [False, True])
async def test_litellm(mill: Mill, provider: str, stream: bool) -> None:
    import litellm

    stage = Stage(mill, [("bash", {"command": "ls"}), ("bash", {"command": "pwd"})], "Done.")
    door, key = await stage.open()
    base = f"{door.url}/v1" if provider == "openai" else door.url
    ask = {"model": f"{provider}/rollmill", "api_base": base, "api_key": key, "max_tokens": 1000, "tools": [BASH]}
    messages: list[Any] = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Look."}]

    async def answer() -> Any:
        if not stream:
            return (await litellm.acompletion(messages=messages, **ask)).choices[0].message
        pieces = [piece async for piece in await litellm.acompletion(messages=messages, stream=True, **ask)]
        return litellm.stream_chunk_builder(pieces).choices[0].message  # type: ignore[union-attr]

    first = await answer()
    assert [json.loads(call.function.arguments) for call in first.tool_calls] == [{"command": "ls"}, {"command": "pwd"}]
    # litellm itself replaces an empty text by a sentence, which is an edit of the history
    messages.append(first.model_dump() | {"content": first.content or None})
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "x"} for call in first.tool_calls]
    assert (await answer()).content == "Done."
    stage.check(await door.seal("a"), "start")


async def test_litellm_raises_its_own_error_for_a_prompt_that_is_too_long(mill: Mill) -> None:
    import litellm

    stage = Stage(mill, "x")
    stage.engine.context_limit = 5
    door, key = await stage.open()
    for provider, base in (("openai", f"{door.url}/v1"), ("anthropic", door.url)):
        with pytest.raises(litellm.exceptions.ContextWindowExceededError):
            await litellm.acompletion(
                model=f"{provider}/rollmill",
                api_base=base,
                api_key=key,
                max_tokens=9,
                messages=[{"role": "user", "content": "x" * 50}],
            )


@pytest.mark.parametrize("provider", ["openai", "anthropic"])
async def test_mini_swe_agent_solves_a_task(mill: Mill, tmp_path: Path, provider: str) -> None:
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import get_config_from_spec
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    stage = Stage(
        mill,
        [("bash", {"command": "echo 'x = 1' > a.py"})],
        [("bash", {"command": "cat a.py"}), ("bash", {"command": "ls"})],
        "I am done.",  # no call: the agent drops this answer and tells the model so
        [("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat a.py"})],
    )
    door, key = await stage.open()
    kwargs = {"api_base": f"{door.url}/v1" if provider == "openai" else door.url, "api_key": key, "max_tokens": 1000}
    config = get_config_from_spec("mini.yaml")
    model_config = config["model"] | {"model_kwargs": kwargs, "cost_tracking": "ignore_errors"}
    model = LitellmModel(**(model_config | {"model_name": f"{provider}/rollmill"}))
    agent_config = {name: config["agent"][name] for name in ("system_template", "instance_template")}
    agent = DefaultAgent(model, LocalEnvironment(cwd=str(tmp_path)), **agent_config)
    ended = await asyncio.to_thread(agent.run, "Write a.py.")
    assert (ended["exit_status"], ended["submission"]) == ("Submitted", "x = 1\n")
    stage.check(await door.seal("a"), "start", "edit")
