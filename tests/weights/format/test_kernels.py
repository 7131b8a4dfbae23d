"""Compiled and plain kernels give the same bytes and read the same payloads, at every width, density and alignment."""

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from rollmill.weights.format import kernels
from rollmill.weights.format.codings import (
    CODINGS,
    SPARSE_CODINGS,
    Changes,
    decode_changes,
    decode_chunk,
    encode_as,
    encode_difference,
    scatter,
)
from rollmill.weights.format.kernels import compiled, plain

ELEMENTS = 40_000 + 13  # whole tiles and a remainder, at every width


@pytest.fixture
def always_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "COMPILED_ELEMENTS", 0)


def make_pair(width: int, share: float, seed: int = 0, size: int = ELEMENTS) -> tuple[np.ndarray, np.ndarray]:
    """Elements of random magnitude, some of which moved: mostly by little, some by any amount."""
    random = np.random.default_rng(seed)
    kind = plain.UNSIGNED[width]
    old = random.integers(0, 1 << 8 * width, size, dtype=np.uint64).astype(kind)
    old[::3] >>= kind.type(4 * width)  # some magnitudes are frequent
    moved = random.random(size) < share
    step = random.choice(np.array([1, 1, 1, 2**32 - 1, 2**32 - 1, 3, 2**32 - 200, 255, 256, 70_001]), size)
    new = np.where(moved, old + step.astype(kind), old).astype(kind)
    return old, new


@pytest.mark.slow
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("share", [0, 0.0003, 0.012, 0.4, 1])
def test_both_give_the_same_bytes_and_read_them(monkeypatch: pytest.MonkeyPatch, width: int, share: float) -> None:
    old, new = make_pair(width, share)
    base, wanted = old.view(np.uint8), new.view(np.uint8)
    for coding in CODINGS:
        payloads, decoded, changes = [], [], []
        for smallest in (1 << 60, 0):
            monkeypatch.setattr(kernels, "COMPILED_ELEMENTS", smallest)
            payloads.append(encode_as(coding, old, new, width))
            decoded.append(decode_chunk(coding, payloads[0], base, base.size, width))
            if coding in SPARSE_CODINGS:
                changes.append(decode_changes(coding, payloads[0], base, width))
        assert payloads[0] == payloads[1], coding
        assert np.array_equal(decoded[0], wanted), coding
        assert np.array_equal(decoded[1], wanted), coding
        for left, right in zip(*changes, strict=True) if changes else ():
            assert left.dtype == right.dtype
            assert np.array_equal(left, right)


@pytest.mark.parametrize("size", [1, 7, 2048, 4096, 8192, 8193, 16384, 16385])
@pytest.mark.parametrize("width", [1, 2, 4])
def test_sizes_around_a_tile(always_compiled: None, width: int, size: int) -> None:
    old, new = make_pair(width, 0.3, size, size)
    new[-1] = ~old[-1]  # the very last element changes
    for coding in CODINGS:
        decoded = decode_chunk(coding, encode_as(coding, old, new, width), old.view(np.uint8), old.nbytes, width)
        assert np.array_equal(decoded.view(new.dtype), new)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_elements_may_lie_anywhere_and_be_read_only(always_compiled: None, width: int) -> None:
    old, new = make_pair(width, 0.05)
    expected = {coding: encode_as(coding, old, new, width) for coding in CODINGS}
    for offset in {width, 3 * width}:
        shifted = []
        for bits in (old, new):
            room = np.zeros(bits.nbytes + 16, dtype=np.uint8)
            room[offset : offset + bits.nbytes] = bits.view(np.uint8)
            room.flags.writeable = False
            shifted.append(room[offset : offset + bits.nbytes])
        for coding in CODINGS:
            assert encode_as(coding, *(data.view(old.dtype) for data in shifted), width) == expected[coding]
            decoded = decode_chunk(coding, expected[coding], shifted[0], old.nbytes, width)
            assert np.array_equal(decoded, new.view(np.uint8))


def test_bytes_at_an_odd_address() -> None:
    """As in a file that was read: elements of two bytes may start at an odd address."""
    old, new = make_pair(2, 0.05)
    room = np.zeros(old.nbytes + 1, dtype=np.uint8)
    room[1:] = old.view(np.uint8)
    for functions in (plain, compiled):
        indices, differences, values = (a.copy() for a in functions.collect(room[1:].view("<u2"), new))
        assert np.array_equal(new[indices], values)
        moved = functions.add_differences(room[1:].view("<u2"), indices, differences)
        assert np.array_equal(moved, values)


def test_scatter_writes_and_returns_what_was_there(always_compiled: None) -> None:
    for width in (1, 2, 4):
        old, new = make_pair(width, 0.1)
        chunk = old.view(np.uint8).copy()
        indices = np.flatnonzero(old != new).astype(np.uint32)
        before = scatter(chunk, Changes(indices, new[indices]), width)
        assert np.array_equal(chunk, new.view(np.uint8))
        assert np.array_equal(before, old[indices])


def test_large_chunks_take_the_compiled_kernels_and_small_ones_do_not() -> None:
    assert kernels.kernels_for(1 << 20) is compiled
    assert kernels.kernels_for((1 << 20) - 1) is plain


def test_threads_do_not_disturb_each_other(always_compiled: None) -> None:
    pairs = [make_pair(2, share, seed) for seed, share in enumerate((0.01, 0.2, 0.6, 0.03))]
    expected = [encode_difference(old.view(np.uint8), new.view(np.uint8), 2, "small") for old, new in pairs]
    wrong = []

    def work(which: int) -> None:
        old, new = (bits.view(np.uint8) for bits in pairs[which])
        for _ in range(10):
            encoded = encode_difference(old, new, 2, "small")
            if encoded != expected[which] or not np.array_equal(
                decode_chunk(encoded.coding, encoded.payload, old, old.size, 2), new
            ):
                wrong.append(which)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(len(pairs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_thread_keeps_little_memory(always_compiled: None) -> None:
    old, new = np.random.default_rng(0).integers(0, 1 << 16, (2, 6 << 20), np.uint16)  # nearly all are exceptions
    encode_as("sparse", old, new, 2)
    assert compiled._buffer._data.size == 0
    old[::2] = new[::2]
    old[::4] = new[::4]
    sparse = old.copy()
    sparse[::50] ^= 1
    encode_as("sparse", old, sparse, 2)
    assert compiled._buffer._data.size > 0  # kept for the next chunk, mostly untouched


WITHOUT_NUMBA = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "numba":
            raise ImportError("no numba here")
sys.meta_path.insert(0, Missing())
import numpy as np
from rollmill.weights.format import kernels
from rollmill.weights.format.codings import decode_chunk, encode_difference
assert kernels.kernels_for(1 << 24) is kernels.plain
old = np.arange(1 << 20, dtype=np.uint32).astype(np.uint16)
new = old.copy(); new[::99] += 1
encoded = encode_difference(old.view(np.uint8), new.view(np.uint8), 2)
assert np.array_equal(decode_chunk(*encoded[:2], old.view(np.uint8), old.nbytes, 2), new.view(np.uint8))
print("fine")
"""


def test_without_numba_everything_works() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], capture_output=True, text=True, env=os.environ)
    assert done.stdout == "fine\n", done.stderr


def test_the_compiler_is_only_loaded_when_it_is_needed() -> None:
    code = "import sys, rollmill.weights.format.codings; print('numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.stdout == "False\n", done.stderr
