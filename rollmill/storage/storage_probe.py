"""Whether a store and a database can be used, found out before anything starts."""

from __future__ import annotations

import secrets
import time

from rollmill.errors import ConfigError, StorageError
from rollmill.storage.objects import Objects

PATIENCE_S = 5.0
MOST_APART_S = 60.0  # clocks of hosts: certificates, keys that expire and signatures of requests need about the same
NEEDS = (
    "the bucket must exist, and the credentials of the environment (for s3: AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, "
    "AWS_REGION; for another server AWS_ENDPOINT_URL) must allow to write, read and delete"
)


def check_store(url: str) -> None:
    """Write, read and delete one object. ConfigError if the store does not allow it."""
    key, content = f"probe/{secrets.token_hex(8)}", b"can this be written?"
    try:
        objects = Objects.open(url, patience=PATIENCE_S)
        objects.create(key, content)
        same, written = objects.get(key) == content, objects.modified(key)
        objects.delete(key)
    except StorageError as error:
        raise ConfigError(f"store = {url!r} cannot be used: {error.message}", hint=NEEDS) from None
    if not same:
        raise ConfigError(f"store = {url!r} returned other bytes than were written", hint=NEEDS)
    if written is not None:
        _compare_clocks(written, f"the store {url!r}")


def check_database(url: str) -> None:
    """Ask for the time. ConfigError if the database does not answer, or if its clock is far from that of this host."""
    from rollmill.storage.database import clock_of

    try:
        there = clock_of(url)
    except StorageError as error:
        hint = "is it running and reachable from this host? Its password is read from PGPASSWORD or ~/.pgpass"
        raise ConfigError(f"the database cannot be used: {error.message}", hint=hint) from None
    _compare_clocks(there, "the database")


def _compare_clocks(there: float, where: str) -> None:
    apart = there - time.time()
    if abs(apart) > MOST_APART_S:
        raise ConfigError(
            f"the clock of {where} is {abs(apart):.0f} s {'ahead of' if apart > 0 else 'behind'} that of this host",
            hint="set both by NTP, for example with `timedatectl set-ntp true`",
        )
