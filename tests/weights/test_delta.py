"""Codings are lossless for every bit pattern; a damaged payload gives the right number of bytes or an error."""

import contextlib

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.errors import WeightsError
from rollmill.weights.delta import CODINGS, Coding, decode_chunk, encode_as, encode_difference, encode_full
from tests.weights.build import bf16

# ±0, the smallest and largest subnormals, ±1, the largest finite numbers, ±inf, quiet and signalling NaNs with payloads
SPECIAL = [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x807F, 0x3F80, 0xBF80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80]
SPECIAL += [0x7FC0, 0xFFC0, 0x7F81, 0xFFBF, 0x7FFF, 0xFFFF]


def encode_all(base: np.ndarray, new: np.ndarray, width: int) -> list[tuple[Coding, bytes]]:
    """Every coding, not only the one that would be chosen."""
    unsigned = np.dtype(f"<u{width}")
    old_bits, new_bits = base.view(unsigned), new.view(unsigned)
    return [(coding, encode_as(coding, old_bits, new_bits, width)) for coding in CODINGS]


def check(base: np.ndarray, new: np.ndarray, width: int) -> None:
    before = base.copy()
    for coding, payload in encode_all(base, new, width):
        decoded = decode_chunk(coding, payload, base, new.size, width)
        assert np.array_equal(decoded, new), coding
    coding, payload, changed = encode_difference(base, new, width)
    assert changed == np.count_nonzero((base.reshape(-1, width) != new.reshape(-1, width)).any(axis=1))
    if changed:
        assert np.array_equal(decode_chunk(coding, payload, base, new.size, width), new)
    assert np.array_equal(base, before)


def test_every_special_value_becomes_every_other() -> None:
    base, new = (grid.reshape(-1).astype(np.uint16).view(np.uint8) for grid in np.meshgrid(SPECIAL, SPECIAL))
    check(base, new, 2)


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("share", [0.0005, 0.02, 0.3, 1.0])
def test_random_bits_at_any_density(width: int, share: float) -> None:
    random = np.random.default_rng(width)
    base = random.integers(0, 256, 40_000 * width, dtype=np.uint8)
    new = base.copy()
    chosen = random.random(40_000) < share
    new.reshape(-1, width)[chosen] = random.integers(0, 256, (int(chosen.sum()), width), dtype=np.uint8)
    check(base, new, width)


@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.tuples(st.integers(0, 199), st.sampled_from(SPECIAL) | st.integers(0, 0xFFFF)), max_size=60),
)
@settings(max_examples=150, deadline=None)
def test_any_elements_become_any_others(seed: int, changes: list[tuple[int, int]]) -> None:
    base = np.random.default_rng(seed).choice(np.array([*SPECIAL, 0x3C23, 0xBC23], dtype=np.uint16), 200)
    new = base.copy()
    for index, value in changes:
        new[index] = value
    check(base.view(np.uint8), new.view(np.uint8), 2)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 65_535, 65_536, 70_000])
def test_gaps_of_every_length(gap: int) -> None:
    base = np.zeros(2 * gap + 10, dtype=np.uint16)
    new = base.copy()
    new[[gap, 2 * gap + 1]] = 1
    check(base.view(np.uint8), new.view(np.uint8), 2)


def test_small_steps_cost_little() -> None:
    """A later optimizer step at a usual learning rate changes about one element in a hundred, mostly by one unit."""
    random = np.random.default_rng(0)
    master = random.normal(0, 0.02, 400_000)
    base, new = bf16(master), bf16(master + 1e-6 * random.normal(0, 1, master.size))
    coding, payload, changed = encode_difference(base, new, 2)
    assert coding == "sparse"
    assert 0.005 < changed / master.size < 0.05
    assert new.size / len(payload) > 50
    assert new.size / len(encode_full(new, 2)) > 1.4


def test_the_smallest_coding_is_chosen() -> None:
    random = np.random.default_rng(0)
    master = random.normal(0, 0.02, 100_000)
    base = bf16(master)
    for scale, expected in ((1e-5, "sparse"), (1e-3, "dense"), (1.0, "raw")):
        new = bf16(master + scale * random.normal(0, 1, master.size))
        coding, payload, _ = encode_difference(base, new, 2)
        assert coding == expected
        assert len(payload) == min(len(other) for _, other in encode_all(base, new, 2))


@pytest.mark.parametrize("coding", CODINGS)
def test_damaged_payloads_give_the_right_size_or_an_error(coding: Coding) -> None:
    random = np.random.default_rng(0)
    master = random.normal(0, 0.02, 3000)
    base = bf16(master)
    new = bf16(master + 1e-4 * random.normal(0, 1, master.size))
    payload = dict(encode_all(base, new, 2))[coding]
    for length in {*range(0, len(payload), max(1, len(payload) // 200)), len(payload) - 1}:
        with pytest.raises(WeightsError):
            decode_chunk(coding, payload[:length], base, new.size, 2)
    with pytest.raises(WeightsError):
        decode_chunk(coding, payload + b"\0", base, new.size, 2)
    refused = 0
    for bit in random.integers(0, len(payload) * 8, 400):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << (bit % 8)
        try:
            decoded = decode_chunk(coding, bytes(damaged), base, new.size, 2)
            assert decoded.size == new.size  # one level up its digest is what refuses it
        except WeightsError:
            refused += 1
    assert refused


@given(st.sampled_from(CODINGS), st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_arbitrary_payloads_never_do_more_than_fail(coding: Coding, payload: bytes) -> None:
    base = np.zeros(64, dtype=np.uint8)
    with contextlib.suppress(WeightsError):
        assert decode_chunk(coding, payload, base, 64, 2).size == 64


def test_a_payload_cannot_ask_for_more_memory_than_the_chunk_has() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 28))
    for claimed in (64, 1 << 28):
        header = bytearray()
        for value in (claimed, len(bomb)):
            while value > 127:
                header.append(value & 127 | 128)
                value >>= 7
            header.append(value)
        with pytest.raises(WeightsError):
            decode_chunk("raw", bytes(header) + bomb, None, 1 << 15, 1)


def test_a_difference_needs_its_base() -> None:
    with pytest.raises(WeightsError, match="base"):
        decode_chunk("sparse", b"", None, 4, 2)
