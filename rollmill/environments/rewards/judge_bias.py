"""Does a judge prefer long texts, or what it reads first? Ask it again about the same work, shown in another way.

    again      the same text: how much the judge contradicts itself
    position   the files before the transcript
    length     sentences added that say nothing about the work

A mean change that is several times its error is a bias: an agent can earn reward by it.
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rollmill.environments.episode import Episode
from rollmill.environments.rewards.judge import Judge, files_read, transcript_read

_FILLER = "This sentence is part of the record and says nothing about the work. "
_AT_ONCE = 4  # episodes


@dataclass(frozen=True)
class Bias:
    name: str
    change: float  # of the value, in the mean over episodes
    error: float  # standard error of the change; nan for one episode

    @property
    def clear(self) -> bool:
        return abs(self.change) > 2 * self.error > 0 or (self.error == 0 and self.change != 0)


async def measure_bias(judge: Judge, episodes: Sequence[Episode], filler: int = 2000) -> list[Bias]:
    """The mean change of the judge's value. `filler` is the number of characters that `length` adds.

    RewardError if the judge gives no verdict.
    """
    slots = asyncio.Semaphore(_AT_ONCE)
    more = (_FILLER * (filler // len(_FILLER) + 1))[:filler]

    async def one(episode: Episode) -> dict[str, float]:
        said, files = transcript_read(episode), files_read(episode)
        shown = {
            "": "\n\n".join([*said, *files]),
            "again": "\n\n".join([*said, *files]),
            "position": "\n\n".join([*files, *said]),
            "length": "\n\n".join([*said, *files, more]),
        }
        async with slots:
            values = {name: (await judge.score(text)).value for name, text in shown.items()}
        return {name: value - values[""] for name, value in values.items() if name}

    changes = await asyncio.gather(*map(one, episodes))
    return [_bias(name, [change[name] for change in changes]) for name in ("again", "position", "length")]


def _bias(name: str, changes: list[float]) -> Bias:
    error = statistics.stdev(changes) / math.sqrt(len(changes)) if len(changes) > 1 else math.nan
    return Bias(name, statistics.fmean(changes), error)
