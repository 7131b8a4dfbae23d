"""A second reader of the weights format, written from FORMAT.md alone: it imports nothing of the package.

It shows that the specification is enough, and can be a start for a reader in another language. It is simple, holds
everything in memory, and refuses invalid data with an assertion.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import xxhash
import zstandard
from blake3 import blake3

WIDTHS = {"fp32": 4, "int32": 4, "bf16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1, "int8": 1, "uint8": 1, "fp4x2": 1}


def read_version(store: Path, line: str, form: str, number: int) -> dict[str, np.ndarray]:
    """The bytes of every tensor (flat uint8) of a version."""
    folder = store / "weights" / line / form
    manifest = read_sealed(folder / "manifests" / f"{number:010d}.manifest")
    assert (manifest["format"], manifest["line"], manifest["number"], manifest["form"]) == (2, line, number, form)
    tensors = manifest["tensors"]
    table = [[tensor[key] for key in ("name", "dtype", "shape", "chunks")] for tensor in tensors]
    assert [row[0] for row in table] == sorted({row[0] for row in table})
    assert blake3(json.dumps(table, separators=(",", ":")).encode()).hexdigest() == manifest["digest"]
    anchor = folder / "anchors" / f"{number:010d}.anchor"
    if manifest["snapshot"] and all(pack_path(folder, number, p).exists() for p in manifest["snapshot"]["packs"]):
        weights = apply(folder, number, tensors, manifest["snapshot"], None)
    elif anchor.exists():
        sealed = read_sealed(anchor)
        assert sealed["digest"] == manifest["digest"]
        weights = apply(folder, number, tensors, sealed["snapshot"], None)
    else:
        base = manifest["delta"]["base"]
        before = read_version(store, line, form, base["number"])
        weights = apply(folder, number, tensors, manifest["delta"], before)
    for tensor in tensors:
        ranges = chunk_ranges(tensor["shape"], WIDTHS[tensor["dtype"]])
        digests = [xxhash.xxh3_128_hexdigest(weights[tensor["name"]][start:stop].tobytes()) for start, stop in ranges]
        assert digests == tensor["chunks"], f"{tensor['name']} differs from the manifest"
    return weights


def read_sealed(path: Path) -> dict:
    body, seal, rest = path.read_bytes().split(b"\n")
    assert blake3(body).hexdigest() == seal.decode() and not rest
    return json.loads(body)


def pack_path(folder: Path, number: int, pack: dict) -> Path:
    return folder / "packs" / f"{number:010d}-{pack['digest']}"


def chunk_ranges(shape: list[int], width: int) -> list[tuple[int, int]]:
    """Byte ranges of the chunks of a tensor."""
    total, folded = math.prod(shape), 1
    row = math.prod(shape[folded:])
    while row > 1 << 24:
        folded += 1
        row = math.prod(shape[folded:])
    rows = (1 << 24) // max(row, 1)
    step = row * (rows - rows % 128 if rows > 128 else rows)
    return [(start * width, min(start + step, total) * width) for start in range(0, total, max(step, 1))]


def apply(folder: Path, number: int, tensors: list, encoding: dict, base: dict | None) -> dict[str, np.ndarray]:
    packs = []
    for pack in encoding["packs"]:
        packs.append(pack_path(folder, number, pack).read_bytes())
        assert blake3(packs[-1]).hexdigest() == pack["digest"] and len(packs[-1]) == pack["bytes"]
    weights, chunks = {}, []
    for tensor in tensors:
        width = WIDTHS[tensor["dtype"]]
        size = math.prod(tensor["shape"]) * width
        data = weights[tensor["name"]] = base[tensor["name"]].copy() if base else np.zeros(size, np.uint8)
        chunks += [(data[start:stop], width) for start, stop in chunk_ranges(tensor["shape"], width)]
    for payload in encoding["payloads"]:
        run = chunks[payload["first"] : payload["first"] + payload["chunks"]]
        (width,) = {width for _, width in run}
        stored = packs[payload["pack"]][payload["offset"] : payload["offset"] + payload["bytes"]]
        joined = np.concatenate([chunk for chunk, _ in run])
        elements = decode(payload["coding"], Streams(stored), joined.view(f"<u{width}")).view(np.uint8)
        for chunk, _ in run:
            chunk[:] = elements[: chunk.size]
            elements = elements[chunk.size :]
    return weights


class Streams:
    def __init__(self, payload: bytes) -> None:
        self.payload = payload

    def next(self) -> np.ndarray:
        length, stored_length = self.number(), self.number()
        stored, self.payload = self.payload[:stored_length], self.payload[stored_length:]
        data = stored if stored_length == length else zstandard.ZstdDecompressor().decompress(stored)
        assert len(data) == length
        return np.frombuffer(data, np.uint8)

    def number(self) -> int:
        value = shift = 0
        while True:
            byte, self.payload = self.payload[0], self.payload[1:]
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    def planes(self, width: int) -> np.ndarray:
        return np.stack([self.next() for _ in range(width)], axis=1).reshape(-1).view(f"<u{width}")

    def indices(self) -> list[int]:
        found, reached = [], -1
        for byte in self.next().tolist():
            reached += byte if byte == 255 else byte + 1
            if byte != 255:
                found.append(reached)
        return found


def decode(coding: str, streams: Streams, base: np.ndarray) -> np.ndarray:
    width, result = base.itemsize, base.copy()
    bits = 8 * width
    if coding == "raw":
        result = rotate_right(streams.planes(width))
    elif coding == "overwrite":
        changed = streams.indices()
        result[changed] = rotate_right(streams.planes(width))
    elif coding == "dense":
        zigzagged = [int(number) for number in streams.planes(width)]
        steps = [number // 2 if number % 2 == 0 else -(number + 1) // 2 for number in zigzagged]
        result[:] = [moved(int(old), step, bits) for old, step in zip(base, steps, strict=True)]
    elif coding == "sparse":
        decode_sparse(streams, result, np.arange(base.size), bits)
    else:
        assert coding == "classed"
        boundaries = streams.next()
        magnitudes = base & 127 if width == 1 else (base >> (bits - 9)) & 255
        classes = (boundaries[:, None] <= magnitudes[None, :]).sum(axis=0)
        for which in range(boundaries.size + 1):
            decode_sparse(streams, result, np.flatnonzero(classes == which), bits)
    assert not streams.payload
    return result


def decode_sparse(streams: Streams, elements: np.ndarray, members: np.ndarray, bits: int) -> None:
    changed, signs, exceptions = streams.indices(), np.unpackbits(streams.next()), streams.indices()
    steps = [1] * len(changed)
    for exception, magnitude in zip(exceptions, streams.next().tolist(), strict=True):
        steps[exception] = magnitude
    literals = streams.next().view(elements.dtype).tolist()
    for index, negative, step in zip(changed, signs, steps, strict=False):
        place = members[index]
        new = moved(int(elements[place]), -step if negative else step, bits) if step else literals.pop(0)
        elements[place] = new


def moved(element: int, step: int, bits: int) -> int:
    """An element moved by `step` ordered integers."""
    top, every = 1 << (bits - 1), (1 << bits) - 1
    ordered = ((element ^ every if element & top else element | top) + step) & every
    return ordered ^ top if ordered & top else ordered ^ every


def rotate_right(elements: np.ndarray) -> np.ndarray:
    bits = 8 * elements.itemsize
    return (elements >> 1) | (elements << (bits - 1)).astype(elements.dtype)
