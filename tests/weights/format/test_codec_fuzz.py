"""Payloads that are random, truncated, flipped, spliced or huge give elements of the chunk or a WeightsError.

Compiled kernels would read or write past their buffers where plain ones raise, so both get every payload and must give
the same result.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmill.errors import WeightsError
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights import WeightStore
from rollmill.weights.format import kernels
from rollmill.weights.format.byte_streams import Streams, pack_streams
from rollmill.weights.format.codings import CODINGS, Coding, decode_chunk, encode_as
from rollmill.weights.format.kernels import plain
from rollmill.weights.format.manifest import chunk_digest
from tests.weights.build import delta_pack, publish_line, same

ELEMENTS = 3001
WIDTHS = [1, 2, 4]


def make_pair(width: int, seed: int = 0, size: int = ELEMENTS) -> tuple[np.ndarray, np.ndarray]:
    """Elements with some exceptions, and literals if the width allows."""
    random = np.random.default_rng(seed)
    kind = plain.UNSIGNED[width]
    old = random.normal(0, 0.02, size).astype(np.float32).view("<u4") >> np.uint32(32 - 8 * width)
    step = random.choice(np.array([1, 1, 1, 1, 2**32 - 1, 2**32 - 1, 4, 2**32 - 9, 70_001]), size)
    return old.astype(kind), np.where(random.random(size) < 0.1, old + step, old).astype(kind)


def outcomes(coding: Coding, payload: bytes, old: np.ndarray) -> list[bytes | None]:
    """What plain and compiled kernels return for a payload: the elements, or None for an error."""
    found: list[bytes | None] = []
    original = kernels.COMPILED_ELEMENTS
    for smallest in (1 << 60, 0):
        kernels.COMPILED_ELEMENTS = smallest
        try:
            decoded = decode_chunk(coding, payload, old.view(np.uint8), old.nbytes, old.itemsize)
            assert decoded.size == old.nbytes
            found.append(decoded.tobytes())
        except WeightsError:
            found.append(None)
        finally:
            kernels.COMPILED_ELEMENTS = original
    assert found[0] == found[1]
    return found


def streams_of(payload: bytes) -> list[np.ndarray]:
    streams, found = Streams(payload), []
    with contextlib.suppress(WeightsError):
        while True:
            found.append(streams.at_most(1 << 20))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("coding", CODINGS)
def test_truncated(coding: Coding, width: int) -> None:
    old, new = make_pair(width)
    payload = encode_as(coding, old, new, width)
    assert outcomes(coding, payload, old)[0] == new.tobytes()
    for length in {*range(0, len(payload), max(1, len(payload) // 60)), len(payload) - 1}:
        assert outcomes(coding, payload[:length], old)[0] is None
    assert outcomes(coding, payload + b"\0", old)[0] is None


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("coding", CODINGS)
def test_flipped_bits(coding: Coding, width: int) -> None:
    """Most are refused. The others give another digest, which the caller refuses."""
    old, new = make_pair(width)
    payload = encode_as(coding, old, new, width)
    right = chunk_digest(new.tobytes())
    random = np.random.default_rng(width)
    results = []
    for bit in random.integers(0, len(payload) * 8, 150):
        damaged = bytearray(payload)
        damaged[bit // 8] ^= 1 << (bit % 8)
        results.append(outcomes(coding, bytes(damaged), old)[0])
    assert None in results
    for result in results:
        # an unused bit, for example one that pads the signs, may be flipped: then the elements are right
        assert result is None or (chunk_digest(result) == right) == (result == new.tobytes())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("coding", CODINGS)
def test_spliced(coding: Coding, width: int) -> None:
    """Valid streams of valid payloads, combined wrongly."""
    random = np.random.default_rng(width)
    pairs = [make_pair(width, seed) for seed in (0, 1)]
    streams = [streams_of(encode_as(coding, *pair, width)) for pair in pairs]
    streams.append(streams_of(encode_as("sparse", *pairs[0], width)))
    for _ in range(60):
        parts = list(streams[0])
        for _ in range(random.integers(1, 4)):
            other = streams[random.integers(len(streams))]
            parts[random.integers(len(parts))] = other[random.integers(len(other))]
        outcomes(coding, pack_streams(parts), pairs[0][0])


@given(
    st.sampled_from(CODINGS),
    st.sampled_from(WIDTHS),
    st.lists(st.binary(max_size=40) | st.lists(st.sampled_from([0, 1, 2, 63, 254, 255])).map(bytes), max_size=12),
)
@settings(max_examples=400, deadline=None)
def test_arbitrary_streams(coding: Coding, width: int, parts: list[bytes]) -> None:
    old = make_pair(width, size=64)[0]
    outcomes(coding, pack_streams([np.frombuffer(part, np.uint8) for part in parts]), old)


@given(st.sampled_from(CODINGS), st.sampled_from(WIDTHS), st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_arbitrary_bytes(coding: Coding, width: int, payload: bytes) -> None:
    outcomes(coding, payload, make_pair(width, size=64)[0])


def test_classes_that_are_not_as_large_as_their_lists_say() -> None:
    """The last members of the last tile are followed by padding, which must not be taken for elements."""
    old = np.zeros(10, dtype=np.uint16)  # all in the lowest class
    empty = np.empty(0, np.uint8)
    for index, fits in ((9, True), (10, False), (11, False), (254, False)):
        one = [np.array([index], np.uint8), np.zeros(1, np.uint8), empty, empty, empty]
        none = [empty] * 5
        assert (outcomes("classed", pack_streams([np.array([5], np.uint8), *one, *none]), old)[0] is not None) == fits
        assert outcomes("classed", pack_streams([np.array([5], np.uint8), *none, *one]), old)[0] is None


def test_boundaries_that_are_not_ascending() -> None:
    old = np.zeros(10, dtype=np.uint16)
    empty = np.empty(0, np.uint8)
    for boundaries in ([5, 5], [6, 5], list(range(8))):
        streams = [np.array(boundaries, np.uint8), *[empty] * 5 * (len(boundaries) + 1)]
        assert outcomes("classed", pack_streams(streams), old)[0] is None
    for boundaries in ([], [0], [255], list(range(7))):
        streams = [np.array(boundaries, np.uint8), *[empty] * 5 * (len(boundaries) + 1)]
        assert outcomes("classed", pack_streams(streams), old)[0] == old.tobytes()


BOMBS = """
import resource
import numpy as np, zstandard
from rollmill.errors import WeightsError
from rollmill.weights.format import kernels
from rollmill.weights.format.codings import CODINGS, decode_chunk, encode_as
from rollmill.weights.format.kernels import compiled

def number(value):
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])

def stream(length, stored):
    return number(length) + number(len(stored)) + stored

zeros = zstandard.ZstdCompressor().compress(bytes(1 << 30))
wide = zstandard.ZstdCompressor(
    compression_params=zstandard.ZstdCompressionParameters(window_log=30, enable_ldm=True)
).compress(bytes(1 << 20))
old = np.arange(1 << 16, dtype=np.uint16)
new = old ^ 1
for coding in CODINGS:  # whatever has to be loaded and compiled is, before memory is limited
    for kernels.COMPILED_ELEMENTS in (0, 1 << 60):
        payload = encode_as(coding, old, new, 2)
        assert np.array_equal(decode_chunk(coding, payload, old.view(np.uint8), old.nbytes, 2), new.view(np.uint8))
with open("/proc/self/status") as status:
    taken = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmSize"))
resource.setrlimit(resource.RLIMIT_AS, (taken + (192 << 20), taken + (192 << 20)))
refused = 0
for coding in CODINGS:
    for kernels.COMPILED_ELEMENTS in (0, 1 << 60):
        for first in (
            stream(1 << 30, zeros), stream(1 << 16, zeros), stream((1 << 35) - 1, zeros[:100]), stream(1 << 20, wide)
        ):
            for before in (b"", stream(0, b""), stream(1, b"\\x05") + stream(0, b"") * 5):
                try:
                    decode_chunk(coding, before + first, old.view(np.uint8), old.nbytes, 2)
                except WeightsError:
                    refused += 1
print("refused", refused)
"""


@pytest.mark.slow
def test_a_payload_cannot_ask_for_more_memory_than_the_chunk_has() -> None:
    done = subprocess.run([sys.executable, "-c", BOMBS], capture_output=True, text=True, env=os.environ, timeout=100)
    assert done.stdout == f"refused {len(CODINGS) * 2 * 4 * 3}\n", done.stderr


def test_a_stream_that_lies_about_its_size() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(100))
    for stored, claimed in ((bomb, 4096), (unsized, 100), (bomb + b"\0", 1 << 20)):
        header = bytearray()
        for value in (claimed, len(stored)):
            while value > 127:
                header.append(value & 127 | 128)
                value >>= 7
            header.append(value)
        with pytest.raises(WeightsError):
            decode_chunk("raw", bytes(header) + stored, None, claimed, 1)


def test_wrong_elements_never_leave_the_store(tmp_path: Path) -> None:
    """A payload that decodes to elements other than those of the table, in a correctly sealed pack and manifest."""
    versions = publish_line(tmp_path, 2)
    pack = delta_pack(tmp_path, 1)
    (path,) = (tmp_path / "weights" / "rl" / "bf16" / "manifests").glob("*1.manifest")
    body, data = json.loads(path.read_bytes().partition(b"\n")[0]), pack.read_bytes()
    store = WeightStore(Objects.open(tmp_path))
    assert same(store.load(Version("rl", 1)), versions[1])
    refused_by_digest = 0
    for bit in np.random.default_rng(0).integers(0, len(data) * 8, 40):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << (bit % 8)
        digest = blake3(damaged).hexdigest()
        body["delta"]["packs"][0]["digest"] = digest
        sealed = json.dumps(body, separators=(",", ":")).encode()
        path.write_bytes(sealed + b"\n" + blake3(sealed).hexdigest().encode() + b"\n")
        pack.with_name(f"0000000001-{digest}").write_bytes(damaged)
        try:
            loaded = WeightStore(Objects.open(tmp_path)).load(Version("rl", 1))
            assert same(loaded, versions[1])  # an unused bit
        except WeightsError as error:
            refused_by_digest += "digest" in error.message
    assert refused_by_digest
