"""What an object store must provide, and what the stores share."""

from __future__ import annotations

import builtins
import time
from collections.abc import Callable, Sequence
from typing import IO, NamedTuple, Protocol

from rollmill.backoff import Backoff

PATIENCE_SECONDS = 15.0


class Stat(NamedTuple):
    bytes: int
    modified: float  # when it was written, by the store's clock, seconds since the epoch


class Backend(Protocol):
    """What a store must provide. Keys have been validated."""

    def get(self, key: str) -> bytes: ...
    def get_range(self, key: str, start: int, length: int) -> bytes: ...
    def put(self, key: str, data: bytes) -> None: ...
    def create(self, key: str, data: bytes) -> None: ...
    def create_from(self, key: str, file: IO[bytes]) -> None: ...
    def stat(self, key: str) -> Stat | None: ...
    def list(self, prefix: str) -> builtins.list[str]: ...
    def stats(self, prefix: str) -> dict[str, Stat]: ...
    def folders(self, prefix: str) -> builtins.list[str]: ...
    def delete(self, keys: Sequence[str]) -> None: ...
    def wait_for(self, key: str, seconds: float) -> bytes | None: ...


def look_until(is_there: Callable[[], bool], seconds: float, longest_pause: float) -> bool:
    """Poll with growing pauses until `is_there`, for at most `seconds`: for stores that cannot notify."""
    backoff = Backoff(0.02, longest_pause, patience=seconds, factor=1.5)
    while not is_there():
        if not backoff.left():
            return False
        time.sleep(min(backoff.failed(), backoff.left()))
    return True
