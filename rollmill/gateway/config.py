"""Settings of the gateway, and the address of an engine."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, model_validator

from rollmill.config import Config
from rollmill.gateway.access.redaction import RedactionSection

_TIME = r"([01][0-9]|2[0-3]):[0-5][0-9]"
HOURS = rf"^{_TIME}-{_TIME}$"


class BackendConfig(Config):
    """An OpenAI-compatible server beside the run's engines. Its answers are recorded, and not trained on."""

    url: str = Field(description="Address of the server, with or without /v1.")
    model: str = Field(description="Name of the model there. Requests ask for it as `external-MODEL`.")
    key_variable: str | None = Field(default=None, description="Environment variable that holds its API key.")
    region: str = Field(default="external", description="Region that spans are recorded with.")

    def endpoint(self) -> EngineEndpoint:
        token = os.environ.get(self.key_variable) if self.key_variable else None
        url = self.url.rstrip("/").removesuffix("/v1")
        return EngineEndpoint(url, self.region, token, "openai", self.model)


class GatewayConfig(Config):
    backends: list[BackendConfig] = Field(
        default_factory=list, description="OpenAI-compatible servers that answer beside the run's engines."
    )
    workers: int | None = Field(
        default=None,
        ge=1,
        le=64,
        description="Processes that share the gateway's address; each has some of the sessions. Not set: one, and for "
        "`rollmill serve` one per four cores, at most eight. Places and queue are divided between them.",
    )
    replicas: int = Field(
        default=1,
        ge=1,
        le=64,
        description="How many gateways a run has. Each has some of the sessions: the hash of a session's id says "
        "which. All answer production; while one is away, the others answer for it. Limits per minute of a key hold "
        "per gateway.",
    )
    max_body_bytes: int = Field(
        default=16 << 20, ge=1024, description="Largest request body in bytes; a larger one gets status 413."
    )
    max_messages: int = Field(default=4096, ge=1, description="Most messages in one request.")
    default_max_tokens: int = Field(
        default=1024, ge=1, description="Most tokens of an answer if the request does not set it."
    )
    split: dict[str, dict[str, float]] = Field(
        default_factory=dict,
        description="Divides the production sessions that ask for a model between names, by weight, for a canary: "
        "`split = {rollmill = {live = 0.95, candidate = 0.05}}`. A session keeps what it got.",
    )
    aliases: dict[str, str] = Field(
        default_factory=dict,
        description="Names of models that clients ask for, and the name that is served instead: "
        '`aliases = {"claude-*" = "rollmill"}`. `*` stands for any text, so `"*"` takes every name. The first that '
        "fits counts. Names that are served need none.",
    )
    engine_requests: int = Field(
        default=1024, ge=1, description="Most requests that one engine gets at the same time; the others wait."
    )
    queue_requests: int = Field(
        default=4096,
        ge=0,
        description="Most requests that wait for an engine. Further ones get status 429 with Retry-After.",
    )
    engine_wait_s: float = Field(
        default=30.0,
        ge=0,
        description="Seconds a request waits for an engine before it gets status 503. Raise it if engines restart "
        "slowly.",
    )
    engine_silence_s: float = Field(
        default=300.0,
        gt=0,
        description="Seconds without a byte from an engine after which the gateway retries on another engine.",
    )
    health_interval_s: float = Field(
        default=0.25, gt=0, description="Seconds between two health checks of each engine."
    )
    stream_above: int = Field(
        default=64,
        ge=0,
        description="Answers of up to this many tokens are requested whole. That is cheaper; if the engine "
        "dies, they are requested again. Longer answers are streamed. If the engine dies, no token is lost.",
    )
    seal_idle_s: float = Field(
        default=1800.0,
        gt=0,
        description="Seconds without a request after which a production conversation is sealed into a trajectory.",
    )
    expire_idle_s: float = Field(
        default=86400.0,
        gt=0,
        description="Seconds without a request after which a rollout session that nobody sealed is given up.",
    )
    record_wait_s: float = Field(
        default=1.0,
        gt=0,
        description="Seconds a production answer waits for the disk of the session log, at most. After that it is sent "
        "unrecorded, and its conversation is not trained on.",
    )
    body_wait_s: float = Field(
        default=60.0, gt=0, description="Seconds in which a request body must arrive; a slower one gets status 408."
    )
    heartbeat_s: float = Field(
        default=40.0,
        gt=0,
        description="Seconds of silence after which a streamed answer gets a heartbeat, also while its request waits "
        "for an engine. From then on an error is told in the stream, no longer as a status. Keep it below the time "
        "after which clients and proxies give up.",
    )
    reader_wait_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds for which a client may read nothing of its answer while more of it waits. Then its "
        "connection is closed, and its place at the engine is free.",
    )
    idle_s: float = Field(
        default=75.0,
        gt=0,
        description="Seconds after which a connection without a request is closed; slow headers count as none.",
    )
    tls_cert: str | None = Field(
        default=None, description="File with the certificate chain: `rollmill serve` then answers HTTPS only."
    )
    tls_key: str | None = Field(default=None, description="File with the private key of `tls_cert`.")
    access_log: bool = Field(
        default=True,
        description="Whether each request becomes a line of access.jsonl in the gateway's directory: times, tokens, "
        "key id, session; never contents.",
    )
    traces: str | None = Field(
        default=None,
        description="URL of an OpenTelemetry collector (OTLP over HTTP) that gets a span per request. Needs the extra "
        "`tracing`.",
    )
    key_cache_s: float = Field(
        default=2.0,
        ge=0,
        description="Seconds for which the gateway remembers an API key. A revoked key is refused after that time.",
    )
    consent: Literal["none", "store", "train"] = Field(
        default="store",
        description="What may be kept of production requests that say nothing, with keys that say nothing: `none` is "
        "never written, `store` is never trained on, `train` is for real-time RL. A key says it with `rollmill keys "
        "create --consent`, a request with the header x-rollmill-consent.",
    )
    redaction: RedactionSection = Field(
        default={},
        validate_default=True,
        description="What is removed from production requests before the model sees them.",
    )
    retention_days: float | None = Field(
        default=None,
        gt=0,
        description="Days after which the payload of a production trajectory is deleted. Not set: never.",
    )
    compact_bytes: int = Field(
        default=64 << 20,
        ge=1 << 12,
        description="The session log is rewritten when it has more bytes than this and most of them belong to sealed "
        "sessions.",
    )


class LendingConfig(Config):
    """When engines of production work for training. Load is the share of their places that is taken."""

    line: str | None = Field(
        default=None, description="Line that lent engines serve. Not set: that of the run's last stage."
    )
    keep: int = Field(default=1, ge=1, description="Engines that are never lent.")
    below: float = Field(
        default=0.3,
        gt=0,
        lt=1,
        description="An engine is lent if the load of those that stay would be at most this. Larger lends more.",
    )
    above: float = Field(
        default=0.6,
        gt=0,
        le=1,
        description="Engines are recalled while the load is above this. Smaller recalls earlier.",
    )
    quiet_s: float = Field(
        default=30.0,
        ge=0,
        description="Seconds for which the load must be low before an engine is lent. Larger lends more rarely.",
    )
    return_s: float = Field(
        default=10.0,
        gt=0,
        description="Seconds in which an engine that is recalled must serve production again. A later return is "
        "reported as late.",
    )
    hours: tuple[Annotated[str, Field(pattern=HOURS)], ...] = Field(
        default=(),
        description="When engines may be lent, in UTC, such as 22:00-06:00. Outside these hours all are recalled. "
        "Empty: at any time.",
    )

    @model_validator(mode="after")
    def _below_is_lower(self) -> LendingConfig:
        if self.below >= self.above:
            raise ValueError(
                f"below ({self.below}) must be lower than above ({self.above}): engines would go to and fro"
            )
        return self


@dataclass(frozen=True)
class EngineEndpoint:
    url: str
    region: str
    token: str | None = field(default=None, repr=False)  # the engine's bearer token
    kind: Literal["rollmill", "openai"] = "rollmill"  # "openai": any OpenAI-compatible server
    model: str = ""  # the name of the model at such a server
    capacity: int = 64  # requests that it decodes together
