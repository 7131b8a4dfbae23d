"""Ids of groups and trajectories. They are parts of URLs and object keys, so the gateway takes only some characters and
at most 128 of them."""

from __future__ import annotations

import hashlib
import re

LONGEST = 96  # the numbers of group, member and attempt follow
_DIGEST = 12  # hexadecimal digits
_STRANGE = re.compile(r"[^A-Za-z0-9._-]")


def as_id(text: str) -> str:
    """`text`, if it is a valid beginning of an id; otherwise its valid characters, cut, and a digest of all of it."""
    valid = _STRANGE.sub("-", text)
    if valid == text and len(text) <= LONGEST:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGEST]
    return f"{valid[: LONGEST - _DIGEST - 1]}-{digest}"
