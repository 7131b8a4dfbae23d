"""Reads the fields of a request body that several dialects share. Every refusal names the field and the value."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from rollmill.errors import GatewayError
from rollmill.gateway.wire.body import to_bytes
from rollmill.gateway.wire.dialect import Limits
from rollmill.strict import short
from rollmill.types import Sampling

LARGEST = (1 << 31) - 1
_MOST_STOPS = 16
_MOST_BIASES = 1024
# fields of OpenAI's dialects, and those that vLLM adds to them
PENALTIES = frozenset("frequency_penalty logit_bias min_p presence_penalty repetition_penalty".split())
_LONGEST_STOP = 256  # characters; each new token is compared with the end of the answer, several times this long


def check_names(
    tree: Mapping[str, Any], known: Collection[str], neutral: Mapping[str, tuple[Any, ...]], ignored: Collection[str]
) -> tuple[str, ...]:
    """Refuses unknown fields, and fields of `neutral` with a value other than the ones listed there. Returns the fields
    of `ignored` that the request has: they are accepted without effect.

    A field that would change the answer and is silently ignored would give a client something it did not ask for.
    """
    unknown = [name for name in tree if name not in known and name not in neutral and name not in ignored]
    if unknown:
        names = ", ".join(short(name) for name in unknown[:8])
        raise GatewayError(f"unknown field {names}", hint="leave it out", code="unknown_parameter")
    for name, values in neutral.items():
        value = tree.get(name)
        if value is not None and value not in values:
            raise GatewayError(
                f"{name} = {short(value)} is not supported", hint=f"leave {name} out", code="unsupported_parameter"
            )
    return tuple(name for name in tree if name in ignored and tree[name] is not None)


def field(tree: Mapping[str, Any], name: str, kind: type) -> Any:
    """The value of a field, or None. Raises if it has another type."""
    value = tree.get(name)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise GatewayError(f"{name} must be of type {kind.__name__}, got {short(value)}")
    return value


def integer(tree: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value: int | None = field(tree, name, int)
    if value is not None and not low <= value <= high:
        raise GatewayError(f"{name} must be from {low} to {high}, got {short(value)}")
    return value


def number(tree: Mapping[str, Any], name: str, low: float, high: float, default: float = 1.0) -> float:
    value = tree.get(name)
    if value is None:
        return default
    # NaN is outside of every range
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise GatewayError(f"{name} must be a number from {low:g} to {high:g}, got {short(value)}")
    return float(value)


def sampling(tree: Mapping[str, Any], stop_tokens: tuple[int, ...], max_tokens: int) -> Sampling:
    """The fields have the same names in all dialects that know them."""
    seed = field(tree, "seed", int)
    return Sampling(
        temperature=number(tree, "temperature", 0.0, 2.0),
        top_p=number(tree, "top_p", 1e-6, 1.0),
        top_k=min(max(0, field(tree, "top_k", int) or 0), LARGEST),
        max_tokens=max_tokens,
        stop_tokens=stop_tokens,
        seed=None if seed is None else seed % (1 << 63),
        min_p=number(tree, "min_p", 0.0, 1.0, 0.0),
        presence_penalty=number(tree, "presence_penalty", -2.0, 2.0, 0.0),
        frequency_penalty=number(tree, "frequency_penalty", -2.0, 2.0, 0.0),
        repetition_penalty=number(tree, "repetition_penalty", 0.01, 100.0),
        logit_bias=_biases(tree),
    )


def common(tree: Mapping[str, Any], limits: Limits, max_tokens_names: Collection[str]) -> dict[str, Any]:
    """The fields of a ModelRequest that have the same names in all dialects."""
    return {
        "sampling": sampling(tree, limits.stop_tokens, max_tokens(tree, max_tokens_names, limits.default_max_tokens)),
        "stream": bool(field(tree, "stream", bool)),
        "model": field(tree, "model", str) or "",
    }


def _biases(tree: Mapping[str, Any]) -> tuple[tuple[int, float], ...]:
    """logit_bias: token ids as text → what is added to their logits."""
    given: dict[str, Any] = field(tree, "logit_bias", dict) or {}
    if len(given) > _MOST_BIASES:
        raise GatewayError(f"logit_bias may have up to {_MOST_BIASES} tokens, got {len(given)}")
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise GatewayError(f"logit_bias: {short(token)} is no token id")
    return tuple((int(token), number(given, token, -100.0, 100.0, 0.0)) for token in given)


def max_tokens(tree: Mapping[str, Any], names: Collection[str], default: int) -> int:
    """The first of the fields `names` that is set."""
    return next((limit for name in names if (limit := integer(tree, name, 1, LARGEST)) is not None), default)


def stops(name: str, stop: Any) -> tuple[str, ...]:
    texts = [stop] if isinstance(stop, str) else stop or []
    if (
        not isinstance(texts, list)
        or len(texts) > _MOST_STOPS
        or not all(isinstance(text, str) and text for text in texts)
    ):
        raise GatewayError(f"{name} must be a string or up to {_MOST_STOPS} strings, got {short(stop)}")
    if any(len(text) > _LONGEST_STOP for text in texts):
        raise GatewayError(f"{name}: a string may have up to {_LONGEST_STOP} characters, got {short(stop)}")
    return tuple(texts)


def event(tree: Mapping[str, Any], name: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + to_bytes(tree) + b"\n\n"
