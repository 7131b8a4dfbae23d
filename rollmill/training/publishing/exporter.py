"""Exports a model as versions of one line, in one or several forms: the form that the trainer computes with first.

The parameters hold the values of the trainer's own form, and the other forms are made from these values. So the bytes
of a version in another form follow from its published bytes, whoever makes them and when. Each form has its own delta
chain.

A kill leaves a version in some of the forms. The others get it from `resume`, which reads it from the store. A step is
committed when its version is published in all forms.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rollmill import telemetry
from rollmill.errors import TrainingError
from rollmill.models.adapters import trained
from rollmill.models.decoder import Decoder
from rollmill.training.config import TrainingConfig
from rollmill.training.parallelism import FormBytes, FormExport, Parallelism
from rollmill.types import Version
from rollmill.weights.format.manifest import Manifest
from rollmill.weights.format.tensors import Tensors
from rollmill.weights.reading.weight_store import WeightStore
from rollmill.weights.writing.publisher import Publisher

Exports = Mapping[str, FormExport]  # by form


class Exporter:
    """All methods but `held` are collective. `last`, `held` and `matches` are about the trainer's own form."""

    def __init__(
        self,
        parallel: Parallelism,
        model: Decoder,
        weights: WeightStore,
        line: str,
        forms: Sequence[str],
        config: TrainingConfig,
    ) -> None:
        """`forms`: the first one is the form that the model computes with."""
        self._parallel, self._model, self._weights, self._line, self._config = parallel, model, weights, line, config
        self._form, self._others = forms[0], forms[1:]
        self._chains = {form: self._chain(form) for form in forms}

    def _chain(self, form: str) -> tuple[FormBytes, Publisher]:
        goal = self._config.delta_goal
        making = self._parallel.models.form_bytes(self._model, form, on_device=goal == "fast")
        # The rarer a snapshot, the more deltas a late reader takes: with adapters, whose deltas are as much smaller as
        # they are, both together cost least at the root of that.
        own, all_ = (
            sum(each.numel() for each in some) for some in (trained(self._model).values(), self._model.parameters())
        )
        snapshot_every = round(self._config.snapshot_every * math.sqrt(all_ / own))
        # an export is a copy that nobody changes, so it is kept
        return making, Publisher(
            self._weights,
            self._line,
            form,
            snapshot_every,
            goal,
            keeps=True,
            ranks=self._parallel.ranks,
        )

    @property
    def last(self) -> Manifest | None:
        return self._chains[self._form][1].last

    def resume(self) -> None:
        """Take over the line at its head."""
        for form, (making, publisher) in self._chains.items():
            if form != self._form:
                self._catch_up(form)
            publisher.resume(making.owned)

    def export(self, model: Decoder) -> Exports:
        """The bytes of a version, or the part of them that this rank publishes."""
        return {form: making.export(model) for form, (making, _) in self._chains.items()}

    def held(self, exports: Exports) -> Tensors:
        """The part of an export that this rank computes with: its rows, in the served form."""
        return exports[self._form].held

    def matches(self, manifest: Manifest, exports: Exports) -> bool:
        """Whether that version has these bytes."""
        (making, publisher), exported = self._chains[self._form], exports[self._form]
        same = publisher.matches(manifest, exported.weights)
        if same:
            making.published(exported, manifest.digest)
        return same

    def publish(self, number: int, exports: Exports, parent: Version | None, metadata: Mapping[str, Any]) -> Manifest:
        own = self._publish(self._chains[self._form], number, exports[self._form], parent, metadata)
        for form in self._others:
            self._publish_form(self._chains[form], exports[form], own)
        return own

    def _publish(
        self,
        chain: tuple[FormBytes, Publisher],
        number: int,
        exported: FormExport,
        parent: Version | None,
        metadata: Mapping[str, Any],
    ) -> Manifest:
        making, publisher = chain
        manifest = publisher.publish(number, exported.weights, parent, metadata, exported.payloads)
        making.published(exported, manifest.digest)
        return manifest

    def _publish_form(self, chain: tuple[FormBytes, Publisher], exported: FormExport, own: Manifest) -> None:
        """Publish the version `own` in another form."""
        start = time.time()
        manifest = self._publish(chain, own.number, exported, own.parent, own.metadata)
        if self._parallel.ranks.first:
            telemetry.emit(
                "publish_form",
                line=self._line,
                version=own.number,
                form=manifest.form,
                encoding=manifest.kind,
                bytes=manifest.bytes,
                full_bytes=manifest.full_bytes,
                density=manifest.density,
                seconds=time.time() - start,
                digest=manifest.digest,
            )

    def _catch_up(self, form: str) -> None:
        """Publish the versions that this form lacks, from those of the trainer's own form. A form without any version
        begins with the newest one. Collective."""
        head, ranks = self.last, self._parallel.ranks
        if head is None:
            return
        known = ranks.from_first(self._weights.head(self._line, form) if ranks.first else None)
        missing = range(head.number if known is None else known + 1, head.number + 1)
        if not missing:
            return
        # a chain of its own: one that codes on the device must always export the same parameters
        model, chain = self._parallel.models.make_like(self._model), self._chain(form)
        chain[1].resume(chain[0].owned)
        for number in missing:
            version = Version(self._line, number)
            if not self._weights.exists(version, self._form):
                raise TrainingError(
                    f"{version} is missing in the form {form!r}, and was collected in the form {self._form!r}",
                    hint=f"delete weights/{self._line}/{form} in the store: it then begins with the newest version",
                )
            self._parallel.models.load_version(model, self._weights, version, self._form)
            self._publish_form(chain, chain[0].export(model), self._weights.manifest(version, self._form))
