"""An engine as the router last saw it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollmill.gateway.config import EngineEndpoint
from rollmill.types import PolicyRef, TrafficClass


@dataclass
class EngineState:
    endpoint: EngineEndpoint
    alive: bool = False
    name: str = ""
    policy: PolicyRef | None = None
    channel: str | None = None  # the channel it follows
    lent: str | None = None  # the line that it is lent to
    context: int | None = None  # its longest context
    paused: bool = False
    queued: int = 0  # running and waiting, by its own count
    in_flight: int = 0  # our requests that it has not finished
    failures: int = 0
    problem: str = field(default="no health check yet")

    def __post_init__(self) -> None:
        self.url = self.endpoint.url.rstrip("/")

    @property
    def region(self) -> str:
        return self.endpoint.region

    @property
    def load(self) -> float:
        """Requests per place in its batch: an engine that decodes more together gets more."""
        return max(self.queued, self.in_flight) / self.endpoint.capacity

    @property
    def serving(self) -> tuple[object, ...]:
        """What decides who may be answered: when it changes, those who wait are looked at again."""
        return self.policy, self.paused, self.channel, self.lent

    def takes(self, traffic: TrafficClass) -> bool:
        """An engine that is lent to training answers rollouts only."""
        return self.lent is None or traffic == "rollout"

    def see(self, health: dict[str, Any]) -> None:
        """Takes over what an engine says at /health. Raises KeyError, TypeError or ValueError if it is malformed."""
        policy, serves = health.get("policy"), health.get("serves") or {}
        self.name = str(health["engine"])
        self.policy = PolicyRef(**policy) if policy else None
        self.lent = str(health["lent"]) if health.get("lent") else None
        self.channel = str(serves["name"]) if serves.get("kind") == "channel" and not self.lent else None
        self.context = int(serves["context"]) if "context" in serves else None
        self.paused = bool(health.get("paused"))
        self.queued = int(health["running"]) + int(health["waiting"])
        self.alive = self.policy is not None  # an engine without weights cannot answer

    def describe(self) -> dict[str, Any]:
        as_they_are = ("url", "region", "alive", "channel", "lent", "context", "paused", "queued")
        return {
            **{name: getattr(self, name) for name in as_they_are},
            "engine": self.name,
            "policy": None if self.policy is None else vars(self.policy),
            "problem": None if self.alive else self.problem,
        }
