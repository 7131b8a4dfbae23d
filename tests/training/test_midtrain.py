from pathlib import Path

import numpy as np

from rollmill import telemetry
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.storage.objects import Objects
from rollmill.training.config import MidtrainConfig, OptimizerConfig, TrainingConfig
from rollmill.training.loop import Trainer
from rollmill.training.pretraining.document_objective import MidtrainObjective
from rollmill.types import Version
from rollmill.weights.reading.weight_store import WeightStore
from tests.training.streams import generated
from tests.training.world import MODEL

STEPS = 30


def counting(index: int, seed: int = 5) -> tuple[list[int], list[bool]]:
    """Documents that count up by their own stride: easy to learn, but only from the tokens before."""
    draw = np.random.default_rng((seed, index))
    stride, length = int(draw.integers(1, 4)), int(draw.integers(6, 20))
    tokens = [(index + stride * place) % MODEL.vocab_size for place in range(length)]
    return tokens, [place > 1 for place in range(length)]


def make_trainer(
    path: Path,
    documents=counting,
    training: TrainingConfig | None = None,
    model: ModelConfig = MODEL,
    **settings: float,
) -> tuple[Trainer, WeightStore]:
    objective = MidtrainObjective(
        MidtrainConfig(documents_per_step=8, publish_every=10, **settings),  # type: ignore[arg-type]
        generated(documents),
        max_context=MODEL.max_context,
        tokens_per_microbatch=64,
    )
    training = training or TrainingConfig(checkpoint_every=7, optimizer=OptimizerConfig(lr=0.02, warmup_steps=3))
    objects = Objects.open(path / "store")
    weights = WeightStore(objects)
    return Trainer(training, model, objective, weights, objects, "base", steps=STEPS, seed=5), weights


def test_loss_falls_and_versions_are_published_at_intervals(tmp_path: Path):
    telemetry.open_events(tmp_path / "events", "midtrain")
    trainer, weights = make_trainer(tmp_path)
    assert trainer.run(25) == Version("base", 3)
    steps = [manifest.step for manifest in weights.versions("base")]
    assert steps == [0, 10, 20, 25], "the last step is always a version"
    events = [event for event in telemetry.read_events(tmp_path / "events") if event["kind"] == "document_step"]
    losses = [event["loss"] for event in events]
    assert len(losses) == 25 and np.mean(losses[-5:]) < 0.6 * np.mean(losses[:5])
    assert all(len(event["expert_load_by_layer"]) == MODEL.moe_layers for event in events)
    assert trainer.run(STEPS) == Version("base", 4), "the run can continue"


def test_resume_is_exact_from_any_checkpoint(tmp_path: Path):
    straight, expected = make_trainer(tmp_path / "straight")
    straight.run(STEPS)
    make_trainer(tmp_path / "stopped")[0].run(12)  # checkpoints at 7 and, because it stopped there, at 12
    resumed, weights = make_trainer(tmp_path / "stopped")
    assert resumed.run(STEPS) == Version("base", 4)
    digests = {manifest.step: manifest.digest for manifest in expected.versions("base")}
    resumed_digests = {manifest.step: manifest.digest for manifest in weights.versions("base")}
    assert resumed_digests.items() >= digests.items() and set(resumed_digests) - set(digests) == {12}


BIASED = MODEL.model_copy(update={"gate": "sigmoid", "gate_bias": True})


def test_gate_biases_follow_the_load_and_are_published_and_resumed(tmp_path: Path) -> None:
    def biases(weights: WeightStore, number: int) -> np.ndarray:
        tensors = weights.load(Version("base", number))
        return np.stack([each.data.view(np.float32) for name, each in tensors.items() if name.endswith("router.bias")])

    frozen, kept = make_trainer(tmp_path / "frozen", model=BIASED, balance=0.0, gate_bias_rate=0.0)
    frozen.run(20)
    assert not biases(kept, 2).any()
    straight, expected = make_trainer(tmp_path / "straight", model=BIASED, balance=0.0, gate_bias_rate=0.01)
    straight.run(20)
    moved = biases(expected, 2)
    assert len(moved) == MODEL.moe_layers and 0.01 <= np.abs(moved).max() <= 0.2001
    assert np.allclose(moved, np.round(moved / 0.01) * 0.01, atol=1e-6), "each step moves by the rate, or not at all"
    make_trainer(tmp_path / "stopped", model=BIASED, balance=0.0, gate_bias_rate=0.01)[0].run(12)
    resumed, weights = make_trainer(tmp_path / "stopped", model=BIASED, balance=0.0, gate_bias_rate=0.01)
    resumed.run(20)
    assert [m.digest for m in weights.versions("base") if m.step == 20] == [
        expected.manifest(Version("base", 2)).digest
    ]


def test_other_documents_start_a_new_line(tmp_path: Path):
    """Checkpoint 7 is loaded, and step 10 gives other weights."""
    trainer, weights = make_trainer(tmp_path, training=TrainingConfig(checkpoint_every=7, keep_checkpoints=9))
    trainer.run(10)
    trainer._checkpoints._objects.delete("checkpoints/base/00000010/checkpoint.json")

    trainer, weights = make_trainer(tmp_path, lambda index: counting(index, seed=6))
    assert trainer.run(20) == Version("base.2", 2)
    manifests = weights.versions("base.2")
    assert [(manifest.number, manifest.step) for manifest in manifests] == [(0, 7), (1, 10), (2, 20)]
    assert manifests[0].parent == Version("base", 0) and manifests[0].metadata["abandons"] == ["base@1"]


def test_targets_are_the_masked_tokens_only() -> None:
    documents = [([5, 6, 7, 8], [True, False, True, False]), ([1, 2], [True, False])]
    objective = MidtrainObjective(
        MidtrainConfig(documents_per_step=2),
        generated(lambda index: documents[index]),
        max_context=64,
        tokens_per_microbatch=64,
    )
    batch = objective.next_batch(1, 0.0, None, lambda: False)  # type: ignore[arg-type]
    assert batch is not None
    model = Decoder(MODEL)
    model.initialise(0)
    figures = objective.backward(model, batch)
    # a first token has no context, and the second document has no other token
    assert figures["targets"] == 1 and figures["notes"] == {"nothing to learn": 1}
    (part,) = batch.microbatches
    assert part.tokens_N.tolist() == [5, 6] and part.targets_M.tolist() == [7] and part.rows_M.tolist() == [1]
