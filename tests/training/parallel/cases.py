"""The same work by one process and by ranks; the tests compare what comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollmill.models.config import LatentAttention, ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.device import compute_dtype
from rollmill.models.host_tensors import to_host
from rollmill.storage.objects import Objects
from rollmill.training.batching import MicroBatch, PackedSequence, SampledFacts, pack
from rollmill.training.config import OptimizerConfig, TrainingConfig
from rollmill.training.numerics.next_token import NextTokenPasses
from rollmill.training.numerics.router_replay import replay_of
from rollmill.training.optimizers.master_optimizer import MasterOptimizer
from rollmill.training.parallel.many_ranks import ShardedModels, over_ranks
from rollmill.training.parallel.mesh import Meshes
from rollmill.training.parallel.world import World
from rollmill.training.parallelism import Parallelism
from rollmill.training.publishing.exporter import Exporter
from rollmill.training.single import SINGLE
from rollmill.training.training_checkpoint import Checkpoint, Checkpoints
from rollmill.weights.format.manifest import describe, root_digest
from rollmill.weights.reading.weight_store import WeightStore

CPU = torch.device("cpu")
BASE: dict[str, Any] = {
    "vocab_size": 24,
    "layers": 2,
    "width": 16,
    "heads": 2,
    "kv_heads": 1,
    "head_dim": 8,
    "mlp_width": 20,
    "max_context": 64,
}
MODELS = {
    "dense": ModelConfig(**BASE, experts=0),
    "mixture": ModelConfig(
        **BASE, experts=4, experts_per_token=2, expert_width=8, shared_experts=1, gate="sigmoid", gate_bias=True
    ),
    "latent": ModelConfig(
        **{**BASE, "kv_heads": 2},
        experts=0,
        tie_embeddings=True,
        latent=LatentAttention(q_rank=6, kv_rank=8, plain_dim=4, rope_dim=4, value_dim=6),
    ),
}
ADAMW = OptimizerConfig(lr=0.02, max_grad_norm=0.5, weight_decay=0.1)
MUON = OptimizerConfig(lr=0.02, max_grad_norm=0.5, kind="muon")
LENGTHS = (13, 9, 8, 5, 3, 1)
Shape = tuple[int, int, int]  # ranks, expert, context


def make_microbatches(config: ModelConfig, seed: int = 5) -> list[MicroBatch]:
    """Two micro-batches; in the first there are fewer sequences than four ranks."""
    return pack(make_sequences(config, seed), 24)


def make_sequences(config: ModelConfig, seed: int) -> list[PackedSequence]:
    draw = np.random.default_rng(seed)
    sequences = []
    for index, length in enumerate(LENGTHS):
        rows = np.sort(draw.choice(length, max(1, length // 2), replace=False))
        routes = None
        if config.moe_layers:
            places = length * config.moe_layers
            orders = [draw.permutation(config.experts)[: config.experts_per_token] for _ in range(places)]
            routes = np.array(orders, np.uint8).reshape(length, config.moe_layers, -1)
        facts = SampledFacts(
            logprobs=np.log(draw.uniform(0.02, 0.2, len(rows))).astype(np.float32),
            temperatures=np.full(len(rows), 0.5 + 0.1 * index, np.float32),
            advantages=draw.normal(size=len(rows)).astype(np.float32),
            staleness=np.zeros(len(rows), np.int64),
            trajectory=np.full(len(rows), index, np.int64),
        )
        sequences.append(
            PackedSequence(
                tokens=draw.integers(0, config.vocab_size, length),
                rows=rows,
                targets=draw.integers(0, config.vocab_size, len(rows)),
                routes=routes,
                routes_valid=None if routes is None else draw.random(length) < 0.8,
                facts=facts,
            )
        )
    return sequences


def make_model(name: str, form: str = "bf16", device: torch.device = CPU) -> Decoder:
    model = Decoder(MODELS[name], compute_dtype(device), form)
    model.initialise(1)
    for key, buffer in model.state_dict().items():
        if key.endswith("router.bias"):
            buffer.copy_(torch.linspace(-0.1, 0.1, len(buffer)))
    return model.to(device)


def make_sharded(
    world: World, name: str, shape: Shape, form: str = "bf16", device: torch.device = CPU
) -> tuple[Decoder, Parallelism]:
    parallel = over_ranks(world, Meshes(*shape, device))
    model = parallel.models.make_model(MODELS[name], form, device)
    assert isinstance(parallel.models, ShardedModels)
    values, rows = make_model(name, form, device).state_dict(), parallel.models.sharding.rows
    own = {key: values[key][each[world.rank].start : each[world.rank].stop] for key, each in rows.items()}
    parallel.models.load_held(
        model, to_host(values | own, "fp32" if model.embedding.dtype == torch.float32 else "bf16")
    )
    return model, parallel


def make_placed(
    world: World | None, name: str, shape: Shape, form: str = "bf16", device: torch.device = CPU
) -> tuple[Decoder, Parallelism]:
    if world is None:
        return make_model(name, form, device), SINGLE
    return make_sharded(world, name, shape, form, device)


def next_token_pass(parallel: Parallelism, model: Decoder, parts: list[MicroBatch]) -> float:
    targets, tokens = sum(len(part.targets_M) for part in parts), sum(len(part.tokens_N) for part in parts)
    # recorded passes want gradients to be taken away after each
    whole = parallel is SINGLE
    passes = NextTokenPasses(model, 0.01, graphs=False) if whole else parallel.passes.next_token(model, 0.01)
    return sum(float(passes(part, targets, tokens)[0]) for part in parts)


def policy_pass(
    parallel: Parallelism, model: Decoder, parts: list[MicroBatch], plausibility: float = 0.0
) -> dict[str, Any]:
    """A policy gradient with entropy, replayed."""
    total, rows, found = 0.0, 0, []
    for part in parts:
        assert part.facts is not None
        result = parallel.passes.recompute(model, part, replay_of(part, plausibility))
        advantages_M = torch.from_numpy(part.facts.advantages).to(result.logprobs_M.device)
        loss = -(result.logprobs_M * advantages_M).sum() / 9
        loss = loss - 0.1 * result.entropies_M.sum() / 9
        loss.backward()
        total += float(loss.detach())
        found.append(result.logprobs_M.detach())
        for number, routing in enumerate(result.routings):
            assert len(routing.chosen) == len(routing.scores)
            if result.replay is not None and plausibility == 0.0:
                replay = result.replay.to(routing.chosen.device)
                assert torch.equal(routing.chosen[replay.valid], replay.routes[replay.valid][:, number].long())
            rows += len(routing.chosen)
    return {"loss": total, "logprobs": torch.cat(found), "routed": rows}


def gradients(parallel: Parallelism, model: Decoder) -> dict[str, Tensor]:
    """Taken off the model and made whole."""
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    own = {name: parallel.rows.local(gradient) for name, gradient in found.items() if gradient is not None}
    return assemble(parallel, own)


def assemble(parallel: Parallelism, own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gathers tensors that are sharded like the parameters."""
    if not isinstance(parallel.models, ShardedModels):
        return {name: tensor.clone() for name, tensor in own.items()}
    found, sharding = {}, parallel.models.sharding
    for name, each in {name: parallel.ranks.gather(tensor) for name, tensor in own.items()}.items():
        found[name] = torch.full(sharding.own(name).shape, torch.nan, device=own[name].device)
        for rows, tensor in zip(sharding.rows[name], each, strict=True):
            found[name][rows.start : rows.stop] = tensor
    return found


def passes(world: World | None, name: str, shape: Shape = (1, 1, 1), device: torch.device = CPU) -> dict[str, Any]:
    """Loss and gradients of both objectives."""
    model, parallel = make_placed(world, name, shape, device=device)
    parts = make_microbatches(model.config)
    found: dict[str, Any] = {"next token": next_token_pass(parallel, model, parts)}
    found["next token gradients"] = gradients(parallel, model)
    found["policy"] = policy_pass(parallel, model, parts)
    found["policy gradients"] = gradients(parallel, model)
    found["filtered"] = policy_pass(parallel, model, parts, plausibility=0.9)
    found["filtered gradients"] = gradients(parallel, model)
    return found


class Run:
    """A little trainer: steps, checkpoints, versions."""

    def __init__(
        self, path: Path, world: World | None, name: str, shape: Shape, config: OptimizerConfig, form: str = "bf16"
    ) -> None:
        self.name, self.form = name, form
        self.model, self.parallel = make_placed(world, name, shape, form)
        self.optimizer = MasterOptimizer(self.model, config, form, rows=self.parallel.rows)
        self.objects = Objects.open(path)
        self.checkpoints = Checkpoints(self.objects, 2, self.parallel)
        self.step = 0

    def train(self, steps: int) -> list[tuple[float, float]]:
        """(loss, length of the gradient) of each step."""
        found = []
        for _ in range(steps):
            self.step += 1
            loss = next_token_pass(self.parallel, self.model, make_microbatches(self.model.config, self.step))
            found.append((loss, self.optimizer.update(0.02).grad_norm))
        return found

    def save(self) -> None:
        self.checkpoints.save(Checkpoint("line", self.step, 0, {**self.optimizer.state(), "rng": torch.arange(8)}))

    def resume(self) -> int:
        checkpoint = self.checkpoints.newest("line")
        assert checkpoint is not None
        tensors = dict(checkpoint.tensors)
        assert torch.equal(tensors.pop("rng"), torch.arange(8))
        self.optimizer.load(tensors)
        self.step = checkpoint.step
        return self.step

    def masters(self) -> dict[str, Tensor]:
        state = {key: value for key, value in self.optimizer.state().items() if key.startswith("master.")}
        return assemble(self.parallel, {key.removeprefix("master."): value for key, value in state.items()})

    def digest(self) -> str:
        """Of the version one process would publish that had these masters."""
        whole = make_model(self.name, self.form)
        masters = self.masters()
        with torch.no_grad():
            for name, parameter in whole.named_parameters():
                parameter.copy_(masters[name])
        MasterOptimizer(whole, ADAMW, self.form)
        return root_digest(describe(to_host(whole.state_dict(), self.form)))

    def publisher(self, line: str) -> Exporter:
        config = TrainingConfig(snapshot_every=4)
        found = Exporter(self.parallel, self.model, WeightStore(self.objects), line, [self.form], config)
        found.resume()
        return found
