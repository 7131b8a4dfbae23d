"""Parses request bodies as JSON that every later part can store, render and read again."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from rollmill.errors import GatewayError, TrajectoryError
from rollmill.trajectories.storable import DEEPEST_JSON, check_depth


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Refuses non-finite numbers and deep nesting. Replaces lone surrogates."""
    try:
        tree = json.loads(body, parse_constant=_refuse_number, parse_float=_finite)
        if b"\\u" in body:  # an escape can be a lone surrogate, which no tokenizer and no database accepts
            tree = _whole_characters(tree)
        if body.count(b"[") + body.count(b"{") >= DEEPEST_JSON:  # fewer brackets cannot be nested so deep
            check_depth("the request body", tree)
    except TrajectoryError as error:
        raise GatewayError(error.message) from None
    except (ValueError, RecursionError) as error:
        raise GatewayError(f"the request body is not JSON: {str(error)[:200]}") from None
    if not isinstance(tree, dict):
        raise GatewayError(f"the request body must be a JSON object, got {short(tree)}")
    return tree


def short(value: Any) -> str:
    """A JSON value in an error message."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse_number(text)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text[:40]} is not a finite number")


def _whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_whole_characters(item) for item in value]
    if isinstance(value, dict):
        return {_whole_characters(key): _whole_characters(item) for key, item in value.items()}
    return value
