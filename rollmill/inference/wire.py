"""Requests and chunks as JSON, one object a line. No torch. What is decoded here came from another process: every field
is checked, and what does not fit is an EngineError that names it."""

from __future__ import annotations

import base64
import binascii
import json
import math
from typing import Any, get_args

import numpy as np

from rollmill.errors import EngineError
from rollmill.inference.engine import GenerateChunk, GenerateRequest
from rollmill.types import FinishReason, PolicyRef, Sampling, TrafficClass

ROUTE_TYPES = {"uint8": np.uint8, "uint16": np.uint16}


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
    """The request, and whether its tokens are to be streamed."""
    fields = _Fields(_tree(data), "request")
    request = GenerateRequest(
        session=fields.text("session"),
        tokens=fields.integers("tokens"),
        sampling=_sampling(_Fields(fields.mapping("sampling"), "sampling")),
        traffic=fields.one_of("traffic", get_args(TrafficClass), "rollout"),
        min_version=fields.integer("min_version", 0),
    )
    stream = fields.tree.get("stream", False)
    if not isinstance(stream, bool):
        raise EngineError(f"stream must be true or false, not {stream!r}")
    return request, stream


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
    fields = _Fields(_tree(data), "chunk")
    oldest = fields.tree.get("oldest_kv_policy")
    chunk = GenerateChunk(
        tokens=fields.integers("tokens"),
        logprobs=fields.numbers("logprobs"),
        policy=fields.integers("policy"),
        policies=[_policy(tree) for tree in fields.items("policies")],
        routes_start=fields.integer("routes_start", 0),
        routes=_routes(fields.tree.get("routes")),
        finish=fields.one_of("finish", (None, *get_args(FinishReason)), None),
        oldest_kv_policy=None if oldest is None else _policy(oldest),
        cached_tokens=fields.integer("cached_tokens", 0),
        timing=fields.tree.get("timing", {}),
    )
    if not len(chunk.tokens) == len(chunk.logprobs) == len(chunk.policy):
        raise EngineError("chunk: tokens, logprobs and policy must have one entry a token")
    if any(not 0 <= index < len(chunk.policies) for index in chunk.policy):
        raise EngineError("chunk: policy points outside policies")
    return chunk


class _Fields:
    """Typed access to a decoded object."""

    def __init__(self, tree: Any, what: str) -> None:
        if not isinstance(tree, dict):
            raise EngineError(f"{what} must be an object, not {type(tree).__name__}")
        self.tree: dict[str, Any] = tree
        self._what = what

    def text(self, name: str) -> str:
        value = self.tree.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def integer(self, name: str, default: int) -> int:
        value = self.tree.get(name, default)
        if type(value) is not int or value < 0:
            raise self._wrong(name, "a whole number, not negative")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.tree.get(name, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self._wrong(name, "a number")
        return float(value)

    def items(self, name: str) -> list[Any]:
        value = self.tree.get(name)
        if not isinstance(value, list):
            raise self._wrong(name, "a list")
        return value

    def integers(self, name: str) -> list[int]:
        value = self.items(name)
        if any(type(item) is not int or item < 0 for item in value):
            raise self._wrong(name, "a list of whole numbers, none negative")
        return value

    def numbers(self, name: str) -> list[float]:
        value = self.items(name)
        if any(type(item) not in (int, float) or not math.isfinite(item) for item in value):
            raise self._wrong(name, "a list of numbers")
        return [float(item) for item in value]

    def mapping(self, name: str) -> dict[str, Any]:
        return self.tree.get(name, {})

    def one_of(self, name: str, allowed: tuple[Any, ...], default: Any) -> Any:
        value = self.tree.get(name, default)
        if value not in allowed:
            raise self._wrong(name, f"one of {', '.join(map(str, allowed))}")
        return value

    def _wrong(self, name: str, wanted: str) -> EngineError:
        return EngineError(f"{self._what}: {name} must be {wanted}, got {str(self.tree.get(name))[:80]!r}")


def _sampling(fields: _Fields) -> Sampling:
    seed = fields.tree.get("seed")
    sampling = Sampling(
        temperature=fields.number("temperature", 1.0),
        top_p=fields.number("top_p", 1.0),
        top_k=fields.integer("top_k", 0),
        max_tokens=fields.integer("max_tokens", 256),
        stop_tokens=tuple(fields.integers("stop_tokens")) if "stop_tokens" in fields.tree else (),
        seed=None if seed is None else fields.integer("seed", 0),
    )
    if sampling.temperature and not 1e-3 <= sampling.temperature <= 1e3:
        raise EngineError(f"sampling: temperature must be 0 or from 0.001 to 1000, got {sampling.temperature}")
    if not 0 < sampling.top_p <= 1 or sampling.max_tokens < 1:
        raise EngineError("sampling: 0 < top_p ≤ 1 and max_tokens ≥ 1 are needed")
    return sampling


def _policy(tree: Any) -> PolicyRef:
    fields = _Fields(tree, "policy")
    return PolicyRef(fields.text("line"), fields.integer("number", 0), fields.text("form"), fields.text("digest"))


def _routes(tree: Any) -> np.ndarray | None:
    if tree is None:
        return None
    fields = _Fields(tree, "routes")
    dtype = fields.one_of("dtype", tuple(ROUTE_TYPES), None)
    try:
        data = base64.b64decode(fields.text("data"), validate=True)
        return np.frombuffer(data, ROUTE_TYPES[dtype]).reshape(fields.integers("shape"))
    except (binascii.Error, ValueError) as error:
        raise EngineError(f"routes: {error}") from None


def _tree(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineError(f"not JSON: {error}") from None
