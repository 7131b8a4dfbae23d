"""Plans how to reach a version: the cheapest legs to read.

A leg is one object set that leads to a version: its snapshot, its anchor (a snapshot that a region made itself), or its
delta on top of its base. A path starts from weights already in memory, or from a snapshot or an anchor, and continues
along deltas.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from rollmill.errors import ObjectMissing, StorageError, WeightsError
from rollmill.types import Version
from rollmill.weights.format.manifest import Encoding, Manifest, Pack

if TYPE_CHECKING:
    from rollmill.weights.format.manifest import Anchor

LegKind = Literal["delta", "snapshot", "anchor"]
LegId = tuple[str, int, LegKind]
ReadManifest = Callable[[Version], Manifest]
ReadAnchor = Callable[[Version], "Anchor | None"]
Have = Callable[[Version, str], bool]  # whether the version with this root digest is already in memory
_DAMAGED = "`rollmill weights verify` names the damaged objects; the next snapshot of the line heals it"
_ANCHORLESS_LEGS = 8  # for a chain this long, anchors are looked up too


@dataclass(frozen=True)
class Source:
    """Where legs are read from: the versions of one form in one store."""

    manifest: ReadManifest
    anchor: ReadAnchor
    pack: Callable[[Manifest, Pack], bytes]  # the whole pack, checked against its digest
    part: Callable[[Manifest, Pack, int, int], bytes]  # `length` bytes from `offset`; only the length is checked


class Leg(NamedTuple):
    manifest: Manifest
    kind: LegKind
    anchor: Anchor | None = None

    @property
    def id(self) -> LegId:
        return self.manifest.line, self.manifest.number, self.kind

    @property
    def encoding(self) -> Encoding:
        if self.kind == "anchor":
            assert self.anchor is not None
            return self.anchor.snapshot
        return self.manifest.encoding(self.kind)

    @property
    def bytes(self) -> int:
        return self.encoding.bytes


class LegFailed(WeightsError):
    """This leg does not lead to its version. `memory`: the base in memory was wrong, not the leg."""

    def __init__(self, leg: Leg, why: str, *, memory: bool = False) -> None:
        message = f"the {leg.kind} of {leg.manifest.version} ({leg.manifest.form}) is unusable: {why}"
        super().__init__(message, hint=_DAMAGED)
        self.leg = leg
        self.memory = memory


def plan_legs(
    read_manifest: ReadManifest,
    read_anchor: ReadAnchor,
    target: Version,
    have: Have,
    avoid: frozenset[LegId] = frozenset(),
) -> list[Leg]:
    """The legs with the fewest bytes to `target`, from a version that `have` recognises or from nothing.

    Walks back from the target along its deltas. Every snapshot and every anchor on the way is a possible start.
    """
    plan = _Plan(read_anchor, avoid)
    manifest, ended = read_manifest(target), ""
    if have(manifest.version, manifest.digest):
        return []
    while plan.pass_by(manifest):
        delta = Leg(manifest, "delta")
        if manifest.delta is None or delta.id in avoid:
            break
        plan.chain.append(delta)
        plan.chain_bytes += delta.bytes
        base = manifest.delta.base
        assert base is not None
        if have(Version(target.line, base.number), base.digest):
            plan.offer(None)
            break
        try:
            manifest = read_manifest(Version(target.line, base.number))
        except (StorageError, WeightsError) as error:
            if isinstance(error, StorageError) and not isinstance(error, ObjectMissing) and not plan.found:
                raise  # the store did not answer, so other paths may exist
            ended = f": {error.message}"
            break  # damaged or collected: only the paths found so far exist
        if manifest.digest != base.digest:
            ended = f": {manifest.version} is not what the delta of the version after it starts from"
            break
    legs = plan.end()
    if legs is None:
        raise WeightsError(
            f"no readable chain of snapshots and deltas leads to {target}{ended}",
            hint=_DAMAGED,
        )
    return legs


class _Plan:
    """A walk back from the target: the deltas so far, and the cheapest path found. Looking up an anchor costs a round
    trip and mostly finds none, so it is put off until the walk is long."""

    def __init__(self, read_anchor: ReadAnchor, avoid: frozenset[LegId]) -> None:
        self._read_anchor, self._avoid = read_anchor, avoid
        self.chain: list[Leg] = []  # newest first
        self.chain_bytes = 0
        self._best: list[Leg] | None = None
        self._best_bytes = 0
        self._unasked: list[tuple[Manifest, int, int]] = []  # anchors not looked up yet: chain length and bytes there

    @property
    def found(self) -> bool:
        return self._best is not None

    def pass_by(self, manifest: Manifest) -> bool:
        """Consider the paths that start at this version. False if going further back cannot be cheaper."""
        if manifest.snapshot and (leg := Leg(manifest, "snapshot")).id not in self._avoid:
            self.offer(leg)
        self._unasked.append((manifest, len(self.chain), self.chain_bytes))
        if len(self.chain) >= _ANCHORLESS_LEGS or self.chain_bytes > manifest.full_bytes // 8:
            self._ask_for_anchors()
        return self._best is None or self.chain_bytes < self._best_bytes

    def offer(self, start: Leg | None, length: int | None = None, chain_bytes: int | None = None) -> None:
        """Offer a path: the chain, or its first `length` legs, on top of `start` or of the weights in memory."""
        chain = self.chain[:length]
        total = (self.chain_bytes if chain_bytes is None else chain_bytes) + (start.bytes if start else 0)
        if self._best is None or total < self._best_bytes or (start is None and total == self._best_bytes):
            self._best, self._best_bytes = [*([start] if start else []), *reversed(chain)], total

    def end(self) -> list[Leg] | None:
        if self._best is None:
            self._ask_for_anchors()
        return self._best

    def _ask_for_anchors(self) -> None:
        for manifest, length, chain_bytes in self._unasked:
            if self._best is None or chain_bytes < self._best_bytes:
                leg = _anchor_leg(manifest, self._read_anchor)
                if leg is not None and leg.id not in self._avoid:
                    self.offer(leg, length, chain_bytes)
        self._unasked = []


def _anchor_leg(manifest: Manifest, read_anchor: ReadAnchor) -> Leg | None:
    """The anchor of a version as a leg, if it fits the version."""
    try:
        anchor = read_anchor(manifest.version)
        if anchor is None or anchor.digest != manifest.digest or anchor.snapshot.base is not None:
            return None
        anchor.snapshot.check(manifest.chunks)
        return Leg(manifest, "anchor", anchor)
    except (StorageError, WeightsError, ValueError):
        return None  # an anchor is only a shortcut
