"""Keys and tokens of requests."""

from __future__ import annotations

import hmac

from aiohttp import web


def given_key(request: web.Request) -> str:
    """The key in `Authorization: Bearer KEY` (OpenAI) or `x-api-key: KEY` (Anthropic); "" without any."""
    bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return bearer or request.headers.get("x-api-key", "")


def same_secret(given: str, secret: str | None) -> bool:
    """Compares in constant time. No key equals a secret that is not set."""
    return bool(secret) and hmac.compare_digest(given.encode(errors="replace"), str(secret).encode())
