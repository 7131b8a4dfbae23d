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

import os
import socket
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from pydantic import Field, ValidationError

from rollmill.errors import ObjectExists, StorageError, WeightsError
from rollmill.strict import StrictModel, describe_problem, parse_json
from rollmill.types import Version
from rollmill.weights.format.keys import epoch_key, manifest_key, valid_name
from rollmill.weights.format.manifest import Encoding, Manifest, TensorEntry, root_digest
from rollmill.weights.reading.store import WeightStore


class Epoch(StrictModel):
    """Who took the line over, from which head, and when: for people to read."""

    writer: str = Field(max_length=200)
    after: int | None = None
    at: float | None = None


class Writer:
    """The right to commit versions of a line: takes it over, and stops for good once somebody else has."""

    def __init__(self, store: WeightStore, line: str, form: str) -> None:
        self.store, self.line, self.form = store, valid_name(line), valid_name(form)
        self.epoch = 0
        self.name = f"{socket.gethostname()[:100]}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._fenced: WeightsError | None = None

    def take_over(self) -> Manifest | None:
        """Fence every other writer; returns the newest version, after which none of theirs is to be expected."""
        self.refuse_if_fenced()
        head = self.store.head(self.line, self.form)
        self.epoch = take_epoch(self.store, self.line, self.form, self.name, head)
        head = self.store.head(self.line, self.form, after=head)  # one may have come in between
        return self.store.manifest(Version(self.line, head), self.form) if head is not None else None

    def refuse_if_fenced(self) -> None:
        if self._fenced is not None:
            raise WeightsError(self._fenced.message, hint=self._fenced.hint)

    def check(self) -> None:
        """WeightsError, from now on always, if somebody took the line over."""
        self.refuse_if_fenced()
        try:
            check_epoch(self.store, self.line, self.form, self.epoch)
        except WeightsError as error:
            self._fenced = error
            raise

    def commit(self, manifest: Manifest) -> bool:
        """Create the manifest. False: the number is taken, by whatever."""
        self.check()
        try:
            self.store.objects.create(manifest_key(manifest.version, self.form), manifest.to_bytes())
        except ObjectExists:
            return False
        return True

    def manifest(
        self,
        number: int,
        entries: tuple[TensorEntry, ...],
        encodings: tuple[Encoding | None, Encoding | None],
        last: Manifest | None,
        parent: Version | None,
        metadata: Mapping[str, Any],
    ) -> Manifest:
        """The manifest of the version after `last`; its encodings are delta and snapshot."""
        parent = parent or (last.version if last else None)
        origin = last.origin if last else parent
        try:
            return Manifest(
                line=self.line,
                number=number,
                form=self.form,
                parent_line=parent.line if parent else None,
                parent_number=parent.number if parent else None,
                first=last.first if last else number,
                origin_line=origin.line if origin else None,
                origin_number=origin.number if origin else None,
                digest=root_digest(entries),
                tensors=entries,
                delta=encodings[0],
                snapshot=encodings[1],
                metadata=dict(metadata),
                writer=self.name,
                epoch=self.epoch,
                created_at=time.time(),
            )
        except ValidationError as error:
            raise WeightsError(
                f"{Version(self.line, number)} cannot be published: {describe_problem(error)}",
                hint="metadata must be plain JSON values, numbers count from 0",
            ) from None

    def diverged(self, manifest: Manifest, ours: str) -> WeightsError:
        return WeightsError(
            f"{manifest.version} ({self.form}) has diverged: {manifest.writer} (epoch {manifest.epoch}) published "
            f"{manifest.digest[:16]}…, and this writer (epoch {self.epoch}) has {ours}",
            hint="one trainer per line; to go on with these weights, start a new line from the last common version",
        )

    def check_number(self, number: int, last: Manifest | None) -> None:
        """WeightsError unless `number` follows the version this writer stands at."""
        if last is not None and number != last.number + 1:
            raise WeightsError(
                f"{self.line} stands at {last.number}, so {number} cannot be published: numbers follow each other",
                hint="a line that should go on from an earlier version needs a new name; its parent can be any version",
            )


def take_epoch(store: WeightStore, line: str, form: str, writer: str, after: int | None) -> int:
    """Take the line over: returns the epoch that is now ours. `after` is the head that was seen."""
    number = store.epoch(line, form) + 1
    epoch = Epoch(writer=writer, after=after, at=time.time())
    while True:
        try:
            store.objects.create(epoch_key(line, form, number), epoch.model_dump_json().encode())
            return number
        except ObjectExists:
            if _read(store, line, form, number).writer == writer:
                return number  # the answer to our own request was lost, and it was sent again
            number += 1


def check_epoch(store: WeightStore, line: str, form: str, number: int) -> None:
    """WeightsError if somebody took the line over since we created epoch `number`."""
    if store.objects.head(epoch_key(line, form, number + 1)) is None:
        return
    newest = store.epoch(line, form)
    epoch = _read(store, line, form, newest)
    raise WeightsError(
        f"this writer (epoch {number}) is fenced: {epoch.writer} took {line} ({form}) over{_when(epoch.at)} "
        f"(epoch {newest})",
        hint="one trainer per line; stop this one, or start it again so that it takes the line over where it stands",
    )


def _read(store: WeightStore, line: str, form: str, number: int) -> Epoch:
    """What an epoch says. Only the existence of its key decides anything, so damage costs a name in a message."""
    try:
        return parse_json(store.objects.get(epoch_key(line, form, number)), Epoch)
    except (StorageError, ValueError):
        return Epoch(writer="another one")


def _when(at: float | None) -> str:
    try:
        return f" at {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC" if at is not None else ""
    except (ValueError, OverflowError, OSError):
        return ""
