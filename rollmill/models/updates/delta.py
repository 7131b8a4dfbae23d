"""Weight deltas on the device: turns the changes between two versions into payloads, without moving the model.

Only the streams of coding `sparse` (rollmill/weights/FORMAT.md) leave the device, about 1 % of the model; the host
compresses them. The bytes are the same as those of the host's encoder. The reference is written in torch and runs
anywhere. On CUDA, Triton does the same with a few launches for a whole model.

`prepare` applies a delta, and `audit` is the checksum of a device copy; both are exported here too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollmill.errors import WeightsError
from rollmill.models.triton import has_triton
from rollmill.models.updates.bits import bits_of, ordered, packed_bits
from rollmill.models.updates.device_audit import audit, audit_change
from rollmill.models.updates.patch_preparation import ParameterChange, apply_changes, prepare

if TYPE_CHECKING:
    from rollmill.models.updates.delta_batch import Batch, DeviceStreams
    from rollmill.weights.format.codings import EncodedPayload

__all__ = [
    "Differences",
    "Pair",
    "ParameterChange",
    "SparseStreams",
    "apply_changes",
    "audit",
    "audit_change",
    "changes",
    "difference_streams",
    "encode_chunks",
    "prepare",
]

Pair = tuple[Tensor, Tensor]  # the same elements of the base and of the new version, both contiguous
DENSEST = 1 / 16  # if a larger share changed, another coding may be smaller: the host's encoder decides
_BATCH_ELEMENTS = 3 << 29  # at once: bounds the memory for lists of changes, and every position fits in 32 bits
_SKIP, _LARGEST_MAGNITUDE = 255, 255


class SparseStreams(NamedTuple):
    """The streams of one `sparse` payload, flat uint8, before compression."""

    gaps: Tensor
    signs: Tensor
    exception_gaps: Tensor
    magnitudes: Tensor
    literals: Tensor
    changed: int

    def arrays(self) -> list[np.ndarray]:
        return [stream.cpu().numpy() for stream in self[:5]]


def difference_streams(base: Tensor, new: Tensor) -> SparseStreams:
    """The streams that turn chunk `base` into chunk `new`."""
    (streams,) = Differences([[(base, new)]]).streams()
    assert streams is not None
    return streams


def changes(base: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the ascending indices (int32) of elements whose bits differ, and their new values."""
    indices, values = Differences([[(base, new)]]).changes()
    return indices, values.view(new.dtype)


def encode_chunks(
    groups: Sequence[Sequence[Pair]], densest: float = DENSEST, threads: int | None = None
) -> list[EncodedPayload | None]:
    """One payload per group of chunks; None if more than the share `densest` of its elements changed.

    A payload covers a group: one chunk, or several of the same width that are coded as one.
    """
    return Differences(groups, threads).encode(densest)


class Differences:
    """Pairs of tensors to compare after every step. The tables that describe them are made once.

    The tensors must not move. Every call reads their current values.
    """

    def __init__(self, groups: Sequence[Sequence[Pair]], threads: int | None = None) -> None:
        self._groups = [[(bits_of(base), bits_of(new)) for base, new in group] for group in groups]
        for group in self._groups:
            if len({(new.dtype, new.device) for pair in group for new in pair}) != 1:
                raise WeightsError("the chunks of one payload must have elements of the same width, on the same device")
            if any(base.numel() != new.numel() for base, new in group):
                raise WeightsError("a chunk and its base have different numbers of elements")
            if sum(new.numel() for _, new in group) > _BATCH_ELEMENTS:
                raise WeightsError("a payload cannot cover that many elements", hint="cut the tensor into its chunks")
        self._batches = [self._batch(groups) for groups in self._device_batches()]
        on_device = {group for batch in self._batches for group in batch.groups}
        self._others = [group for group in range(len(groups)) if group not in on_device]
        self._pool = ThreadPoolExecutor(threads)  # threads and their compressors start with the first `encode`

    def streams(self, densest: float = 1.0) -> Iterator[SparseStreams | None]:
        """The streams of each group; None if more than the share `densest` of its elements changed.

        All streams are computed now. The iterator only cuts them into tensors per group.
        """
        found: dict[int, SparseStreams | None] = {
            group: reference_streams(*self._flat(group), densest) for group in self._others
        }
        places: dict[int, tuple[DeviceStreams, int]] = {}
        for batch in self._batches:
            done = batch.run(densest)
            places |= {group: (done, place) for place, group in enumerate(batch.groups)}
        return (found[group] if group in found else _cut(*places[group]) for group in range(len(self._groups)))

    def changes(self) -> tuple[Tensor, Tensor]:
        """Indices and new elements as integers, for a single group."""
        if self._batches:
            return self._batches[0].changes()
        old, new = self._flat(0)
        indices = torch.nonzero(old != new).flatten()
        return indices.to(torch.int32), new[indices]

    def encode(self, densest: float = DENSEST) -> list[EncodedPayload | None]:
        """The payloads; None if more than the share `densest` of a group's elements changed."""
        return [future.result() for future in self.start(densest)]

    def start(self, densest: float = DENSEST) -> list[Future[EncodedPayload | None]]:
        """The same, without waiting for the threads that compress the payloads. The tensors may change afterwards."""
        futures: dict[int, Future[EncodedPayload | None]] = {}
        for batch in self._batches:
            done = batch.run(densest)
            for group, arrays, changed in zip(batch.groups, done.on_host(), done.changed, strict=True):
                futures[group] = self._pool.submit(_encoded, arrays, changed)
        for group in self._others:
            streams = reference_streams(*self._flat(group), densest)
            arrays, changed = (streams.arrays(), streams.changed) if streams else (None, 0)
            futures[group] = self._pool.submit(_encoded, arrays, changed)
        return [futures[group] for group in range(len(self._groups))]

    def _device_batches(self) -> Iterable[list[int]]:
        """The groups that Triton can process, in batches of the same device and width."""
        batches: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        sizes: dict[tuple[torch.device, torch.dtype], int] = {}
        for group, pairs in enumerate(self._groups):
            key = pairs[0][1].device, pairs[0][1].dtype
            if not has_triton(key[0]):
                continue
            size = sum(new.numel() for _, new in pairs)
            if key in batches and sizes[key] + size > _BATCH_ELEMENTS:
                yield batches.pop(key)
            if key not in batches:
                batches[key], sizes[key] = [], 0
            batches[key].append(group)
            sizes[key] += size
        yield from batches.values()

    def _batch(self, groups: list[int]) -> Batch:
        from rollmill.models.updates.delta_batch import Batch

        return Batch(groups, [self._groups[group] for group in groups])

    def _flat(self, group: int) -> Pair:
        pairs = self._groups[group]
        if len(pairs) == 1:
            return pairs[0]
        return torch.cat([old for old, _ in pairs]), torch.cat([new for _, new in pairs])


def _cut(batch: DeviceStreams, place: int) -> SparseStreams | None:
    streams = batch[place]
    return None if streams is None else SparseStreams._make((*streams, batch.changed[place]))


def _encoded(streams: list[np.ndarray] | None, changed: int) -> EncodedPayload | None:
    from rollmill.weights.format.byte_streams import pack_streams
    from rollmill.weights.format.codings import EncodedPayload

    if streams is None:
        return None
    return EncodedPayload("sparse", pack_streams(streams) if changed else b"", changed)


def reference_streams(old: Tensor, new: Tensor, densest: float = 1.0) -> SparseStreams | None:
    """The kernels' computation in torch, on elements as flat integers of their width."""
    indices = torch.nonzero(old != new).flatten()
    if indices.numel() > densest * new.numel():
        return None
    before, after = old[indices], new[indices]
    modulus = 1 << 8 * new.element_size()
    difference = torch.remainder(ordered(after) - ordered(before), modulus)
    negative = difference >= modulus // 2
    magnitude = torch.where(negative, modulus - difference, difference)
    exceptions = torch.nonzero(magnitude != 1).flatten()
    unusual = magnitude[exceptions]
    escaped = unusual > _LARGEST_MAGNITUDE
    return SparseStreams(
        _gap_bytes(indices),
        packed_bits(torch.nn.functional.pad(negative, (0, -negative.numel() % 8))),
        _gap_bytes(exceptions),
        torch.where(escaped, 0, unusual).to(torch.uint8),
        after[exceptions[escaped]].view(torch.uint8),
        indices.numel(),
    )


def _gap_bytes(indices: Tensor) -> Tensor:
    gaps = torch.diff(indices, prepend=indices.new_tensor([-1])) - 1
    skips = gaps // _SKIP
    ends = torch.cumsum(skips + 1, 0)
    data = torch.full((int(ends[-1]) if ends.numel() else 0,), _SKIP, dtype=torch.uint8, device=indices.device)
    data[ends - 1] = (gaps - _SKIP * skips).to(torch.uint8)
    return data
