"""Anchors: a region makes its own snapshots from the deltas it has, so that full snapshots need not cross regions.

Order, safe under kill -9 at any point: restore and verify the weights of a version, write its packs, then create the
anchor. A builder that dies leaves packs that nothing names; the next builder writes them again, or `collect` removes
them. Two builders make the same packs; the second finds the anchor there.
"""

from __future__ import annotations

import time

from rollmill.errors import ObjectExists, WeightsError
from rollmill.storage.parallel import sizes_of
from rollmill.types import Version
from rollmill.weights.format.manifest import Anchor, Manifest, layout_of, seal
from rollmill.weights.format.object_keys import anchor_key, pack_key, valid_name
from rollmill.weights.reading.host_weights import HostWeights, restore
from rollmill.weights.reading.weight_store import HeadWatch, WeightStore
from rollmill.weights.writing.encoder import Encoder, rows_of


class AnchorBuilder:
    """Keeps one version in host memory. `poll` raises the errors of the store and of damaged chains; call it again."""

    def __init__(
        self, store: WeightStore, line: str, form: str = "bf16", every: int = 32, threads: int | None = None
    ) -> None:
        if every < 1:
            raise WeightsError(f"an anchor every {every} versions", hint="1 makes one for every version")
        self.store, self.line, self.form, self.every = store, valid_name(line), valid_name(form), every
        self._head = HeadWatch(store, line, form)
        self._encoder = Encoder(store, line, form, threads=threads)
        self._host: HostWeights | None = None
        self._done = -1  # all numbers up to this one are done

    def poll(self) -> int | None:
        """Make the anchor that is due, if any. Returns its number.

        Due is the newest version whose number is a multiple of `every`, unless it has a snapshot or an anchor here.
        Older anchors are not made later: they would only shorten the path to old versions.
        """
        head = self._head.newest()
        due = head - head % self.every if head is not None else -1
        version = Version(self.line, due)
        if due <= self._done or not self.store.exists(version, self.form):
            return None
        manifest = self.store.manifest(version, self.form)
        made = None
        if self.store.anchor(version, self.form) is None and not self.store.has_snapshot(manifest):
            made = due if self._make(manifest) else None
        self._done = due
        return made

    def _make(self, manifest: Manifest) -> bool:
        host = self._host = restore(self.store.source(self.form), manifest.version, self._host)
        rows = rows_of(layout_of(manifest.tensors))
        coded = self._encoder.encode(
            manifest.number, rows, lambda row: host.tensors[row.tensor].data[row.start : row.stop], None, True
        )
        assert coded.snapshot is not None
        # digests of the bytes that were coded: memory that went bad after it was verified must not become an anchor
        if [coded.digests[row.place] for row in rows] != [chunk.digest for chunk in manifest.chunks]:
            self._host = None
            raise WeightsError(
                f"the weights of {manifest.version} ({self.form}) changed in memory while it was written",
                hint="nothing was committed; if it happens again, check the memory of this host",
            )
        anchor = Anchor(
            line=self.line,
            number=manifest.number,
            form=self.form,
            digest=manifest.digest,
            snapshot=coded.snapshot,
            created_at=time.time(),
        )
        key = anchor_key(manifest.version, self.form)
        try:
            self.store.objects.create(key, seal(anchor))
        except ObjectExists:  # from another builder, or our own request was retried
            return False
        if None in sizes_of(self.store.objects, [pack_key(anchor, pack) for pack in anchor.snapshot.packs]):
            self.store.objects.delete(key)
            raise WeightsError(
                f"packs for an anchor of {manifest.version} ({self.form}) were collected while it was made",
                hint="they were left by an attempt that died; the next poll makes them again",
            )
        return True
