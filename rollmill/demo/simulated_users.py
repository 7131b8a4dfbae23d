"""Simulated users, called so wherever they appear: a population from a TOML file asks the real gateway for real work.

Each user has a task of the run's task set. The run's own harness works on it in a real machine, through the gateway, as
production traffic. Then the user looks at what came of it, and reports about the last answer:

    likes   weights of what was seen (solved, malformed, turns, tool_calls, stopped, asked, constant). More than 0.5 in
            all is true acceptance. Nothing but the measurement sees it.
    says    the same for what is reported. Not given: as `likes`. Given: a poisoned signal.
    noise   share of reports that say the opposite; silent: share of users who report nothing; delay_s: mean delay

Populations are files: rollmill/demo/populations has some, and anyone can bring others.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import Field

from rollmill.config import Config, load_config
from rollmill.environments.environment import Environments
from rollmill.environments.rewards import transcript
from rollmill.environments.task import Task
from rollmill.rollouts.agent_endpoint import Endpoint, EndpointProxy, play
from rollmill.rollouts.config import RolloutConfig
from rollmill.signals import About, Signals
from rollmill.types import Sampling

log = logging.getLogger(__name__)
FOLDER = Path(__file__).parent / "populations"
Sign = Literal["solved", "malformed", "turns", "tool_calls", "stopped", "asked", "constant"]


class Taste(Config):
    """One kind of simulated users."""

    name: str = Field(description="What these users are called in tables.")
    share: float = Field(gt=0, description="How many there are, relative to the other kinds.")
    noise: float = Field(0.0, ge=0, le=1, description="Share of reports that say the opposite.")
    silent: float = Field(0.0, ge=0, le=1, description="Share of users who report nothing.")
    delay_s: float = Field(0.0, ge=0, description="Mean delay of a report in seconds.")
    likes: dict[Sign, float] = Field(
        description="Weights of what was seen: solved, malformed, turns, tool_calls, stopped, asked, constant. More "
        "than 0.5 in all is true acceptance."
    )
    says: dict[Sign, float] | None = Field(
        None, description="The same for what is reported. Not set: as `likes`. Set: a poisoned signal."
    )


class PopulationFile(Config):
    """A population of simulated users."""

    users: tuple[Taste, ...] = Field(min_length=1, description="The kinds of users there are.")

    def draw(self, random: np.random.Generator) -> Taste:
        shares = np.array([taste.share for taste in self.users])
        return self.users[int(random.choice(len(self.users), p=shares / shares.sum()))]


@dataclass(frozen=True)
class Visit:
    session: str
    task: str
    truth: bool  # would the user accept it? The rule never sees this
    said: bool | None  # what was reported


def load_population(name: str) -> PopulationFile:
    """Of a file, or the name of one in rollmill/demo/populations."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    return load_config(PopulationFile, path)


async def visit(
    environments: Environments,
    url: str,
    key: str,
    tasks: Sequence[Task],
    population: PopulationFile,
    limits: RolloutConfig,
    *,
    seed: int,
    concurrency: int = 16,
    silent: bool = False,
) -> list[Visit]:
    """One user per task, `concurrency` at once. `url`: the gateway, without /v1. `silent`: nobody reports anything."""
    slots, signals = asyncio.Semaphore(concurrency), Signals(url, key, timeout_s=30.0)

    async def one(number: int, task: Task) -> Visit | None:
        random = np.random.default_rng([seed, number])
        async with slots:
            session = f"user-{secrets.token_hex(6)}"
            work = await _work(environments, Endpoint(f"{url}/s/{session}/v1", key), task, random, limits)
        if work is None:
            return None
        seen, answer = work
        taste = population.draw(random)
        truth = _accepts(taste.likes, seen)
        said: bool | None = _accepts(taste.says or taste.likes, seen) != bool(random.random() < taste.noise)
        if silent or random.random() < taste.silent:
            said = None
        if said is not None:
            await asyncio.sleep(float(random.exponential(taste.delay_s)) if taste.delay_s else 0.0)
            about = session if answer is None else {"answers": [answer]}
            await asyncio.to_thread(_report, signals, about, said, task.family)
        return Visit(session, task.id, truth, said)

    visits = await asyncio.gather(*(one(number, task) for number, task in enumerate(tasks)))
    return [each for each in visits if each is not None]


def _report(signals: Signals, about: About, said: bool, family: str) -> None:
    signals.task(about, family or "task")
    if said:
        signals.accepted(about)
    else:
        signals.reverted(about)


def _accepts(weights: dict[Sign, float], seen: dict[Sign, float]) -> bool:
    return sum(weight * seen[name] for name, weight in weights.items()) > 0.5


async def _work(
    environments: Environments, endpoint: Endpoint, task: Task, random: np.random.Generator, limits: RolloutConfig
) -> tuple[dict[Sign, float], str | None] | None:
    """What a user sees of the work on a task, and the name of its last answer; None if the infrastructure failed."""
    sampling = Sampling(temperature=1.0, max_tokens=limits.max_answer_tokens, seed=int(random.integers(1 << 62)))
    async with EndpointProxy(endpoint) as proxy:  # the user's product: it has the transcript
        played = await play(environments, proxy, task, sampling, limits)
    result = played.episode.result
    if played.reward is None or result is None:
        log.warning("a simulated user was lost: %s", played.reason)
        return None
    seen: dict[Sign, float] = {
        "solved": float(played.reward.solved),
        "malformed": float(result.bad_tool_calls),
        "turns": float(result.turns),
        "tool_calls": float(result.tool_calls),
        "stopped": float(result.stop == "answer"),
        "asked": float(transcript.asks(played.episode)),
        "constant": 1.0,
    }
    return seen, played.answer
