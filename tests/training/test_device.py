"""The loop on the CPU and on CUDA: reproducible bits, all figures every step, and no effect of broken numbers."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmill import telemetry
from rollmill.errors import TrainingError
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.device import Device, decoder_on
from rollmill.models.host_tensors import to_host
from rollmill.models.moe import Replay, Routing
from rollmill.training.config import MidtrainConfig, OptimizerConfig, RLConfig, TrainingConfig
from rollmill.training.loop import Trainer
from rollmill.training.numerics.graphs import GraphedPasses
from rollmill.training.numerics.router_replay import RouterMeasures
from rollmill.training.pretraining.document_objective import MidtrainObjective
from rollmill.trajectories.staleness import Pace
from rollmill.types import Version
from rollmill.weights.writing.publisher import Publisher
from tests.training.streams import generated
from tests.training.world import MODEL, STEPS, TRAINING, World, honest_segment, make_segment, policy

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=GPU)])
def device(request: pytest.FixtureRequest) -> Device:
    return request.param


def document(index: int) -> tuple[list[int], list[bool]]:
    """All of one length, with every fourth token not a target: shapes repeat, and rows are selected."""
    tokens = np.random.default_rng((5, index)).integers(0, MODEL.vocab_size, 16)
    return tokens.tolist(), [place % 4 != 2 for place in range(16)]


def midtrainer(
    world: World, training: TrainingConfig = TRAINING, parent: Version | None = None, form: str = "bf16"
) -> Trainer:
    objective = MidtrainObjective(
        MidtrainConfig(documents_per_step=6, publish_every=1),
        generated(document),
        max_context=world.model.max_context,
        tokens_per_microbatch=48,
    )
    return Trainer(
        training,
        world.model,
        objective,
        world.weights,
        world.objects,
        "main",
        parent,
        steps=STEPS,
        seed=5,
        form=form,
        device=world.device,
    )


def run(world: World, kind: str, until: int, training: TrainingConfig = TRAINING) -> None:
    (world.trainer(training) if kind == "rl" else midtrainer(world, training)).run(until)


def prepared(path: Path, device: Device, model: ModelConfig = MODEL) -> World:
    world = World(path, model, device)
    world.add_steps()
    return world


@pytest.mark.parametrize("kind", ["rl", "midtrain"])
def test_a_run_that_was_interrupted_has_the_bits_of_one_that_was_not(tmp_path: Path, device: Device, kind: str):
    """On CUDA the uninterrupted run replays recorded graphs where the resumed one runs its first passes directly."""
    straight, stopped = (prepared(tmp_path / name, device) for name in ("straight", "stopped"))
    run(straight, kind, STEPS)
    for until in (3, STEPS):
        run(World(stopped.path, device=device), kind, until)
    assert len(straight.chain()) == STEPS + 1 and straight.chain() == stopped.chain()
    assert len(set(straight.chain())) == STEPS + 1


@pytest.mark.parametrize("form", ["fp8", "nvfp4"])
def test_a_quantised_run_resumes_whatever_uninitialised_memory_held(
    tmp_path: Path, device: Device, form: str, monkeypatch: pytest.MonkeyPatch
):
    """A model is allocated in uninitialised memory, which may hold numbers that have no codes."""

    def littered(*given: Any) -> Decoder:
        model = decoder_on(*given)
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, torch.nan)
        return model

    monkeypatch.setattr("rollmill.training.single.decoder_on", littered)
    for until in (1, 3):
        trainer = midtrainer(World(tmp_path, device=device), form=form)
        assert trainer.run(until) == Version("main", until)


@GPU
def test_passes_of_repeated_shapes_are_recorded_in_mid_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    recorded: list[Any] = []
    record = GraphedPasses._record
    monkeypatch.setattr(GraphedPasses, "_record", lambda self, *given: recorded.append(1) or record(self, *given))
    run(prepared(tmp_path, "cuda"), "midtrain", STEPS)
    assert len(recorded) == 1, "two micro-batches per step, all of one shape"


def test_a_deleted_trainer_is_freed_at_once(tmp_path: Path, device: Device):
    """If graphs wait for the garbage collector, they may be freed while another one is recorded, which breaks it."""
    trainer = midtrainer(prepared(tmp_path, device))
    trainer.run(3)
    passes = weakref.ref(trainer._objective._pass)  # type: ignore[attr-defined]
    gc.disable()
    try:
        del trainer
        assert passes() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["rl", "midtrain"])
def test_training_without_determinism(tmp_path: Path, device: Device, kind: str):
    training = TRAINING.model_copy(update={"deterministic": False})
    world = prepared(tmp_path, device)
    run(world, kind, 3, training)
    run(World(world.path, device=device), kind, 5, training)
    assert torch.get_deterministic_debug_mode() == 0
    steps = [manifest.step for line in ("main", "main.2") for manifest in world.weights.versions(line)]
    assert max(step for step in steps if step is not None) == 5


@pytest.mark.parametrize("kind", ["rl", "midtrain"])
def test_recomputed_layers_change_no_bit(tmp_path: Path, device: Device, kind: str):
    kept, again = (prepared(tmp_path / name, device) for name in ("kept", "again"))
    run(kept, kind, 3)
    run(again, kind, 3, TRAINING.model_copy(update={"recompute_every": 1}))
    assert kept.chain() == again.chain()


FIGURES = [
    "loss", "tokens", "trained_tokens", "drift_k1", "drift_k3", "drift_p99", "drift_max", "drift_outside", "ess",
    "mismatch_k1", "mismatch_k3", "mismatch_p99", "mismatch_max", "mismatch_outside", "mismatch_tokens",
    "mask_fraction", "mask_fraction_positive", "mask_fraction_negative", "clip_fraction", "clip_fraction_positive",
    "clip_fraction_negative", "veto_share", "entropy", "kl_entropy", "router_flip_rate", "router_zero_overlap",
    "router_replaced", "router_live_rows", "expert_load_max", "staleness_mean", "staleness_max", "staleness_queue",
    "staleness_flight", "reference_k3", "grad_norm", "lr",
]  # fmt: skip


def test_every_step_has_every_figure(tmp_path: Path, device: Device):
    """Tokens of an engine that computes in FP32 on the CPU, trained on the device of the test."""
    telemetry.open_events(tmp_path / "events", "trainer")
    world = World(tmp_path, device=device)
    config = RLConfig(kl_factor=0.01, reference="main@0", max_step_drift=0)
    trainer = world.trainer(pace=Pace(1, 4, 4), config=config)
    for step in range(1, 4):
        trainer.run(step - 1)
        model, current = world.version(step - 1)
        members = [honest_segment(model, 10 * step + seed, 1.0, current) for seed in range(4)]
        world.add_group(f"group-{step}", members, [1.0, 0.0, 1.0, 0.0])
    trainer.run(3)
    events = [event for event in telemetry.read_events(tmp_path / "events") if event["kind"] == "step"]
    assert len(events) == 3
    for event in events:
        assert [name for name in FIGURES if event[name] is None] == []
        for name in ("router_flip_rate", "router_zero_overlap", "expert_load"):
            assert len(event[f"{name}_by_layer"]) == MODEL.moe_layers
        assert event["router_zero_overlap"] == 0 and event["ess"] > 0.99
        assert event["mismatch_max"] < (0.1 if device == "cuda" else 1e-5), "the same weights, other rounding"
        assert 0 < event["entropy"] <= np.log(MODEL.vocab_size) + 1e-3


@GPU
@pytest.mark.parametrize("move", [(0, 0), (1, 0), (0, 1)])
def test_router_figures_are_the_same_on_both_devices(move: tuple[int, int]):
    draw = torch.Generator().manual_seed(0)
    live = torch.rand(200, 3, 8, generator=draw).topk(2).indices
    replay = Replay(live.roll(move, (0, 1)), torch.rand(200, generator=draw) < 0.9)
    found = []
    for where in ("cpu", "cuda"):
        measures = RouterMeasures()
        for _ in range(2):
            routings = [Routing(torch.ones(200, 8), live[:, layer], replay.routes[:, layer]) for layer in range(3)]
            measures.add([Routing(*(x.to(where) for x in vars(each).values())) for each in routings], replay)
        found.append(measures.figures())
    assert found[0] == found[1] and ("router_fit" in found[0]) == (move != (0, 0))


@pytest.mark.parametrize(
    "dials",
    [
        {"loss": "gspo", "veto_ratio": 1e-3, "aggregation": "sequence_mean", "entropy_factor": 1e-3},
        {"loss": "mis", "weight_level": "sequence", "kl_factor": 0.1, "kl_form": "k3", "reference": "main@0"},
        {"loss": "dppo", "replay_plausibility": 0.5, "veto_drift": 1.0},
    ],
)
def test_losses_over_sequences_and_routes_train_and_repeat(tmp_path: Path, device: Device, dials: dict[str, Any]):
    first, second = (prepared(tmp_path / name, device) for name in ("first", "second"))
    for world in (first, second):
        world.trainer(config=RLConfig(max_step_drift=0, **dials)).run(3)
    assert first.chain() == second.chain() and len(set(first.chain())) == 4


# numbers that are not finite


def poisoned_parent(world: World) -> Version:
    """A published version with one weight that is not finite, as the parent of a run."""
    model = Decoder(world.model)
    model.initialise(0)
    with torch.no_grad():
        model.embedding[3, 0] = torch.inf
    Publisher(world.weights, "broken", "bf16").publish(0, to_host(model.state_dict()))
    return Version("broken", 0)


@pytest.mark.parametrize("kind", ["rl", "midtrain"])
def test_weights_that_are_not_finite_end_the_run_unchanged(tmp_path: Path, device: Device, kind: str):
    telemetry.open_events(tmp_path / "events", "trainer")
    world = prepared(tmp_path, device)
    training = TRAINING.model_copy(update={"max_bad_steps": 2})
    parent = poisoned_parent(world)
    trainer = world.trainer(training, parent=parent) if kind == "rl" else midtrainer(world, training, parent)
    with pytest.raises(TrainingError, match="in the last 2 steps, up to step 2, gradients were not finite"):
        trainer.run(STEPS)
    assert len({digest for _, digest in world.chain()}) == 1, "the weights did not change"
    assert world.weights.manifest(Version("main", 2)).metadata["unchanged"] == "its gradient was not finite"
    steps = [event for event in telemetry.read_events(tmp_path / "events") if event["kind"].endswith("step")]
    assert [(event["applied"], event["grad_norm"], event["loss"]) for event in steps] == [(False, None, None)] * 2


def test_a_batch_that_is_not_finite_costs_only_its_own_step(tmp_path: Path, device: Device):
    telemetry.open_events(tmp_path / "events", "trainer")
    world = World(tmp_path, device=device)
    for step in range(1, 5):
        members = [make_segment([0, 0, 0, 1, 1, 1], seed=10 * step + index, policies=[policy()]) for index in range(2)]
        if step in (2, 3):
            members[0].logprobs[4] = -3e38  # finite, as payloads must be, but too large to compute with
        world.add_group(f"group-{step}", members, [1.0, 0.0])
    world.trainer(pace=Pace(1, 2, 100)).run(4)
    digests = [digest for _, digest in world.chain()]
    assert digests[1] == digests[2] == digests[3] and len(set(digests)) == 3, "steps 1 and 4 learnt something"
    texts = [event["text"] for event in telemetry.read_events(tmp_path / "events") if event["kind"] == "warning"]
    assert sum("changed nothing: its gradient was not finite" in text for text in texts) == 1, "once a minute"


# gates with a bias, which is not in the optimizer

BIASED = MODEL.model_copy(update={"gate": "sigmoid", "gate_bias": True})


@pytest.mark.parametrize("kind", ["rl", "midtrain"])
def test_a_gates_bias_survives_a_restart(tmp_path: Path, device: Device, kind: str):
    world = prepared(tmp_path, device, BIASED)
    model = Decoder(BIASED)
    model.initialise(0)
    for layer in model.layers:
        layer.mlp.router.bias.copy_(torch.linspace(-0.3, 0.3, BIASED.experts))  # type: ignore[union-attr, operator]
    Publisher(world.weights, "base", "bf16").publish(0, to_host(model.state_dict()))
    for until in (3, 5):  # a new process each
        again = World(tmp_path, BIASED, device)
        parent = Version("base", 0)
        (again.trainer(parent=parent) if kind == "rl" else midtrainer(again, parent=parent)).run(until)
    (name,) = {key for key in again.weights.load(Version("main", 5)) if key.endswith("1.mlp.router.bias")}
    given = to_host(model.state_dict())[name].data.tobytes()
    served = [again.weights.load(Version("main", number))[name].data.tobytes() for number in (0, 3, 5)]
    assert served[0] == given and (len(set(served)) == 1) == (kind == "rl"), "RL freezes it, mid-training moves it"
    assert again.weights.numbers("main.2") == [], "the checkpoint had the published bias"


def test_a_checkpoint_without_the_bias_is_refused(tmp_path: Path):
    plain = prepared(tmp_path, "cpu", MODEL.model_copy(update={"gate": "sigmoid"}))
    run(plain, "rl", 2)
    with pytest.raises(TrainingError, match=r"it has the buffers \[\], the model \['layers.0.mlp.router.bias'"):
        World(tmp_path, BIASED).trainer().run(3)


@GPU
def test_gradients_of_many_micro_batches_are_added_in_fp32(tmp_path: Path):
    """512 micro-batches of the same document have its gradient; a bf16 sum would stop growing half-way."""
    telemetry.open_events(tmp_path / "events", "trainer")
    for count in (1, 512):
        world = World(tmp_path / str(count), device="cuda")
        config = MidtrainConfig(documents_per_step=count, balance=0.0)
        objective = MidtrainObjective(
            config, generated(lambda index: document(0)), max_context=64, tokens_per_microbatch=1
        )
        Trainer(TRAINING, MODEL, objective, world.weights, world.objects, "main", steps=1, seed=0, device="cuda").run(1)
    one, many = [event for event in telemetry.read_events(tmp_path / "events") if event["kind"] == "document_step"]
    assert many["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.01)
    assert many["loss"] == pytest.approx(one["loss"], rel=1e-4)


def test_optimizers_of_both_kinds_train(tmp_path: Path, device: Device):
    training = TrainingConfig(optimizer=OptimizerConfig(kind="muon", lr=0.01), tokens_per_microbatch=48)
    world = prepared(tmp_path, device)
    run(world, "midtrain", 3, training)
    assert len(set(world.chain())) == 4
