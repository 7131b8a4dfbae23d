"""The tensors of a checkpoint in an object store. One process writes one of two layouts, several ranks the
other; both read either.

    one process  state-00000.safetensors …                "objects": name, bytes and digest of each object
    ranks        state-RANK-of-RANKS-00000.safetensors …  "tensors": dtype and shape of each tensor, and its "pieces":
                                                      which rows are where in which object, with a digest

`described` is the content of checkpoint.json, which is written last.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import safetensors.torch
import torch
from blake3 import blake3
from torch import Tensor

from rollmill.storage.objects import Objects

DESCRIPTION = "checkpoint.json"
OBJECT_BYTES = 256 << 20
RowsOf = Callable[[str], tuple[int, int] | None]  # name of a tensor → the rows [start, stop) to read; None: all


def write_whole(objects: Objects, folder: str, described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """One object after another: the memory this needs beside the state is that of one object."""
    written = []
    for number, part in enumerate(parts_of(tensors)):
        name, data = f"state-{number:05d}.safetensors", safetensors.torch.save(part)
        objects.put(f"{folder}/{name}", data)
        written.append({"name": name, "bytes": len(data), "blake3": _digest(data)})
    write_description(objects, folder, {**described, "objects": written})


def write_pieces(objects: Objects, folder: str, prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Objects PREFIX-00000.safetensors …; returns where each tensor is: object, start, bytes and digest."""
    places: dict[str, Any] = {}
    for number, part in enumerate(parts_of(tensors)):
        name, data = f"{prefix}-{number:05d}.safetensors", safetensors.torch.save(part)
        objects.put(f"{folder}/{name}", data)
        header = int.from_bytes(data[:8], "little")
        for tensor, entry in json.loads(data[8 : 8 + header]).items():
            if tensor in part:
                start, stop = (8 + header + offset for offset in entry["data_offsets"])
                digest = _digest(memoryview(data)[start:stop])
                places[tensor] = {"object": name, "start": start, "bytes": stop - start, "blake3": digest}
    return places


def write_description(objects: Objects, folder: str, described: Mapping[str, Any]) -> None:
    objects.put(f"{folder}/{DESCRIPTION}", json.dumps(described, indent=1).encode())


def read_tensors(
    objects: Objects, folder: str, described: Mapping[str, Any], rows_of: RowsOf = lambda name: None
) -> dict[str, Tensor]:
    """The rows that `rows_of` names of every tensor. Raises ValueError if bytes do not match their digest."""
    read = _read_pieces if "tensors" in described else _read_objects
    return dict(read(objects, folder, described, rows_of))


def _read_objects(
    objects: Objects, folder: str, described: Mapping[str, Any], rows_of: RowsOf
) -> Iterator[tuple[str, Tensor]]:
    for entry in described["objects"]:
        data = objects.get(f"{folder}/{entry['name']}")
        _check(data, entry["blake3"], entry["name"])
        for name, tensor in safetensors.torch.load(data).items():
            rows = rows_of(name)
            yield name, tensor if rows is None else tensor[slice(*rows)].clone()


def _read_pieces(
    objects: Objects, folder: str, described: Mapping[str, Any], rows_of: RowsOf
) -> Iterator[tuple[str, Tensor]]:
    for name, entry in described["tensors"].items():
        dtype, shape = getattr(torch, entry["dtype"]), entry["shape"]
        start, stop = rows_of(name) or (0, shape[0] if shape else 1)
        found = torch.empty((stop - start, *shape[1:]) if shape else (1,), dtype=dtype)
        missing = stop - start
        for piece in entry["pieces"]:
            first, count = (piece["offsets"][0], piece["sizes"][0]) if shape else (0, 1)
            lower, upper = max(first, start), min(first + count, stop)
            if lower < upper:
                values = _read_piece(objects, folder, name, piece, dtype).view(count, *shape[1:])
                found[lower - start : upper - start] = values[lower - first : upper - first]
                missing -= upper - lower
        if missing:
            raise ValueError(f"{missing} rows of {name} are in no object")
        yield name, found if shape else found[0]


def _read_piece(objects: Objects, folder: str, name: str, piece: Mapping[str, Any], dtype: torch.dtype) -> Tensor:
    """The whole piece, of which some rows may be wanted: its digest is that of all its bytes."""
    data = objects.get_range(f"{folder}/{piece['object']}", piece["start"], piece["bytes"])
    _check(data, piece["blake3"], f"{name} in {piece['object']}")
    return torch.frombuffer(bytearray(data), dtype=dtype)


def parts_of(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """The tensors in order, on the host, in parts of up to OBJECT_BYTES."""
    part: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if part and size + tensor.nbytes > OBJECT_BYTES:
            yield part
            part, size = {}, 0
        part[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    yield part


def copies_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the host. A thread that writes them then does nothing on a device, where a graph may be recorded."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def _check(data: bytes, digest: str, what: str) -> None:
    if _digest(data) != digest:
        raise ValueError(f"the bytes of {what} do not match their digest")


def _digest(data: bytes | memoryview) -> str:
    return blake3(data, max_threads=blake3.AUTO).hexdigest()
