"""An answer while it is sampled. Chunks from one engine, or from several if one died, become one record."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence

import numpy as np

from rollmill.chat.first_call import FirstCall
from rollmill.chat.format import ChatFormat, Message, Tool
from rollmill.chat.tokenizer import Tokenizer
from rollmill.gateway.routing.engines import EngineState
from rollmill.gateway.wire.answer import Answer, call_id
from rollmill.inference.engine import GenerateChunk, GenerateRequest
from rollmill.types import FinishReason, PolicyRef, Span


class AnswerBuilder:
    """Positions count from the start of the segment: the answer begins at the end of the request's context."""

    def __init__(
        self,
        request: GenerateRequest,
        tokenizer: Tokenizer,
        stops: Sequence[str],
        first_call: FirstCall | None = None,
    ) -> None:
        """`first_call`: the answer ends behind its first tool call."""
        self._request = request
        self._tokenizer = tokenizer
        self._stops = stops
        self._first_call = first_call
        self._offset = len(request.tokens)
        self._share: _EngineShare | None = None  # what the current engine contributes
        self._cut: str | None = None  # the stop string that ended the answer
        self._cached = 0
        self.tokens: list[int] = []
        # arrays: thousands of answers may be sampled at a time, for minutes
        self.logprobs = array("d")
        self.top_logprobs: list[list[tuple[int, float]]] = []
        self._policy = array("i")
        self._kept: list[bytes] = []  # shorter than `tokens` while no token was excluded since
        self._sets: dict[bytes, bytes] = {}  # equal sets are held once: grammars repeat them
        self._policies: list[PolicyRef] = []
        self._spans: list[Span] = []
        self._routes: list[tuple[int, np.ndarray]] = []
        self._started_at = time.time()
        self.finish: FinishReason | None = None

    def add(self, engine: EngineState, chunk: GenerateChunk) -> None:
        """Add a chunk. Tokens that do not belong to the answer are dropped."""
        if self._share is None or self._share.engine is not engine:
            self._end_share("abort", None)
            self._share = _EngineShare(engine, len(self.tokens), self._started_at)
        self._share.missing = self._share.missing or chunk.missing
        before = len(self.tokens)
        self.tokens += chunk.tokens
        self.logprobs.extend(chunk.logprobs)
        if self._request.top_logprobs:  # an engine may not know them
            self.top_logprobs += chunk.top_logprobs or [[] for _ in chunk.tokens]
        if chunk.kept:
            self._kept += [b""] * (before - len(self._kept))
            self._kept += [self._sets.setdefault(kept, kept) for kept in chunk.kept]
        numbers = [self._number(policy) for policy in chunk.policies]
        self._policy.extend([numbers[index] for index in chunk.policy])
        if chunk.routes is not None and len(chunk.routes):
            self._routes.append((chunk.routes_start, chunk.routes))
        self._cached = max(self._cached, chunk.cached_tokens)
        if self._stops:
            self._stop_at_string(before)
        if self._first_call is not None:
            self._stop_behind_call(self._first_call, before)
        if self.finish is None and chunk.finish not in (None, "abort"):
            self.finish = chunk.finish
        if self.finish is not None:
            self._end_share(self.finish, chunk.oldest_kv_policy)

    def abort(self) -> None:
        """End the answer here: nobody waits for the rest."""
        if self.finish is None:
            self.finish = "abort"
            self._end_share("abort", None)

    def build(self, format: ChatFormat | None, tools: Sequence[Tool]) -> Answer:
        """The whole answer. Without a chat format its message is the text of its tokens."""
        assert self.finish is not None, "an answer is built once it has ended"
        message = self._plain_message() if format is None else format.parse(self.tokens, tools)
        for index, call in enumerate(message.get("tool_calls") or ()):
            call["id"] = call_id(self._offset, index)
        if self._cut is not None and message["content"]:
            message["content"] = message["content"].partition(self._cut)[0]
        return Answer(
            tokens=self.tokens,
            logprobs=self.logprobs,
            policy=self._policy,
            policies=self._policies,
            spans=self._spans,
            routes=self._routes,
            finish=self.finish,
            closed=self._is_closed(),
            message=message,
            cached_tokens=self._cached,
            stop=self._cut,
            top_logprobs=self.top_logprobs,
            kept=[*self._kept, *[b""] * (len(self.tokens) - len(self._kept))] if any(self._kept) else [],
        )

    def _is_closed(self) -> bool:
        return bool(self.tokens) and self.tokens[-1] in self._request.sampling.stop_tokens

    def _plain_message(self) -> Message:
        text = self._tokenizer.decode(self.tokens[:-1] if self._is_closed() else self.tokens)
        return {"role": "assistant", "content": text}

    def _end_share(self, finish: FinishReason, oldest: PolicyRef | None) -> None:
        share, now = self._share, time.time()
        self._share = None
        self._started_at = now
        if share is None or (share.start == len(self.tokens) and (finish == "abort" or self._spans)):
            return  # no tokens from this engine
        if oldest is not None:
            number = self._number(oldest)
        else:  # an engine that dies cannot report it; the weights of its first token are the oldest known
            number = self._policy[share.start] if share.start < len(self.tokens) else -1
        self._spans.append(
            Span(
                start=self._offset + share.start,
                end=self._offset + len(self.tokens),
                sampling=self._request.sampling,
                finish=finish,
                engine=share.engine.name,
                region=share.engine.region,
                traffic=self._request.traffic,
                started_at=share.started_at,
                ended_at=now,
                oldest_kv_policy=number,
                missing=share.missing,
                answered=self._request.answered + share.start,
            )
        )

    def _stop_at_string(self, before: int) -> None:
        """Ends the answer after the token that completes a stop string. Later tokens of the engine are dropped."""
        reach = 4 * max(map(len, self._stops))  # a character is at most four tokens
        for count in range(before + 1, len(self.tokens) + 1):
            text = self._tokenizer.decode(self.tokens[max(0, count - reach) : count])
            found = next((stop for stop in self._stops if stop in text), None)
            if found is not None:
                self._end_at(count, found)
                return

    def _stop_behind_call(self, first_call: FirstCall, before: int) -> None:
        """Ends the answer behind its first call. Later tokens of the engine are dropped."""
        for count in range(before + 1, len(self.tokens) + 1):
            end = first_call.cut(self.tokens, count)
            if end is not None:
                self._end_at(end, None)
                return

    def _end_at(self, count: int, stop: str | None) -> None:
        del self.tokens[count:], self.logprobs[count:], self._policy[count:], self.top_logprobs[count:]
        del self._kept[count:]
        self._cut, self.finish = stop, "stop"

    def _number(self, policy: PolicyRef) -> int:
        for number, known in enumerate(self._policies):
            if known == policy:
                return number
        self._policies.append(policy)
        return len(self._policies) - 1


class _EngineShare:
    """What one engine contributes to an answer."""

    def __init__(self, engine: EngineState, start: int, started_at: float) -> None:
        self.engine = engine
        self.start = start
        self.started_at = started_at
        self.missing = ""
