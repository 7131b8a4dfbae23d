"""The version that KL is measured to: named in the configuration, read from the store once, never trained."""

from __future__ import annotations

from torch import Tensor

from rollmill.models.decoder import Decoder
from rollmill.training.batching import MicroBatch
from rollmill.training.lineage import form_held
from rollmill.training.numerics.frozen_model import FrozenModel
from rollmill.training.parallelism import Parallelism
from rollmill.types import Version
from rollmill.weights.reading.weight_store import WeightStore


class Reference:
    def __init__(self, name: str, weights: WeightStore) -> None:
        line, _, number = name.rpartition("@")
        self._version = Version(line, int(number))
        self._weights = weights
        self._frozen: FrozenModel | None = None  # made on first use, since it may be the run's own version 0

    def logprobs(self, parallel: Parallelism, model: Decoder, part: MicroBatch) -> Tensor:
        """[M]. Experts are chosen live: recorded routes are the policy's choice, not the reference's. Collective."""
        if self._frozen is None:
            frozen = FrozenModel(parallel, model)
            form = form_held(self._weights, self._version, model.form)
            parallel.models.load_version(frozen.decoder, self._weights, self._version, form)
            if form != model.form:
                frozen.round_to_form()
            self._frozen = frozen
        return self._frozen.logprobs(part, replay=None)
