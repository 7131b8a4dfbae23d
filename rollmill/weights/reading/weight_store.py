"""WeightStore: reads the versions in an object store. writing/publisher.py writes them; FORMAT.md lists the keys."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator

from rollmill.errors import ObjectMissing, StorageError, WeightsError
from rollmill.storage.objects import Objects
from rollmill.storage.parallel import sizes_of
from rollmill.types import Version
from rollmill.weights.format.manifest import Anchor, Manifest, Pack, digest_bytes, parse_anchor, parse_manifest
from rollmill.weights.format.object_keys import anchor_key, form_folder, manifest_key, pack_key, valid_name
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.reading.chunks import decode_run, fetch
from rollmill.weights.reading.host_weights import HostWeights, restore
from rollmill.weights.reading.read_plan import Leg, LegId, Source, plan_legs

_NUMBER = re.compile(r"\d{10}")
_MANIFEST_BYTES = 8 << 20  # of manifests in the cache as they are stored; parsed they take about 11 times as much
_MANIFESTS_KEPT = 2  # at least: a version and its base
_PROBES = 8  # a reader that is further behind lists the manifests instead
_LISTING_SECONDS = 10.0


class WeightStore:
    """The lines of a store, their versions, and their weights, with every byte verified."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        # a cache: manifests never change, and chains are walked often
        self._manifests: dict[tuple[Version, str], tuple[Manifest, int]] = {}  # with its bytes, the oldest first
        self._begun: set[str] = set()  # lines that have a version

    def lines(self) -> list[str]:
        return self.objects.folders("weights")

    def forms(self, line: str) -> list[str]:
        return self.objects.folders(f"weights/{valid_name(line)}")

    def numbers(self, line: str, form: str = "bf16") -> list[int]:
        """Numbers of all committed versions, ascending."""
        return self._numbers(line, form, "manifests", ".manifest")

    def anchors(self, line: str, form: str = "bf16") -> list[int]:
        """Numbers of the versions that have an anchor in this store, ascending."""
        return self._numbers(line, form, "anchors", ".anchor")

    def epoch(self, line: str, form: str = "bf16") -> int:
        """The newest epoch: how many publishers have taken over the line."""
        return max(self._numbers(line, form, "epochs", ".json"), default=0)

    def _numbers(self, line: str, form: str, folder: str, ending: str) -> list[int]:
        names = (key.rpartition("/")[2] for key in self.objects.list(f"{form_folder(line, form)}/{folder}"))
        return [int(name[:10]) for name in names if _NUMBER.fullmatch(name.removesuffix(ending)) and ending in name]

    def begun(self, line: str) -> bool:
        """Whether the line has a version in any form. A writer that died before its first version leaves no line."""
        if line not in self._begun and any(self.numbers(line, form) for form in self.forms(line)):
            self._begun.add(line)
        return line in self._begun

    def head(self, line: str, form: str = "bf16", after: int | None = None) -> int | None:
        """The newest committed number. With `after`, a committed number, only the numbers after it are probed."""
        if after is None:
            numbers = self.numbers(line, form)
            return numbers[-1] if numbers else None
        for number in range(after, after + _PROBES):
            if not self.exists(Version(line, number + 1), form):
                return number
        return max(after, self.head(line, form) or after)

    def exists(self, version: Version, form: str = "bf16") -> bool:
        return self.objects.head(manifest_key(version, form)) is not None

    def manifest(self, version: Version, form: str = "bf16") -> Manifest:
        if (kept := self._manifests.get((version, form))) is not None:
            return kept[0]
        try:
            data = self.objects.get(manifest_key(version, form))
        except ObjectMissing:
            raise WeightsError(
                f"{version} ({form}) does not exist in {self.objects.url}",
                hint="`rollmill weights log` lists the versions that do",
            ) from None
        manifest = parse_manifest(data, version, form)
        known = {**self._manifests, (version, form): (manifest, len(data))}
        held = sum(size for _, size in known.values())
        while held > _MANIFEST_BYTES and len(known) > _MANIFESTS_KEPT:
            held -= known.pop(next(iter(known)))[1]
        self._manifests = known  # assigned whole: other threads read it
        return manifest

    def forget(self, version: Version, form: str = "bf16") -> None:
        """Drop a deleted version from the cache."""
        self._manifests.pop((version, form), None)

    def anchor(self, version: Version, form: str = "bf16") -> Anchor | None:
        """The anchor of a version: a snapshot made in this store, if there is one."""
        try:
            data = self.objects.get(anchor_key(version, form))
        except ObjectMissing:
            return None
        return parse_anchor(data, self.manifest(version, form))

    def versions(self, line: str, form: str = "bf16") -> list[Manifest]:
        """Manifests of a line, oldest first."""
        return [self.manifest(Version(line, number), form) for number in self.numbers(line, form)]

    def load(self, version: Version, form: str = "bf16") -> dict[str, HostTensor]:
        """The weights of a version, every chunk and the root digest verified."""
        return self.hold(version, form).tensors

    def hold(self, version: Version, form: str = "bf16") -> HostWeights:
        """Like `load`, as host weights that can be brought to other versions."""
        return restore(self.source(form), version)

    def source(self, form: str = "bf16") -> Source:
        """This store as the source of one form."""
        return Source(
            manifest=lambda version: self.manifest(version, form),
            anchor=lambda version: self.anchor(version, form),
            pack=self.read_pack,
            part=self.read_part,
        )

    def read_part(self, manifest: Manifest | Anchor, pack: Pack, offset: int, length: int) -> bytes:
        """A range of a pack. It has no digest: only what it decodes to can be verified."""
        return self.objects.get_range(pack_key(manifest, pack), offset, length)

    def read_pack(self, manifest: Manifest | Anchor, pack: Pack) -> bytes:
        """A whole pack, checked against its digest. Never reads more than the manifest says."""
        key = pack_key(manifest, pack)
        data = self.objects.get_range(key, 0, pack.bytes)
        check_pack(self.objects, key, data, pack)
        return data

    # -- routes: how a version can be restored from what is in this store. Nothing is decoded.

    def route(
        self, target: Version, form: str = "bf16", digest: str | None = None, avoid: frozenset[LegId] = frozenset()
    ) -> list[Leg]:
        """The legs with the fewest bytes to a version, from weights with the root digest `digest` or from nothing."""
        source = self.source(form)
        return plan_legs(source.manifest, source.anchor, target, lambda _, found: found == digest, avoid)

    def check_present(self, target: Version, form: str = "bf16") -> list[Leg]:
        """A route whose objects all exist with the right size. WeightsError says what is missing.

        A quick check before something points at the version. Only `verify` reads the bytes.
        """
        avoid: frozenset[LegId] = frozenset()
        missing: str | None = None
        while True:
            try:
                legs = self.route(target, form, avoid=avoid)
            except WeightsError as error:
                if missing is None:
                    raise
                raise WeightsError(
                    f"{target} ({form}) cannot be restored from {self.objects.url}: {missing}", hint=error.hint
                ) from None
            broken = next((leg for leg in legs if self._missing(leg)), None)
            if broken is None:
                return legs
            missing = missing or self._missing(broken)
            avoid |= {broken.id}

    def _missing(self, leg: Leg) -> str | None:
        keys = [pack_key(leg.manifest, pack) for pack in leg.encoding.packs]
        for pack, key, size in zip(leg.encoding.packs, keys, sizes_of(self.objects, keys), strict=True):
            if size != pack.bytes:
                return f"{key!r} is missing" if size is None else f"{key!r} has {size} bytes, not {pack.bytes}"
        return None

    # -- verifying

    def verify(self, line: str, form: str = "bf16") -> Iterator[tuple[Version, bool, str]]:
        """Read and decode everything of a line. Yields for each version whether it is intact, and what is wrong."""
        host: HostWeights | None = None
        for number in self.numbers(line, form):
            version = Version(line, number)
            try:
                host, note = self._verify_version(self.manifest(version, form), host)
                yield version, True, note
            except (StorageError, WeightsError) as error:
                host = None
                yield version, False, error.message

    def _verify_version(self, manifest: Manifest, host: HostWeights | None) -> tuple[HostWeights, str]:
        """Check every encoding of a version and its anchor. Returns its host weights, and notes."""
        source, notes = self.source(manifest.form), []
        reached: HostWeights | None = None
        if manifest.delta is not None and manifest.delta.base is not None:
            base = Version(manifest.line, manifest.delta.base.number)
            if host is None or not host.holds(manifest.delta.base.digest):
                host = self._hold_or_none(base, manifest.form)
            if host is not None:
                host.take(Leg(manifest, "delta"), source)
                reached = host
            else:
                notes.append(f"delta not checked: its base {base} cannot be restored")
        starts = self._starts(manifest, notes if reached else None)
        if reached is None and not starts:
            raise WeightsError(notes[0].removeprefix("delta not checked: "))
        for start in starts:
            if reached is None:
                reached = HostWeights(manifest.tensors)
                reached.take(start, source)
            else:
                _check_start(start, self.read_pack)
        assert reached is not None
        return reached, "; ".join(notes)

    def _starts(self, manifest: Manifest, notes: list[str] | None) -> list[Leg]:
        """The snapshot and the anchor of a version. A region copies only what it needs: a missing snapshot is noted."""
        starts = []
        if manifest.snapshot:
            if notes is not None and not self.has_snapshot(manifest):
                notes.append("its snapshot is not kept in this store")
            else:
                starts.append(Leg(manifest, "snapshot"))
        anchor = self.anchor(manifest.version, manifest.form)
        return [*starts, Leg(manifest, "anchor", anchor)] if anchor else starts

    def has_snapshot(self, manifest: Manifest) -> bool:
        """Whether the version has a snapshot whose packs are in this store."""
        packs = manifest.snapshot.packs if manifest.snapshot else ()
        here = None not in sizes_of(self.objects, [pack_key(manifest, pack) for pack in packs])
        return manifest.snapshot is not None and here

    def _hold_or_none(self, version: Version, form: str) -> HostWeights | None:
        try:
            return self.hold(version, form)
        except (StorageError, WeightsError):
            return None


def check_pack(objects: Objects, key: str, data: bytes, pack: Pack) -> None:
    if digest_bytes(data) != pack.digest:
        raise WeightsError(f"{key!r} in {objects.url} is damaged: its bytes do not have the digest in its name")


def _check_start(start: Leg, read_pack: Callable[[Manifest, Pack], bytes]) -> None:
    """Decode a snapshot and check it against its chunk table, payload by payload, without keeping it."""
    for group in fetch(start, start.encoding.payloads, read_pack) if start.encoding.payloads else ():
        for payload, data in group:
            decode_run(start, payload, data, {})


def newest_line(weights: WeightStore, line: str) -> str:
    """The newest successor of a line that was abandoned, or the line itself: main → main.2 → main.3."""
    prefix = f"{line}."
    numbers = [int(name[len(prefix) :]) for name in weights.lines() if _is_successor(name, prefix)]
    for number in sorted(numbers, reverse=True):
        if weights.begun(f"{prefix}{number}"):
            return f"{prefix}{number}"
    return line


def _is_successor(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name[len(prefix) :].isdecimal()


class HeadWatch:
    """Polls the head of a line. It probes the next number, which is cheap. Every 10 s it lists all manifests, which
    also finds versions after a missing number."""

    def __init__(self, store: WeightStore, line: str, form: str) -> None:
        self._store, self._line, self._form = store, line, form
        self._known: int | None = None
        self._listed_at = float("-inf")

    def learn(self, number: int) -> None:
        """Remember a version that is known to exist."""
        self._known = number if self._known is None else max(number, self._known)

    def newest(self) -> int | None:
        listing = self._known is None or time.monotonic() - self._listed_at > _LISTING_SECONDS
        if listing:
            self._listed_at = time.monotonic()
        self._known = self._store.head(self._line, self._form, after=None if listing else self._known)
        return self._known
