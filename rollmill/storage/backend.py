"""What an object store must provide, and what the stores share."""

from __future__ import annotations

import builtins
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import IO, NamedTuple

from rollmill.backoff import Backoff

PATIENCE_SECONDS = 15.0


class Stat(NamedTuple):
    bytes: int
    modified: float  # when it was written, by the store's clock, seconds since the epoch


class Backend(ABC):
    """What a store must provide. Keys have been validated."""

    look_s = 0.05  # the longest pause between two looks of `wait_for`

    @abstractmethod
    def get(self, key: str) -> bytes: ...
    @abstractmethod
    def get_range(self, key: str, start: int, length: int) -> bytes: ...
    @abstractmethod
    def put(self, key: str, data: bytes) -> None: ...
    @abstractmethod
    def create(self, key: str, data: bytes) -> None: ...
    @abstractmethod
    def create_from(self, key: str, file: IO[bytes]) -> None: ...
    @abstractmethod
    def stat(self, key: str) -> Stat | None: ...
    @abstractmethod
    def list(self, prefix: str) -> builtins.list[str]: ...
    @abstractmethod
    def folders(self, prefix: str) -> builtins.list[str]: ...
    @abstractmethod
    def delete(self, keys: Sequence[str]) -> None: ...

    def stats(self, prefix: str) -> dict[str, Stat]:
        found = ((key, self.stat(key)) for key in self.list(prefix))
        return {key: stat for key, stat in found if stat is not None}

    def wait_for(self, key: str, seconds: float) -> bytes | None:
        """The object as soon as it exists; None if it does not after `seconds`. Polls with growing pauses."""
        backoff = Backoff(0.02, self.look_s, patience=seconds, factor=1.5)
        while self.stat(key) is None:
            if not backoff.left():
                return None
            time.sleep(min(backoff.failed(), backoff.left()))
        return self.get(key)
