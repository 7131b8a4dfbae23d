"""Length: what an episode cost, as a penalty. Composer 2's C(x), in section 4.2 of its report.

    x     = tokens_weight · sampled tokens + tool_calls_weight · tool calls + turns_weight · turns
    C(x)  = ((1 + k·x)^(1 - q) - 1) / (k · (1 - q));   ln(1 + k·x) / k for q = 1
    value = -scale · C(x)

C rises with x, ever more slowly: the first thousand tokens of an easy task cost more than the last thousand of a hard
one. Calls that are made in one turn cost one turn, so tools are called in parallel. The value is never above 0. Add it
to a reward for the outcome with a `weight` so small that no saving is worth a failure.
"""

from __future__ import annotations

import math

from pydantic import Field

from rollmill.config import Config
from rollmill.environments.episode import Episode
from rollmill.environments.reward import Reward
from rollmill.environments.rewards import transcript
from rollmill.types import Grade


class LengthConfig(Config):
    tokens_weight: float = Field(0.001, ge=0, description="What one sampled token adds to x.")
    tool_calls_weight: float = Field(0.1, ge=0, description="What one tool call adds to x.")
    turns_weight: float = Field(0.2, ge=0, description="What one turn (one answer of the model) adds to x.")
    k: float = Field(1.0, gt=0, description="How soon C(x) bends: from about x = 1/k on, more costs less per unit.")
    q: float = Field(
        1.0, ge=0, description="How strongly C(x) bends: 0 is a straight line, 1 a logarithm, more has an upper bound."
    )
    scale: float = Field(1.0, ge=0, description="The value is -scale · C(x).")


class Length(Reward):
    name = "length"
    cannot_protect = "It counts what was sampled, not what it was good for: an agent that gives up early costs little."

    def __init__(self, config: LengthConfig | None = None) -> None:
        self.config = config or LengthConfig()

    async def grade(self, episode: Episode) -> Grade:
        config, result = self.config, episode.result
        answers = transcript.answers(episode)
        # a harness may report no turns, and a transcript may lack turns that were summarised: the larger count is right
        turns = max(len(answers), result.turns if result else 0)
        calls = max(sum(len(transcript.calls(answer)) for answer in answers), result.tool_calls if result else 0)
        x = config.tokens_weight * episode.tokens + config.tool_calls_weight * calls + config.turns_weight * turns
        cost = config.scale * concave(x, config.k, config.q)
        evidence = {"tokens": episode.tokens, "tool_calls": calls, "turns": turns, "x": x}
        return Grade(0.0 - cost, evidence=evidence, grader=self.name)


def concave(x: float, k: float, q: float) -> float:
    """C(x). expm1 and log1p keep small values exact, and q = 1 is the limit of its neighbours."""
    logarithm, rest = math.log1p(k * x), 1.0 - q
    return logarithm / k if rest == 0.0 else math.expm1(rest * logarithm) / (k * rest)
