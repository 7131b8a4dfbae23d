"""Mirror: brings versions from another region's store into this one. Nothing unverified is ever written.

Order, safe under kill -9 at any point: the packs of a version, then its manifest, versions ascending; a channel's entry
after the version it points at. Packs are named by their digest, so what a killed copy left behind is used and not
fetched again. Only what the next reader needs is copied: the deltas after what is here, or the newest snapshot and
the deltas after it. Other packs that a manifest names can be had later, one by one (`fetch_pack`).
"""

from __future__ import annotations

from dataclasses import dataclass

from rollmill.errors import ObjectExists, WeightsError
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights.channels import Channels, entry_key, parse_entry
from rollmill.weights.manifest import Manifest, Pack, parse_manifest
from rollmill.weights.restore import plan_legs
from rollmill.weights.store import HeadWatch, WeightStore, manifest_key, pack_key


@dataclass(frozen=True)
class Copied:
    versions: tuple[Version, ...]
    bytes: int


class Mirror:
    def __init__(self, source: Objects, target: Objects) -> None:
        self.source, self.target = WeightStore(source), WeightStore(target)
        self._watches: dict[tuple[str, str], tuple[HeadWatch, HeadWatch]] = {}

    def copy(self, line: str, form: str = "bf16", number: int | None = None) -> Copied:
        """Bring a line up to `number`, or to the head it has in the source."""
        there, here = self._watch(line, form)
        newest = here.newest()
        if number is None:
            number = there.newest()
        if number is None or number == newest or self.target.exists(Version(line, number), form):
            return Copied((), 0)

        def have(version: Version, digest: str) -> bool:
            return self._is_here(version, form, digest)

        legs = plan_legs(lambda version: self.source.manifest(version, form), Version(line, number), have)
        copied = 0
        for leg in legs:
            for pack in leg.manifest.encoding(leg.kind).packs:
                copied += self._copy_pack(leg.manifest, pack)
            self._copy_manifest(leg.manifest)
            here.learn(leg.manifest.number)
        return Copied(tuple(leg.manifest.version for leg in legs), copied)

    def copy_channel(self, name: str, form: str = "bf16") -> Version | None:
        """Bring a channel up to date: the version it points at, then its entries. Returns that version."""
        newest = Channels(self.source.objects).entry(name)
        if newest is None:
            return None
        self.copy(newest.version.line, form, newest.version.number)
        here = Channels(self.target.objects).entry(name)
        for number in range(here.number + 1 if here else 1, newest.number + 1):
            data = self.source.objects.get(entry_key(name, number))
            parse_entry(data, name, number)
            _create(self.target.objects, entry_key(name, number), data)
        return newest.version

    def fetch_pack(self, manifest: Manifest, pack: Pack) -> bytes:
        """Fetch a pack that is missing or damaged here, write it over what is there, and return it."""
        data = self.source.read_pack(manifest, pack)
        self.target.objects.put(pack_key(manifest, pack), data)
        return data

    def _is_here(self, version: Version, form: str, digest: str) -> bool:
        if not self.target.exists(version, form):
            return False
        if self.target.manifest(version, form).digest != digest:
            raise _diverged(manifest_key(version, form), self.target.objects)
        return True

    def _watch(self, line: str, form: str) -> tuple[HeadWatch, HeadWatch]:
        if (line, form) not in self._watches:
            self._watches[line, form] = HeadWatch(self.source, line, form), HeadWatch(self.target, line, form)
        return self._watches[line, form]

    def _copy_pack(self, manifest: Manifest, pack: Pack) -> int:
        if self.target.objects.head(pack_key(manifest, pack)) == pack.bytes:
            return 0
        return len(self.fetch_pack(manifest, pack))

    def _copy_manifest(self, manifest: Manifest) -> None:
        key = manifest_key(manifest.version, manifest.form)
        data = self.source.objects.get(key)
        if parse_manifest(data, manifest.version, manifest.form) != manifest:
            raise WeightsError(f"the manifest of {manifest.version} changed while it was copied")
        _create(self.target.objects, key, data)


def _create(objects: Objects, key: str, data: bytes) -> None:
    try:
        objects.create(key, data)
    except ObjectExists:
        if objects.get(key) != data:
            raise _diverged(key, objects) from None


def _diverged(key: str, objects: Objects) -> WeightsError:
    return WeightsError(
        f"{key!r} in {objects.url} differs from the one in the other region: the two have diverged",
        hint="one region is the home of a line; remove this region's copy of the line, it is then copied again",
    )
