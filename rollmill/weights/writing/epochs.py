"""Epochs: who may write to a line. Whoever creates the next epoch owns it; every older writer is fenced.

    epochs/0000000001.json   {"writer", "after", "at"}   create-only, without gaps, never deleted

Of two that take a line over at once, one creates the epoch and the other one the next: the later owns the line. A
writer looks for a newer epoch just before it creates a manifest. Between the look and the creation it may be stopped
for as long as you like, be fenced, and create its manifest then. That is harmless, and happens once at most:

- Its number is one more than the version it stood at. If the new owner has published that number, the creation is
  refused. If not, the late version is simply the last one of the old writer.
- The new owner then finds the number taken. With the same root digest (both ran the same recorded step) the version is
  confirmed; with another one the owner says that they have diverged, and a new line or a new take-over decides.
- A version's delta starts from the version before it, whoever wrote it, and both were verified by root digest. So every
  version can be restored whatever the order, and the epochs of a line's manifests never fall.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime

from rollmill.errors import ObjectExists, StorageError, WeightsError
from rollmill.weights.format.keys import epoch_key
from rollmill.weights.reading.store import WeightStore


def take_epoch(store: WeightStore, line: str, form: str, writer: str, after: int | None) -> int:
    """Take the line over: returns the epoch that is now ours. `after` is the head that was seen."""
    number = store.epoch(line, form) + 1
    fields = {"writer": writer, "after": after, "at": time.time()}
    while True:
        try:
            store.objects.create(epoch_key(line, form, number), json.dumps(fields).encode())
            return number
        except ObjectExists:
            if _read(store, line, form, number).get("writer") == writer:
                return number  # the answer to our own request was lost, and it was sent again
            number += 1


def check_epoch(store: WeightStore, line: str, form: str, number: int) -> None:
    """WeightsError if somebody took the line over since we created epoch `number`."""
    if store.objects.head(epoch_key(line, form, number + 1)) is None:
        return
    newest = store.epoch(line, form)
    fields = _read(store, line, form, newest)
    raise WeightsError(
        f"this writer (epoch {number}) is fenced: {fields.get('writer', 'another one')} took {line} ({form}) over"
        f"{_when(fields.get('at'))} (epoch {newest})",
        hint="one trainer per line; stop this one, or start it again so that it takes the line over where it stands",
    )


def _read(store: WeightStore, line: str, form: str, number: int) -> dict[str, object]:
    """What an epoch says. Only the existence of its key decides anything, so damage costs a name in a message."""
    try:
        fields = json.loads(store.objects.get(epoch_key(line, form, number)))
    except (StorageError, ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _when(at: object) -> str:
    try:
        return f" at {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC" if isinstance(at, float) else ""
    except (ValueError, OverflowError, OSError):
        return ""
