"""What a gateway is given, and the parts that it makes of it. Every route gets the parts, and takes what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollmill.chat.format import ChatFormat
from rollmill.chat.tokenizer import Tokenizer
from rollmill.gateway.access.access import Access
from rollmill.gateway.access.buckets import Buckets
from rollmill.gateway.access.keys import KeyRing, KeyStore
from rollmill.gateway.access.limits import KeyLimits
from rollmill.gateway.answering import Answering
from rollmill.gateway.config import EngineEndpoint, GatewayConfig
from rollmill.gateway.recording.early_feedback import EarlyFeedback
from rollmill.gateway.recording.recorder import Recorder
from rollmill.gateway.recording.replaying import replay
from rollmill.gateway.recording.sealing import Sealer
from rollmill.gateway.routing.fleet import Fleet
from rollmill.gateway.routing.router import Router
from rollmill.gateway.routing.traffic_splits import SplitStore
from rollmill.gateway.sessions.registry import Registry
from rollmill.gateway.watching.metrics import Metrics
from rollmill.gateway.workers import Workers, log_directory, share
from rollmill.storage.objects import Objects
from rollmill.trajectories.trajectory_store import TrajectoryStore


@dataclass(frozen=True)
class GatewayInputs:
    """Settings, stores and secrets."""

    config: GatewayConfig
    format: ChatFormat
    tokenizer: Tokenizer
    trajectories: TrajectoryStore
    objects: Objects
    log_dir: Path  # sessions found there continue after a crash
    admin_token: str = field(repr=False)
    engines: Sequence[EngineEndpoint] = ()
    # these secrets are valid keys too, beside those that `rollmill keys` made
    production_key: str | None = field(default=None, repr=False)
    rollout_key: str | None = field(default=None, repr=False)
    keys: KeyStore | None = None
    splits: SplitStore | None = None  # how production is divided, read again while the gateway runs
    fleet: Fleet | None = None  # engines register, and come and go
    run: str | None = None  # the id that production is recorded with


class GatewayParts:
    def __init__(self, given: GatewayInputs, workers: Workers) -> None:
        """`workers`: these are the parts of one of several processes, with a log directory of its own."""
        self.given = given
        self.workers = workers
        workers.reader_wait_s = given.config.reader_wait_s
        self.config = config = share(given.config, workers)
        self.log_dir = log_directory(given.log_dir, workers.number)
        bootstrap = {
            "admin": given.admin_token,
            "production": given.production_key,
            "rollout": given.rollout_key,
            "engine": given.fleet.token if given.fleet else None,
        }
        ring = KeyRing(given.keys, bootstrap, cache_s=config.key_cache_s)
        self.access = Access(ring, KeyLimits(given.keys, Buckets(workers.limits)))
        self.metrics = Metrics(workers.number, workers.metrics)
        self.registry = Registry(given.admin_token, fresh=workers.fresh, run=given.run)
        self.recorder = Recorder(self.log_dir, compact_bytes=config.compact_bytes)
        early = replay(self.registry, self.recorder.replay())
        self.router = Router(given.engines, config, given.tokenizer.encode, follows=given.fleet is not None)
        stores = given.trajectories, given.objects
        self.sealer = Sealer(config, self.recorder, self.registry, *stores, self.metrics)
        self.early = EarlyFeedback(self.registry, self.sealer, self.recorder, given.trajectories, self.metrics, early)
        self.answering = Answering(
            config, given.format, given.tokenizer, self.router, self.recorder, self.registry, self.metrics, workers
        )
