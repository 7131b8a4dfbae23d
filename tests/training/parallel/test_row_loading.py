"""A rank gets the rows it holds, the same bits as one process has there, and never has a whole model in memory."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from rollmill.errors import WeightsError
from rollmill.models import decoder as decoder_module
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.host_tensors import layout_in, load_host, to_host
from rollmill.models.quantize import dequantise_rows, place
from rollmill.storage.objects import Objects
from rollmill.training.loop import Trainer
from rollmill.training.numerics.frozen_model import FrozenModel
from rollmill.training.optimizers.master_optimizer import MasterOptimizer
from rollmill.training.parallel.many_ranks import ShardedModels, over_ranks
from rollmill.training.parallel.mesh import Meshes
from rollmill.training.parallel.world import World
from rollmill.training.parallelism import Parallelism
from rollmill.training.single import SINGLE
from rollmill.types import Version
from rollmill.weights.format import tensors as tensors_module
from rollmill.weights.format.manifest import layout_of
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.reading import chunks as ranges
from rollmill.weights.reading import chunks as repair
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.writing import encoder as packs
from rollmill.weights.writing.publisher import Publisher
from tests.training.parallel.cases import (
    ADAMW,
    CPU,
    MODELS,
    Shape,
    assemble,
    make_microbatches,
    make_model,
    make_sharded,
)
from tests.training.parallel.ranks import run_ranks
from tests.training.world import MODEL, TRAINING
from tests.training.world import World as TrainingWorld

# twenty times what a rank may have beside its rows
LARGE = ModelConfig(
    vocab_size=512,
    layers=8,
    width=128,
    heads=4,
    kv_heads=2,
    head_dim=32,
    mlp_width=256,
    experts=8,
    experts_per_token=2,
    expert_width=64,
    max_context=16,
)
LOADED = Version("base", 1)


class Loaded(NamedTuple):
    state: dict[str, Tensor]  # made whole
    read: int  # bytes of packs
    held: int  # bytes of the rows
    most: int  # bytes in memory at one time, with the rows


def small_pieces(elements: int = 512) -> None:
    """Everything is read, kept and drawn in little pieces, of which the models here have many."""
    tensors_module.CHUNK_ELEMENTS = decoder_module.DRAWN_ELEMENTS = elements
    tensors_module.chunk_ranges.cache_clear()
    packs.RUN_BYTES, ranges.BATCH_BYTES = 2 * elements, 32 * elements


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Any:
    for module, name in (
        (tensors_module, "CHUNK_ELEMENTS"),
        (packs, "RUN_BYTES"),
        (ranges, "BATCH_BYTES"),
        (decoder_module, "DRAWN_ELEMENTS"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))  # to be put back
    small_pieces()
    yield
    monkeypatch.undo()
    tensors_module.chunk_ranges.cache_clear()


def publish(path: Path, model: Decoder, form: str) -> Decoder:
    """A snapshot and a delta of it; the model has the values of the second."""
    publisher = Publisher(WeightStore(Objects.open(path)), LOADED.line, form)
    for number in range(LOADED.number + 1):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        MasterOptimizer(model, ADAMW, form)  # rounds it to the form
        publisher.publish(number, to_host(model.state_dict(), form))
    return model


class Arrays:
    """Bytes of the arrays that weights are decoded into and copied to, as long as anybody has them."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def add(self, array: np.ndarray) -> np.ndarray:
        self.now += array.nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(array, self._remove, array.nbytes)
        return array

    def _remove(self, size: int) -> None:
        self.now -= size


def peak_of(work: Callable[[], Any]) -> int:
    """The most bytes that tensors and arrays of weights had at one time, counted where they are made."""
    arrays, decode, check = Arrays(), repair.decode_chunk, HostTensor.__post_init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repair, "decode_chunk", lambda *call: arrays.add(decode(*call)))
        patch.setattr(HostTensor, "__post_init__", lambda tensor: (check(tensor), arrays.add(tensor.data)))
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            work()
    now = most = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most + arrays.most


def load(world: World, config: ModelConfig, shape: Shape, path: Path | None, form: str, measured: bool) -> Loaded:
    small_pieces(4096 if measured else 512)
    read: list[int] = []
    whole_of, range_of = Objects.get, Objects.get_range

    def counted(get: Callable[..., bytes]) -> Callable[..., bytes]:
        def wrapped(objects: Objects, key: str, *rest: int) -> bytes:
            data = get(objects, key, *rest)
            read.append(len(data) if "/packs/" in key else 0)
            return data

        return wrapped

    Objects.get, Objects.get_range = counted(whole_of), counted(range_of)  # type: ignore[method-assign]
    parallel = over_ranks(world, Meshes(*shape, CPU))
    models: list[Decoder] = []

    def make() -> None:
        models.append(parallel.models.make_model(config, form, CPU))
        if path is None:
            parallel.models.initialise(models[0], 1)
        else:
            parallel.models.load_version(models[0], WeightStore(Objects.open(path)), LOADED, form)

    most = 0
    if measured:
        most = peak_of(make)
    else:
        make()
    Objects.get, Objects.get_range = whole_of, range_of  # type: ignore[method-assign]
    assert isinstance(parallel.models, ShardedModels)
    state = {name: parallel.rows.local(tensor) for name, tensor in models[0].state_dict().items()}
    sharded = {name: tensor.detach() for name, tensor in state.items() if name in parallel.models.sharding.rows}
    held = sum(tensor.nbytes for tensor in state.values())
    return Loaded(state | assemble(parallel, sharded), sum(read), held, most)


def several(world: World, cases: list[Any]) -> list[Loaded]:
    return [load(world, *case, False) for case in cases]


def check_state(found: dict[str, Tensor], expected: Decoder, case: object) -> None:
    assert found.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found[name], tensor), f"{case}: {name}"


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_rows_are_those_of_one_process(ranks: int, tmp_path: Path, pieces: None) -> None:
    shapes: list[Shape] = [(2, 1, 2), (2, 2, 1)] if ranks == 2 else [(4, 1, 1), (4, 4, 1), (4, 2, 2)]
    names = [(name, shape) for shape in shapes for name in MODELS if shape[1] == 1 or MODELS[name].experts]
    cases: list[Any] = [(MODELS[name], shape, None, "bf16") for name, shape in names]
    expected = []
    for name, _ in names:
        expected.append(Decoder(MODELS[name]))
        expected[-1].initialise(1)
    for form in ("bf16", "fp8", "nvfp4"):
        for name, shape in names:
            path = tmp_path / f"{len(cases)}"
            expected.append(publish(path, make_model(name, form), form))
            cases.append((MODELS[name], shape, path, form))
    for of_rank in run_ranks(tmp_path / "ranks", ranks, several, cases):
        for case, loaded, model in zip(cases, of_rank, expected, strict=True):
            check_state(loaded.state, model, case)


def measured(world: World, path: Path) -> list[Loaded]:
    return [load(world, LARGE, (4, 2, 1), each, "bf16", True) for each in (path, None)]


@pytest.mark.slow
def test_no_rank_reads_or_holds_a_whole_model(tmp_path: Path, pieces: None) -> None:
    small_pieces(4096)
    drawn = Decoder(LARGE)
    drawn.initialise(1)
    whole = sum(tensor.nbytes for tensor in drawn.state_dict().values())
    model = publish(tmp_path / "store", make_large(), "bf16")
    packed = sum(each.bytes for each in WeightStore(Objects.open(tmp_path / "store")).versions(LOADED.line))
    found = run_ranks(tmp_path / "ranks", 4, measured, tmp_path / "store")
    for rank, (stored, random) in enumerate(found):
        check_state(stored.state, model, rank)
        check_state(random.state, drawn, rank)
        assert stored.read < 0.3 * packed and random.read == 0
        for loaded in (stored, random):
            assert loaded.held < 0.26 * whole
            assert loaded.most < loaded.held + 0.05 * whole, f"{loaded.most - loaded.held} of {whole} beside the rows"


def make_large() -> Decoder:
    model = Decoder(LARGE)
    model.initialise(2)
    return model


def begin(world: World | None, path: Path, parent: Version | None, form: str) -> list[str]:
    """The digests of a line that begins and goes no further."""
    place = TrainingWorld(path)
    parallel: Parallelism = SINGLE
    if world is not None:
        parallel = over_ranks(world, Meshes(world.size, 2, 1, CPU))
    stores = (place.objective(), place.weights, place.objects)
    trainer = Trainer(
        TRAINING, MODEL, *stores, "main", parent, steps=1, seed=3, form=form, device="cpu", parallel=parallel
    )
    trainer.run(0)
    return [manifest.digest for manifest in place.weights.versions("main", form)]


def begin_all(world: World, path: Path, cases: list[tuple[Version | None, str]]) -> list[list[str]]:
    return [begin(world, path / str(index), *case) for index, case in enumerate(cases)]


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_line_begins_with_the_digest_of_one_process(ranks: int, tmp_path: Path) -> None:
    imported = Version("imported", 0)  # there in bf16 alone, whatever the run is served as
    cases = [(parent, form) for parent in (None, imported) for form in ("bf16", "fp8", "nvfp4")]
    model = Decoder(MODEL)
    model.initialise(8)
    expected = []
    for index, case in enumerate(cases):
        for where in ("alone", "ranks"):
            store = WeightStore(Objects.open(tmp_path / where / str(index) / "store"))
            Publisher(store, imported.line).publish(0, to_host(model.state_dict()))
        expected.append(begin(None, tmp_path / "alone" / str(index), *case))
        assert len(expected[-1]) == 1
    found = run_ranks(tmp_path / "work", ranks, begin_all, tmp_path / "ranks", cases)
    assert found == [expected] * ranks


def round_twin(world: World, path: Path) -> dict[str, dict[str, Tensor]]:
    found = {}
    for form in ("fp8", "nvfp4", "fp16"):
        parallel = over_ranks(world, Meshes(2, 2, 1, CPU))
        twin = FrozenModel(parallel, parallel.models.make_model(MODELS["mixture"], form, CPU))
        twin.load_version(WeightStore(Objects.open(path)), LOADED, "bf16")
        twin.round_to_form()
        own = {name: parallel.rows.local(parameter.detach()) for name, parameter in twin.decoder.named_parameters()}
        found[form] = assemble(parallel, own)
    return found


def test_a_version_of_another_form_is_rounded_as_by_one_process(tmp_path: Path) -> None:
    publish(tmp_path / "store", make_model("mixture"), "bf16")
    for of_rank in run_ranks(tmp_path / "ranks", 2, round_twin, tmp_path / "store"):
        for form, parameters in of_rank.items():
            twin = FrozenModel(SINGLE, Decoder(MODELS["mixture"], form=form))
            twin.load_version(WeightStore(Objects.open(tmp_path / "store")), LOADED, "bf16")
            twin.round_to_form()
            for name, parameter in twin.decoder.named_parameters():
                assert torch.equal(parameters[name], parameter), f"{form}: {name}"


def gathered(world: World) -> list[bool]:
    """Whether a parameter is whole here, before a backward pass of a model and after a twin has computed."""
    model, parallel = make_sharded(world, "dense", (2, 1, 1))
    twin = FrozenModel(parallel, model)
    parallel.models.initialise(twin.decoder, 1)
    part = make_microbatches(model.config)[0]
    parallel.passes.recompute(model, part, None)
    twin.logprobs(part, None)
    from torch.distributed.tensor import DTensor  # it takes seconds, and each worker imports this file

    return [not isinstance(each.embedding, DTensor) for each in (model, twin.decoder)]


def test_a_twin_keeps_nothing_that_it_gathered(tmp_path: Path) -> None:
    assert run_ranks(tmp_path, 2, gathered) == [[True, False]] * 2


def other_model(world: World, path: Path) -> str:
    small_pieces()
    parallel = over_ranks(world, Meshes(2, 1, 1, CPU))
    model = parallel.models.make_model(MODELS["dense"], "bf16", CPU)
    with pytest.raises(WeightsError) as raised:
        parallel.models.load_version(model, WeightStore(Objects.open(path)), LOADED, "bf16")
    return str(raised.value)


def test_weights_of_another_model_are_refused(tmp_path: Path, pieces: None) -> None:
    publish(tmp_path / "store", make_model("latent"), "bf16")
    for text in run_ranks(tmp_path / "ranks", 2, other_model, tmp_path / "store"):
        assert "the weights are of another model" in text


def test_a_draw_in_pieces_is_one_draw() -> None:
    shapes = {"a": (70, 33), "b": (4, 5, 6), "c": (3,), "d": (5, 3), "e": (4097, 4)}
    found = []
    for elements in (1 << 24, 16, 1024):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(decoder_module, "DRAWN_ELEMENTS", elements)
            values = list(decoder_module.initial_values(shapes, 2, 3))
        assert max(len(each) for _, _, each in values) <= elements + 15
        found.append(torch.cat([each for _, _, each in values]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("form", ["bf16", "fp16", "fp8", "nvfp4"])
def test_some_rows_are_those_of_the_whole(form: str) -> None:
    """Across the blocks that scales are of; and what a version consists of is known without its values."""
    model = make_large()
    for name in ("layers.0.qkv", "layers.1.mlp.gate_up"):
        tensor = model.state_dict()[name]
        whole = to_host({name: tensor}, form)
        assert layout_of(whole) == layout_in({name: tensor.to("meta")}, form)
        placed = {part: place(host, CPU) for part, host in whole.items()}
        values = dequantise_rows(name, placed, 0)
        for start, stop in ((0, 1), (3, 8), (5, 6), (100, 200), (128, 256), (131, 132)):
            shared = {part for part in placed if len(placed[part].shape) == 0 or len(placed[part]) != len(tensor)}
            rows = {part: each if part in shared else each[start:stop] for part, each in placed.items()}
            assert torch.equal(dequantise_rows(name, rows, start), values[start:stop]), (name, start)


def test_loading_gives_what_was_published(tmp_path: Path) -> None:
    """What the ranks are compared with here is what a single process reads."""
    for form in ("bf16", "fp8", "nvfp4"):
        model = publish(tmp_path / form, make_model("mixture", form), form)
        again = Decoder(MODELS["mixture"], form=form)
        load_host(again, WeightStore(Objects.open(tmp_path / form)).load(LOADED, form))
        check_state(again.state_dict(), model, form)
