"""Long work beside the event loop: rendering or redacting a large history must not delay other answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from rollmill.gateway.wire.dialect import ModelRequest

T = TypeVar("T")
_LARGE = 64 << 10  # characters: they take some milliseconds, and changing threads some tenths of one


async def aside(request: ModelRequest, work: Callable[[], T]) -> T:
    """What `work` returns. For a large request it runs in a thread."""
    return await asyncio.to_thread(work) if is_large(request) else work()


def is_large(request: ModelRequest) -> bool:
    size = len(request.prompt or ())
    for message in request.messages:
        size += len(message["content"] or "")
        if size > _LARGE:
            return True
    return size > _LARGE
