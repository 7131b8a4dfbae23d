"""Computes the streams of many payloads at once. Waits for the device twice: for the number of changes, and for
sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import triton.language as tl
from torch import Tensor

from rollmill.models.triton import current
from rollmill.models.updates import delta_triton as kernels

TILE = 16384  # elements
WORD = 8  # bytes compared at once
_BLOCK = 256  # changes at once: about as many as a tile has
_PACKED = 1024  # bytes of signs
_UNSIGNED = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}
# rows of the table of counts
_CHANGES, _EXCEPTIONS, _LITERALS, _SKIPS, _EXCEPTION_SKIPS = range(5)

Pairs = Sequence[tuple[Tensor, Tensor]]  # base and new, as flat integers


class Batch:
    """Groups of chunks of the same width on one device, described by tables in device memory."""

    def __init__(self, groups: list[int], pairs: Sequence[Pairs]) -> None:
        self.groups = groups
        self._pairs = pairs  # the tables hold addresses, so the tensors must stay alive
        self._bits, self._device = pairs[0][0][1].dtype, pairs[0][0][1].device
        self._sizes = np.array([sum(new.numel() for _, new in group) for group in pairs])
        rows = _tile_rows(pairs)
        self._tiles = len(rows.old)
        aligned = ((rows.old | rows.new | rows.elements * self._bits.itemsize) % WORD) == 0
        first_tiles = np.searchsorted(rows.payload, np.arange(len(pairs) + 1))
        self._payload_tiles = self._table(first_tiles)
        self._first_tiles = self._table(first_tiles[rows.payload].astype(np.int32))
        self._old, self._new = self._table(rows.old), self._table(rows.new)
        self._elements, self._origins, self._payloads = (
            self._table(row.astype(np.int32)) for row in (rows.elements, rows.origin, rows.payload)
        )
        self._aligned, self._ragged = (self._table(np.flatnonzero(a).astype(np.int32)) for a in (aligned, ~aligned))
        self._counts = torch.zeros(5, self._tiles + 1, dtype=torch.int32, device=self._device)
        self._starts = torch.zeros_like(self._counts)

    def changes(self) -> tuple[Tensor, Tensor]:
        """Indices and new elements of all groups, in order."""
        with current(self._device):
            bitmap = self._flag()
            index, value, _ = self._gather(bitmap, int(self._starts[_CHANGES, -1]))
            return index, value

    def run(self, densest: float) -> DeviceStreams:
        with current(self._device):
            bitmap = self._flag()
            # waits for the device: the number of changes decides how much is allocated
            changed = np.diff(self._starts[_CHANGES].index_select(0, self._payload_tiles).cpu().numpy())
            too_dense = changed > densest * self._sizes
            if too_dense.any():
                self._counts[_CHANGES, 1:] *= self._table(~too_dense).index_select(0, self._payloads)
                self._sum(_CHANGES)
            return self._streams(bitmap, int(changed[~too_dense].sum()), too_dense)

    def _flag(self) -> Tensor:
        """One bit per element, set if it changed."""
        bitmap, width = self._empty(self._tiles * TILE // 32), self._bits.itemsize
        tables = self._old, self._new, self._elements, bitmap, self._counts[_CHANGES]
        if self._aligned.numel():
            shape = tl.uint64, 8 * width, WORD // width, TILE, 128 if width > 1 else 256
            kernels.flag[(self._aligned.numel(),)](self._aligned, *tables, *shape, num_warps=4)
        if self._ragged.numel():
            shape = _UNSIGNED[width], 8 * width, 1, TILE, 64
            kernels.flag[(self._ragged.numel(),)](self._ragged, *tables, *shape, num_warps=4)
        self._sum(_CHANGES)
        return bitmap

    def _gather(self, bitmap: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
        """The index, new element and kind of each change."""
        lists = self._empty(total), self._empty(total, self._bits), self._empty(total, torch.int16)
        counts, width = self._counts, self._bits.itemsize
        kernels.gather[(self._tiles,)](
            self._old, self._new, self._origins, bitmap, self._starts[_CHANGES],
            *lists, counts[_EXCEPTIONS], counts[_LITERALS], _UNSIGNED[width], width, TILE, num_warps=16,
        )  # fmt: skip
        return lists

    def _streams(self, bitmap: Tensor, total: int, left_out: np.ndarray) -> DeviceStreams:
        index, value, kind = self._gather(bitmap, total)
        self._sum(_EXCEPTIONS)
        self._sum(_LITERALS)
        signs = torch.zeros((total + 7) // 8 * 8 + 8 * len(self._pairs), dtype=torch.uint8, device=self._device)
        # as large as the number of changes, so that nothing has to wait for the exact sizes
        exception, magnitudes = self._empty(total), self._empty(total, torch.uint8)
        literals = self._empty(total, self._bits)
        starts = self._starts
        kernels.write_exceptions[(self._tiles,)](
            kind, value, starts[_CHANGES], self._first_tiles, self._payloads, starts[_EXCEPTIONS], starts[_LITERALS],
            signs, exception, magnitudes, literals, BLOCK=_BLOCK, num_warps=4,
        )  # fmt: skip
        buffers = (
            self._gaps(index, _CHANGES, _SKIPS, total + int(self._sizes.sum()) // 255),
            self._packed(signs),
            self._gaps(exception, _EXCEPTIONS, _EXCEPTION_SKIPS, total + total // 255),
            magnitudes,
            literals.view(torch.uint8),
        )
        begins = starts.index_select(1, self._payload_tiles).cpu().numpy().astype(np.int64)
        return DeviceStreams(buffers, begins, self._bits.itemsize, left_out)

    def _gaps(self, index: Tensor, items: int, skips: int, most: int) -> Tensor:
        """The gap bytes, at most `most`, of a list whose counts are in row `items`."""
        starts, grid = self._starts[items], (self._tiles,)
        kernels.count_skips[grid](index, starts, self._first_tiles, self._counts[skips], BLOCK=_BLOCK, num_warps=4)
        self._sum(skips)
        gaps = torch.full((most,), 255, dtype=torch.uint8, device=self._device)
        tables = starts, self._first_tiles, self._starts[skips]
        kernels.write_gaps[grid](index, *tables, gaps, BLOCK=_BLOCK, num_warps=4)
        return gaps

    def _packed(self, signs: Tensor) -> Tensor:
        packed = self._empty(signs.numel() // 8, torch.uint8)
        grid = (-(-packed.numel() // _PACKED),)
        kernels.pack_signs[grid](signs, packed, packed.numel(), BLOCK=_PACKED, num_warps=4)
        return packed

    def _sum(self, row: int) -> None:
        torch.cumsum(self._counts[row], 0, dtype=torch.int32, out=self._starts[row])

    def _table(self, rows: np.ndarray) -> Tensor:
        return torch.from_numpy(rows).to(self._device)

    def _empty(self, size: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(size, dtype=dtype, device=self._device)


class DeviceStreams:
    """The streams of many payloads: five buffers, each with all payloads in order."""

    def __init__(self, buffers: Sequence[Tensor], sums: np.ndarray, width: int, left_out: np.ndarray) -> None:
        """`sums` has the rows of the table of counts: for each payload the count before it, and at the end the
        total."""
        self._buffers, self._left_out = buffers, left_out
        self.changed: list[int] = np.diff(sums[_CHANGES]).tolist()
        bounds = np.stack(
            [
                sums[_CHANGES] + sums[_SKIPS],
                (sums[_CHANGES] + 7) // 8 + np.arange(sums.shape[1]),  # where `write_exceptions` puts them
                sums[_EXCEPTIONS] + sums[_EXCEPTION_SKIPS],
                sums[_EXCEPTIONS],
                sums[_LITERALS] * width,
            ]
        )
        self._begins, self._ends = bounds[:, :-1], bounds[:, 1:].copy()
        self._ends[1] = self._begins[1] + (np.diff(sums[_CHANGES]) + 7) // 8

    def __getitem__(self, payload: int) -> tuple[Tensor, ...] | None:
        """Five device tensors, or None if the payload was too dense."""
        if self._left_out[payload]:
            return None
        bounds = zip(self._buffers, self._begins[:, payload].tolist(), self._ends[:, payload].tolist(), strict=True)
        return tuple(buffer[a:b] for buffer, a, b in bounds)

    def on_host(self) -> list[list[np.ndarray] | None]:
        """All streams as arrays on the host, moved in one copy."""
        sizes = self._ends[:, -1].tolist()
        pinned = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._buffers[0].is_cuda)
        parts = pinned.split(sizes)
        for part, buffer in zip(parts, self._buffers, strict=True):
            part.copy_(buffer[: part.numel()], non_blocking=True)
        if self._buffers[0].is_cuda:
            torch.cuda.current_stream(self._buffers[0].device).synchronize()
        arrays = [part.numpy() for part in parts]
        bounds = zip(self._begins.T.tolist(), self._ends.T.tolist(), self._left_out, strict=True)
        return [
            None if left_out else [array[a:b] for array, a, b in zip(arrays, begins, ends, strict=True)]
            for begins, ends, left_out in bounds
        ]


class _TileRows(NamedTuple):
    old: np.ndarray  # address of the first element in the base
    new: np.ndarray
    elements: np.ndarray  # number of elements
    payload: np.ndarray
    origin: np.ndarray  # index of the first element in its payload


def _tile_rows(pairs: Sequence[Pairs]) -> _TileRows:
    pieces = [(payload, old, new) for payload, group in enumerate(pairs) for old, new in group]
    sizes = np.array([new.numel() for _, _, new in pieces], dtype=np.int64)
    payload = np.array([payload for payload, _, _ in pieces], dtype=np.int64)
    origin = np.cumsum(sizes) - sizes
    origin -= origin[np.searchsorted(payload, payload)]  # relative to the payload's first chunk
    tiles = -(-sizes // TILE)
    piece = np.repeat(np.arange(len(pieces)), tiles)
    offset = (np.arange(len(piece)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * TILE
    width = pieces[0][1].element_size()
    old = np.array([base.data_ptr() for _, base, _ in pieces], dtype=np.int64)
    new = np.array([changed.data_ptr() for _, _, changed in pieces], dtype=np.int64)
    return _TileRows(
        old[piece] + offset * width,
        new[piece] + offset * width,
        np.minimum(sizes[piece] - offset, TILE),
        payload[piece],
        origin[piece] + offset,
    )
