"""Facts of tokens as JSON and arrays. One codec: the engine's wire, the gateway's log and the payloads all use it.

The weights that sampled a token (PolicyRef), the sampling (Sampling, Span) and the experts (routes) have the same form
in all three places. Input may come from another process or another region, so the types are strict.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any

import numpy as np
from pydantic import ConfigDict, Field, PlainSerializer, PlainValidator, TypeAdapter

from rollmill.types import PolicyRef, Sampling, Span

# the dtypes that each fact may have as an array
DTYPES: dict[str, tuple[str, ...]] = {
    "tokens": ("int32",),
    "sampled": ("bool",),
    "logprobs": ("float32",),
    "policy": ("int16",),
    "routes": ("uint8", "uint16"),
    "routes_valid": ("bool",),
    "kept_sizes": ("int32",),
    "kept": ("uint8",),
}
STRICT = ConfigDict(strict=True, allow_inf_nan=False)
Natural = Annotated[int, Field(ge=0)]
Int31 = Annotated[int, Field(ge=0, lt=1 << 31)]  # token ids and version numbers: they go into 32-bit columns and arrays
POLICIES = TypeAdapter(list[PolicyRef])
SPANS = TypeAdapter(list[Span])


def to_plain(value: object) -> object:
    """For `json.dumps(default=…)`."""
    if isinstance(value, Span | Sampling | PolicyRef):
        return vars(value)
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} {value!r}")


def _encode_routes(routes: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(routes).data).decode()
    return {"shape": list(routes.shape), "dtype": str(routes.dtype), "data": data}


def _decode_routes(tree: Any) -> np.ndarray:
    if isinstance(tree, np.ndarray):
        return tree
    if not isinstance(tree, dict) or tree.get("dtype") not in DTYPES["routes"]:
        raise ValueError(f"routes are an object with a dtype of {' or '.join(DTYPES['routes'])}")
    try:
        data = base64.b64decode(tree["data"], validate=True)
        return np.frombuffer(data, tree["dtype"]).reshape(tree["shape"])
    except (binascii.Error, KeyError, TypeError) as error:
        raise ValueError(f"routes: {error}") from None


Routes = Annotated[np.ndarray, PlainValidator(_decode_routes), PlainSerializer(_encode_routes)]
