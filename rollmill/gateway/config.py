"""Settings of the gateway, and what it is told about the engines behind it."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from rollmill.config import Config


class GatewayConfig(Config):
    max_body_bytes: int = Field(
        default=16 << 20, ge=1024, description="largest request body; more is answered with 413"
    )
    max_messages: int = Field(default=4096, ge=1, description="most messages in one request")
    default_max_tokens: int = Field(default=1024, ge=1, description="length of an answer when the request does not say")
    engine_wait_s: float = Field(
        default=30.0, ge=0, description="how long a request waits for an engine before it gets a 503"
    )
    engine_silence_s: float = Field(default=300.0, gt=0, description="an engine silent for so long is taken for dead")
    health_interval_s: float = Field(default=0.25, gt=0, description="how often each engine is asked how it is")
    stream_above: int = Field(
        default=64,
        ge=0,
        description="answers that may be longer come from the engine token by token, so that its death costs none of "
        "them; shorter ones come in one piece, which is cheaper, and are asked for again",
    )
    seal_idle_s: float = Field(default=1800.0, gt=0, description="a production conversation ends after so much silence")
    expire_idle_s: float = Field(
        default=86400.0, gt=0, description="a rollout session nobody seals is given up after so long"
    )
    compact_bytes: int = Field(
        default=64 << 20, ge=1 << 12, description="the log is rewritten when larger and mostly dead"
    )


@dataclass(frozen=True)
class EngineEndpoint:
    url: str
    region: str
