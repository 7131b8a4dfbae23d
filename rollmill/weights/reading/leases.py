"""Leases: followers say which version they stand at, so that what they need next is not collected.

    leases/HOLDER.json   {"number", "seconds", "engine", "region", …}   written again and again, by its holder alone

A lease ends `seconds` after it was written, by the clock of the store that holds it: the clock of the holder and that
of whoever asks do not matter. What time it is by the store's clock is found by writing a small object and looking when
it was written.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

from rollmill.errors import ObjectMissing, WeightsError
from rollmill.storage.objects import Objects
from rollmill.weights.format.keys import form_folder, valid_name

LONGEST_SECONDS = 86_400.0  # a lease that is not renewed for a day is nobody's
_ROUNDING_SECONDS = 1.0  # stores tell the time in whole seconds


@dataclass(frozen=True)
class Lease:
    holder: str
    number: int
    seconds: float
    left: float  # seconds until it ends, by the store's clock
    about: Mapping[str, str]  # engine, region …


class Leases:
    def __init__(self, objects: Objects, line: str, form: str = "bf16") -> None:
        self._objects = objects
        self._folder = form_folder(line, form)

    def hold(self, holder: str, number: int, seconds: float, **about: str) -> None:
        """Stand at a version for so long; renew it well before. A holder has one lease, the last one written."""
        if number < 0 or not 0 < seconds <= LONGEST_SECONDS:
            raise WeightsError(f"a lease on version {number} for {seconds} s", hint="at most a day; renew it")
        fields = {**about, "number": number, "seconds": seconds}
        self._objects.put(self._key(holder), json.dumps(fields).encode())

    def release(self, holder: str) -> None:
        self._objects.delete(self._key(holder))

    def held(self) -> list[Lease]:
        """The leases that have not ended, by holder. What is not a lease is left out."""
        keys = [key for key in self._objects.list(f"{self._folder}/leases") if key.endswith(".json")]
        if not keys:
            return []
        now = store_time(self._objects, self._folder)
        return [lease for key in keys if (lease := self._read(key, now)) is not None]

    def _read(self, key: str, now: float) -> Lease | None:
        # in this order: a lease that is renewed in between counts as older than it is, and is looked at again below
        written = self._objects.modified(key)
        try:
            fields = json.loads(self._objects.get(key))
            number, seconds = fields.pop("number"), float(fields.pop("seconds"))
        except (ObjectMissing, ValueError, LookupError, TypeError, AttributeError, RecursionError):
            return None
        written = max(filter(None, (written, self._objects.modified(key))), default=None)
        if written is None or type(number) is not int or number < 0 or not math.isfinite(seconds):
            return None
        left = written + min(seconds, LONGEST_SECONDS) + _ROUNDING_SECONDS - now
        holder = key.rpartition("/")[2].removesuffix(".json")
        return Lease(holder, number, seconds, left, {k: str(v) for k, v in fields.items()}) if left > 0 else None

    def _key(self, holder: str) -> str:
        return f"{self._folder}/leases/{valid_name(holder)}.json"


def store_time(objects: Objects, folder: str) -> float:
    """What time it is by the store's own clock: that of an object written now."""
    objects.put(f"{folder}/clock", b"now")
    written = objects.modified(f"{folder}/clock")
    if written is None:
        raise WeightsError(f"{objects.url} does not keep what is written to it: {folder}/clock is gone again")
    return written
