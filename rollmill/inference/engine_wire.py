"""Requests and chunks as JSON, one object per line. No torch.

What is decoded here came from another process. Every field is checked, and a wrong one raises an EngineError that names
it. Unknown fields are ignored: the other process may be newer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import TypeAdapter
from pydantic_core import to_json

from rollmill.errors import EngineError
from rollmill.inference.engine import GenerateChunk, GenerateRequest
from rollmill.strict import parse_json
from rollmill.trajectories.allowed_tokens import LARGEST_SET
from rollmill.trajectories.facts import STRICT, Int31
from rollmill.types import Sampling

T = TypeVar("T")
WIRE = 1  # version of this contract: a gateway refuses engines with another one


@dataclass
class _Request(GenerateRequest):
    __pydantic_config__ = STRICT

    tokens: list[Int31]
    stream: bool = False


_REQUEST = TypeAdapter(_Request)
_CHUNK = TypeAdapter(GenerateChunk)
_CHUNKS = TypeAdapter(list[GenerateChunk])


def request_to_json(request: GenerateRequest, *, stream: bool = False, tokens: bytes | None = None) -> bytes:
    """`tokens`: JSON of the request's tokens. Making it takes most of the time if there are many."""
    rest = {name: value for name, value in vars(request).items() if name not in ("session", "tokens")}
    tokens = to_json(list(request.tokens)) if tokens is None else tokens
    return b"".join([b'{"session":', to_json(request.session), b',"tokens":', tokens, _rest_of_request(stream, **rest)])


@functools.lru_cache(maxsize=64)
def _rest_of_request(stream: bool, **rest: Any) -> bytes:
    """JSON of all but session and tokens, which begins with a comma. Most requests have the same."""
    return _REQUEST.dump_json(_Request("", [], stream=stream, **rest)).removeprefix(b'{"session":"","tokens":[]')


def request_from_json(data: bytes) -> tuple[GenerateRequest, bool]:
    """Returns the request, and whether its tokens are to be streamed."""
    fields = vars(_parse(_REQUEST, data, "request"))
    stream = fields.pop("stream")
    _check_sampling(fields["sampling"])
    return GenerateRequest(**fields), stream


def chunk_to_json(chunk: GenerateChunk) -> bytes:
    return _CHUNK.dump_json(chunk)


def chunk_from_json(data: bytes) -> GenerateChunk:
    return _checked(_parse(_CHUNK, data, "chunk"))


def chunks_from_json(lines: Sequence[bytes]) -> list[GenerateChunk]:
    """The chunks of these lines, parsed together: to start the parser takes longer than most lines. Chunks that differ
    only in their tokens become one."""
    if len(lines) == 1:
        return [chunk_from_json(lines[0])]
    parsed = _parse(_CHUNKS, b"[%b]" % b",".join(lines), "chunks")
    if len(parsed) != len(lines):
        raise EngineError("chunks: a line must be one JSON object")
    return [_checked(_joined(parsed))] if _are_alike(parsed) else list(map(_checked, parsed))


def _are_alike(chunks: Sequence[GenerateChunk]) -> bool:
    """Whether they are one chunk of the same tokens: what is said of an answer's end, only the last one says."""
    last = chunks[-1]
    return all(
        len(chunk.tokens) == len(chunk.logprobs) == len(chunk.policy)
        and chunk.policies == last.policies
        and chunk.missing == last.missing
        and chunk.routes is None
        and not (chunk.kept or chunk.top_logprobs)
        and (chunk is last or not (chunk.finish or chunk.timing or chunk.oldest_kv_policy or chunk.cached_tokens))
        for chunk in chunks
    )


def _joined(chunks: Sequence[GenerateChunk]) -> GenerateChunk:
    last = chunks[-1]
    last.tokens = [token for chunk in chunks for token in chunk.tokens]
    last.logprobs = [logprob for chunk in chunks for logprob in chunk.logprobs]
    last.policy = [index for chunk in chunks for index in chunk.policy]
    return last


def _checked(chunk: GenerateChunk) -> GenerateChunk:
    if not len(chunk.tokens) == len(chunk.logprobs) == len(chunk.policy):
        raise EngineError("chunk: tokens, logprobs and policy must have one entry per token")
    if chunk.top_logprobs and len(chunk.top_logprobs) != len(chunk.tokens):
        raise EngineError("chunk: top_logprobs must have one entry per token")
    if chunk.kept and (len(chunk.kept) != len(chunk.tokens) or max(map(len, chunk.kept)) > LARGEST_SET):
        raise EngineError(f"chunk: kept must have one entry per token, of at most {LARGEST_SET} bytes")
    if max(chunk.policy, default=-1) >= len(chunk.policies):
        raise EngineError("chunk: policy points outside policies")
    for policy in (*chunk.policies, chunk.oldest_kv_policy):
        if policy is not None and not 0 <= policy.number < 1 << 31:
            raise EngineError("chunk: the number of a policy is negative or too large")
    return chunk


def _check_sampling(sampling: Sampling) -> None:
    if sampling.temperature and not 1e-3 <= sampling.temperature <= 1e3:
        raise EngineError(f"sampling: temperature must be 0 or from 0.001 to 1000, got {sampling.temperature}")
    if not 0 < sampling.top_p <= 1 or not 0 <= sampling.min_p <= 1 or sampling.max_tokens < 1:
        raise EngineError("sampling: 0 < top_p ≤ 1, 0 ≤ min_p ≤ 1 and max_tokens ≥ 1 are needed")
    if not 1e-2 <= sampling.repetition_penalty <= 100:
        raise EngineError(f"sampling: repetition_penalty must be from 0.01 to 100, got {sampling.repetition_penalty}")
    biases = [bias for _, bias in sampling.logit_bias]
    if any(abs(value) > 100 for value in (sampling.presence_penalty, sampling.frequency_penalty, *biases)):
        raise EngineError("sampling: penalties and biases must be from -100 to 100")
    if any(not 0 <= token < 1 << 31 for token, _ in sampling.logit_bias):
        raise EngineError("sampling: a token of logit_bias is negative or too large")
    if min(sampling.top_k, sampling.seed or 0, *sampling.stop_tokens, 0) < 0:
        raise EngineError("sampling: top_k, seed and stop_tokens must not be negative")


def _parse(adapter: TypeAdapter[T], data: bytes, what: str) -> T:
    try:
        return parse_json(data, adapter)
    except ValueError as error:
        raise EngineError(f"{what}: {error}") from None
