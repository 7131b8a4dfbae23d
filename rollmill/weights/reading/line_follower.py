"""LineFollower: keeps one engine's host weights at the head of a line, or at a channel.

When a line is abandoned for a successor (main → main.2), the follower moves to it. An engine that is lent follows
another line in second host weights and keeps its own, so `recall` needs no download.

`poll()` never raises for faults of storage or other regions. What it returns is verified. If no newer version can be
verified, the engine keeps what it has, `problem` says why, and later polls retry with growing pauses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from rollmill.backoff import Backoff
from rollmill.errors import StorageError, WeightsError
from rollmill.types import PolicyRef, Version
from rollmill.weights.format.manifest import Anchor, Manifest, Pack, layout_of
from rollmill.weights.format.object_keys import manifest_key, valid_name
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.reading.channels import Channels
from rollmill.weights.reading.host_weights import HostWeights, restore
from rollmill.weights.reading.leases import HeldLeases
from rollmill.weights.reading.patches import Patch, Patches, TensorPatches
from rollmill.weights.reading.read_plan import Leg, LegFailed, LegId, Source
from rollmill.weights.reading.weight_store import HeadWatch, WeightStore, newest_line

__all__ = ["LineFollower", "Patch", "Update"]

_RETRY_SECONDS = 0.5, 30.0  # the first pause after a failure, and the longest
_SUCCESSOR_SECONDS = 2.0  # how often to look for a successor of the line
LEASE_SECONDS = 300.0


# Called with each pack that has arrived, whole and checked, before the rest of its leg; True: it need not be kept.
Ahead = Callable[[Leg, Pack, bytes], bool]


@dataclass(frozen=True)
class CopyResult:
    """What a copy from another region brought."""

    versions: tuple[Version, ...]
    bytes: int


class OtherRegion(Protocol):
    """Another region's store, as a follower uses it. `regions/mirror.py` implements it."""

    @property
    def source(self) -> WeightStore: ...
    def copy(self, line: str, form: str, number: int | None = None, ahead: Ahead | None = None) -> CopyResult: ...
    def copy_channel(self, name: str, form: str) -> Version | None: ...
    def remembered(self, pack: Pack) -> bytes | None: ...
    def fetch_pack(self, manifest: Manifest | Anchor, pack: Pack) -> bytes: ...
    def wait_for_next(self, line: str, form: str, seconds: float) -> bool: ...


@dataclass(frozen=True)
class Update:
    """New weights for an engine. `tensors` are views of the follower's host weights: valid until the next poll."""

    policy: PolicyRef
    tensors: dict[str, HostTensor]
    patches: TensorPatches | None  # the changes since `base`; None: copy everything
    base: PolicyRef | None  # the update before this one, which the patches apply to
    bytes: int  # read from the store for this update
    seconds: Mapping[str, float]  # mirror: copying (with decoding meanwhile); fetch: reading; decode: the rest
    created_at: float  # when the version was published


@dataclass
class _Course:
    """A line or channel that is followed, and the state of following it."""

    line: str
    head: HeadWatch
    channel: str | None = None
    host: HostWeights | None = None
    served: Manifest | None = None  # the version of the last update
    patches: Patches = field(default_factory=Patches)  # changes of the host weights since then
    target: Version | None = None  # the head of the line or channel at the last poll
    failed_target: Version | None = None
    looked_at: float = float("-inf")

    def __post_init__(self) -> None:
        self.family = self.line


class _Reader:
    """Reads legs from the own store, and from the other region what is missing or damaged here. Counts the cost."""

    def __init__(self, store: WeightStore, form: str, mirror: OtherRegion | None) -> None:
        self._store, self._mirror = store, mirror
        own = store.source(form)
        self.source = Source(own.manifest, own.anchor, self._pack, self._part)
        self._lock = threading.Lock()
        self.reaches_mirror = True  # if False, missing packs are not asked for: another path may exist
        self.bytes, self.busy_seconds = 0, 0.0
        self._reading, self._since = 0, 0.0

    def reset(self) -> None:
        self.bytes, self.busy_seconds = 0, 0.0

    def _pack(self, manifest: Manifest | Anchor, pack: Pack) -> bytes:
        with self:
            try:
                data = self._mirror.remembered(pack) if self._mirror else None
                if data is None:
                    data = self._store.read_pack(manifest, pack)
            except (StorageError, WeightsError):
                if self._mirror is None or not self.reaches_mirror:
                    raise
                data = self._mirror.fetch_pack(manifest, pack)  # the other region may have it intact
        return self.count(data)

    def _part(self, manifest: Manifest | Anchor, pack: Pack, offset: int, length: int) -> bytes:
        with self:
            data = self._store.read_part(manifest, pack, offset, length)
        return self.count(data)

    def count(self, data: bytes) -> bytes:
        with self._lock:
            self.bytes += len(data)
        return data

    def __enter__(self) -> None:
        """Overlapping reads of several threads count once."""
        with self._lock:
            self._since = self._since if self._reading else time.perf_counter()
            self._reading += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._reading -= 1
            if not self._reading:
                self.busy_seconds += time.perf_counter() - self._since


class LineFollower:
    """Any thread may call it; calls run one at a time. `mirror` copies from another region before each look at the own
    store. With `holder`, a lease in the own store keeps the version in use from being collected."""

    def __init__(
        self,
        store: WeightStore,
        line: str,
        form: str = "bf16",
        mirror: OtherRegion | None = None,
        holder: str | None = None,
        about: Mapping[str, str] | None = None,
    ) -> None:
        self.store, self.form, self.mirror = store, valid_name(form), mirror
        self.problem: str | None = None
        self._course = _Course(valid_name(line), HeadWatch(store, line, form))
        self._own: _Course | None = None  # while lent: the course to return to
        self._mirror_problem: str | None = None
        self._restoring, self._mirroring = Backoff(*_RETRY_SECONDS), Backoff(*_RETRY_SECONDS)
        self._channels = Channels(store.objects)
        self._reader = _Reader(store, form, mirror)
        self._leases = HeldLeases(store.objects, form, holder, LEASE_SECONDS, about)
        self._lock = threading.RLock()

    @property
    def line(self) -> str:
        return self._course.line

    @property
    def lent(self) -> str | None:
        """The line the engine is lent to."""
        return self._course.line if self._own else None

    @property
    def current(self) -> PolicyRef | None:
        """The policy of the last update."""
        return self._course.served.policy if self._course.served else None

    def follow_channel(self, name: str) -> None:
        """From the next poll on, follow a channel, also backwards, instead of the head of the line."""
        self._course.channel = valid_name(name)

    def poll(self) -> Update | None:
        """The newest verified weights; None if they are those of the last update."""
        with self._lock:
            update = self._poll()
            self._leases.renew([c.served.version for c in (self._course, self._own) if c and c.served])
            self.problem = self.problem or self._leases.problem
            return update

    def again(self) -> Update | None:
        """The last update again with all weights, for an engine that could not apply it. The host weights may be the
        cause, so every chunk is hashed, and a bad one is read from the store again."""
        with self._lock:
            course, served = self._course, self._course.served
            if served is None or course.host is None:
                return None
            self._reader.reset()
            began = time.perf_counter()
            try:
                if not _is(course.host.manifest, served):
                    restore(self._reader.source, served.version, course.host, course.patches)
                course.host.heal(served, self._reader.source)
            except (StorageError, WeightsError) as error:
                self.problem = f"{served.version} cannot be restored: {error}"
                return None
            course.patches = Patches()
            return self._make_update(served, None, None, {"decode": time.perf_counter() - began})

    def lend(self, line: str) -> None:
        """From the next poll on, follow another line. The host weights of the own line are kept for `recall`."""
        with self._lock:
            if self._own is not None:
                raise WeightsError(f"already lent to {self.lent}", hint="recall it first")
            own, course = self._course, _Course(valid_name(line), HeadWatch(self.store, line, self.form))
            if own.host is not None and own.served is not None and _is(own.host.manifest, own.served):
                course.host, course.served = own.host.copy(), own.served  # the other line may share much of it
            self._course, self._own = course, own
            self._restoring.reset()
            self._mirroring.reset()

    def recall(self) -> Update | None:
        """Return to the own line: the version it was lent at, from memory, if the engine now has another one."""
        with self._lock:
            if self._own is None:
                return None
            lent, self._course, self._own = self._course, self._own, None
            self._leases.release(lent.line)
            self._restoring.reset()
            self._mirroring.reset()
            course, self.problem = self._course, None
            served = course.served
            if served is None or course.host is None or not _is(course.host.manifest, served):
                course.served = None  # the host weights were between two versions: the next poll gives all weights
                return None
            self._reader.reset()
            patches = _whole_tensors(lent.served, served)
            return self._make_update(served, patches, lent.served.policy if lent.served else None, {})

    def hint(self) -> None:
        """There may be something new: retry at once what failed before."""
        self._restoring.reset()
        self._mirroring.reset()

    def wait(self, seconds: float) -> None:
        """Return when there may be something new, after at most `seconds`."""
        course, began = self._course, time.monotonic()
        if self.problem is None and course.target is not None and course.channel is None:
            following = Version(course.target.line, course.target.number + 1)
            try:
                if self.mirror is not None:
                    self.mirror.wait_for_next(following.line, self.form, seconds)
                else:
                    self.store.objects.wait_for(manifest_key(following, self.form), seconds)
                return
            except StorageError:
                seconds -= time.monotonic() - began  # the next poll reports the error
        time.sleep(max(seconds, 0.0))

    def close(self) -> None:
        """Release the leases."""
        with self._lock:
            self._leases.close()

    # -- one poll

    def _poll(self) -> Update | None:
        began = time.perf_counter()
        course = self._course
        self._reader.reset()
        self._copy_from_mirror(course)
        mirrored = time.perf_counter() - began
        try:
            course.target = target = self._target(course)
        except (StorageError, WeightsError) as error:
            self.problem = str(error)
            return None
        if target is None or (course.served and target == course.served.version):
            self.problem = self._mirror_problem
            self._look_for_successor(course)  # a long round trip: only when there is nothing new to fetch
            return None
        if target == course.failed_target and self._restoring.waiting():
            return None
        began = time.perf_counter()
        self.problem = self._restore_newest(course, target) or self._mirror_problem
        fetch = self._reader.busy_seconds
        arrived = course.host.manifest if course.host else None
        if arrived is None or _is(arrived, course.served) or (course.channel and arrived.version != target):
            return None  # a follower of a channel serves only the version it points at
        base, patches = course.served, course.patches.take()
        decode = max(time.perf_counter() - began - fetch, 0.0)
        return self._make_update(
            arrived,
            patches if base and layout_of(base.tensors) == layout_of(arrived.tensors) else None,
            base.policy if base else None,
            {"mirror": mirrored, "fetch": fetch, "decode": decode},
        )

    def _make_update(
        self, manifest: Manifest, patches: TensorPatches | None, base: PolicyRef | None, seconds: Mapping[str, float]
    ) -> Update:
        course = self._course
        assert course.host is not None
        course.served = manifest
        tensors, read = dict(course.host.tensors), self._reader.bytes
        return Update(manifest.policy, tensors, patches, base, read, seconds, manifest.created_at)

    def _target(self, course: _Course) -> Version | None:
        if course.channel is not None:
            return self._channels.get(course.channel)
        number = course.head.newest()
        return Version(course.line, number) if number is not None else None

    def _look_for_successor(self, course: _Course) -> None:
        if course.channel is not None or time.monotonic() - course.looked_at < _SUCCESSOR_SECONDS:
            return
        course.looked_at = time.monotonic()
        try:
            line = newest_line(self.mirror.source if self.mirror else self.store, course.family)
        except (StorageError, WeightsError):
            return  # the next copy or poll of the head reports the error
        if line != course.line:
            self._leases.release(course.line)
            course.line, course.head = line, HeadWatch(self.store, line, self.form)

    def _restore_newest(self, course: _Course, target: Version) -> str | None:
        """Move to the target, or to the newest version below it that can be restored. Returns the problem, if any."""
        failure: StorageError | WeightsError | None = None
        wanted = target
        while True:
            try:
                if course.host is None:  # made here, so that an interrupted attempt can be continued
                    course.host = HostWeights(self._reader.source.manifest(wanted).tensors)
                restore(self._reader.source, wanted, course.host, course.patches)
                break
            except (StorageError, WeightsError) as error:
                failure = failure or error
                broken = error.leg.manifest.number if isinstance(error, LegFailed) else wanted.number
                wanted = Version(wanted.line, broken - 1)  # nothing from the broken leg on can be restored
                if course.channel is not None or wanted.number <= _served_number(course) or not self._readable(wanted):
                    break
        if failure is None:
            course.failed_target = None
            self._restoring.reset()
            return None
        if target != course.failed_target:
            self._restoring.reset()
        course.failed_target = target
        self._restoring.failed()
        arrived = course.host.manifest if course.host and course.channel is None else None
        serving = arrived or course.served
        return f"{target} cannot be restored, serving {serving.version if serving else 'nothing'}: {failure}"

    def _readable(self, version: Version) -> bool:
        try:
            return version.number >= 0 and self.store.exists(version, self.form)
        except StorageError:
            return False

    def _copy_from_mirror(self, course: _Course) -> None:
        if self.mirror is None or self._mirroring.waiting():
            return
        try:
            if course.channel is not None:
                self.mirror.copy_channel(course.channel, self.form)
            else:
                for version in self.mirror.copy(course.line, self.form, ahead=self._ahead(course)).versions:
                    course.head.learn(version.number)
        except (StorageError, WeightsError) as error:
            self._mirroring.failed()
            self._reader.reaches_mirror = not isinstance(error, StorageError)
            self._mirror_problem = f"the other region cannot be copied from: {error}"
        else:
            self._mirroring.reset()
            self._reader.reaches_mirror = True
            self._mirror_problem = None

    def _ahead(self, course: _Course) -> Ahead:
        """Decodes deltas from the version in memory while the rest of them is still copied. If the weights then stay
        between two versions, the next attempt continues there. Nothing is served before it holds a whole version."""
        failed: set[LegId] = set()

        def ahead(leg: Leg, pack: Pack, data: bytes) -> bool:
            base, host = leg.encoding.base, course.host
            if host is None or base is None or leg.id in failed or not host.holds(base.digest):
                return False
            try:
                host.begin(leg, pack, memoryview(data), self._reader.source, course.patches)
            except (StorageError, WeightsError):
                failed.add(leg.id)  # the restore after the copy finds and reports the same error
                return False
            self._reader.count(data)
            return True

        return ahead


def _is(manifest: Manifest | None, other: Manifest | None) -> bool:
    """Whether both are the same version with the same bytes."""
    return manifest is not None and other is not None and manifest.policy == other.policy


def _served_number(course: _Course) -> int:
    return course.served.number if course.served and course.served.line == course.line else -1


def _whole_tensors(old: Manifest | None, new: Manifest) -> TensorPatches | None:
    """The tensors that differ between two versions, by their chunk tables alone."""
    if old is None or layout_of(old.tensors) != layout_of(new.tensors):
        return None
    return {entry.name: None for was, entry in zip(old.tensors, new.tensors, strict=True) if was != entry}
