import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from rollmill.errors import WeightsError
from rollmill.storage.objects import Objects
from rollmill.types import PolicyRef, Version
from rollmill.weights import HostTensor, Tensors, WeightStore
from rollmill.weights.files.checkpoint_directory import weight_files
from rollmill.weights.files.companions import kept_companions
from rollmill.weights.files.exchange import export_directory, exported_as, import_directory, publish_import
from rollmill.weights.files.huggingface_tensors import _round_bf16
from rollmill.weights.files.safetensors import MOST_TENSORS, read_file
from rollmill.weights.format.manifest import describe, root_digest
from tests.weights.build import make_tensors, same
from tests.weights.worker import in_child, killed_at

COMPANIONS = {"config.json": b'{"layers": 2}\n', "tokenizer.json": b"{}"}


def export(directory: Path, tensors: Tensors, **options: Any) -> dict[str, bytes]:
    policy = PolicyRef("main", 7, "bf16", root_digest(describe(tensors)))
    files = export_directory(directory, tensors, policy, COMPANIONS, **options)
    return {path.name: path.read_bytes() for path in files}


def mixed() -> dict[str, HostTensor]:
    """One model with every served dtype."""
    random = np.random.default_rng(3)
    widths = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "uint8": 1, "int32": 4}
    return {
        f"layer.{dtype}": HostTensor(dtype, (3, 5), random.integers(0, 256, 15 * width, dtype=np.uint8))
        for dtype, width in widths.items()
    }


def test_an_export_is_imported_again_bit_for_bit(tmp_path: Path) -> None:
    tensors = make_tensors()
    first = export(tmp_path / "a", tensors)
    assert first.keys() == {*COMPANIONS, "model.safetensors", "rollmill.json"}
    with import_directory(tmp_path / "a", "bf16") as imported:
        assert same(imported.tensors, tensors) and not imported.converted
        assert export(tmp_path / "b", imported.tensors) == first
    about = exported_as(tmp_path / "a")
    assert about == PolicyRef("main", 7, "bf16", root_digest(describe(tensors)))


def test_every_served_dtype_is_kept(tmp_path: Path) -> None:
    export(tmp_path / "model", mixed())
    with import_directory(tmp_path / "model", "fp8_e4m3") as imported:
        assert same(imported.tensors, mixed())


def test_other_readers_read_it(tmp_path: Path) -> None:
    """The reference implementation agrees with ours, both ways."""
    tensors = make_tensors()
    export(tmp_path / "model", tensors)
    loaded = load_file(tmp_path / "model/model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == {n: t.shape for n, t in tensors.items()}
    for name, tensor in loaded.items():
        assert tensor.dtype is torch.bfloat16
        assert tensor.view(-1).view(torch.uint8).numpy().tobytes() == tensors[name].data.tobytes()
    save_file(loaded, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    theirs = read_file(tmp_path / "theirs.safetensors")
    assert {name: stored.data.tobytes() for name, stored in theirs.items()} == {
        name: tensor.data.tobytes() for name, tensor in tensors.items()
    }


def test_large_models_are_cut_into_shards(tmp_path: Path) -> None:
    tensors = make_tensors()
    limit = 50_000
    files = export(tmp_path / "model", tensors, shard_bytes=limit)
    shards = sorted(name for name in files if name.endswith(".safetensors"))
    assert shards == [f"model-{k:05d}-of-{len(shards):05d}.safetensors" for k in range(1, len(shards) + 1)]
    assert len(shards) == 3 and all(len(files[name]) <= limit + 1000 for name in shards)
    index = json.loads(files["model.safetensors.index.json"])
    assert index["metadata"]["total_size"] == sum(tensor.data.size for tensor in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    with import_directory(tmp_path / "model", "bf16") as imported:
        assert same(imported.tensors, tensors) and imported.files == 3
    # an index must agree with its files, and must not lead out of the directory
    path = tmp_path / "model/model.safetensors.index.json"
    wrong = {**index["weight_map"], "scale": shards[0]}
    for weight_map, message in (
        (wrong, "does not hold 'scale'"),
        ({**wrong, "scale": "../x.safetensors"}, "not a safetensors file in the same directory"),
        ({**wrong, "scale": "gone.safetensors"}, "lacks 1 of 4 shards: gone"),
        ([], "is damaged"),
    ):
        path.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(WeightsError, match=message), import_directory(tmp_path / "model", "bf16"):
            pass


def test_a_directory_is_replaced_only_when_told(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    export(target, make_tensors())  # an empty directory is replaced
    with pytest.raises(WeightsError, match="not empty"):
        export(target, make_tensors(1))
    with import_directory(target, "bf16") as kept:
        assert same(kept.tensors, make_tensors())
    export(target, make_tensors(1), force=True)
    with import_directory(target, "bf16") as replaced:
        assert same(replaced.tensors, make_tensors(1))
    (target / "notes").mkdir()
    with pytest.raises(WeightsError, match="more than an export"):
        export(target, make_tensors(), force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing else is left"


def test_bytes_that_do_not_have_the_digest_are_not_exported(tmp_path: Path) -> None:
    policy = PolicyRef("main", 7, "bf16", "0" * 64)
    with pytest.raises(WeightsError, match="nothing was exported"):
        export_directory(tmp_path / "model", make_tensors(), policy, {})
    assert list(tmp_path.iterdir()) == []


def header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


def entry(start: int, stop: int, dtype: str = "BF16", shape: Any = None) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(stop - start) // 2] if shape is None else shape, "data_offsets": [start, stop]}


def _twice(first: dict[str, Any], second: dict[str, Any]) -> bytes:
    text = f'{{"a": {json.dumps(first)}, "a": {json.dumps(second)}}}'.encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated"),
        (b"\x05\x00\x00", "truncated"),
        ((1 << 40).to_bytes(8, "little") + b"{}", "truncated"),
        (header(a=entry(0, 8)) + b"1234567", "truncated: 'a' ends at byte 8 of 7"),
        (header(a=entry(0, 8)) + b"123456789", "1 bytes at its end"),
        (header(a=entry(0, 8), b=entry(4, 12)) + bytes(12), "'b' overlaps"),
        (header(a=entry(0, 8), b=entry(10, 12)) + bytes(12), "'b' leaves a hole"),
        (header(a=entry(8, 0, shape=[4])) + bytes(8), "not -8 bytes"),
        (header(a=entry(0, 8, shape=[5])) + bytes(8), "not 8 bytes"),
        (header(a=entry(0, 8, shape=[-2, -2])) + bytes(8), "not valid: a.shape.0"),
        (header(a=entry(0, 8, shape=[4.0])) + bytes(8), "not valid: a.shape.0"),
        (header(a=entry(0, 2, shape={})) + bytes(2), "not valid: a.shape"),
        (header(a=entry(0, 8, dtype="F4")) + bytes(8), "unknown dtype 'F4'"),
        (header(a=[1, 2]) + bytes(8), "not valid: a"),
        (b"\x0f" + bytes(7) + b'{"a": 1, "a":2}', "not valid: a"),
        (_twice(entry(0, 4), entry(4, 8)) + bytes(8), "'a' leaves a hole"),
        (header(a=entry(0, 8) | {"data_offsets": [0, 10**400]}) + bytes(8), "not valid: a.data_offsets"),
        (b"\x04" + bytes(7) + b"[[[[", "Invalid JSON"),
        (b"\x02" + bytes(7) + b"\xff\xfe", "Invalid JSON"),
        ((60_000).to_bytes(8, "little") + b"[" * 60_000, "Invalid JSON"),
    ],
)
def test_a_file_that_lies_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(WeightsError, match=message), import_directory(tmp_path, "bf16"):
        pass


def test_a_header_is_bounded_by_its_data_and_in_its_tensors(tmp_path: Path) -> None:
    """Each tensor of a header takes time and a kilobyte of memory, also one without data."""
    empty = header(**{f"t{n}": entry(0, 0, shape=[0]) for n in range(20_000)})
    many = header(**{f"t{n}": {} for n in range(MOST_TENSORS + 1)}) + bytes(8 << 20)
    for data, message in ((empty, "its header claims 1[0-9]{6} bytes, its data 0"), (many, "more than 262144 tensors")):
        (tmp_path / "model.safetensors").write_bytes(data)
        with pytest.raises(WeightsError, match=message):
            read_file(tmp_path / "model.safetensors")


def test_damage_is_found_or_harmless(tmp_path: Path) -> None:
    """Any byte of the header changed, any length cut: a typed error, or tensors of exactly the file's bytes."""
    export(tmp_path / "model", make_tensors(shapes={"a": (4, 3), "b": (2,)}))
    whole = (tmp_path / "model/model.safetensors").read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    random = np.random.default_rng(0)
    path = tmp_path / "changed.safetensors"
    refused = 0
    for position in range(length):
        changed = bytearray(whole)
        changed[position] ^= int(random.integers(1, 256))
        path.write_bytes(bytes(changed))
        try:
            found = read_file(path)
            assert sum(stored.data.size for stored in found.values()) == len(whole) - length
        except WeightsError:
            refused += 1
    assert refused > length / 2
    for stop in range(len(whole)):
        path.write_bytes(whole[:stop])
        with pytest.raises(WeightsError):
            read_file(path)


def test_pickles_and_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no safetensors files"):
        weight_files(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match="runs code from the file") as caught:
        weight_files(tmp_path)
    assert "safe_serialization" in str(caught.value.hint)


def test_one_name_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"w": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(WeightsError, match="'w' is in two files"), import_directory(tmp_path, "fp32"):
        pass


SPECIAL = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1.0, 1e-40, -3.140625, 65504.0])


@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("form", "target"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_rounding_is_that_of_the_reference(tmp_path: Path, source: torch.dtype, form: str, target: torch.dtype) -> None:
    values = torch.cat([torch.randn(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(1)), SPECIAL])
    values = values.to(source)
    if target is torch.float16:
        values = values[values.double().abs().nan_to_num(0.0, 0.0) <= 65504]
    save_file({"w": values}, tmp_path / "model.safetensors")
    expected = values.to(target)
    with import_directory(tmp_path, form, lossy=True) as imported:
        got = torch.from_numpy(imported.tensors["w"].data.copy()).view(target)
        assert imported.converted == (() if source is target else ("w",))
    assert torch.equal(got.isnan(), expected.isnan())
    number = ~expected.isnan()
    width = torch.int16 if got.element_size() == 2 else torch.int32
    differ = got[number].view(width) != expected[number].view(width)
    if source is torch.float64 and target is torch.bfloat16:
        # the reference rounds twice, by way of fp32; ours is never further away
        exact = values[number][differ]
        ours, theirs = got[number][differ].double(), expected[number][differ].double()
        assert torch.all((ours - exact).abs() <= (theirs - exact).abs())
    else:
        assert not differ.any()


def test_fp64_is_rounded_once() -> None:
    """Just above a tie between two bf16 values, closer to it than fp32 can resolve."""
    above, tie, below = 1 + 2**-8 + 2**-40, 1 + 2**-8, 1 + 3 * 2**-8 - 2**-40
    with np.errstate(over="ignore"):
        bits = _round_bf16(np.array([above, tie, below, -above, 1e300, -1e300, np.nan]))
    assert [hex(one) for one in bits[:6]] == ["0x3f81", "0x3f80", "0x3f81", "0xbf81", "0x7f80", "0xff80"]
    assert bits[6] & 0x7FFF > 0x7F80


def test_an_inexact_conversion_needs_lossy(tmp_path: Path) -> None:
    exact = torch.tensor([1.0, -0.5, 3.140625, float("inf")])
    save_file({"kept": exact, "count": torch.arange(3, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with import_directory(tmp_path, "bf16") as imported:
        assert imported.tensors["kept"].dtype == "bf16" and imported.converted == ("kept",)
        assert imported.tensors["count"].dtype == "int32"
    save_file({"kept": exact, "lost": torch.tensor([1.0, 0.1])}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="lost is F32 and cannot become bf16: 1 of") as caught:
        with import_directory(tmp_path, "bf16"):
            pass
    assert "--convert" in str(caught.value.hint)
    with import_directory(tmp_path, "bf16", lossy=True) as imported:
        assert imported.tensors["lost"].data.view(np.uint16).tolist() == [0x3F80, 0x3DCD]


@pytest.mark.parametrize(
    ("tensor", "form", "message"),
    [
        (torch.tensor([1e6]), "fp16", "too large for fp16"),
        (torch.zeros(2, dtype=torch.int64), "bf16", "I64, which no form supports"),
        (torch.zeros(2).to(torch.float8_e4m3fn), "bf16", "have no meaning without their scales"),
        (torch.zeros(2, dtype=torch.float64), "int8", "F64, which no form supports"),
    ],
)
def test_a_dtype_that_a_form_cannot_hold_is_named(
    tmp_path: Path, tensor: torch.Tensor, form: str, message: str
) -> None:
    save_file({"w": tensor}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=message) as caught, import_directory(tmp_path, form, lossy=True):
        pass
    assert str(caught.value.message).startswith("w ") and caught.value.hint


def test_progress_adds_up(tmp_path: Path) -> None:
    def total(work: Callable[[Callable[[int], object]], object]) -> int:
        told: list[int] = []
        work(told.append)
        return sum(told)

    tensors = make_tensors()
    size = sum(tensor.data.size for tensor in tensors.values())
    assert total(lambda advance: export(tmp_path / "model", tensors, advance=advance)) == 2 * size

    def read(advance: Callable[[int], object]) -> None:
        with import_directory(tmp_path / "model", "bf16", advance=advance):
            pass

    assert total(read) == size


@pytest.mark.slow
def test_a_killed_import_can_be_repeated(tmp_path: Path) -> None:
    """kill -9 before and after every call of the object store: the line is complete, or does not exist."""
    tensors = make_tensors()
    export(tmp_path / "model", tensors)

    def bring(objects: Objects) -> None:
        with import_directory(tmp_path / "model", "bf16") as imported:
            publish_import(WeightStore(objects), tmp_path / "model", "base", "bf16", imported, COMPANIONS)

    step = committed = 0
    while killed_at(tmp_path / f"store{step}", step, bring):
        store = WeightStore(Objects.open(tmp_path / f"store{step}"))
        if store.numbers("base"):
            committed += 1
            assert kept_companions(store.objects, "base") == COMPANIONS
        bring(store.objects)
        assert kept_companions(store.objects, "base") == COMPANIONS
        assert store.numbers("base") == [0] and same(WeightStore(store.objects).load(Version("base", 0)), tensors)
        step += 1
    assert step > 8 and 0 < committed < step


def test_an_export_that_is_killed_leaves_the_old_directory_or_the_new_one(tmp_path: Path) -> None:
    old, new = make_tensors(), make_tensors(1)
    target = tmp_path / "model"

    def die_at(step: int) -> None:
        for name in ("fsync", "mkdir", "rename"):
            setattr(os, name, counted(getattr(os, name), step))

    def counted(call: Callable[..., Any], step: int) -> Callable[..., Any]:
        def wrapper(*args: Any, **options: Any) -> Any:
            calls.append(call)
            if len(calls) > step:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return wrapper

    def replace(step: int) -> None:
        die_at(step)
        export(target, new, force=True)

    calls: list[Any] = []
    step = 0
    while True:
        export(target, old, force=target.exists())
        _, status = os.waitpid(in_child(lambda step=step: replace(step)), 0)  # type: ignore[misc]
        if not os.WIFSIGNALED(status):
            break
        # between the two renames the old directory is complete beside its place
        (found,) = [target] if target.exists() else tmp_path.glob(".model.old-*")
        with import_directory(found, "bf16") as kept:
            assert same(kept.tensors, old) or same(kept.tensors, new)
        step += 1
    assert os.WEXITSTATUS(status) == 0 and step > 6
    with import_directory(target, "bf16") as replaced:
        assert same(replaced.tensors, new)
