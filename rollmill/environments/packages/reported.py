"""The reward that an environment reports about an episode that it played.

The harness hands the report in as a file. So it is stored with the episode, and the same grade can be given again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, FiniteFloat

from rollmill.environments.episode import Episode
from rollmill.environments.reward import Reward
from rollmill.errors import HarnessError, RewardError
from rollmill.machines.machine import Machine
from rollmill.strict import FreeJson, StrictModel, parse_json
from rollmill.trajectories.storable import LARGEST_NUMBER
from rollmill.types import Grade

REPORT = "report.json"
GRADING = {"kind": "reported"}
_LONGEST = 128 << 10  # bytes; half of what an index takes
_Number = Annotated[FiniteFloat, Field(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]


class _Report(StrictModel):
    value: _Number
    parts: dict[str, _Number]
    evidence: dict[str, FreeJson]


async def hand_in_report(
    machine: Machine, what: str, value: float, parts: Mapping[str, float], evidence: Mapping[str, Any]
) -> None:
    """HarnessError if it cannot be stored: a number that is not finite or too large, or too much evidence."""
    data = json.dumps({"value": value, "parts": parts, "evidence": evidence}).encode()
    if len(data) > _LONGEST:
        raise HarnessError(f"{what}: its report has {len(data)} bytes, and only {_LONGEST} are kept")
    try:
        parse_json(data, _Report)
    except ValueError as error:
        raise HarnessError(f"{what}: its reward cannot be used: {error}", hint="see its own code") from None
    await machine.write(REPORT, data)


class Reported(Reward):
    name = "reported"
    kind = "reported"
    cannot_protect = "The environment's package decides, with all that it lets the agent deceive it about."

    async def grade(self, episode: Episode) -> Grade:
        if episode.result is None:  # `rollmill tasks check` hands in what is there before an episode
            return Grade(0.0, evidence={"played": False}, grader=self.name)
        data = episode.submission.get(REPORT)
        if data is None:
            late = "its time was over before" if episode.result.stop == "time" else "it ended before"
            raise RewardError(
                f"{late} the environment reported a reward", hint="`rollouts.timeout_s` is the limit of an episode"
            )
        try:
            report = parse_json(data, _Report)
        except ValueError as error:
            raise RewardError(f"{REPORT} cannot be read: {error}") from None
        return Grade(report.value, report.parts, report.evidence, self.name)
