"""A small real world for the trainer: a directory store, SQLite, a tiny model, trajectories drawn from seeds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rollmill.models.attention import PackedAttention
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.device import Device
from rollmill.models.host_tensors import load_host
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.training.config import OptimizerConfig, RLConfig, TrainingConfig
from rollmill.training.loop import Trainer
from rollmill.training.packed_pass import target_logprobs
from rollmill.training.rl.rl_objective import RLObjective
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.payload import encode_trajectory
from rollmill.trajectories.staleness import Pace
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Grade, PolicyRef, Sampling, Segment, Span, Trajectory, Version
from rollmill.weights.reading.weight_store import WeightStore
from tests.trajectories.build import start_group

MODEL = ModelConfig(
    vocab_size=24,
    layers=2,
    width=16,
    heads=2,
    kv_heads=1,
    head_dim=8,
    mlp_width=16,
    experts=4,
    experts_per_token=2,
    expert_width=8,
    max_context=64,
)
PACE = Pace(groups_per_step=2, group_size=3, max_staleness=100)
TRAINING = TrainingConfig(
    checkpoint_every=2,
    snapshot_every=4,
    tokens_per_microbatch=48,
    optimizer=OptimizerConfig(lr=0.02, warmup_steps=2),
)
RUN = "run"
STEPS = 6


def policy(number: int = 0, line: str = "main") -> PolicyRef:
    return PolicyRef(line, number, "bf16", "0" * 64)


def make_segment(
    sampled: list[int],
    *,
    seed: int = 0,
    policies: list[PolicyRef] | None = None,
    policy_of: list[int] | None = None,
    sampling: Sampling | None = None,
    routes: bool = True,
) -> Segment:
    """`sampled`: 0 or 1 per token; runs of ones are spans. Tokens, log-probs and routes are drawn from the seed."""
    draw = np.random.default_rng(seed)
    mask = np.array(sampled, np.bool_)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8))).reshape(-1, 2)
    spans = [
        Span(int(a), int(b), sampling or Sampling(), "stop", "engine", "home", "rollout", 0.0, 1.0, 0, answer=number)
        for number, (a, b) in enumerate(edges)
    ]
    shape = (len(mask), MODEL.moe_layers)
    chosen = np.array([draw.permutation(MODEL.experts)[: MODEL.experts_per_token] for _ in range(np.prod(shape))])
    indices = np.array(policy_of if policy_of is not None else [0] * len(mask), np.int16)
    return Segment(
        id=f"segment-{seed}",
        tokens=draw.integers(0, MODEL.vocab_size, len(mask)).astype(np.int32),
        sampled=mask,
        logprobs=np.where(mask, np.log(draw.uniform(0.02, 0.2, len(mask))), np.nan).astype(np.float32),
        policy=np.where(mask, indices, -1).astype(np.int16),
        policies=policies or [policy()],
        spans=spans,
        routes=chosen.reshape(*shape, -1).astype(np.uint8) if routes else None,
        routes_valid=draw.random(len(mask)) < 0.9 if routes else None,
    )


def record_as(segment: Segment, model: Decoder, start: int, end: int) -> Segment:
    """Writes what this model gives: log-probs of tokens[start:end], and the routes since the answer before."""
    tokens = torch.from_numpy(segment.tokens.astype(np.int64))
    heat = torch.full((len(tokens) - 1,), segment.spans[0].sampling.temperature)
    with torch.no_grad():
        output = model(tokens[:-1], torch.arange(len(tokens) - 1), PackedAttention([len(tokens) - 1]))
        logprobs, _ = target_logprobs(model.logits(output.hidden), tokens[1:], heat)
    segment.logprobs[start:end] = logprobs.numpy()[start - 1 : end - 1]
    assert segment.routes is not None and segment.routes_valid is not None and output.routes is not None
    first = max((position for position in np.flatnonzero(segment.sampled) if position < start), default=0)
    segment.routes[first : end - 1] = output.routes.numpy()[first : end - 1]
    segment.routes_valid[first : end - 1] = True
    return segment


def honest_segment(model: Decoder, seed: int, temperature: float = 1.0, by: PolicyRef | None = None) -> Segment:
    """A segment with the log-probs and routes that this model gives."""
    sampling = Sampling(temperature=temperature)
    segment = make_segment([0] * 4 + [1] * 5, seed=seed, sampling=sampling, policies=[by or policy()])
    return record_as(segment, model, 4, 9)


@dataclass
class World:
    path: Path
    model: ModelConfig = MODEL
    device: Device = "cpu"
    forms: tuple[str, ...] = ("bf16",)  # the first one is the trainer's own

    def __post_init__(self) -> None:
        self.objects = Objects.open(self.path / "store")
        database = open_database(f"sqlite:///{self.path / 'mill.db'}")
        self.weights = WeightStore(self.objects)
        self.trajectories = TrajectoryStore(database, self.objects)
        self.ledger = Ledger(database, RUN)

    def add_group(self, name: str, segments: list[Segment], rewards: list[float | None]) -> list[str]:
        """A waiting group; a reward of None is a failed rollout."""
        self.start_group(name, len(rewards))
        return self.finish_group(name, segments, rewards)

    def start_group(self, name: str, size: int) -> list[str]:
        ids = [f"{name}-{index}" for index in range(size)]
        assert start_group(self.ledger, name, "task", size, pace=Pace(10_000, 1, 0), ids=ids) is not None
        return ids

    def finish_group(self, name: str, segments: list[Segment], rewards: list[float | None]) -> list[str]:
        ids = [f"{name}-{index}" for index in range(len(rewards))]
        for id, segment, reward in zip(ids, segments, rewards, strict=True):
            if reward is None:
                self.trajectories.fail(id, "the machine was lost")
                continue
            key = f"trajectories/{id}"
            self.objects.create(key, encode_trajectory(Trajectory(id, [segment], task_id="task", group_id=name)))
            self.trajectories.finish(
                id, key, None, tokens=len(segment.tokens), sampled_tokens=int(segment.sampled.sum()), segments=1
            )
            self.trajectories.grade(id, Grade(reward))
        self.ledger.group_ready(name)
        return ids

    def add_steps(self, steps: int = STEPS, after: int = 0) -> None:
        """Groups for this many steps, all waiting, in a run that has had groups for `after` steps."""
        draw = np.random.default_rng(7 + after)
        for index in range(after * PACE.groups_per_step, (after + steps) * PACE.groups_per_step):
            patterns = [[0] * int(draw.integers(2, 8)) + [1] * 4 + [0] * 2 + [1] * 3 for _ in range(PACE.group_size)]
            segments = [make_segment(each, seed=100 * index + i) for i, each in enumerate(patterns)]
            self.add_group(f"group-{index:03d}", segments, [1.0, 0.0, float(index % 2)])

    def objective(self, config: RLConfig | None = None, pace: Pace = PACE) -> RLObjective:
        return RLObjective(
            config or RLConfig(max_step_drift=0),  # its learning rate is large, and its log-probs are made up
            self.ledger,
            self.trajectories,
            self.weights,
            pace=pace,
            model_config=self.model,
            tokens_per_microbatch=TRAINING.tokens_per_microbatch,
        )

    def trainer(
        self,
        training: TrainingConfig = TRAINING,
        pace: Pace = PACE,
        parent: Version | None = None,
        config: RLConfig | None = None,
        steps: int = STEPS,
    ) -> Trainer:
        return Trainer(
            training,
            self.model,
            self.objective(config, pace),
            self.weights,
            self.objects,
            "main",
            parent,
            steps=steps,
            seed=3,
            form=self.forms[0],
            other_forms=self.forms[1:],
            device=self.device,
        )

    def version(self, number: int, line: str = "main") -> tuple[Decoder, PolicyRef]:
        """A model with the weights of a published version, and that version's policy."""
        model = Decoder(self.model)
        load_host(model, self.weights.load(Version(line, number)))
        return model, self.weights.manifest(Version(line, number)).policy

    def chain(self, line: str = "main", form: str = "bf16") -> list[tuple[int, str]]:
        return [(manifest.number, manifest.digest) for manifest in WeightStore(self.objects).versions(line, form)]
