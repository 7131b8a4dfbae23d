"""Whether a store can be used, found out before anything starts."""

from __future__ import annotations

import secrets

from rollmill.errors import ConfigError, StorageError
from rollmill.storage.objects import Objects

PATIENCE_S = 5.0
_HINT = (
    "the bucket must exist, and the credentials of the environment (for s3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
    "AWS_REGION; for another server AWS_ENDPOINT_URL) must allow to write, read and delete"
)


def check_store(url: str) -> None:
    """Write, read and delete one object. ConfigError if the store does not allow it."""
    key, content = f"probe/{secrets.token_hex(8)}", b"can this be written?"
    try:
        objects = Objects.open(url, patience=PATIENCE_S)
        objects.create(key, content)
        same = objects.get(key) == content
        objects.delete(key)
    except StorageError as error:
        raise ConfigError(f"store = {url!r} cannot be used: {error.message}", hint=_HINT) from None
    if not same:
        raise ConfigError(f"store = {url!r} returned other bytes than were written", hint=_HINT)
