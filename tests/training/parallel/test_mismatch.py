"""Mismatch is measured by all ranks together, and its figures are those of one process."""

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmill import telemetry
from rollmill.errors import WeightsError
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import to_host
from rollmill.storage.objects import Objects
from rollmill.training.config import RLConfig, TrainingConfig
from rollmill.training.numerics.logprob_check import UNAVAILABLE, MismatchMeter, Probe, Sample, ServedWeights
from rollmill.training.optimizers.master_optimizer import MasterOptimizer
from rollmill.training.parallel.world import World
from rollmill.training.parallelism import Parallelism
from rollmill.training.publishing.exporter import Exporter
from rollmill.training.single import SINGLE
from rollmill.types import PolicyRef, Version
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.writing.publisher import Publisher
from tests.processes import SERVER
from tests.training.parallel.cases import ADAMW, MODELS, Shape, make_model, make_sequences, make_sharded
from tests.training.parallel.ranks import free_port, run_ranks
from tests.training.parallel.test_loop import RANKS, finish, train_rank
from tests.training.world import PACE, STEPS, honest_segment
from tests.training.world import World as TrainingWorld

VERSIONS = 3
CASES: list[tuple[str, Shape]] = [
    ("dense", (2, 1, 1)),
    ("dense", (2, 1, 2)),
    ("mixture", (2, 2, 1)),
    ("mixture", (4, 2, 2)),
    ("mixture", (4, 4, 1)),
    ("latent", (4, 1, 2)),
]


def publish(path: Path, name: str, form: str = "bf16") -> list[PolicyRef]:
    """Versions far from each other, in all of their tensors."""
    publisher = Publisher(WeightStore(Objects.open(path)), "main", form)
    found = []
    for number in range(VERSIONS):
        model = make_model(name, form)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 - 0.3 * number)
        MasterOptimizer(model, ADAMW, form)  # rounds it to the form
        found.append(publisher.publish(number, to_host(model.state_dict(), form)).policy)
    return found


def make_sample(name: str, policies: list[PolicyRef]) -> Sample:
    """Sequences of all versions, one after the other."""
    sequences = make_sequences(MODELS[name], 3)
    return Sample([Probe(policies[i % len(policies)], each) for i, each in enumerate(sequences)], Counter())


def measure(path: Path, model: Decoder, parallel: Parallelism, sample: Sample) -> tuple[np.ndarray, Counter[str]]:
    meter = MismatchMeter(ServedWeights(WeightStore(Objects.open(path)), VERSIONS), budget=20, router_replay=True)
    meter.compute_like(parallel, model)
    return meter.measure(1, sample)


def several(world: World, cases: list[tuple[Path, str, Shape, Sample]]) -> list[Any]:
    return [measure(path, *make_sharded(world, name, shape), sample) for path, name, shape, sample in cases]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_figures_are_those_of_one_process(ranks: int, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    cases = []
    for number, (name, shape) in enumerate(CASES):
        if shape[0] == ranks:
            path = tmp_path / str(number)
            policies = publish(path, name)
            # versions that are not there, and one that is another than its tokens say
            wrong = [replace(policies[0], number=99), replace(policies[1], digest="0" * 64)]
            cases.append((path, name, shape, make_sample(name, [*policies, *wrong])))
    found = run_ranks(tmp_path / "ranks", ranks, several, cases)
    for index, (path, name, _, sample) in enumerate(cases):
        deltas, left_out = measure(path, make_model(name), SINGLE, sample)
        assert deltas.size and left_out[UNAVAILABLE]
        for of_rank in found:
            np.testing.assert_allclose(of_rank[index][0], deltas, rtol=1e-4, atol=1e-5)
            assert of_rank[index][1] == left_out


def one_without(world: World, path: Path, sample: Sample) -> tuple[int, Counter[str]]:
    """The second rank cannot read version 1: nobody measures its tokens, and nobody waits."""
    read_part = WeightStore.read_part

    def broken(store: WeightStore, manifest: Any, *rest: Any) -> bytes:
        if world.rank == 1 and manifest.number == 1:
            raise WeightsError("the network is down")
        return read_part(store, manifest, *rest)

    WeightStore.read_part = WeightStore.read_pack = broken  # type: ignore[method-assign]
    deltas, left_out = measure(path, *make_sharded(world, "mixture", (2, 2, 1)), sample)
    return deltas.size, left_out


def test_a_rank_without_its_rows_costs_a_figure_and_nothing_else(tmp_path: Path) -> None:
    sample = make_sample("mixture", publish(tmp_path / "store", "mixture")[:2])
    tokens = [sum(probe.tokens for probe in sample.probes if probe.policy.number == number) for number in (0, 1)]
    expected = (tokens[0], Counter({UNAVAILABLE: tokens[1]}))
    assert run_ranks(tmp_path / "ranks", 2, one_without, tmp_path / "store", sample) == [expected] * 2


def kept_and_read(world: World, path: Path, form: str, sample: Sample) -> list[np.ndarray]:
    """What is measured with versions in memory, and with the same ones from the store."""
    model, parallel = make_sharded(world, "mixture", (2, 2, 1), form)
    store = WeightStore(Objects.open(path))
    exporter = Exporter(parallel, model, store, "kept", [form], TrainingConfig())
    kept = ServedWeights(WeightStore(Objects.open(path / "empty")), VERSIONS)
    for number in range(VERSIONS):
        parallel.models.load_version(model, store, Version("main", number), form)
        exported = exporter.export(model)
        manifest = store.manifest(Version("main", number), form)
        assert exporter.matches(manifest, exported)
        kept.remember(manifest.digest, exporter.held(exported))
    found = []
    for served in (kept, ServedWeights(store, 0)):
        meter = MismatchMeter(served, budget=20, router_replay=True)
        meter.compute_like(parallel, model)
        found.append(meter.measure(1, sample)[0])
    return found


@pytest.mark.parametrize("form", ["bf16", "fp8", "nvfp4"])
def test_versions_in_memory_are_those_of_the_store(form: str, tmp_path: Path) -> None:
    sample = make_sample("mixture", publish(tmp_path / "store", "mixture", form))
    for kept, read in run_ranks(tmp_path / "ranks", 2, kept_and_read, tmp_path / "store", form, sample):
        assert kept.size == sum(probe.tokens for probe in sample.probes)
        np.testing.assert_array_equal(kept, read)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Groups of a run whose tokens are what its version 0 gives, before it begins."""
    first = TrainingWorld(tmp_path_factory.mktemp("first"))
    first.trainer().run(0)
    model, by = first.version(0)
    world = TrainingWorld(tmp_path_factory.mktemp("honest"))
    for index in range(STEPS * PACE.groups_per_step):
        members = [honest_segment(model, 10 * index + member, by=by) for member in range(PACE.group_size)]
        world.add_group(f"group-{index:03d}", members, [1.0, 0.0, 0.0])
    return world.path


def watched_rank(directory: Path, measured: bool, rank: int, *rest: Any) -> None:
    """Leaves the random state it ends with."""
    if not measured:
        MismatchMeter.measure = lambda *_: (np.empty(0, np.float32), Counter())  # type: ignore[method-assign]
        ServedWeights.remember = lambda *_: None  # type: ignore[method-assign]
    train_rank(directory, rank, *rest)
    (directory / f"random-{rank}").write_bytes(torch.get_rng_state().numpy().tobytes())


def train(path: Path, cut: tuple[int, int], measured: bool, deaths: dict[int, str]) -> list[int | None]:
    port = free_port()
    rest = [(RANKS, port, deaths.get(rank, "none"), RLConfig(max_step_drift=0), cut) for rank in range(RANKS)]
    processes = [
        SERVER.Process(target=watched_rank, args=(path, measured, rank, *each)) for rank, each in enumerate(rest)
    ]
    for process in processes:
        process.start()
    return finish(list(processes))


@pytest.mark.slow
@pytest.mark.parametrize("cut", [(2, 1), (1, 2)], ids=["experts", "context"])
def test_measuring_leaves_no_trace_in_the_weights(cut: tuple[int, int], honest: Path, tmp_path: Path) -> None:
    runs = {}
    for measured in (True, False):
        path = tmp_path / str(measured)
        shutil.copytree(honest, path)
        if measured:  # a restart: versions that were in memory are read from the store
            assert any(train(path, cut, measured, {0: "commit_step:3"}))
        assert train(path, cut, measured, {}) == [0] * RANKS
        world = TrainingWorld(path)
        random = [(path / f"random-{rank}").read_bytes() for rank in range(RANKS)]
        runs[measured] = world.chain(), world.ledger.counts(), random
    assert runs[True] == runs[False]
    steps = [e for e in telemetry.read_events(tmp_path / "True" / "events") if e["kind"] == "step"]
    assert {event["step"] for event in steps} == set(range(1, STEPS + 1))
    for event in steps:
        assert event["mismatch_tokens"] == 5 and event["mismatch_max"] < 1e-4, event["step"]
    assert steps[-1]["drift_k3"] > 1e-3, "the policy has moved meanwhile"
