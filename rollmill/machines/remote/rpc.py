"""Connect's protocol in JSON, as far as E2B's SDKs use it: unary calls, and answers that are streams of envelopes.

An envelope is a byte of flags, four bytes of length, and JSON. The last one of a stream has the flag `END` and may hold
an error: {"error": {"code", "message"}}.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from aiohttp import web
from pydantic import TypeAdapter

from rollmill.strict import FreeJson, parse_json

END = 0b10
_COMPRESSED = 0b1
_HEAD = struct.Struct(">BI")
HEAD_BYTES = _HEAD.size
_ANY = TypeAdapter(dict[str, FreeJson])
_STATUS = {
    "invalid_argument": 400,
    "unauthenticated": 401,
    "not_found": 404,
    "already_exists": 409,
    "resource_exhausted": 429,
    "unimplemented": 501,
    "unavailable": 503,
}


class RpcError(Exception):
    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message

    def json(self) -> dict[str, str]:
        return {"code": self.code, "message": self.message}

    def response(self) -> web.Response:
        return web.json_response(self.json(), status=_STATUS.get(self.code, 500))


def message(data: bytes) -> dict[str, Any]:
    """The object of a unary request. Types of its fields are the caller's to check."""
    try:
        return parse_json(data or b"{}", _ANY)
    except ValueError as error:
        raise RpcError("invalid_argument", str(error)) from None


def only_message(data: bytes) -> dict[str, Any]:
    """The one envelope that the request of a server stream has."""
    if len(data) < _HEAD.size:
        raise RpcError("invalid_argument", "an envelope is cut short")
    flags, length = _HEAD.unpack_from(data)
    if flags & _COMPRESSED or length != len(data) - _HEAD.size:
        raise RpcError("invalid_argument", "exactly one envelope, not compressed, is expected")
    return message(data[_HEAD.size :])


def head(data: bytes) -> tuple[int, int]:
    """Flags and length of an envelope, of its first HEAD_BYTES."""
    flags, length = _HEAD.unpack(data)
    return flags, length


def envelope(content: dict[str, Any], flags: int = 0) -> bytes:
    data = json.dumps(content).encode()
    return _HEAD.pack(flags, len(data)) + data


def text(fields: dict[str, Any], name: str, default: str | None = None) -> str:
    value = fields.get(name, default)
    if not isinstance(value, str):
        raise RpcError("invalid_argument", f"{name!r} must be a string")
    return value
