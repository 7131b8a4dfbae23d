"""How a version leaves the trainer: by one process, or by many ranks together (training.parallel.publish)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rollmill.models.decoder import Decoder
from rollmill.models.host import to_host
from rollmill.training.config import TrainingConfig
from rollmill.training.parallel.rows import shards_of
from rollmill.types import Version
from rollmill.weights.format.manifest import Manifest, describe, root_digest
from rollmill.weights.format.tensors import Tensors
from rollmill.weights.reading.store import WeightStore
from rollmill.weights.writing.publisher import Publisher


class ModelPublisher(Protocol):
    """Publishes one line. Of many ranks each calls all of it, at the same time."""

    @property
    def last(self) -> Manifest | None: ...

    def resume(self) -> None:
        """Take the line over and begin where it stands."""
        ...

    def export(self, model: Decoder) -> Any:
        """The bytes of a version, or what this rank publishes of them."""
        ...

    def held(self, exported: Any) -> Tensors:
        """What of an export this rank computes with, as the bytes it is served as: its rows, or all."""
        ...

    def matches(self, manifest: Manifest, exported: Any) -> bool:
        """Whether that version has these bytes."""
        ...

    def publish(self, number: int, exported: Any, parent: Version | None, metadata: Mapping[str, Any]) -> Manifest: ...


class WholePublisher:
    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher

    @property
    def last(self) -> Manifest | None:
        return self._publisher.last

    def resume(self) -> None:
        self._publisher.resume()

    def export(self, model: Decoder) -> Tensors:
        return to_host(model.state_dict(), self._publisher.form)

    def held(self, exported: Tensors) -> Tensors:
        return exported

    def matches(self, manifest: Manifest, exported: Tensors) -> bool:
        return manifest.digest == root_digest(describe(exported))

    def publish(self, number: int, exported: Tensors, parent: Version | None, metadata: Mapping[str, Any]) -> Manifest:
        return self._publisher.publish(number, exported, parent, metadata)


def publisher_of(model: Decoder, weights: WeightStore, line: str, form: str, config: TrainingConfig) -> ModelPublisher:
    shards = shards_of(model)
    if shards is None:
        return WholePublisher(Publisher(weights, line, form, config.snapshot_every, goal=config.delta_goal))
    from rollmill.training.parallel.publish import shard_publisher

    return shard_publisher(model, shards, weights, line, form, config.snapshot_every, config.delta_goal)
