"""Channels: named pointers to versions (candidate, live). Numbered, create-only entries: channels/NAME/0000000001.json

Creating the next number moves the channel: compare-and-swap on any object store. A second writer of the same number is
refused. Entries are never changed, so they are also the history.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from pydantic import Field

from rollmill.errors import ObjectExists, WeightsError
from rollmill.storage.objects import Objects
from rollmill.strict import StrictModel, parse_json
from rollmill.types import Version
from rollmill.weights.format.manifest import Count, Name
from rollmill.weights.format.object_keys import valid_name
from rollmill.weights.reading.weight_store import WeightStore

_ENTRY = re.compile(r"(\d{10})\.json")
_LOOKED_AT = 64  # newest entries that are read to find the version to roll back to


@dataclass(frozen=True)
class ChannelEntry:
    number: int  # 1 is the first
    version: Version
    at: float  # seconds since the epoch


class _EntryObject(StrictModel):
    """An entry as it is stored."""

    line: Name
    number: Count
    at: float = Field(ge=0, lt=1e11)  # a date can be made of it


class Channels:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._newest: dict[str, ChannelEntry] = {}  # entries never change, so the next search starts here

    def get(self, name: str) -> Version | None:
        entry = self.entry(name)
        return entry.version if entry else None

    def entry(self, name: str) -> ChannelEntry | None:
        """The newest entry; its number is what `move` expects."""
        newest = self._newest.get(valid_name(name))
        if newest is None:
            numbers = self._numbers(name)
            if not numbers:
                return None
            newest = self._read(name, numbers[-1])
        while self._objects.head(entry_key(name, newest.number + 1)) is not None:
            newest = self._read(name, newest.number + 1)
        self._newest[name] = newest
        return newest

    def move(self, name: str, to: Version, expect: int | None = None) -> int:
        """Point the channel at a version. Returns the number of the new entry.

        With `expect`, move only if that entry is still the newest (0: the channel is new); without it, always.
        """
        self._check_exists(name, to)
        while True:
            newest = self.entry(name)
            number = newest.number if newest else 0
            if expect is not None and number != expect:
                raise self._moved(name, expect, newest)
            entry = _EntryObject(line=to.line, number=to.number, at=time.time())
            try:
                self._objects.create(entry_key(name, number + 1), entry.model_dump_json().encode())
            except ObjectExists:
                continue  # another process moved it first: look again
            self._check_exists(name, to)  # `collect` may have read the channel before and removed it since
            return number + 1

    def rollback(self, name: str) -> ChannelEntry:
        """Point the channel at the version before the current one. Returns the new entry."""
        newest, before = self.entry(name), self.before(name)
        if newest is None or before is None:
            raise WeightsError(
                f"channel {name!r} has no version before {newest.version if newest else 'its first'} to go back to",
                hint="`rollmill weights channel history` shows its entries; name a version to move it there",
            )
        number = self.move(name, before.version, expect=newest.number)
        return self._read(name, number)

    def before(self, name: str) -> ChannelEntry | None:
        """The entry a rollback returns to: the version before the current one, never one that was rolled back from.
        `collect` keeps it and asks often, so only the last entries of a long history are read."""
        path: list[ChannelEntry] = []  # the moves that led to the current version
        for entry in (self._read(name, number) for number in self._numbers(valid_name(name))[-_LOOKED_AT:]):
            versions = [earlier.version for earlier in path]
            if entry.version in versions:  # a return to a version undoes the moves after it
                del path[versions.index(entry.version) :]
            path.append(entry)
        return path[-2] if len(path) > 1 else None

    def history(self, name: str, newest: int | None = None) -> list[ChannelEntry]:
        """All entries, or only the `newest` ones, oldest first."""
        numbers = self._numbers(valid_name(name))
        return [self._read(name, number) for number in (numbers if newest is None else numbers[-newest:])]

    def names(self) -> list[str]:
        return self._objects.folders("channels")

    def _check_exists(self, name: str, to: Version) -> None:
        store = WeightStore(self._objects)
        if not any(store.exists(to, form) for form in store.forms(to.line)):
            raise WeightsError(
                f"channel {name!r} cannot point at {to}: no such version in {self._objects.url}",
                hint="`rollmill weights log` lists the versions that exist",
            )

    def _numbers(self, name: str) -> list[int]:
        keys = self._objects.list(f"channels/{name}")
        return [int(found[1]) for key in keys if (found := _ENTRY.fullmatch(key.rpartition("/")[2]))]

    def _read(self, name: str, number: int) -> ChannelEntry:
        return ChannelEntry(number, *parse_entry(self._objects.get(entry_key(name, number)), name, number))

    def _moved(self, name: str, expect: int, newest: ChannelEntry | None) -> WeightsError:
        now = f"entry {newest.number} ({newest.version})" if newest else "empty"
        return WeightsError(
            f"channel {name!r} was expected at entry {expect} and is at {now}",
            hint="another process moved it; look at its history and decide again",
        )


def entry_key(name: str, number: int) -> str:
    return f"channels/{valid_name(name)}/{number:010d}.json"


def parse_entry(data: bytes, name: str, number: int) -> tuple[Version, float]:
    """Read an untrusted entry: the version, and when the channel was moved there."""
    try:
        entry = parse_json(data, _EntryObject)
    except ValueError as error:
        raise WeightsError(
            f"entry {number} of channel {name!r} is damaged: {error}", hint="move the channel again"
        ) from None
    return Version(entry.line, entry.number), entry.at
