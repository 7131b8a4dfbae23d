"""RegionKeeper: the one process of a region that keeps its store up to date. Its engines read only that store.

    copy       new versions of the line and of its successors (main → main.2), after the companions of the model
    channels   their entries, after the versions they point at
    anchor     make snapshots here from the deltas, so that full ones need not cross regions
    collect    remove what no reader needs any more

Each duty is tried on its own and retried with growing pauses: a broken link does not stop anchors, and a full disk does
not stop reading channels. Faults of storage and other regions are not raised; `problem` reports them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rollmill import telemetry
from rollmill.backoff import Backoff
from rollmill.errors import StorageError, WeightsError
from rollmill.storage.objects import Objects
from rollmill.types import Version
from rollmill.weights.format.manifest import Anchor, Manifest, Pack
from rollmill.weights.format.object_keys import valid_name
from rollmill.weights.reading.line_follower import CopyResult
from rollmill.weights.reading.read_plan import LegFailed
from rollmill.weights.reading.weight_store import WeightStore, newest_line
from rollmill.weights.regions.anchors import AnchorBuilder
from rollmill.weights.regions.collection import collect, collect_companions
from rollmill.weights.regions.mirror import Mirror, is_of_delta

_RETRY_SECONDS = 0.5, 30.0  # the first pause after a failure, and the longest
_SUCCESSOR_SECONDS = 2.0  # how often to look for a successor of the line
_HINT_SECONDS, _HINT_SECONDS_WITH_CHANNELS = 10.0, 2.0  # how long to wait for the next version before looking around
_IDLE_SECONDS = 0.5  # between two looks where the source cannot be waited at

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Round:
    """The results of one step."""

    versions: tuple[Version, ...] = ()
    bytes: int = 0
    channels: tuple[Version, ...] = ()  # where they point now
    anchored: int | None = None
    removed: int = 0  # versions


class _Duty:
    """A task that is repeated: when it is due, and why it failed last."""

    def __init__(self, what: str, every: float = 0.0) -> None:
        self._what, self._every = what, every
        self._backoff = Backoff(*_RETRY_SECONDS)
        self.due = 0.0  # by the monotonic clock
        self.problem: str | None = None
        self.unreachable = False  # the store did not answer

    def attempt(self, call: Callable[[], _Result]) -> _Result | None:
        if time.monotonic() < self.due:
            return None
        try:
            result = call()
        except (StorageError, WeightsError) as error:
            self.due = time.monotonic() + self._backoff.failed()
            self.problem, self.unreachable = f"{self._what}: {error}", isinstance(error, StorageError)
            return None
        self._backoff.reset()
        self.due = time.monotonic() + self._every
        self.problem, self.unreachable = None, False
        return result


class _RepairingStore(WeightStore):
    """The region's own store; damaged objects and missing packs are fetched from the other region. Packs of snapshots
    only with `fetches_snapshots`: mostly they are not copied on purpose, and another path exists."""

    def __init__(self, mirror: Mirror) -> None:
        super().__init__(mirror.target.objects)
        self._mirror = mirror
        self.fetches_snapshots = False

    def manifest(self, version: Version, form: str = "bf16") -> Manifest:
        try:
            return super().manifest(version, form)
        except WeightsError as error:
            if not self.exists(version, form):
                raise  # it was collected
            try:
                return self._mirror.fetch_manifest(version, form)
            except (StorageError, WeightsError):
                raise error from None

    def read_pack(self, manifest: Manifest | Anchor, pack: Pack) -> bytes:
        try:
            return super().read_pack(manifest, pack)
        except (StorageError, WeightsError) as error:
            if not self.fetches_snapshots and not is_of_delta(manifest, pack):
                raise
            try:
                return self._mirror.fetch_pack(manifest, pack)
            except (StorageError, WeightsError):
                raise error from None


class RegionKeeper:
    """Called from one thread at a time."""

    def __init__(
        self,
        source: Objects,
        target: Objects,
        line: str,
        form: str = "bf16",
        channels: Sequence[str] = (),
        anchor_every: int = 32,
        keep: int = 50,
        budget: int | None = None,
        region: str = "",
        collect_seconds: float = 60.0,
    ) -> None:
        """Of the line that is followed `keep` versions stay, fewer if they have more than `budget` bytes; of those it
        took over from, the last one."""
        self.mirror = Mirror(source, target, region)
        self.line, self.form, self.region = valid_name(line), valid_name(form), region
        self._family, self.channels, self._keep = line, tuple(map(valid_name, channels)), keep
        self._anchor_every, self._budget = anchor_every, budget
        self._looked = False
        self._repaired = _RepairingStore(self.mirror)
        self._anchors = self._anchor_builder()
        self._succeed = _Duty("the lines of the other region cannot be read", _SUCCESSOR_SECONDS)
        self._copy = _Duty("the other region cannot be copied from")
        self._copy_channels = {name: _Duty(f"channel {name} cannot be copied") for name in self.channels}
        self._anchor = _Duty("no anchor can be made")
        self._collect = _Duty("nothing can be collected", collect_seconds)

    @property
    def problem(self) -> str | None:
        """Why the region is not up to date, if it is not."""
        problems = [duty.problem for duty in self._duties() if duty.problem]
        return "\n".join(problems) or None

    def step(self) -> Round:
        """Do what is due, once."""
        if not self._looked:  # a line that was abandoned long ago must not be copied first
            self._look_for_successor()
        copied = self._copy.attempt(lambda: self.mirror.copy(self.line, self.form)) or CopyResult((), 0)
        channels = tuple(filter(None, map(self._bring_channel, self.channels)))
        self._look_for_successor()  # last: a new version does not wait for this round trip
        return Round(
            versions=copied.versions,
            bytes=copied.bytes,
            channels=channels,
            anchored=self._anchor.attempt(self._make_anchor),
            removed=self._collect.attempt(self._remove) or 0,
        )

    def _look_for_successor(self) -> None:
        line = self._succeed.attempt(lambda: newest_line(self.mirror.source, self._family))
        if line is not None:
            self._looked = True
            if line != self.line:
                self.line, self._anchors = line, self._anchor_builder(line)

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set; in between, wait for the next version."""
        while not stop.is_set():
            began = time.monotonic()
            if not self.step().versions and not self._wait_for_next():
                stop.wait(max(_IDLE_SECONDS - (time.monotonic() - began), 0.0))

    def _wait_for_next(self) -> bool:
        """Whether there is something new. A lost notification only delays."""
        if self._copy.problem is not None:
            return False
        seconds = _HINT_SECONDS_WITH_CHANNELS if self.channels else _HINT_SECONDS
        try:
            return self.mirror.wait_for_next(self.line, self.form, seconds)
        except (StorageError, WeightsError):
            return False

    def _bring_channel(self, name: str) -> Version | None:
        if self._copy.unreachable:
            return None  # channels use the same link
        return self._copy_channels[name].attempt(lambda: self.mirror.copy_channel(name, self.form))

    def _anchor_builder(self, line: str | None = None) -> AnchorBuilder | None:
        if self._anchor_every < 1:
            return None
        return AnchorBuilder(self._repaired, line or self.line, self.form, self._anchor_every)

    def _make_anchor(self) -> int | None:
        if self._anchors is None:
            return None
        began = time.monotonic()
        self._repaired.fetches_snapshots = False
        try:
            number = self._anchors.poll()
        except LegFailed:
            self._repaired.fetches_snapshots = True
            number = self._anchors.poll()
        if number is not None:
            seconds = time.monotonic() - began
            telemetry.emit("anchor", region=self.region, line=self.line, version=number, seconds=seconds)
        return number

    def _remove(self) -> int:
        store = self.mirror.target
        collect_companions(store)
        removed = 0
        for line in store.lines():
            if line == self._family or line.removeprefix(f"{self._family}.").isdecimal():
                followed = line == self.line
                collected = collect(
                    store, line, self.form, self._keep if followed else 1, self._budget if followed else None
                )
                removed += len(collected.removed)
                if collected.problem:
                    raise WeightsError(collected.problem)
        return removed

    def _duties(self) -> list[_Duty]:
        return [self._succeed, self._copy, *self._copy_channels.values(), self._anchor, self._collect]
