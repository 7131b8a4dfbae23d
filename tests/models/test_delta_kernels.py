"""Device deltas: the torch reference and the kernels give the bytes of the host's encoder."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rollmill.errors import WeightsError
from rollmill.models.updates import delta
from rollmill.models.updates.delta import Differences, apply_changes, audit, audit_change, prepare
from rollmill.models.updates.device_audit import reference_audit
from rollmill.weights.format.chunk_audit import audit_host
from rollmill.weights.format.codings import decode_chunk, encode_as
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.reading.patches import Patch
from tests.kernels import DEVICE, INTERPRETED

TILE = 8192  # elements per program; the interpreter takes half as many as a GPU
LONGEST = 9_000 if INTERPRETED else 40_000  # more than a tile
UNSIGNED: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2"), 4: np.dtype("<u4")}
DTYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}
# ±0, ±infinity, quiet and signalling NaN with payloads, smallest subnormal, largest number; as bfloat16
SPECIAL = np.array([0, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 1, 0x8001, 0x7F7F], dtype=np.uint16)


@pytest.fixture(params=["cpu", pytest.param(DEVICE, marks=pytest.mark.kernels, id="kernels")])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if INTERPRETED:
        from rollmill.models.updates import delta_batch

        monkeypatch.setattr(delta_batch, "TILE", TILE)
    return request.param


def random_bits(rng: np.random.Generator, size: int, width: int) -> np.ndarray:
    return rng.integers(0, 1 << 8 * width, size, dtype=np.uint64).astype(UNSIGNED[width])


def updated(rng: np.random.Generator, bits: np.ndarray, share: float) -> np.ndarray:
    """Like an optimizer step: mostly ±1, some up to ±300, a few arbitrary."""
    width = bits.dtype.itemsize
    new = bits.copy()
    changed = np.flatnonzero(rng.random(bits.size) < share)
    steps = np.where(rng.random(changed.size) < 0.89, 1, rng.integers(2, 300, changed.size))
    steps = np.where(rng.random(changed.size) < 0.5, -steps, steps).astype(np.int64)
    new[changed] = (new[changed].astype(np.int64) + steps).astype(UNSIGNED[width])
    anything = changed[rng.random(changed.size) < 0.05]
    new[anything] = random_bits(rng, anything.size, width)
    return new


def tensor(bits: np.ndarray, device: str, dtype: torch.dtype | None = None) -> Tensor:
    signed = torch.from_numpy(bits.view(f"i{bits.dtype.itemsize}").copy())
    return signed.to(device).view(dtype or DTYPES[bits.dtype.itemsize])


def bits_on_host(parameter: Tensor) -> np.ndarray:
    width = parameter.element_size()
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32}[width]
    return parameter.detach().view(-1).view(signed).cpu().numpy().view(UNSIGNED[width])


def check_payload(old: np.ndarray, new: np.ndarray, device: str) -> None:
    width, changed = old.dtype.itemsize, int((old != new).sum())
    (encoded,) = delta.encode_chunks([[(tensor(old, device), tensor(new, device))]], densest=1.0, threads=1)
    assert encoded is not None
    assert encoded.coding == "sparse"
    assert encoded.changed == changed
    assert encoded.payload == (encode_as("sparse", old, new, width) if changed else b"")
    if changed:
        decoded = decode_chunk("sparse", encoded.payload, old.view(np.uint8), old.nbytes, width)
        assert np.array_equal(decoded, new.view(np.uint8))


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 33, 4097, 9_001] if INTERPRETED else [1, 7, 8, 33, 4097, 16384, 50_003])
def test_payloads_are_those_of_the_host_encoder(width: int, size: int, device: str) -> None:
    rng = np.random.default_rng(size * width)
    old = random_bits(rng, size, width)
    check_payload(old, updated(rng, old, 0.012), device)
    check_payload(old, updated(rng, old, 0.5), device)
    check_payload(old, random_bits(rng, size, width), device)
    check_payload(old, old.copy(), device)


def test_special_values_come_through(device: str) -> None:
    old, new = (part.reshape(-1).copy() for part in np.meshgrid(SPECIAL, SPECIAL))
    check_payload(old, new, device)


@pytest.mark.parametrize("width", [1, 4])
def test_the_largest_steps_come_through(width: int, device: str) -> None:
    edges = np.array([0, 1, 127, 128, 129, 254, 255], dtype=np.uint64)
    edges = np.concatenate([edges, 2 ** np.arange(8 * width, dtype=np.uint64), [(1 << 8 * width) - 1]])
    old, new = (part.reshape(-1).astype(UNSIGNED[width]) for part in np.meshgrid(edges, edges))
    check_payload(old, new, device)


def test_gaps_around_the_multiples_of_255(device: str) -> None:
    gaps = np.array([0, 1, 253, 254, 255, 256, 509, 510, 511, 765, 0, 20_000, 40_000])
    indices = np.cumsum(gaps + 1) - 1
    rng = np.random.default_rng(0)
    old = random_bits(rng, int(indices[-1]) + 1000, 2)
    new = old.copy()
    new[indices] ^= 1
    check_payload(old, new, device)
    unusual = new.copy()
    unusual[indices] += 7
    check_payload(old, unusual, device)


def test_exceptions_with_wide_gaps_between_them(device: str) -> None:
    rng, size = np.random.default_rng(5), 20_000 if INTERPRETED else 60_000
    old = random_bits(rng, size, 2) & np.uint16(0x7FF0)
    new = old + np.uint16(1)
    new[[0, 254, 510, 1276, size // 2, size - 1]] += np.uint16(40)
    check_payload(old, new, device)


def test_several_chunks_are_coded_as_if_they_were_one(device: str) -> None:
    rng = np.random.default_rng(1)
    old = random_bits(rng, 100_000, 2)
    new = updated(rng, old, 0.02)
    old_device, new_device = tensor(old, device), tensor(new, device)
    cuts = [0, 3, 3, 20_001, 40_000, 99_999, 100_000]  # the pieces start at every alignment
    group = [(old_device[a:b], new_device[a:b]) for a, b in itertools.pairwise(cuts)]
    (encoded,) = delta.encode_chunks([group])
    assert encoded is not None
    assert encoded.payload == encode_as("sparse", old, new, 2)


def test_many_payloads_of_several_widths_at_once(device: str) -> None:
    rng = np.random.default_rng(2)
    pairs = []
    for number in range(20 if INTERPRETED else 40):
        old = random_bits(rng, int(rng.integers(1, LONGEST)), (1, 2, 4)[number % 3])
        new = updated(rng, old, (0.012, 0.0, 0.04)[number % 7 % 3])
        pairs.append((old, random_bits(rng, old.size, old.dtype.itemsize) if number in (5, 17) else new))
    differences = Differences([[(tensor(old, device), tensor(new, device))] for old, new in pairs])
    for _ in range(2):
        for number, ((old, new), encoded) in enumerate(zip(pairs, differences.encode(0.2), strict=True)):
            if number in (5, 17) or (old != new).mean() > 0.2:
                assert encoded is None, "too many changes: left to the host's encoder"
            else:
                assert encoded is not None
                width = old.dtype.itemsize
                assert encoded.payload == (encode_as("sparse", old, new, width) if encoded.changed else b"")


def test_a_difference_sees_what_the_tensors_hold_now(device: str) -> None:
    rng = np.random.default_rng(3)
    old = random_bits(rng, 5000, 2)
    base, new = tensor(old, device), tensor(old, device)
    differences = Differences([[(base, new)]])
    assert [streams.changed for streams in differences.streams() if streams] == [0]
    apply_changes(new, torch.tensor([4, 4999], device=device), tensor(SPECIAL[:2], device))
    (streams,) = differences.streams()
    expected = old.copy()
    expected[[4, 4999]] = SPECIAL[:2]
    assert streams is not None
    assert streams.changed == int((old != expected).sum())


@pytest.mark.parametrize("width", [1, 2, 4])
def test_changes_turn_the_base_into_the_new_version(width: int, device: str) -> None:
    rng = np.random.default_rng(width)
    old = random_bits(rng, 70_001, width)
    new = updated(rng, old, 0.03)
    indices, values = delta.changes(tensor(old, device), tensor(new, device))
    assert np.array_equal(indices.cpu().numpy(), np.flatnonzero(old != new))
    parameter = tensor(old, device)
    for _ in range(2):  # values are absolute, so applying twice does no harm
        apply_changes(parameter, indices, values)
        assert np.array_equal(bits_on_host(parameter), new)


def test_tensors_that_cannot_be_compared_are_refused(device: str) -> None:
    a, b = torch.zeros(8, device=device), torch.zeros(9, device=device)
    with pytest.raises(WeightsError, match="different numbers"):
        Differences([[(a, b)]])
    with pytest.raises(WeightsError, match="same width"):
        Differences([[(a, a), (a.half(), a.half())]])
    with pytest.raises(WeightsError, match="not contiguous"):
        Differences([[(torch.zeros(4, 4, device=device).t(), torch.zeros(4, 4, device=device).t())]])
    with pytest.raises(WeightsError, match="8 bytes"):
        Differences([[(a.double(), a.double())]])


# -- audit


def plain_audit(bits: np.ndarray) -> int:
    total = 0
    for i, v in enumerate(bits.tolist()):
        z = (i * 0x9E3779B97F4A7C15 + v) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        total += z ^ z >> 31
    return total % 2**64


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("size", [0, 1, 1000, 32_768, 40_001])
def test_host_and_device_compute_the_specified_audit(width: int, size: int, device: str) -> None:
    bits = random_bits(np.random.default_rng(size), size, width)
    assert audit_host(bits.view(np.uint8), width) == plain_audit(bits)
    assert audit(tensor(bits, device)) == plain_audit(bits)
    assert reference_audit(tensor(bits, device), DTYPES[width]) == plain_audit(bits)


def test_the_compiled_audit_is_the_same() -> None:
    bits = random_bits(np.random.default_rng(9), (1 << 20) + 5, 2)
    assert audit_host(bits.view(np.uint8), 2) == reference_audit(tensor(bits, "cpu"), torch.bfloat16)


def test_the_audit_sees_every_flipped_bit_and_moved_element(device: str) -> None:
    rng = np.random.default_rng(4)
    bits = np.concatenate([SPECIAL, random_bits(rng, 500, 2)])
    right = audit(tensor(bits, device))
    for index in (0, 1, 255, bits.size - 1):
        for bit in range(16):
            flipped = bits.copy()
            flipped[index] ^= np.uint16(1 << bit)
            assert audit(tensor(flipped, device)) != right
    swapped = bits.copy()
    swapped[[3, 400]] = swapped[[400, 3]]
    for wrong in (swapped, np.roll(bits, 1), bits[:-1], np.append(bits, np.uint16(0))):
        assert audit(tensor(wrong, device)) != right


def test_the_audit_keeps_up_with_changes(device: str) -> None:
    rng = np.random.default_rng(6)
    old = random_bits(rng, 80_000, 2)
    new = updated(rng, old, 0.02)
    start = 10_000
    indices = np.flatnonzero(old[start:] != new[start:]).astype(np.uint32)
    new[:start] = old[:start]
    before, after = old[start:][indices], new[start:][indices]
    expected = (audit_host(new.view(np.uint8), 2) - audit_host(old.view(np.uint8), 2)) % 2**64
    on_device = torch.from_numpy(indices.astype(np.int32)).to(device)
    assert audit_change(on_device, tensor(before, device), tensor(after, device), start) == expected


@pytest.mark.parametrize("form", [torch.bfloat16, torch.float16])
def test_a_wider_parameter_has_the_audit_of_its_form(form: torch.dtype, device: str) -> None:
    rng = np.random.default_rng(7)
    bits = random_bits(rng, 40_000, 2)
    if form == torch.float16:
        bits[(bits & 0x7C00) == 0x7C00] = 0x3C00  # no NaN: converting may change which one it is
    parameter = torch.zeros(bits.size, device=device)
    apply_changes(parameter, torch.arange(bits.size, device=device), tensor(bits, device, form))
    assert audit(parameter, form) == plain_audit(bits)
    assert reference_audit(parameter, form) == plain_audit(bits)
    parameter.view(torch.int32)[1234] += 1  # something that the form cannot express
    assert audit(parameter, form) == reference_audit(parameter, form) != plain_audit(bits)


# -- prepare


def model(device: str, dtype: torch.dtype = torch.bfloat16) -> tuple[dict[str, np.ndarray], dict[str, Tensor]]:
    rng = np.random.default_rng(8)
    served = {name: random_bits(rng, size, 2) for name, size in (("a", 30_001), ("b", 640), ("c", 1), ("d", 5000))}
    served["a"][: SPECIAL.size] = SPECIAL
    parameters = {name: torch.zeros(bits.size, dtype=dtype, device=device) for name, bits in served.items()}
    prepare(parameters, None, host(served)).apply()
    return served, parameters


def host(served: dict[str, np.ndarray]) -> dict[str, HostTensor]:
    return {name: HostTensor("bf16", (bits.size,), bits.view(np.uint8)) for name, bits in served.items()}


def patches_between(old: np.ndarray, new: np.ndarray, chunk: int) -> list[Patch]:
    patches = []
    for start in range(0, old.size, chunk):
        indices = np.flatnonzero(old[start : start + chunk] != new[start : start + chunk]).astype(np.uint32)
        if indices.size:
            patches.append(Patch(start, indices, new[start : start + chunk][indices]))
    return patches


def expect(parameters: dict[str, Tensor], served: dict[str, np.ndarray]) -> None:
    for name, bits in served.items():
        if parameters[name].dtype == torch.float32:
            bits = bits.astype(np.uint32) << 16
        assert np.array_equal(bits_on_host(parameters[name]), bits), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_prepared_changes_arrive_bit_for_bit_and_only_when_applied(dtype: torch.dtype, device: str) -> None:
    old, parameters = model(device, dtype)
    expect(parameters, old)
    rng = np.random.default_rng(10)
    new = {"a": updated(rng, old["a"], 0.1), "b": updated(rng, old["b"], 0.5), "c": ~old["c"], "d": old["d"]}
    patches = {"a": patches_between(old["a"], new["a"], 4096), "b": None, "c": patches_between(old["c"], new["c"], 9)}
    audits = {name: audit_host(bits.view(np.uint8), 2) for name, bits in new.items()}
    prepared = prepare(parameters, patches, host(new), audits)
    expect(parameters, old)
    for _ in range(2):
        assert prepared.apply() == audits
        expect(parameters, new)


def test_several_patches_of_a_chunk_count_in_their_order(device: str) -> None:
    old, parameters = model(device)
    new, listed, rng = old["a"].copy(), [], np.random.default_rng(11)
    for _ in range(3):
        step = updated(rng, new, 0.2)
        listed += patches_between(new, step, 8192)
        new = step
    prepare(parameters, {"a": listed}, host({**old, "a": new})).apply()
    expect(parameters, {**old, "a": new})


def test_an_update_of_other_weights_is_detected(device: str) -> None:
    old, parameters = model(device)
    new = old["a"].copy()
    new[7] ^= 1
    patches = {"a": [Patch(0, np.array([7], np.uint32), new[[7]])]}
    audits = {"a": audit_host(new.view(np.uint8), 2), "d": audit_host(old["d"].view(np.uint8), 2)}
    apply_changes(parameters["a"], torch.tensor([9], device=device), tensor(SPECIAL[:1], device))
    with pytest.raises(WeightsError, match=r"1 parameters do not match .*: a"):
        prepare(parameters, patches, host({**old, "a": new}), audits).apply()
    prepare(parameters, {"a": None}, host({**old, "a": new}), audits).apply()
    expect(parameters, {**old, "a": new})


def test_changes_that_do_not_fit_are_refused_before_any_parameter_changes(device: str) -> None:
    old, parameters = model(device)
    one, value = np.array([0], np.uint32), np.array([1], np.uint16)
    good = [Patch(0, one, value)]
    for wrong in (
        Patch(0, np.array([30_001], np.uint32), value),
        Patch(30_001, one, value),
        Patch(-1, one, value),
        Patch(0, one, np.array([1], np.uint32)),
        Patch(0, np.array([0, 1], np.uint32), value),
    ):
        with pytest.raises(WeightsError, match="a patch"):
            prepare(parameters, {"d": good, "a": [*good, wrong]}, host(old))
    with pytest.raises(WeightsError, match="no parameter"):
        prepare(parameters, {"d": good, "e": good}, host(old))
    with pytest.raises(WeightsError, match="there"):
        prepare(parameters, {"d": good}, host({**old, "d": old["d"][1:]}))
    with pytest.raises(WeightsError, match="cannot hold"):
        prepare({**parameters, "d": parameters["d"].half()}, {"d": good}, host(old))
    expect(parameters, old)


def test_read_only_bytes_can_be_copied(device: str) -> None:
    old, parameters = model(device)
    new = {name: ~bits for name, bits in old.items()}
    for bits in new.values():
        bits.flags.writeable = False
    prepare(parameters, None, host(new)).apply()
    expect(parameters, new)
