"""What a request asks for: a line, a channel, a version, or any engine. Model names say it.

    rollmill    any engine, or as `split` in [gateway] says
    rl          the line rl: its newest version that an engine serves
    rl@7        exactly this version
    live        engines that follow the channel live

`split` in [gateway] divides the production sessions that ask for a name between names, by weight. A session always gets
the same one, also after a restart: its id decides. Rollouts are not divided.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from rollmill.gateway.routing.engines import EngineState
from rollmill.types import same_line

DEFAULT = "rollmill"


@dataclass(frozen=True)
class Target:
    line: str = ""  # "": any
    number: int | None = None  # exactly this version of the line
    channel: str | None = None

    def is_served_by(self, engine: EngineState) -> bool:
        policy = engine.policy
        if policy is None or (self.channel is not None and engine.channel != self.channel):
            return False
        if self.number is not None:
            return (policy.line, policy.number) == (self.line, self.number)
        return not self.line or same_line(policy.line, self.line)


def read_target(name: str, channels: set[str]) -> Target:
    """What a model name means. `channels` are the names of channels that engines follow."""
    if name in ("", DEFAULT):
        return Target()
    if name in channels:
        return Target(channel=name)
    line, at, number = name.rpartition("@")
    return Target(line, int(number)) if at and number.isdecimal() else Target(name)


def pick(split: Mapping[str, float], session: str) -> str:
    """One of the names, by weight. The same session gets the same one."""
    drawn = int.from_bytes(hashlib.blake2b(session.encode(), digest_size=8).digest()) / 2**64 * sum(split.values())
    for name, weight in split.items():
        drawn -= weight
        if drawn < 0:
            return name
    return list(split)[-1]
