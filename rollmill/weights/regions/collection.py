"""Collect: remove what no reader needs any more from one line in one form.

Kept are: the head and the last `keep` versions; the versions that channels point at and would be rolled back to; the
version of each lease and everything after it; and for each of these the snapshot or anchor at or below it and the
deltas between.

Order, safe under kill -9 at any point: versions are removed from the newest to the oldest, each one's manifest first,
then its anchor, then its packs. So every version that exists can be restored at any moment, and an interrupted
collection leaves only objects that nothing names; a later one removes them. Objects without a manifest may belong to a
writer at work, so they are removed only when they are older than an hour by the store's clock; packs above the head are
never removed. Companions follow the same rule: those of a line that has versions stay.
"""

from __future__ import annotations

import bisect
import collections
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollmill.errors import WeightsError
from rollmill.types import Version
from rollmill.weights.files.companions import index_key
from rollmill.weights.format.manifest import Encoding
from rollmill.weights.format.object_keys import anchor_key, form_folder, manifest_key, pack_prefix
from rollmill.weights.reading.channels import Channels
from rollmill.weights.reading.leases import Leases, store_time
from rollmill.weights.reading.weight_store import WeightStore

ABANDONED_SECONDS = 3600.0
_PACK = re.compile(r"(\d{10})-[0-9a-f]{64}")


@dataclass(frozen=True)
class CollectionResult:
    """What was removed, or would be with `dry_run`."""

    kept: tuple[int, ...]  # versions
    removed: tuple[int, ...]
    abandoned: int  # objects of attempts that died
    freed: int  # bytes
    bytes: int  # that are left
    problem: str | None  # why the budget is not met, if it is not


def collect(
    store: WeightStore, line: str, form: str = "bf16", keep: int = 50, budget: int | None = None, dry_run: bool = False
) -> CollectionResult:
    """Remove what is not needed. With a `budget` in bytes, fewer than `keep` versions are kept if necessary; the head
    and the versions of channels and leases always stay."""
    if keep < 1:
        raise WeightsError(f"{keep} versions cannot be kept", hint="the head always stays: at least 1")
    found = _LineObjects(store, line, form)
    if not found.numbers:
        return CollectionResult((), (), 0, 0, sum(stat.bytes for stat in found.stats.values()), None)
    # Read last, so that channels and leases that changed during the listing count.
    holds = _holds(store, line, form, found.numbers)
    plan = found.plan(holds, keep)
    if budget is not None and plan.left > budget:
        # keeping fewer never takes more bytes: the largest number that fits, or else 1
        fit = bisect.bisect_right(range(1, keep + 1), budget, key=lambda last: found.plan(holds, last).left)
        plan = found.plan(holds, max(fit, 1))
    if not dry_run:
        found.remove(plan)
    problem = _over_budget(line, plan, budget, holds) if budget is not None and plan.left > budget else None
    abandoned = len(found.abandoned)
    return CollectionResult(plan.kept, plan.doomed, abandoned, plan.freed, plan.left, problem)


def collect_companions(store: WeightStore, dry_run: bool = False) -> dict[str, int]:
    """Remove the companions of lines without any version: an import or a copy died before its first one. A line with an
    object younger than an hour may still be written, and stays. Returns the bytes removed per line."""
    lines: dict[str, list[str]] = collections.defaultdict(list)
    for key in store.objects.list("companions"):
        line, separator, _ = key.removeprefix("companions/").partition("/")
        if separator and not store.begun(line):
            lines[line].append(key)
    now = store_time(store.objects, "collection") if lines else 0.0
    removed: dict[str, int] = {}
    for line, keys in lines.items():
        own = store.objects.stats(f"companions/{line}")
        stats = [*own.values(), *store.objects.stats(f"weights/{line}").values()]
        young = any(now - stat.modified <= ABANDONED_SECONDS for stat in stats)
        if young or store.begun(line):  # checked last: a version may have been committed meanwhile
            continue
        removed[line] = sum(stat.bytes for stat in own.values())
        if not dry_run:
            store.objects.delete(index_key(line))  # first: it names only what is there
            store.objects.delete_all(keys)
    return removed


class _Plan(NamedTuple):
    kept: tuple[int, ...]
    doomed: tuple[int, ...]
    freed: int  # bytes
    left: int


class _Version(NamedTuple):
    """What collection needs to know of one version."""

    before: int | None  # the version that a reader of this one needs as well
    packs: set[str] | None  # keys that its manifest and anchor name; None: one of them is damaged and may name any


class _LineObjects:
    """All objects of a line, by listing."""

    def __init__(self, store: WeightStore, line: str, form: str) -> None:
        self._store, self._line, self._form = store, line, form
        folder = form_folder(line, form)
        self._now = store_time(store.objects, folder)
        # packs are listed before manifests: a pack that no manifest names is abandoned, or its writer is at work
        self._packs: dict[int, list[str]] = collections.defaultdict(list)
        for key in store.objects.list(f"{folder}/packs"):
            if pack := _PACK.fullmatch(key.rpartition("/")[2]):
                self._packs[int(pack[1])].append(key)
        self._anchors = set(store.anchors(line, form))
        self.numbers = store.numbers(line, form)
        self.stats = store.objects.stats(folder)
        below = dict(zip(self.numbers[1:], self.numbers, strict=False))
        self._versions = {number: self._look(number, below.get(number)) for number in self.numbers}
        self.abandoned = self._abandoned() if self.numbers else []

    def _look(self, number: int, below: int | None) -> _Version:
        """A damaged manifest may be restored later: it is treated as a delta from the version below."""
        version = Version(self._line, number)
        try:
            manifest = self._store.manifest(version, self._form)
        except WeightsError:
            return _Version(below, None)
        try:
            anchor = self._store.anchor(version, self._form) if number in self._anchors else None
            damaged = False
        except WeightsError:
            anchor, damaged = None, True
        starts = [manifest.snapshot, anchor.snapshot if anchor else None]
        base = manifest.delta.base.number if manifest.delta and manifest.delta.base else None
        if any(self._keys(number, start) <= self.stats.keys() for start in starts if start):
            base = None
        named = [self._keys(number, encoding) for encoding in (manifest.delta, *starts) if encoding]
        return _Version(base, None if damaged else set().union(*named))

    def _keys(self, number: int, encoding: Encoding) -> set[str]:
        prefix = pack_prefix(self._line, self._form, number)
        return {prefix + pack.digest for pack in encoding.packs}

    def plan(self, holds: Iterable[int], keep: int) -> _Plan:
        """What is removed if the versions in `holds` and the last `keep` stay."""
        kept = self._closure([*holds, *self.numbers[-keep:]])
        doomed = tuple(number for number in self.numbers if number not in kept)
        keys = {key for number in doomed for key in self._objects_of(number)}.union(self.abandoned)
        freed = sum(self.stats[key].bytes for key in keys)
        left = sum(stat.bytes for stat in self.stats.values()) - freed
        return _Plan(tuple(sorted(kept)), doomed, freed, left)

    def _closure(self, wanted: Iterable[int]) -> set[int]:
        """These versions, and those down to the nearest snapshot or anchor at or below each."""
        kept: set[int] = set()
        for number in sorted(wanted):
            step: int | None = number
            while step in self._versions and step not in kept:
                kept.add(step)
                step = self._versions[step].before
        return kept

    def _objects_of(self, number: int) -> list[str]:
        """All objects of a version, in the order in which they may be removed."""
        version = Version(self._line, number)
        keys = [manifest_key(version, self._form), anchor_key(version, self._form), *self._packs.get(number, [])]
        return [key for key in keys if key in self.stats]

    def _abandoned(self) -> list[str]:
        """Objects that nothing names, and that are older than an hour."""
        head = self.numbers[-1]
        stray = (Version(self._line, number) for number in self._anchors.difference(self.numbers) if number <= head)
        keys = [anchor_key(version, self._form) for version in stray]
        for number, packs in self._packs.items():
            if number <= head:
                version = self._versions.get(number, _Version(None, set()))
                keys += [key for key in packs if version.packs is not None and key not in version.packs]
        return [key for key in keys if key in self.stats and self._is_old(key)]

    def _is_old(self, key: str) -> bool:
        return self._now - self.stats[key].modified > ABANDONED_SECONDS

    def remove(self, plan: _Plan) -> None:
        for number in reversed(plan.doomed):
            keys = self._objects_of(number)
            packs = set(self._packs.get(number, []))
            for key in keys:
                if key not in packs:
                    self._store.objects.delete(key)
            self._store.objects.delete_all(key for key in keys if key in packs)
            self._store.forget(Version(self._line, number), self._form)
        # An anchor may have been made meanwhile from packs that counted as abandoned.
        made = set(self._store.anchors(self._line, self._form)) - self._anchors
        spared = tuple(pack_prefix(self._line, self._form, number) for number in made)
        self._store.objects.delete_all(key for key in self.abandoned if not key.startswith(spared))


def _holds(store: WeightStore, line: str, form: str, numbers: Sequence[int]) -> dict[int, list[str]]:
    """The versions that stay whatever the budget, and who holds them. A lease holds its version and all after it."""
    holds: dict[int, list[str]] = {numbers[-1]: ["the head"]}
    exists = set(numbers)
    channels = Channels(store.objects)
    for name in channels.names():
        entries = {f"channel {name}": channels.entry(name), f"a rollback of channel {name}": channels.before(name)}
        for who, entry in entries.items():
            if entry is not None and entry.version.line == line and entry.version.number in exists:
                holds.setdefault(entry.version.number, []).append(who)
    for lease in Leases(store.objects, line, form).held():
        from_there = [number for number in numbers if number >= lease.number]
        for number in from_there:
            holds.setdefault(number, [])
        if from_there:
            holds[from_there[0]].append(f"the lease of {lease.holder}")
    return holds


def _over_budget(line: str, plan: _Plan, budget: int, holds: Mapping[int, list[str]]) -> str:
    held = "; ".join(f"{', '.join(who)} at {line}@{number}" for number, who in sorted(holds.items()) if who)
    return (
        f"{plan.left} bytes are left of a budget of {budget}, in {len(plan.kept)} versions from {line}@{plan.kept[0]} "
        f"on, which are held by: {held}"
    )
