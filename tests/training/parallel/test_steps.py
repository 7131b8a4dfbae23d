"""Steps, checkpoints and versions of ranks against those of one process."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from rollmill.models.host_tensors import load_host, to_host
from rollmill.storage.objects import Objects
from rollmill.training.config import MidtrainConfig, OptimizerConfig, TrainingConfig
from rollmill.training.parallel.world import World
from rollmill.training.pretraining.document_objective import MidtrainObjective
from rollmill.training.publishing.exporter import Exporter
from rollmill.types import Version
from rollmill.weights.format import tensors as tensors_module
from rollmill.weights.format.manifest import describe, root_digest
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.writing.publisher import Publisher
from tests.training.parallel.cases import ADAMW, MUON, Run, Shape, make_model, make_placed
from tests.training.parallel.ranks import run_ranks
from tests.training.streams import generated

pytestmark = pytest.mark.slow


def train(world: World, path: Path, name: str, shape: Shape, config: OptimizerConfig) -> dict[str, Any]:
    """Three steps; a checkpoint after the second, from which a second run repeats the third."""
    run = Run(path, world, name, shape, config)
    found: dict[str, Any] = {"figures": run.train(2)}
    run.save()
    found["figures"] += run.train(1)
    found["masters"], found["digest"] = run.masters(), run.digest()
    again = Run(path, world, name, shape, config)
    assert again.resume() == 2
    found["again"] = again.train(1)
    found["masters again"] = again.masters()
    return found


def several(world: World, path: Path, cases: list[tuple[str, Shape, OptimizerConfig]]) -> list[dict[str, Any]]:
    return [train(world, path / str(index), *case) for index, case in enumerate(cases)]


def test_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    cases = [("dense", (2, 1, 2), MUON), ("mixture", (2, 2, 1), ADAMW)]
    found = run_ranks(tmp_path / "ranks", 2, several, tmp_path / "runs", cases)
    for index, (name, _, config) in enumerate(cases):
        alone = Run(tmp_path / "alone", None, name, (1, 1, 1), config)
        expected, masters = alone.train(3), alone.masters()
        for of_rank in found:
            assert of_rank[index]["figures"] == [pytest.approx(figures, rel=1e-3) for figures in expected]
            for key, master in masters.items():
                # Adam makes much of the smallest gradients: rounding there shows
                torch.testing.assert_close(of_rank[index]["masters"][key], master, rtol=1e-2, atol=2e-3, msg=key)


def test_a_resumed_run_has_the_same_bits(tmp_path: Path) -> None:
    cases = [("mixture", (4, 2, 2), ADAMW)]
    for of_rank in run_ranks(tmp_path / "ranks", 4, several, tmp_path / "runs", cases):
        assert of_rank[0]["again"] == of_rank[0]["figures"][2:]
        for name, master in of_rank[0]["masters"].items():
            assert torch.equal(of_rank[0]["masters again"][name], master), name


def dither(world: World | None, path: Path, forms: list[str]) -> list[dict[str, Any]]:
    shape = (1, 1, 1) if world is None else (2, 2, 1)
    runs = [Run(path, world, "mixture", shape, ADAMW, form) for form in forms]
    for run in runs:
        run.optimizer.dither(3)
    return [run.masters() for run in runs]


def test_ranks_move_masters_inside_their_quantum_as_one_process_does(tmp_path: Path) -> None:
    forms = ["bf16", "fp8", "nvfp4"]
    for found in run_ranks(tmp_path / "ranks", 2, dither, tmp_path / "runs", forms):
        for own, expected in zip(found, dither(None, tmp_path / "alone", forms), strict=True):
            assert all(torch.equal(own[name], master) for name, master in expected.items())


def resume(world: World | None, path: Path, shape: Shape) -> dict[str, Any]:
    """Go on from the newest checkpoint by one step, and leave another."""
    run = Run(path, world, "mixture", shape, ADAMW)
    step = run.resume()
    state = run.masters()
    figures = run.train(1)
    run.save()
    return {"step": step, "resumed": state, "figures": figures, "trained": run.masters()}


def begin(world: World, path: Path, shape: Shape) -> dict[str, Any]:
    run = Run(path, world, "mixture", shape, ADAMW)
    figures = run.train(2)
    run.save()
    return {"figures": figures, "trained": run.masters()}


def test_from_four_ranks_to_two_to_one_and_back(tmp_path: Path) -> None:
    path = tmp_path / "store"
    stages = [run_ranks(tmp_path / "four", 4, begin, path, (4, 2, 1))[0]]
    stages.append(run_ranks(tmp_path / "two", 2, resume, path, (2, 2, 2))[0])
    stages.append(resume(None, path, (1, 1, 1)))
    stages.append(run_ranks(tmp_path / "back", 2, resume, path, (2, 1, 1))[0])
    assert [stage["step"] for stage in stages[1:]] == [2, 3, 4]
    for before, after in itertools.pairwise(stages):
        assert before["trained"].keys() == after["resumed"].keys()
        for name, master in before["trained"].items():
            assert torch.equal(after["resumed"][name], master), name
    whole = Run(tmp_path / "whole", None, "mixture", (1, 1, 1), ADAMW).train(5)
    figures = [each for stage in stages for each in stage["figures"]]
    assert figures == [pytest.approx(each, rel=1e-3) for each in whole]
    kept = Objects.open(path).list("checkpoints")
    assert {key.split("/")[-2] for key in kept} == {"00000004", "00000005"}, "older ones are removed whole"


def damaged(world: World, path: Path) -> int:
    run = Run(path, world, "dense", (2, 1, 1), ADAMW)
    for _ in range(2):
        run.train(1)
        run.save()
    if world.first:
        key = "checkpoints/line/00000002/state-00001-of-00002-00000.safetensors"
        data = bytearray(run.objects.get(key))
        data[-1] ^= 1
        run.objects.put(key, bytes(data))
    world.from_first(None)
    return run.resume()


def test_a_checkpoint_with_a_damaged_piece_is_passed_over(tmp_path: Path) -> None:
    assert run_ranks(tmp_path / "ranks", 2, damaged, tmp_path / "store") == [1, 1]


def publish(world: World, path: Path, name: str, shape: Shape, form: str, chunk: int) -> list[tuple[str, str, bool]]:
    """Three versions, the last by a run that has started again: (digest published, digest of the whole, confirmed)."""
    tensors_module.CHUNK_ELEMENTS = chunk  # so that tensors have several chunks, cut across the ranks
    run = Run(path, world, name, shape, ADAMW, form)
    found = []
    for number in range(3):
        if number != 1:
            publisher = run.publisher("main")
        chunks = publisher.export(run.model)
        manifest = publisher.publish(number, chunks, None, {"step": number})
        same = publisher.matches(manifest, publisher.export(run.model))
        found.append((manifest.digest, run.digest(), same))
        run.train(1)
        assert not publisher.matches(manifest, publisher.export(run.model))
    return found


@pytest.mark.parametrize(
    ("name", "shape", "form"),
    [
        ("dense", (2, 1, 1), "bf16"),
        ("mixture", (4, 2, 1), "bf16"),
        ("dense", (2, 1, 2), "fp8"),
        ("mixture", (2, 2, 1), "nvfp4"),
        ("mixture", (4, 1, 1), "fp8"),
    ],
)
def test_published_as_one_process_would(name: str, shape: Shape, form: str, tmp_path: Path) -> None:
    for of_rank in run_ranks(tmp_path / "ranks", shape[0], publish, tmp_path / "store", name, shape, form, 200):
        assert all(published == whole and confirmed for published, whole, confirmed in of_rank)
    tensors_module.CHUNK_ELEMENTS, usual = 200, tensors_module.CHUNK_ELEMENTS
    tensors_module.chunk_ranges.cache_clear()
    try:
        store = WeightStore(Objects.open(tmp_path / "store"))
        assert [ok for _, ok, _ in store.verify("main", form)] == [True] * 3
        publisher = Publisher(store, "main", form)
        publisher.resume()
        assert publisher.last is not None and publisher.last.version == Version("main", 2)
        assert max(len(entry.chunks) for entry in publisher.last.tensors) > 1
    finally:
        tensors_module.CHUNK_ELEMENTS = usual
        tensors_module.chunk_ranges.cache_clear()


def publish_forms(world: World, path: Path) -> None:
    """Version 1 is published in one form only, as after a kill."""
    run = Run(path, world, "mixture", (2, 2, 1), ADAMW)
    config = TrainingConfig(ranks=2, expert_parallel=2)
    for number, forms in enumerate((("bf16", "fp8"), ("bf16",), ("bf16", "fp8"))):
        publisher = Exporter(run.parallel, run.model, WeightStore(run.objects), "main", forms, config)
        publisher.resume()
        publisher.publish(number, publisher.export(run.model), None, {"step": number})
        run.train(1)


def test_ranks_publish_several_forms(tmp_path: Path) -> None:
    run_ranks(tmp_path / "ranks", 2, publish_forms, tmp_path / "store")
    store = WeightStore(Objects.open(tmp_path / "store"))
    for number in range(3):
        model = make_model("mixture")
        load_host(model, store.load(Version("main", number)))
        whole = root_digest(describe(to_host(model.state_dict(), "fp8")))
        assert store.manifest(Version("main", number), "fp8").digest == whole


def test_meshes_must_cut_evenly() -> None:
    with pytest.raises(ValueError, match="expert_parallel \\(3\\) must divide ranks"):
        TrainingConfig(ranks=4, expert_parallel=3)
    with pytest.raises(ValueError, match="context_parallel \\(3\\) must divide ranks"):
        TrainingConfig(ranks=4, context_parallel=3)
    with pytest.raises(ValueError, match="must divide the model's 0 experts"):
        TrainingConfig(ranks=4, expert_parallel=2).check_model(0)
    with pytest.raises(ValueError, match="must divide the model's 4 experts"):
        TrainingConfig(ranks=8, expert_parallel=8).check_model(4)
    TrainingConfig(ranks=4, expert_parallel=2, context_parallel=4).check_model(4)


def balance(world: World | None, shape: Shape) -> dict[str, torch.Tensor]:
    """The gate's biases after two steps."""
    model, parallel = make_placed(world, "mixture", shape)
    documents = [([(7 * index + place) % 24 for place in range(5 + index)], [True] * (5 + index)) for index in range(8)]
    objective = MidtrainObjective(
        MidtrainConfig(documents_per_step=4, gate_bias_rate=0.25),
        generated(lambda index: documents[index]),
        max_context=64,
        tokens_per_microbatch=24,
    )
    for number in (1, 2):
        batch = objective.next_batch(number, 0.0, None, lambda: False)  # type: ignore[arg-type]
        assert batch is not None
        objective.backward(model, batch, lambda: None, parallel)
    return {name: each.clone() for name, each in model.named_buffers() if name.endswith("router.bias")}


def test_gate_biases_move_alike_on_all_ranks(tmp_path: Path) -> None:
    alone, before = balance(None, (1, 1, 1)), dict(make_model("mixture").named_buffers())
    assert any(not torch.equal(each, before[name]) for name, each in alone.items())
    for found in run_ranks(tmp_path / "ranks", 2, balance, (2, 2, 1)):
        assert found.keys() == alone.keys() and all(torch.equal(found[name], each) for name, each in alone.items())
