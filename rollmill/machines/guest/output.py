"""The beginning and the end of what a command prints."""

from __future__ import annotations

import os


class Output:
    def __init__(self, limit: int) -> None:
        self._limit, self._half = limit, limit // 2
        self._head, self._tail, self._total = bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        self._total += len(data)
        room = max(self._half - len(self._head), 0)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 4 * self._half + (1 << 16):
            del self._tail[: -self._limit]

    def take(self, file: int) -> bool:
        """Read an open file once. Returns False at its end."""
        data = os.read(file, 1 << 16)
        self.add(data)
        return bool(data)

    @property
    def truncated(self) -> bool:
        return self._total > self._limit

    def bytes(self) -> bytes:
        if not self.truncated:
            return bytes(self._head + self._tail)
        cut = f"\n[… {self._total - 2 * self._half} bytes cut]\n".encode()
        return bytes(self._head) + cut + (bytes(self._tail[-self._half :]) if self._half else b"")
