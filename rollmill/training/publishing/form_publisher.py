"""Publishes a line in several forms: the form that the trainer computes with first, then the others.

The parameters hold the values of the trainer's own form, and the other forms are made from these values. So the bytes
of a version in another form follow from its published bytes, whoever makes them and when. Each form has its own delta
chain.

A kill leaves a version in some of the forms. The others get it from `resume`, which reads it from the store. A step is
committed when its version is published in all forms.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rollmill import telemetry
from rollmill.errors import TrainingError
from rollmill.models.decoder import Decoder
from rollmill.training.config import TrainingConfig
from rollmill.training.ranks import ModelPublisher, Placement
from rollmill.types import Version
from rollmill.weights.format.manifest import Manifest
from rollmill.weights.format.tensors import Tensors
from rollmill.weights.reading.weight_store import WeightStore


def publisher_of(
    placement: Placement,
    model: Decoder,
    weights: WeightStore,
    line: str,
    forms: Sequence[str],
    config: TrainingConfig,
) -> ModelPublisher:
    """Publishes a line in `forms`. The first one is the form that the model computes with."""
    if len(forms) == 1:
        return placement.publisher(model, weights, line, forms[0], config)
    return FormsPublisher(placement, model, weights, line, forms, config)


class Exports(NamedTuple):
    own: Any
    others: Mapping[str, Any]  # by form


class FormsPublisher:
    """A ModelPublisher. `last`, `held` and `matches` are about the trainer's own form, the first of `forms`."""

    def __init__(
        self,
        placement: Placement,
        model: Decoder,
        weights: WeightStore,
        line: str,
        forms: Sequence[str],
        config: TrainingConfig,
    ) -> None:
        self._placement, self._model, self._weights, self._line, self._config = placement, model, weights, line, config
        self._form = forms[0]
        self._own = self._publisher(self._form)
        self._others = {form: self._publisher(form) for form in forms[1:]}

    def _publisher(self, form: str) -> ModelPublisher:
        return self._placement.publisher(self._model, self._weights, self._line, form, self._config)

    @property
    def last(self) -> Manifest | None:
        return self._own.last

    def resume(self) -> None:
        self._own.resume()
        for form, publisher in self._others.items():
            self._catch_up(form)
            publisher.resume()

    def export(self, model: Decoder) -> Exports:
        return Exports(
            self._own.export(model), {form: publisher.export(model) for form, publisher in self._others.items()}
        )

    def held(self, exported: Exports) -> Tensors:
        return self._own.held(exported.own)

    def matches(self, manifest: Manifest, exported: Exports) -> bool:
        return self._own.matches(manifest, exported.own)

    def publish(self, number: int, exported: Exports, parent: Version | None, metadata: Mapping[str, Any]) -> Manifest:
        manifest = self._own.publish(number, exported.own, parent, metadata)
        for form, publisher in self._others.items():
            self._publish(publisher, form, exported.others[form], manifest)
        return manifest

    def _publish(self, publisher: ModelPublisher, form: str, exported: Any, own: Manifest) -> None:
        """Publish the version `own` in another form."""
        start = time.time()
        manifest = publisher.publish(own.number, exported, own.parent, own.metadata)
        if self._placement.first:
            telemetry.emit(
                "publish_form",
                line=self._line,
                version=own.number,
                form=form,
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
        head = self._own.last
        if head is None:
            return
        known = self._placement.from_first(self._weights.head(self._line, form) if self._placement.first else None)
        missing = range(head.number if known is None else known + 1, head.number + 1)
        if not missing:
            return
        # a publisher of its own: one that codes on the device must always export the same parameters
        model, publisher = self._placement.make_like(self._model), self._publisher(form)
        publisher.resume()
        for number in missing:
            version = Version(self._line, number)
            if not self._weights.exists(version, self._form):
                raise TrainingError(
                    f"{version} is missing in the form {form!r}, and was collected in the form {self._form!r}",
                    hint=f"delete weights/{self._line}/{form} in the store: it then begins with the newest version",
                )
            self._placement.load_version(model, self._weights, version, self._form)
            self._publish(publisher, form, publisher.export(model), self._weights.manifest(version, self._form))
