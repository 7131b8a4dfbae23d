"""Mirror: copies versions from another region's store into this one. Nothing unverified is ever written.

Order, safe under kill -9 at any point: the packs of a version, then its manifest, versions ascending. The companions
of the model (files/companions.py) come before the first manifest of a line; a channel's entry comes after the version
it points at. Packs are named by their digest, so packs from a killed copy are used again. Only what the next reader
needs is copied: the deltas after the newest version here, or the newest snapshot (or anchor of the source) and the
deltas after it. Other packs can be fetched later, one by one (`fetch_pack`).

Over long links, round trips cost most. The next two manifests are requested at once; if the first is missing, there is
nothing new. Then the packs of all versions are read in parallel ranges while earlier ones are verified and written. A
region that is one version behind needs two round trips.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from rollmill import telemetry
from rollmill.errors import ObjectExists, ObjectMissing, ObjectTruncated, StorageError, WeightsError
from rollmill.storage.objects import Objects
from rollmill.storage.parallel import THREADS, Uploads, read_ranges
from rollmill.types import Version
from rollmill.weights.files.companions import copy_companions
from rollmill.weights.format.manifest import Anchor, Manifest, Pack, parse_manifest, seal
from rollmill.weights.format.object_keys import anchor_key, manifest_key, pack_key
from rollmill.weights.reading.channels import Channels, entry_key, parse_entry
from rollmill.weights.reading.line_follower import Ahead, CopyResult
from rollmill.weights.reading.read_plan import Leg, LegFailed, LegId, plan_legs
from rollmill.weights.reading.weight_store import HeadWatch, WeightStore, check_pack

_FIRST_LOOK, _LONGEST_LOOK = 2, 16  # manifests requested at a time
_LISTING_SECONDS = 30.0  # how often the source is listed, to find versions after a missing number
_DEEPEST = 64  # how far below the head to look for a version that can be copied
_REMEMBERED_BYTES = 64 << 20  # packs of the last copy kept in memory, so the follower need not read them again
_WRITING_BYTES = 64 << 20  # most bytes being written into the own store
_LARGEST_PACK = 1 << 30  # larger packs are refused


class Mirror:
    """Not thread-safe. `region` is the name of this region, for events."""

    def __init__(self, source: Objects, target: Objects, region: str = "", threads: int = THREADS) -> None:
        self.source, self.target, self.region = WeightStore(source), WeightStore(target), region
        self._threads = threads
        self._heads: dict[tuple[str, str], HeadWatch] = {}  # of the lines in the target
        self._listed: dict[tuple[str, str], tuple[float, int | None]] = {}  # those of the source, and when they were
        self._announced: tuple[Version, str, bytes] | None = None  # a manifest that a wait ended with, and its form
        self._remembered: dict[str, bytes] = {}  # by digest
        self._accompanied: set[str] = set()  # lines whose companions are in the target, if they have any
        self._channels_there, self._channels_here = Channels(source), Channels(target)

    def copy(self, line: str, form: str = "bf16", number: int | None = None, ahead: Ahead | None = None) -> CopyResult:
        """Copy a line up to `number`, or up to its head in the source. `ahead` works on packs while others arrive.

        Raises the error that stopped it; versions before that have been copied.
        """
        self._remembered = {}
        there = _Manifests(self.source.objects, line, form)
        head = self._head(line, form)
        newest = head.newest()
        wanted = self._newest_there(there, newest) if number is None else number
        if wanted is None or wanted == newest or self.target.exists(Version(line, wanted), form):
            return CopyResult((), 0)
        lowest = wanted if number is not None else max(wanted - _DEEPEST, 0 if newest is None else newest + 1)
        versions: list[Version] = []
        copied = 0
        for manifest, size in self._approach(there, wanted, lowest, ahead):
            versions.append(manifest.version)
            copied += size
            head.learn(manifest.number)
        return CopyResult(tuple(versions), copied)

    def copy_channel(self, name: str, form: str = "bf16") -> Version | None:
        """Copy a channel: the version it points at, then its entries. Returns that version."""
        newest = self._channels_there.entry(name)
        if newest is None:
            return None
        self.copy(newest.version.line, form, newest.version.number)
        here = self._channels_here.entry(name)
        for number in range(here.number + 1 if here else 1, newest.number + 1):
            data = self.source.objects.get(entry_key(name, number))
            parse_entry(data, name, number)
            _create(self.target.objects, entry_key(name, number), data)
        return newest.version

    def remembered(self, pack: Pack) -> bytes | None:
        """A checked pack of the last copy, if it is still in memory. Each is returned once."""
        return self._remembered.pop(pack.digest, None)

    def fetch_pack(self, manifest: Manifest | Anchor, pack: Pack) -> bytes:
        """Fetch a pack that is missing or damaged here, write it over what is there, and return it."""
        key = pack_key(manifest, pack)
        (data,) = read_ranges(self.source.objects, [(key, 0, pack.bytes)], self._threads)
        check_pack(self.source.objects, key, data, pack)
        self.target.objects.put(key, data)
        return data

    def fetch_manifest(self, version: Version, form: str) -> Manifest:
        """The same for a manifest that is damaged here."""
        data = self.source.objects.get(manifest_key(version, form))
        manifest = parse_manifest(data, version, form)
        self.target.objects.put(manifest_key(version, form), data)
        return manifest

    def wait_for_next(self, line: str, form: str, seconds: float) -> bool:
        """Wait for the next version in the source. Returns whether `copy` has something to do."""
        newest = self._head(line, form).newest()
        if newest is None:
            return False
        following = Version(line, newest + 1)
        data = self.source.objects.wait_for(manifest_key(following, form), seconds)
        if data is not None:
            self._announced = following, form, data  # the next copy need not ask for it
        return data is not None

    def _head(self, line: str, form: str) -> HeadWatch:
        return self._heads.setdefault((line, form), HeadWatch(self.target, line, form))

    def _newest_there(self, there: _Manifests, newest: int | None) -> int | None:
        """The head of the line in the source: by probing the next numbers, and every 30 s by a listing, which also
        finds versions after a missing number."""
        known = newest if newest is None else self._announcement(there, newest) or there.follow(newest)
        if known is not None and known != newest:
            return known
        key = there.line, there.form
        at, listed = self._listed.get(key, (float("-inf"), None))
        if known is None or time.monotonic() - at >= _LISTING_SECONDS:
            listed = self.source.head(there.line, there.form)
            self._listed[key] = time.monotonic(), listed
            there.forget_missing()  # versions may have been published since they were probed
        return listed if known is None or (listed is not None and listed > known) else known

    def _announcement(self, there: _Manifests, newest: int) -> int | None:
        """The number of the version that the last wait returned, if it is the next one."""
        announced, self._announced = self._announced, None
        if announced is None or announced[:2] != (Version(there.line, newest + 1), there.form):
            return None
        there.learn(newest + 1, announced[2])
        return newest + 1

    def _approach(
        self, there: _Manifests, wanted: int, lowest: int, ahead: Ahead | None
    ) -> Iterator[tuple[Manifest, int]]:
        """Copy a path to `wanted` around damage; if there is none, to the newest version below it down to `lowest`."""
        avoid: frozenset[LegId] = frozenset()
        failure: WeightsError | None = None
        target = wanted
        while target >= lowest:
            try:
                plan = self._plan(there, target, avoid)
            except _Divergence:
                raise
            except WeightsError as error:
                failure = failure or error
                target -= 1
                continue
            try:
                for manifest, size in self._take(plan, there, ahead):
                    lowest = max(lowest, manifest.number + 1)
                    yield manifest, size
                break
            except LegFailed as error:
                failure = failure or error
                avoid |= {error.leg.id}
        if failure is not None and target < wanted:
            raise failure

    def _plan(self, there: _Manifests, target: int, avoid: frozenset[LegId]) -> list[Leg]:
        anchors: set[int] | None = None

        def read_anchor(version: Version) -> Anchor | None:
            nonlocal anchors
            if anchors is None:  # one listing instead of a request per version
                anchors = set(self.source.anchors(version.line, there.form))
            return self.source.anchor(version, there.form) if version.number in anchors else None

        def is_here(version: Version, digest: str) -> bool:
            if not self.target.exists(version, there.form):
                return False
            try:
                here = self.target.manifest(version, there.form)
            except WeightsError:
                try:
                    here = self.fetch_manifest(version, there.form)
                except (ObjectMissing, WeightsError):
                    return False  # damaged there too
            if here.digest != digest:
                raise _Divergence(manifest_key(version, there.form), self.target.objects)
            return True

        try:
            return plan_legs(there.read, read_anchor, Version(there.line, target), is_here, avoid)
        except _Unreachable as unreachable:
            raise unreachable.error from None

    def _take(self, legs: list[Leg], there: _Manifests, ahead: Ahead | None) -> Iterator[tuple[Manifest, int]]:
        """Copy leg after leg. Packs of later legs are fetched while earlier ones are written."""
        wanted = [(leg, pack) for leg in legs for pack in leg.encoding.packs]
        with ThreadPoolExecutor(self._threads, thread_name_prefix="packs") as pool:  # one by one, many packs take long
            have = iter(list(pool.map(lambda each: self._has(*each), wanted)))
        missing = [[pack for pack in leg.encoding.packs if not next(have)] for leg in legs]
        ranges = [
            (pack_key(leg.manifest, pack), 0, pack.bytes)
            for leg, packs in zip(legs, missing, strict=True)
            for pack in packs
        ]
        began = time.monotonic()
        with contextlib.closing(read_ranges(self.source.objects, ranges, self._threads)) as stream:
            for leg, packs in zip(legs, missing, strict=True):
                with Uploads(self.target.objects, bytes_in_flight=_WRITING_BYTES) as writes:
                    for pack in packs:
                        self._take_pack(leg, pack, stream, writes, ahead)
                self._commit(leg, there.raw(leg.manifest.number))
                size, seconds = sum(pack.bytes for pack in packs), time.monotonic() - began
                began = time.monotonic()
                telemetry.emit(
                    "arrive",
                    region=self.region,
                    line=leg.manifest.line,
                    version=leg.manifest.number,
                    bytes=size,
                    seconds=seconds,
                    since_publish_seconds=time.time() - leg.manifest.created_at,
                )
                yield leg.manifest, size

    def _has(self, leg: Leg, pack: Pack) -> bool:
        if pack.bytes > _LARGEST_PACK:
            raise LegFailed(leg, f"a pack of {pack.bytes} bytes")
        return self.target.objects.head(pack_key(leg.manifest, pack)) == pack.bytes

    def _take_pack(self, leg: Leg, pack: Pack, stream: Iterator[bytes], writes: Uploads, ahead: Ahead | None) -> None:
        key = pack_key(leg.manifest, pack)
        try:
            data = next(stream)
            check_pack(self.source.objects, key, data, pack)
        except (ObjectMissing, ObjectTruncated, WeightsError) as error:
            raise LegFailed(leg, error.message) from None
        writes.create(key, data)
        if ahead is not None and ahead(leg, pack, data):
            return
        if sum(map(len, self._remembered.values())) + len(data) <= _REMEMBERED_BYTES:
            self._remembered[pack.digest] = data

    def _commit(self, leg: Leg, manifest: bytes) -> None:
        """Create the manifest last: without its anchor the version could not be restored here, without its companions
        it could not be exported."""
        version, form = leg.manifest.version, leg.manifest.form
        if version.line not in self._accompanied:
            copy_companions(self.source, self.target, leg.manifest)
        if leg.anchor is not None:
            with contextlib.suppress(ObjectExists):  # one was made here meanwhile
                self.target.objects.create(anchor_key(version, form), seal(leg.anchor))
        _create(self.target.objects, manifest_key(version, form), manifest)
        self._accompanied.add(version.line)  # only now: those of a line without a version may be collected


def is_of_delta(manifest: Manifest | Anchor, pack: Pack) -> bool:
    """Whether a pack belongs to a version's delta. Packs of snapshots are large, and mostly not needed."""
    return isinstance(manifest, Manifest) and manifest.delta is not None and pack in manifest.delta.packs


class _Manifests:
    """The manifests of one line in the source as bytes, several read at a time. Used for one copy."""

    def __init__(self, objects: Objects, line: str, form: str) -> None:
        self.line, self.form = line, form
        self._objects = objects
        self._raw: dict[int, bytes | None] = {}  # None: not there
        self._parsed: dict[int, Manifest] = {}

    def follow(self, number: int) -> int:
        """The newest number that exists after this one, without a gap."""
        looks = _FIRST_LOOK
        while True:
            self._look(range(number + 1, number + 1 + looks))
            for _ in range(looks):
                if self._raw[number + 1] is None:
                    return number
                number += 1
            looks = min(4 * looks, _LONGEST_LOOK)

    def learn(self, number: int, data: bytes) -> None:
        self._raw[number] = data

    def forget_missing(self) -> None:
        self._raw = {number: data for number, data in self._raw.items() if data is not None}

    def read(self, version: Version) -> Manifest:
        """For the walk back along deltas: after the first step, several manifests are read at a time."""
        number = version.number
        if number not in self._raw:
            try:
                self._look(range(number, max(number - (_LONGEST_LOOK // 2 if self._parsed else 1), -1), -1))
            except StorageError as error:
                raise _Unreachable(error) from None
        if number not in self._parsed:
            self._parsed[number] = parse_manifest(self.raw(number), version, self.form)
        return self._parsed[number]

    def raw(self, number: int) -> bytes:
        data = self._raw[number]
        if data is None:
            raise WeightsError(f"{Version(self.line, number)} ({self.form}) does not exist in {self._objects.url}")
        return data

    def _look(self, numbers: Iterable[int]) -> None:
        unknown = [number for number in numbers if number not in self._raw]
        with ThreadPoolExecutor(max(len(unknown), 1), thread_name_prefix="manifests") as pool:  # one round trip
            self._raw.update(zip(unknown, pool.map(self._get, unknown), strict=True))

    def _get(self, number: int) -> bytes | None:
        try:
            return self._objects.get(manifest_key(Version(self.line, number), self.form))
        except ObjectMissing:
            return None


class _Unreachable(Exception):
    """The source did not answer. A plan must not treat this as a damaged manifest and copy a snapshot instead."""

    def __init__(self, error: StorageError) -> None:
        super().__init__(str(error))
        self.error = error


def _create(objects: Objects, key: str, data: bytes) -> None:
    try:
        objects.create(key, data)
    except ObjectExists:
        if objects.get(key) != data:
            raise _Divergence(key, objects) from None


class _Divergence(WeightsError):
    def __init__(self, key: str, objects: Objects) -> None:
        super().__init__(
            f"{key!r} in {objects.url} differs from the one in the other region: the two have diverged",
            hint="one region is the home of a line; remove this region's copy of the line, it is then copied again",
        )
