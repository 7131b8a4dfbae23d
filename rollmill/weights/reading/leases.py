"""Leases: a reader or a trainer says which version it still needs, so that `collect` does not remove it.

    leases/HOLDER.json   {"number", "seconds", "engine", "region", …}   overwritten by its holder alone

A lease ends `seconds` after it was written, by the clock of the store that holds it. The clocks of the holder and of
the reader do not matter. To learn the store's time, a small object is written and the store is asked when that was.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import ConfigDict, Field

from rollmill.errors import ObjectMissing, StorageError, WeightsError
from rollmill.storage.objects import Objects
from rollmill.strict import FreeJson, StrictModel, parse_json
from rollmill.types import Version
from rollmill.weights.format.manifest import Count
from rollmill.weights.format.object_keys import form_folder, valid_name

LONGEST_SECONDS = 86_400.0  # a lease that was not renewed for a day has ended
_ROUNDING_SECONDS = 1.0  # stores tell the time in whole seconds
_RENEWALS = 3  # of a held lease, in the time it lasts
_LONGEST_TEXT = 200


@dataclass(frozen=True)
class Lease:
    holder: str
    number: int
    seconds: float
    left: float  # seconds until it ends, by the store's clock
    about: Mapping[str, str]  # engine, region …


class _LeaseObject(StrictModel):
    """A lease as it is stored. Further fields describe the holder."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, FreeJson]

    number: Count
    seconds: float = Field(gt=0)


class Leases:
    """The leases on versions of one line in one form."""

    def __init__(self, objects: Objects, line: str, form: str = "bf16") -> None:
        self._objects = objects
        self._folder = form_folder(line, form)

    def hold(self, holder: str, number: int, seconds: float, **about: str) -> None:
        """Hold version `number` for `seconds`; renew it well before they end. A holder has one lease per line."""
        if number < 0 or not 0 < seconds <= LONGEST_SECONDS:
            raise WeightsError(f"a lease on version {number} for {seconds} s", hint="at most a day; renew it")
        fields = {**about, "number": number, "seconds": seconds}
        self._objects.put(self._key(holder), json.dumps(fields).encode())

    def release(self, holder: str) -> None:
        self._objects.delete(self._key(holder))

    def held(self) -> list[Lease]:
        """The leases that have not ended, by holder. Objects that are not valid leases are left out."""
        keys = [key for key in self._objects.list(f"{self._folder}/leases") if key.endswith(".json")]
        if not keys:
            return []
        now = store_time(self._objects, self._folder)
        return [lease for key in keys if (lease := self._read(key, now)) is not None]

    def _read(self, key: str, now: float) -> Lease | None:
        # The time is asked before and after: a lease that is renewed in between must not count as older than it is.
        before = self._objects.modified(key)
        try:
            lease = parse_json(self._objects.get(key), _LeaseObject)
        except (ObjectMissing, ValueError):
            return None
        written = max(filter(None, (before, self._objects.modified(key))), default=None)
        if written is None:
            return None
        left = written + min(lease.seconds, LONGEST_SECONDS) + _ROUNDING_SECONDS - now
        about = {name: str(value)[:_LONGEST_TEXT] for name, value in (lease.model_extra or {}).items()}
        holder = key.rpartition("/")[2].removesuffix(".json")
        return Lease(holder, lease.number, lease.seconds, left, about) if left > 0 else None

    def _key(self, holder: str) -> str:
        return f"{self._folder}/leases/{valid_name(holder)}.json"


class HeldLeases:
    """The leases of one holder, one per line, renewed in time. If one cannot be written, `problem` says so; the holder
    goes on."""

    def __init__(
        self, objects: Objects, form: str, holder: str | None, seconds: float, about: Mapping[str, str] | None = None
    ) -> None:
        self._objects, self._form, self._seconds, self._about = objects, form, seconds, about or {}
        # A store over HTTP is read-only: who copies from it holds a lease on the copy.
        self._holder = None if objects.url.startswith(("http://", "https://")) else holder
        self._wanted: dict[str, int] = {}  # by line: the version to hold
        self._written: dict[str, tuple[int, float]] = {}  # by line: the version, and when its lease was written
        self.problem: str | None = None

    def renew(self, versions: Iterable[Version] = ()) -> None:
        """Hold these versions, and go on holding those of other lines. A lease is written when its version changes and
        when a third of its time has passed."""
        self._wanted.update((version.line, version.number) for version in versions)
        for line, number in self._wanted.items():
            written, at = self._written.get(line, (-1, 0.0))
            recent = time.monotonic() < at + self._seconds / _RENEWALS
            if self._holder is None or (number == written and recent):
                continue
            try:
                Leases(self._objects, line, self._form).hold(self._holder, number, self._seconds, **self._about)
                self._written[line], self.problem = (number, time.monotonic()), None
            except (StorageError, WeightsError) as error:
                version = Version(line, number)
                self.problem = f"the lease on {version} cannot be written, so it may be collected: {error}"

    def release(self, line: str) -> None:
        """End the lease on this line, also one that an earlier process of the same holder wrote."""
        self._wanted.pop(line, None)
        self._written.pop(line, None)
        if self._holder is not None:
            with contextlib.suppress(StorageError):  # it ends by itself
                Leases(self._objects, line, self._form).release(self._holder)

    def close(self) -> None:
        """Release all leases and write none any more."""
        for line in list(self._wanted):
            self.release(line)
        self._holder = None


def store_time(objects: Objects, folder: str) -> float:
    """The time by the store's own clock: when an object that is written now was written."""
    objects.put(f"{folder}/clock", b"now")
    written = objects.modified(f"{folder}/clock")
    if written is None:
        raise WeightsError(f"{objects.url} does not keep written objects: {folder}/clock was written and is missing")
    return written
