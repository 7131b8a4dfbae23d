"""Ranks that publish together, without torch: threads of one process, or processes joined by pipes."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rollmill.weights.format.manifest import layout_of
from rollmill.weights.format.tensors import Tensors
from rollmill.weights.writing.publisher import OwnChunks, Peers

T = TypeVar("T")


def own_chunks(tensors: Tensors, rank: int, size: int) -> OwnChunks:
    """Every `size`-th chunk."""
    keys = [(name, chunk) for name in sorted(tensors) for chunk in range(len(tensors[name].chunks()))]
    chunks = {(name, chunk): tensors[name].chunks()[chunk] for name, chunk in keys[rank::size]}
    return OwnChunks(layout_of(tensors), chunks)


class ThreadRank:
    def __init__(self, rank: int, box: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._box, self._barrier = rank, len(box), box, barrier

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        self._box[self.rank] = value
        self._barrier.wait()
        found = list(self._box)
        self._barrier.wait()
        return found

    def from_first(self, value: T) -> T:
        return self.gather(value)[0]


def together(size: int, work: Callable[[Peers], T]) -> list[T]:
    """What `work` returns on each rank. Raises the error of the first rank that failed; the others end with it."""
    barrier, box = threading.Barrier(size), [None] * size

    def run(rank: int) -> T:
        try:
            return work(ThreadRank(rank, box, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


class PipeRank:
    """Rank 0 has a pipe from and to each other rank. If a process ends, the others raise EOFError."""

    def __init__(self, rank: int, up: list[tuple[int, int]], down: list[tuple[int, int]]) -> None:
        self.rank, self.size, self._up, self._down = rank, len(up), up, down
        for each, (up_read, up_write), (down_read, down_write) in zip(range(self.size), up, down, strict=True):
            for end in (up_write, down_read) if self.first else (up_read, down_write):
                os.close(end)
            for end in (up_write, down_read) if not self.first and each != rank else ():
                os.close(end)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        if not self.first:
            _send(self._up[self.rank][1], value)
            return _receive(self._down[self.rank][0])
        found = [value, *(_receive(reader) for reader, _ in self._up[1:])]
        for _, writer in self._down[1:]:
            _send(writer, found)
        return found

    def from_first(self, value: T) -> T:
        return self.gather(value)[0]


def _send(pipe: int, value: object) -> None:
    data = pickle.dumps(value)
    data = len(data).to_bytes(8) + data
    while data:
        data = data[os.write(pipe, data) :]


def _receive(pipe: int) -> Any:
    return pickle.loads(_read(pipe, int.from_bytes(_read(pipe, 8))))


def _read(pipe: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        some = os.read(pipe, size - len(data))
        if not some:
            raise EOFError("another rank has ended")
        data += some
    return data
