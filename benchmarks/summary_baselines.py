"""What learned summaries are compared with: harnesses that do something else when the context is nearly full.

    Truncating   keeps the task and the newest tool calls with their results, as many as the window holds
    FixedNote    writes the summary itself, without knowing what matters: the number of the next file, and what the
                 newest files said, as many as a summary may hold

Both are kinds for [harness], with the settings of the coding harness. The model was hardly trained under them, so their
rates also tell how unfamiliar they are to it. `reachable` tells what no
model could exceed but by guessing.
"""

from __future__ import annotations

from rollmill.demo.walks import Walk
from rollmill.environments.harness import HarnessResult
from rollmill.environments.harnesses.coding import CodingHarness, HarnessConfig
from rollmill.environments.harnesses.model import Asking
from rollmill.environments.harnesses.summary import Contexts, resumed
from rollmill.environments.harnesses.turns import run_turns, start
from rollmill.environments.machine import Machine
from rollmill.environments.task import Task
from rollmill.types import Sampling

# of a window of 44 tokens with an answer of 6; and of a summary of 14 tokens: five files and the number of the next one
KEPT_CALLS, NOTED_FILES = 4, 5
LAST_NOTE = NOTED_FILES + 1  # needs no number


def reachable(walk: Walk, files: int) -> bool:
    """Whether the key is among the last `files` files: before them, neither harness has it at the end."""
    return any(line.startswith("key") for line in walk.files[-files:])


class TruncatedContexts(Contexts):
    def _ask(self) -> None:
        calls = [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]
        self.messages = [*self._first, *self.messages[calls[-KEPT_CALLS:][0] :]]


class NotedContexts(Contexts):
    said: tuple[str, ...] = ()

    def _ask(self) -> None:
        assert self._config is not None
        newest = " ".join(line.partition(" ")[2] for line in self.messages[-1]["content"].splitlines())
        last = newest.startswith("end")
        self.said = (*self.said, newest)[-(LAST_NOTE if last else NOTED_FILES) :]
        self.summaries += 1
        place = "" if last else f"{self.summaries + 1} "
        self.messages = resumed(self._first, self._config.resume, place + " ".join(self.said), self.summaries)
        self._fresh = True


class Truncating(CodingHarness):
    name = "truncating"
    made: type[Contexts] = TruncatedContexts

    def __init__(self, config: HarnessConfig) -> None:
        super().__init__(config)

    async def run(
        self, task: Task, machine: Machine, *, base_url: str, api_key: str, sampling: Sampling
    ) -> HarnessResult:
        asking = Asking(self._model, base_url, api_key, self.config, sampling, self._schemas)
        contexts = await asking.contexts(start(task, self.config.system_prompt), self.config.max_tool_output)
        return await run_turns(
            asking,
            lambda call: self._call(machine, call),
            self.made(contexts._config, contexts._first, contexts._at, sampling.max_tokens),
            max_turns=self.config.max_turns,
            max_tool_output=self.config.max_tool_output,
        )


class FixedNote(Truncating):
    name = "fixed_note"
    made = NotedContexts
