from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from rollmill.errors import EngineError
from rollmill.inference.engine import GenerateChunk, GenerateRequest
from rollmill.inference.engine_wire import (
    chunk_from_json,
    chunk_to_json,
    chunks_from_json,
    request_from_json,
    request_to_json,
)
from rollmill.types import PolicyRef, Sampling

REQUEST = GenerateRequest(
    "session",
    [1, 2, 3],
    Sampling(0.7, 0.9, 5, 33, (4, 5), 2**63, None, 0.1, 0.5, -0.5, 1.2, ((3, -1.0), (9, 4.5))),
    traffic="production",
    min_version=6,
    top_logprobs=2,
)
OLD, NEW = PolicyRef("main", 1, "bf16", "aa"), PolicyRef("main", 2, "bf16", "bb")
CHUNK = GenerateChunk(
    tokens=[5, 6],
    logprobs=[-0.1, float(np.float32(-1 / 3))],
    policy=[0, 1],
    policies=[OLD, NEW],
    routes_start=7,
    routes=np.arange(12, dtype=np.uint16).reshape(3, 2, 2),
    finish="stop",
    oldest_kv_policy=OLD,
    cached_tokens=4,
    timing={"total_seconds": 0.5},
    top_logprobs=[[(5, -0.1), (9, -3.0)], []],
    kept=[b"\1\5\0\0\0", bytes(range(256))],
)


def test_a_request_survives_the_wire() -> None:
    assert request_from_json(request_to_json(REQUEST)) == (REQUEST, False)
    assert request_from_json(request_to_json(REQUEST, stream=True)) == (REQUEST, True)
    encoded = json.dumps(REQUEST.tokens).encode()
    assert request_from_json(request_to_json(REQUEST, tokens=encoded)) == (REQUEST, False)
    odd = replace(REQUEST, session='"tokens":[]')
    assert request_from_json(request_to_json(odd, tokens=encoded)) == (odd, False)


def test_a_request_may_omit_fields_with_a_default() -> None:
    request, stream = request_from_json(b'{"session": "s", "tokens": [1]}')
    assert request == GenerateRequest("s", [1], Sampling()) and not stream


def test_a_chunk_survives_the_wire_bit_for_bit() -> None:
    line = chunk_to_json(CHUNK)
    assert b"\n" not in line
    decoded = chunk_from_json(line)
    assert decoded.routes is not None and CHUNK.routes is not None
    assert np.array_equal(decoded.routes, CHUNK.routes) and decoded.routes.dtype == np.uint16
    decoded.routes = CHUNK.routes
    assert decoded == CHUNK


def test_a_chunk_of_a_dense_model_in_the_middle_of_an_answer() -> None:
    chunk = GenerateChunk([1], [-2.0], [0], [OLD])
    assert chunk_from_json(chunk_to_json(chunk)) == chunk


def test_chunks_that_come_together_become_one_only_if_nothing_is_lost() -> None:
    first, second = GenerateChunk([1, 2], [-1.0, -2.0], [0, 0], [OLD]), GenerateChunk([3], [-3.0], [0], [OLD])
    last = GenerateChunk([4], [-4.0], [0], [OLD], finish="stop", oldest_kv_policy=OLD, timing={"total_seconds": 1.0})
    whole = replace(last, tokens=[1, 2, 3, 4], logprobs=[-1.0, -2.0, -3.0, -4.0], policy=[0, 0, 0, 0])
    assert chunks_from_json(list(map(chunk_to_json, [first, second, last]))) == [whole]
    for other in (
        replace(second, policies=[NEW]),
        replace(second, kept=[b"\1\5\0\0\0"]),
        replace(second, top_logprobs=[[(3, -3.0)]]),
        replace(second, missing="log-probs"),
        replace(second, finish="abort"),
        replace(second, timing={"requeue_seconds": 2.0}),
    ):
        assert chunks_from_json(list(map(chunk_to_json, [first, other, last]))) == [first, other, last]
    routed = replace(second, routes=np.zeros((1, 2, 2), np.uint16))
    assert len(chunks_from_json(list(map(chunk_to_json, [first, routed, last])))) == 3
    # each is wrong, and joined they would look right
    wrong = [replace(first, logprobs=[-1.0]), replace(second, logprobs=[-3.0, -3.0])]
    with pytest.raises(EngineError, match="one entry per token"):
        chunks_from_json(list(map(chunk_to_json, wrong)))


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": "abc"},
        {"tokens": [1.5]},
        {"tokens": [-1]},
        {"tokens": [True]},
        {"session": 5},
        {"traffic": "vip"},
        {"min_version": "1"},
        {"stream": "yes"},
        {"sampling": []},
        {"sampling": {"temperature": -1}},
        {"sampling": {"temperature": 1e-9}},
        {"sampling": {"temperature": float("nan")}},
        {"sampling": {"top_p": 0}},
        {"sampling": {"top_k": -1}},
        {"sampling": {"min_p": 1.5}},
        {"sampling": {"repetition_penalty": 0}},
        {"sampling": {"presence_penalty": 1e9}},
        {"sampling": {"logit_bias": [[-1, 1.0]]}},
        {"sampling": {"logit_bias": [[1, 1000.0]]}},
        {"sampling": {"logit_bias": {"1": 1.0}}},
        {"sampling": {"max_tokens": 0}},
        {"sampling": {"stop_tokens": 3}},
        {"sampling": {"seed": "x"}},
    ],
    ids=str,
)
def test_an_invalid_request_is_refused(change: dict[str, object]) -> None:
    tree = {"session": "s", "tokens": [1], **change}
    with pytest.raises(EngineError):
        request_from_json(json.dumps(tree).encode())


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"[" * 100000, b"{}"])
def test_malformed_requests_are_refused(data: bytes) -> None:
    with pytest.raises(EngineError):
        request_from_json(data)


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": [-1.0]},
        {"policy": [0, 2]},
        {"logprobs": [None, -1.0]},
        {"finish": "bored"},
        {"policies": [{"line": "main"}]},
        {"policies": [{"line": "main", "number": number, "form": "bf16", "digest": "aa"} for number in (1, 1 << 31)]},
        {"tokens": [1, 1 << 31]},
        {"kept": ["AAAA"]},
        {"kept": ["AAAA", "A"]},
        {"kept": ["AAAA", "A" * 200_000]},
        {"routes": {"shape": [3, 2, 2], "dtype": "uint8", "data": "AAAA"}},
        {"routes": {"shape": [1], "dtype": "object", "data": "AA=="}},
        {"routes": {"shape": [1], "dtype": "uint8", "data": "???"}},
    ],
    ids=str,
)
def test_an_inconsistent_chunk_is_refused(change: dict[str, object]) -> None:
    tree = {**json.loads(chunk_to_json(CHUNK)), **change}
    with pytest.raises(EngineError):
        chunk_from_json(json.dumps(tree).encode())
