"""Writer: who may write to a line. A process takes over a line by creating its next epoch; older writers are fenced.

    epochs/0000000001.json   {"writer", "after", "at"}   create-only, without gaps, never deleted

If two processes take over a line at once, one creates the next epoch and the other the one after it: the later one owns
the line. A writer checks for a newer epoch just before it creates a manifest. Between the check and the creation it may
be paused for any time, be fenced, and still create its manifest. That is harmless, and happens at most once:

- Its number follows the version it was at. If the new owner has published that number, the creation is refused. If
  not, the late version is the last one of the old writer.
- The new owner then finds the number taken. If the root digest is the same (both ran the same recorded step), the
  version is confirmed. If not, the owner reports that they have diverged. A trainer that is started again takes over
  the line after the late version, runs its steps again, and goes on in a new line if they give other weights.
- A version's delta starts from the version before it, whoever wrote it, and both were verified by root digest. So every
  version can be restored in any order, and the epochs of a line's manifests never decrease.
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
from rollmill.weights.format.manifest import Encoding, Manifest, TensorEntry, root_digest, seal
from rollmill.weights.format.object_keys import epoch_key, manifest_key, valid_name
from rollmill.weights.reading.weight_store import WeightStore


class Epoch(StrictModel):
    """Who took over the line, from which head, and when: for people to read."""

    writer: str = Field(max_length=200)
    after: int | None = None
    at: float | None = None


class Writer:
    """The right to commit versions of a line. It takes over the line, and stops for good when another process does."""

    def __init__(self, store: WeightStore, line: str, form: str) -> None:
        self.store, self.line, self.form = store, valid_name(line), valid_name(form)
        self.epoch = 0
        self.name = f"{socket.gethostname()[:100]}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._fenced: WeightsError | None = None

    def take_over(self) -> Manifest | None:
        """Fence every other writer. Returns the newest version."""
        self.refuse_if_fenced()
        head = self.store.head(self.line, self.form)
        self.epoch = self.take_epoch(head)
        head = self.store.head(self.line, self.form, after=head)  # a version may have been committed in between
        return self.store.manifest(Version(self.line, head), self.form) if head is not None else None

    def take_epoch(self, after: int | None) -> int:
        """Create the next epoch. Returns its number. `after` is the head that was seen."""
        number = self.store.epoch(self.line, self.form) + 1
        epoch = Epoch(writer=self.name, after=after, at=time.time())
        while True:
            try:
                self.store.objects.create(epoch_key(self.line, self.form, number), epoch.model_dump_json().encode())
                return number
            except ObjectExists:
                if self._read(number).writer == self.name:
                    return number  # our own request was retried after its answer was lost
                number += 1

    def _read(self, number: int) -> Epoch:
        """The content of an epoch. Only the existence of its key matters, so damage costs only a name in a message."""
        try:
            return parse_json(self.store.objects.get(epoch_key(self.line, self.form, number)), Epoch)
        except (StorageError, ValueError):
            return Epoch(writer="another one")

    def refuse_if_fenced(self) -> None:
        if self._fenced is not None:
            raise WeightsError(self._fenced.message, hint=self._fenced.hint)

    def check(self) -> None:
        """Raise WeightsError if another process took over the line; from then on always."""
        self.refuse_if_fenced()
        if self.store.objects.head(epoch_key(self.line, self.form, self.epoch + 1)) is not None:
            newest = self.store.epoch(self.line, self.form)
            owner = self._read(newest)
            self._fenced = WeightsError(
                f"this writer (epoch {self.epoch}) is fenced: {owner.writer} took over {self.line} ({self.form})"
                f"{_when(owner.at)} (epoch {newest})",
                hint="one trainer per line; stop this one, or start it again: it then takes over the line at its head",
            )
            raise self._fenced

    def commit(self, manifest: Manifest) -> bool:
        """Create the manifest. False: the number is taken."""
        self.check()
        try:
            self.store.objects.create(manifest_key(manifest.version, self.form), seal(manifest))
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
        """The manifest of the version after `last`. `encodings` are its delta and its snapshot."""
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
            hint="start this trainer again: it takes over the line at its head, and goes on in a new line if its steps "
            "give other weights; only one trainer per line may run",
        )

    def check_number(self, number: int, last: Manifest | None) -> None:
        """Raise WeightsError unless `number` follows the version this writer is at."""
        if last is not None and number != last.number + 1:
            raise WeightsError(
                f"{self.line} is at {last.number}, so {number} cannot be published: numbers follow each other",
                hint="to continue from an earlier version, start a line with a new name; its parent can be any version",
            )


def _when(at: float | None) -> str:
    try:
        return f" at {datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S} UTC" if at is not None else ""
    except (ValueError, OverflowError, OSError):
        return ""
