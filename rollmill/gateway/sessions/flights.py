"""An answer in flight: planned, and not yet recorded. The answers of one session are in flight side by side.

The seal of a rollout does not wait for a model: it cuts the answers in flight. What they have sampled is recorded as
aborted answers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from rollmill.chat.format import Message, Tool
from rollmill.gateway.wire.answer import same_message


class AnswerCut(Exception):
    """The session is being sealed: nothing more is sampled."""


class Asked(NamedTuple):
    """What decides whether two requests ask for the same answer."""

    messages: Sequence[Message]
    tools: Sequence[Tool]
    grammar: str | None

    def same_as(self, other: Asked) -> bool:
        if len(self.messages) != len(other.messages) or self[1:] != other[1:]:
            return False
        return all(map(same_message, self.messages, other.messages))


class Flight:
    def __init__(self, cache: str, asked: Asked, is_abandoned: Callable[[], bool]) -> None:
        self.cache = cache  # the name of its KV cache at the engines
        self.asked = asked
        self.is_abandoned = is_abandoned  # whether its client has disconnected
        self._is_cut = False
        self._sampling: asyncio.Task[object] | None = None
        self._ended = asyncio.Event()

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """While tokens are sampled. Raises AnswerCut when the answer is cut."""
        if self._is_cut:
            raise AnswerCut
        task = self._sampling = asyncio.current_task()
        assert task is not None
        try:
            yield
        except asyncio.CancelledError:
            if not self._is_cut or task.uncancel() > 0:  # cancelled by somebody else
                raise
            raise AnswerCut from None
        finally:
            self._sampling = None

    def cut(self) -> None:
        """Stop sampling. An answer that is complete is not affected: it is being recorded."""
        if self._is_cut:
            return
        self._is_cut = True
        if self._sampling is not None:
            self._sampling.cancel()

    def end(self) -> None:
        self._ended.set()

    async def wait(self) -> None:
        """Returns when the answer is recorded or lost."""
        await self._ended.wait()
