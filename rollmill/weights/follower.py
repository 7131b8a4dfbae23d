"""Follower: keeps one engine's host copy of the weights at the head of a line, or at a channel.

A line that was abandoned for a successor (main → main.2) is left for it.

`poll()` never raises for what storage or other regions do. What it returns is verified; when nothing newer verifies,
the engine goes on with what it has, `problem` says why, and later polls try again, more and more rarely.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from rollmill.errors import StorageError, WeightsError
from rollmill.types import PolicyRef, Version
from rollmill.weights.channels import Channels
from rollmill.weights.manifest import Manifest, Pack
from rollmill.weights.restore import Held, LegFailed, restore
from rollmill.weights.store import HeadWatch, WeightStore, newest_line, valid_name
from rollmill.weights.tensors import HostTensor
from rollmill.weights.transfer import Mirror

_FIRST_RETRY_SECONDS, _LAST_RETRY_SECONDS = 0.5, 30.0
_SUCCESSOR_SECONDS = 2.0  # how often to look for a line that took over


@dataclass(frozen=True)
class Update:
    """New weights for an engine. The arrays are read-only and shared with the follower."""

    policy: PolicyRef
    tensors: dict[str, HostTensor]
    changed: set[str]  # names of the tensors that differ from the previous update
    bytes: int  # read from the store for this update
    seconds: dict[str, float]  # mirror: copying from the other region; fetch: reading; decode: decoding and verifying
    created_at: float  # when the version was published


class _Backoff:
    """When to try again after failures of the same kind."""

    def __init__(self) -> None:
        self._failures = 0
        self._at = 0.0

    def waiting(self) -> bool:
        return time.monotonic() < self._at

    def failed(self) -> None:
        delay = min(_FIRST_RETRY_SECONDS * 2**self._failures, _LAST_RETRY_SECONDS)
        self._failures, self._at = self._failures + 1, time.monotonic() + delay

    def succeeded(self) -> None:
        self._failures, self._at = 0, 0.0


class Follower:
    """Called from one thread at a time. `mirror` copies from another region before each look at the own store."""

    def __init__(self, store: WeightStore, line: str, form: str = "bf16", mirror: Mirror | None = None) -> None:
        self.store, self.line, self.form, self.mirror = store, valid_name(line), valid_name(form), mirror
        self.problem: str | None = None
        self._mirror_problem: str | None = None
        self._channel: str | None = None
        self._channels = Channels(store.objects)
        self._held: Held | None = None
        self._failed_target: Version | None = None
        self._restoring, self._mirroring = _Backoff(), _Backoff()
        self._family, self._looked_at = line, float("-inf")
        self._head = HeadWatch(store, line, form)
        self._bytes = 0
        self._fetch_seconds = 0.0

    @property
    def current(self) -> PolicyRef | None:
        return self._held.manifest.policy if self._held else None

    def follow_channel(self, name: str) -> None:
        """From the next poll on, follow a channel, back as well as forth, instead of the head of the line."""
        self._channel = valid_name(name)

    def poll(self) -> Update | None:
        """The newest verified weights, if they are not the ones returned last."""
        began = time.perf_counter()
        self._look_for_successor()
        self._copy_from_mirror()
        mirrored = time.perf_counter() - began
        try:
            target = self._target()
        except (StorageError, WeightsError) as error:
            self.problem = str(error)
            return None
        if target is None or (self._held and target == self._held.manifest.version):
            self.problem = self._mirror_problem
            return None
        if target == self._failed_target and self._restoring.waiting():
            return None
        before = self._held
        self._bytes, self._fetch_seconds, began = 0, 0.0, time.perf_counter()
        self.problem = self._restore_newest(target) or self._mirror_problem
        if self._held is before or self._held is None:
            return None
        decode = time.perf_counter() - began - self._fetch_seconds
        return self._update(before, {"mirror": mirrored, "fetch": self._fetch_seconds, "decode": decode})

    def _update(self, before: Held | None, seconds: dict[str, float]) -> Update:
        assert self._held is not None
        old = {entry.name: entry for entry in before.manifest.tensors} if before else {}
        manifest = self._held.manifest
        changed = {entry.name for entry in manifest.tensors if entry != old.get(entry.name)}
        return Update(manifest.policy, self._held.tensors, changed, self._bytes, seconds, manifest.created_at)

    def _target(self) -> Version | None:
        if self._channel is not None:
            return self._channels.get(self._channel)
        number = self._head.newest()
        return Version(self.line, number) if number is not None else None

    def _look_for_successor(self) -> None:
        if self._channel is not None or time.monotonic() - self._looked_at < _SUCCESSOR_SECONDS:
            return
        self._looked_at = time.monotonic()
        try:
            line = newest_line(self.mirror.source if self.mirror else self.store, self._family)
        except (StorageError, WeightsError):
            return  # what cannot be read now is said by the copy or the look at the head that follows
        if line != self.line:
            self.line, self._head = line, HeadWatch(self.store, line, self.form)

    def _restore_newest(self, target: Version) -> str | None:
        """Move to the target, or to the newest version below it that can be had. Returns what went wrong."""
        failure: StorageError | WeightsError | None = None
        wanted = target
        while True:
            try:
                self._held = restore(self._read_manifest, self._read_pack, wanted, self._held)
                break
            except (StorageError, WeightsError) as error:
                failure = failure or error
                broken = error.leg.manifest.number if isinstance(error, LegFailed) else wanted.number
                wanted = Version(wanted.line, broken - 1)  # nothing from the broken leg upwards can be had
                if self._channel is not None or wanted.number <= self._held_number() or not self._readable(wanted):
                    break
        if failure is None:
            self._failed_target = None
            self._restoring.succeeded()
            return None
        if target != self._failed_target:
            self._restoring.succeeded()
        self._failed_target = target
        self._restoring.failed()
        serving = self._held.manifest.version if self._held else "nothing"
        return f"{target} cannot be restored, serving {serving}: {failure}"

    def _held_number(self) -> int:
        return self._held.manifest.number if self._held and self._held.manifest.line == self.line else -1

    def _readable(self, version: Version) -> bool:
        try:
            return self.store.exists(version, self.form)
        except StorageError:
            return False

    def _read_manifest(self, version: Version) -> Manifest:
        return self.store.manifest(version, self.form)

    def _read_pack(self, manifest: Manifest, pack: Pack) -> bytes:
        began = time.perf_counter()
        try:
            data = self.store.read_pack(manifest, pack)
        except (StorageError, WeightsError):
            if self.mirror is None:
                raise
            data = self.mirror.fetch_pack(manifest, pack)  # the other region still has it whole
        finally:
            self._fetch_seconds += time.perf_counter() - began
        self._bytes += len(data)
        return data

    def _copy_from_mirror(self) -> None:
        if self.mirror is None or self._mirroring.waiting():
            return
        try:
            if self._channel is not None:
                self.mirror.copy_channel(self._channel, self.form)
            else:
                for version in self.mirror.copy(self.line, self.form).versions:
                    self._head.learn(version.number)
        except (StorageError, WeightsError) as error:
            self._mirroring.failed()
            self._mirror_problem = f"the other region cannot be copied from: {error}"
        else:
            self._mirroring.succeeded()
            self._mirror_problem = None
