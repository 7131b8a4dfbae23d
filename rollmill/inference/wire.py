"""Requests and chunks as JSON, one object per line. No torch.

What is decoded here came from another process. Every field is checked, and a wrong one raises an EngineError that names
it. Unknown fields are ignored: the other process may be newer.
"""

from __future__ import annotations

import base64
import binascii
import json
from typing import Annotated, Literal

import numpy as np
from pydantic import ConfigDict, Field, field_validator

from rollmill.errors import EngineError
from rollmill.inference.engine import GenerateChunk, GenerateRequest
from rollmill.strict import StrictModel, parse_json
from rollmill.types import FinishReason, PolicyRef, Sampling, TrafficClass

Count = Annotated[int, Field(ge=0)]


class _Message(StrictModel):
    model_config = ConfigDict(extra="ignore")


class _Sampling(_Message):
    temperature: float = Field(1.0, ge=0, le=1e3)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: Count = 0
    max_tokens: int = Field(256, ge=1)
    stop_tokens: tuple[Count, ...] = ()
    seed: Count | None = None

    @field_validator("temperature")
    @classmethod
    def _greedy_or_not(cls, value: float) -> float:
        if 0 < value < 1e-3:
            raise ValueError("a temperature that is not 0 must be at least 0.001")
        return value


class _Request(_Message):
    session: str
    tokens: list[Count]
    sampling: _Sampling = _Sampling()
    traffic: TrafficClass = "rollout"
    min_version: Count = 0
    stream: bool = False


class _Policy(_Message):
    line: str
    number: Count
    form: str
    digest: str

    def ref(self) -> PolicyRef:
        return PolicyRef(self.line, self.number, self.form, self.digest)


class _Routes(_Message):
    shape: list[Count]
    dtype: Literal["uint8", "uint16"]
    data: str

    def array(self) -> np.ndarray:
        data = base64.b64decode(self.data, validate=True)
        return np.frombuffer(data, self.dtype).reshape(self.shape)


class _Chunk(_Message):
    tokens: list[Count]
    logprobs: list[float]
    policy: list[Count]
    policies: list[_Policy]
    routes_start: Count = 0
    routes: _Routes | None = None
    finish: FinishReason | None = None
    oldest_kv_policy: _Policy | None = None
    cached_tokens: Count = 0
    timing: dict[str, float] = Field({})


def request_to_json(request: GenerateRequest, *, stream: bool = False) -> bytes:
    sampling = request.sampling
    tree = {
        "session": request.session,
        "tokens": request.tokens,
        "sampling": {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "max_tokens": sampling.max_tokens,
            "stop_tokens": sampling.stop_tokens,
            "seed": sampling.seed,
        },
        "traffic": request.traffic,
        "min_version": request.min_version,
        "stream": stream,
    }
    return json.dumps(tree).encode()


def request_from_json(data: bytes) -> tuple[GenerateRequest, bool]:
    """Returns the request, and whether its tokens are to be streamed."""
    try:
        read = parse_json(data, _Request)
    except ValueError as error:
        raise EngineError(f"request: {error}") from None
    sampling = Sampling(**dict(read.sampling))
    return GenerateRequest(read.session, read.tokens, sampling, read.traffic, read.min_version), read.stream


def chunk_to_json(chunk: GenerateChunk) -> bytes:
    routes = chunk.routes
    tree = {
        "tokens": chunk.tokens,
        "logprobs": chunk.logprobs,
        "policy": chunk.policy,
        "policies": [vars(policy) for policy in chunk.policies],
        "routes_start": chunk.routes_start,
        "routes": None
        if routes is None
        else {
            "shape": routes.shape,
            "dtype": str(routes.dtype),
            "data": base64.b64encode(np.ascontiguousarray(routes).data).decode(),
        },
        "finish": chunk.finish,
    }
    if chunk.finish is not None:
        oldest = chunk.oldest_kv_policy
        tree["oldest_kv_policy"] = None if oldest is None else vars(oldest)
        tree["cached_tokens"] = chunk.cached_tokens
        tree["timing"] = chunk.timing
    return json.dumps(tree).encode()


def chunk_from_json(data: bytes) -> GenerateChunk:
    try:
        read = parse_json(data, _Chunk)
        routes = None if read.routes is None else read.routes.array()
    except (ValueError, binascii.Error) as error:
        raise EngineError(f"chunk: {error}") from None
    if not len(read.tokens) == len(read.logprobs) == len(read.policy):
        raise EngineError("chunk: tokens, logprobs and policy must have one entry per token")
    if any(index >= len(read.policies) for index in read.policy):
        raise EngineError("chunk: policy points outside policies")
    return GenerateChunk(
        tokens=read.tokens,
        logprobs=read.logprobs,
        policy=read.policy,
        policies=[policy.ref() for policy in read.policies],
        routes_start=read.routes_start,
        routes=routes,
        finish=read.finish,
        oldest_kv_policy=None if read.oldest_kv_policy is None else read.oldest_kv_policy.ref(),
        cached_tokens=read.cached_tokens,
        timing=read.timing,
    )
