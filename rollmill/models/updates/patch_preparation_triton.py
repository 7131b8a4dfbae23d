"""Changes on a CUDA device: they wait there in lists, and one launch writes all tensors of the same width."""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollmill.models.triton import current
from rollmill.models.updates.apply_triton import AuditTables, ScatterTable, audit_tables, run_audits, scatter_table
from rollmill.models.updates.bits import INTEGERS, bits_of, elements, widened
from rollmill.models.updates.device_audit import Audited, audit_many, is_compiled

if TYPE_CHECKING:
    from rollmill.weights.reading.patches import Patch

WHOLE_BYTES = 1 << 30  # device memory for tensors that are copied whole; what exceeds it is moved in the pause


class _Kind(NamedTuple):
    """Changes that one launch can write. A later round may change the same elements again."""

    round: int
    form: torch.dtype
    dtype: torch.dtype


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream | None:
    """One stream for all updates: torch caches memory per stream, so a new stream each time would keep more and
    more."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


class TritonChange:
    """Moves and converts everything on a stream of its own, so that decoding does not wait."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = _stream_of(device)
        self._patches: defaultdict[_Kind, list[tuple[int, np.ndarray, np.ndarray]]] = defaultdict(list)
        self._tables: list[ScatterTable] = []
        self._moved: list[tuple[Tensor, Tensor]] = []
        self._unmoved: list[tuple[Tensor, torch.dtype, np.ndarray]] = []
        self._whole_bytes = 0
        self._audited: Sequence[Audited] = ()
        self._audits: AuditTables | None = None

    def add_whole(self, parameter: Tensor, form: torch.dtype, data: np.ndarray) -> None:
        self._whole_bytes += parameter.nbytes
        if self._whole_bytes > WHOLE_BYTES:
            self._unmoved.append((parameter, form, data))
            return
        with self._aside():
            self._moved.append((bits_of(parameter), self._on_device(form, parameter.dtype, [data])))

    def add_patches(self, parameter: Tensor, form: torch.dtype, patches: Sequence[Patch]) -> None:
        address, rounds = bits_of(parameter).data_ptr(), Counter[int]()
        for start, indices, values in patches:
            kind = _Kind(rounds[start], form, parameter.dtype)
            self._patches[kind].append((address + start * parameter.element_size(), indices, values))
            rounds[start] += 1

    def ready(self, audited: Sequence[Audited]) -> None:
        self._audited = audited
        with self._aside(), current(self.device):
            for kind in sorted(self._patches, key=lambda kind: kind.round):
                addresses, indices, values = zip(*self._patches[kind], strict=True)
                index = self._on_device(torch.int32, torch.int32, indices)
                value = self._on_device(kind.form, kind.dtype, values)
                runs = [(address, part.size) for address, part in zip(addresses, indices, strict=True)]
                self._tables.append(scatter_table(runs, index, value))
            for table in self._tables:
                table.rehearse()
            if audited and all(is_compiled(*target) for target in audited):
                self._audits = audit_tables(audited)
                self._audits.rehearse()
        self._patches.clear()
        if self._stream is not None:
            self._stream.synchronize()

    def write(self) -> None:
        with current(self.device):
            for bits, new in self._moved:
                bits.copy_(new)
            for parameter, form, data in self._unmoved:
                bits_of(parameter).copy_(widened(elements(data, form).to(self.device), form, parameter.dtype))
            for table in self._tables:
                table.run()

    def audits(self) -> list[int]:
        with current(self.device):
            if self._audits is not None:
                return run_audits(self._audits)
            found = audit_many(self._audited)
            if self._stream is not None:
                torch.cuda.current_stream(self.device).synchronize()
            return found

    def _on_device(self, form: torch.dtype, dtype: torch.dtype, parts: Sequence[np.ndarray]) -> Tensor:
        """Elements of `form`, all parts in order, as the bits they have in `dtype`."""
        flat = [part.reshape(-1).view(f"i{form.itemsize}") for part in parts]
        bits = INTEGERS[form.itemsize]
        host = torch.empty(sum(part.size for part in flat), dtype=bits, pin_memory=self._stream is not None)
        np.concatenate(flat, out=host.numpy())
        return widened(host.to(self.device, non_blocking=True), form, dtype)

    def _aside(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()
