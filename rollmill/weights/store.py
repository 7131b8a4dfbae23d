"""WeightStore: the versions in an object store. Reading only; publisher.py writes. FORMAT.md has the keys."""

from __future__ import annotations

import collections
import re
import time
from collections.abc import Iterator

from rollmill.errors import ObjectMissing, StorageError, WeightsError
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights.manifest import Manifest, Pack, digest_bytes, parse_manifest
from rollmill.weights.restore import Held, Leg, restore, take_leg
from rollmill.weights.tensors import HostTensor

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_MANIFEST_NUMBER = re.compile(r"(\d{10})\.manifest")
_MANIFESTS_KEPT = 64
_PROBES = 8  # a reader that is further behind than this asks for a listing instead
_LISTING_SECONDS = 10.0


class WeightStore:
    """Lines, their versions, and the weights themselves, verified down to the last byte."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        # manifests never change, and chains are walked again and again
        self._manifests: collections.OrderedDict[tuple[Version, str], Manifest] = collections.OrderedDict()

    def lines(self) -> list[str]:
        return self.objects.folders("weights")

    def forms(self, line: str) -> list[str]:
        return self.objects.folders(f"weights/{valid_name(line)}")

    def numbers(self, line: str, form: str = "bf16") -> list[int]:
        """Numbers of all committed versions, ascending."""
        keys = self.objects.list(f"weights/{valid_name(line)}/{valid_name(form)}/manifests")
        return [int(found[1]) for key in keys if (found := _MANIFEST_NUMBER.fullmatch(key.rpartition("/")[2]))]

    def head(self, line: str, form: str = "bf16", after: int | None = None) -> int | None:
        """Newest committed number. With `after`, a number known to be committed, only what follows it is asked for."""
        if after is None:
            numbers = self.numbers(line, form)
            return numbers[-1] if numbers else None
        for number in range(after, after + _PROBES):
            if not self.exists(Version(line, number + 1), form):
                return number
        return max(after, self.head(line, form) or 0)

    def exists(self, version: Version, form: str = "bf16") -> bool:
        return self.objects.head(manifest_key(version, form)) is not None

    def manifest(self, version: Version, form: str = "bf16") -> Manifest:
        known = self._manifests.get((version, form))
        if known is not None:
            return known
        try:
            data = self.objects.get(manifest_key(version, form))
        except ObjectMissing:
            raise WeightsError(
                f"{version} ({form}) does not exist in {self.objects.url}",
                hint="`rollmill weights log` lists the versions that do",
            ) from None
        manifest = parse_manifest(data, version, form)
        self._manifests[version, form] = manifest
        if len(self._manifests) > _MANIFESTS_KEPT:
            self._manifests.popitem(last=False)
        return manifest

    def versions(self, line: str, form: str = "bf16") -> list[Manifest]:
        """Manifests of a line, oldest first."""
        return [self.manifest(Version(line, number), form) for number in self.numbers(line, form)]

    def load(self, version: Version, form: str = "bf16") -> dict[str, HostTensor]:
        """The weights of a version: nearest snapshot and the deltas after it, every chunk and the root verified."""
        return self.hold(version, form).tensors

    def hold(self, version: Version, form: str = "bf16") -> Held:
        """Like `load`, together with the manifest."""
        return restore(lambda wanted: self.manifest(wanted, form), self.read_pack, version)

    def read_pack(self, manifest: Manifest, pack: Pack) -> bytes:
        """A pack, digest checked. It is never larger than the manifest says."""
        key = pack_key(manifest, pack)
        data = self.objects.get_range(key, 0, pack.bytes)
        if digest_bytes(data) != pack.digest:
            raise WeightsError(
                f"{key!r} in {self.objects.url} is damaged: its bytes do not have the digest in its name"
            )
        return data

    def verify(self, line: str, form: str = "bf16") -> Iterator[tuple[Version, bool, str]]:
        """Read and decode everything a line consists of: for each version whether it can be had, and what is wrong."""
        held: Held | None = None
        for number in self.numbers(line, form):
            version = Version(line, number)
            try:
                held, note = self._verify_version(self.manifest(version, form), held)
                yield version, True, note
            except (StorageError, WeightsError) as error:
                held = None
                yield version, False, error.message

    def _verify_version(self, manifest: Manifest, held: Held | None) -> tuple[Held, str]:
        reached: Held | None = None
        note = ""
        if manifest.delta is not None and manifest.delta.base is not None:
            base = Version(manifest.line, manifest.delta.base.number)
            if held is None or held.manifest.version != base:
                held = self._hold_or_none(base, manifest.form)
            if held is not None:
                reached = take_leg(Leg(manifest, "delta"), self.read_pack, held)
            elif manifest.snapshot is None:
                raise WeightsError(f"its base {base} cannot be restored")
            else:
                note = f"delta not checked: its base {base} cannot be restored"
        if manifest.snapshot is None:
            assert reached is not None
            return reached, note
        if reached is not None and any(
            self.objects.head(pack_key(manifest, p)) is None for p in manifest.snapshot.packs
        ):
            return reached, "its snapshot is not kept in this store"  # a region copies only what it needs
        return take_leg(Leg(manifest, "snapshot"), self.read_pack, None), note

    def _hold_or_none(self, version: Version, form: str) -> Held | None:
        try:
            return self.hold(version, form)
        except (StorageError, WeightsError):
            return None


def newest_line(weights: WeightStore, line: str) -> str:
    """The line that goes on where `line` was abandoned, if any: main → main.2 → main.3."""
    prefix = f"{line}."
    numbers = [int(name[len(prefix) :]) for name in weights.lines() if _is_successor(name, prefix)]
    return f"{prefix}{max(numbers)}" if numbers else line


def _is_successor(name: str, prefix: str) -> bool:
    return name.startswith(prefix) and name[len(prefix) :].isdecimal()


class HeadWatch:
    """Looks for the head of a line again and again: a probe of the next number, which costs next to nothing, and now
    and then a full listing, which also sees past a number that is missing."""

    def __init__(self, store: WeightStore, line: str, form: str) -> None:
        self._store, self._line, self._form = store, line, form
        self._known: int | None = None
        self._listed_at = float("-inf")

    def learn(self, number: int) -> None:
        """A version that is known to be there."""
        self._known = max(number, self._known or 0)

    def newest(self) -> int | None:
        listing = self._known is None or time.monotonic() - self._listed_at > _LISTING_SECONDS
        if listing:
            self._listed_at = time.monotonic()
        self._known = self._store.head(self._line, self._form, after=None if listing else self._known)
        return self._known


def valid_name(name: str) -> str:
    """Names of lines, forms and channels become folders."""
    if not _NAME.fullmatch(name):
        raise WeightsError(
            f"{name!r} cannot name a line, a form or a channel",
            hint="at most 100 letters, digits, '_', '-' and '.', not starting with a dot",
        )
    return name


def manifest_key(version: Version, form: str) -> str:
    return f"weights/{valid_name(version.line)}/{valid_name(form)}/manifests/{version.number:010d}.manifest"


def pack_key(manifest: Manifest, pack: Pack) -> str:
    return f"weights/{manifest.line}/{manifest.form}/packs/{manifest.number:010d}-{pack.digest}"
