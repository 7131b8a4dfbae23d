"""Behaviour: what an agent should not do, counted in its transcript, as a penalty.

    malformed   tool calls that the harness could not run: not JSON, unknown tool, wrong arguments
    asking      1 if the episode ends with a question instead of work: nobody is there to answer it
    todos       to-dos that are unfinished when the agent stops: the last list it wrote with one of `todo_tools`, and
                open boxes (`- [ ]`) in its last answer

    value = -min(limit, sum of weight · count)

These are simple rules, and a model can learn to avoid what they count without behaving better: a question without a
question mark is not found. Look at the episodes.
"""

from __future__ import annotations

import re
from typing import Any

from pydantic import Field

from rollmill.config import Config
from rollmill.environments.episode import Episode
from rollmill.environments.reward import Reward
from rollmill.environments.rewards import transcript
from rollmill.types import Grade

_OPEN_BOX = re.compile(r"^\s*[-*] \[ \] ", re.MULTILINE)
_FINISHED = frozenset({"completed", "complete", "done", "finished", "cancelled", "canceled"})
_MAX_TEXT = 300  # characters of the last answer in the evidence


class BehaviourConfig(Config):
    malformed_weight: float = Field(0.1, ge=0, description="What one malformed tool call costs.")
    asking_weight: float = Field(0.5, ge=0, description="What ending with a question costs.")
    todos_weight: float = Field(0.1, ge=0, description="What one unfinished to-do costs.")
    limit: float = Field(1.0, ge=0, description="Most that an episode can lose.")
    todo_tools: tuple[str, ...] = Field(
        ("todo_write", "TodoWrite", "write_todos", "update_plan"),
        description="Names of the tools that write a to-do list. Each call replaces the list: objects with a `status`.",
    )


class Behaviour(Reward):
    name = "behaviour"
    cannot_protect = "Simple rules: a model can learn to avoid what they count without behaving better."

    def __init__(self, config: BehaviourConfig | None = None) -> None:
        self.config = config or BehaviourConfig()

    async def grade(self, episode: Episode) -> Grade:
        config, result = self.config, episode.result
        answers = transcript.answers(episode)
        calls = list(transcript.parsed_calls(episode))
        unparsed = sum(arguments is None for _, arguments in calls)
        last = transcript.text_of(answers[-1]).strip() if answers else ""
        counts = {
            "malformed": max(unparsed, result.bad_tool_calls if result else 0),
            "asking": int(transcript.asks(episode)),
            "todos": self._unfinished(calls) + len(_OPEN_BOX.findall(last)),
        }
        cost = (
            config.malformed_weight * counts["malformed"]
            + config.asking_weight * counts["asking"]
            + config.todos_weight * counts["todos"]
        )
        parts = {name: float(count) for name, count in counts.items()}
        return Grade(0.0 - min(cost, config.limit), parts, {"last_answer": last[-_MAX_TEXT:]}, self.name)

    def _unfinished(self, calls: list[tuple[str, dict[str, Any] | None]]) -> int:
        written = [arguments for name, arguments in calls if name in self.config.todo_tools and arguments is not None]
        lists = [value for value in (written[-1].values() if written else ()) if isinstance(value, list)]
        todos = [item for items in lists for item in items if isinstance(item, dict) and "status" in item]
        return sum(str(item["status"]).lower() not in _FINISHED for item in todos)
