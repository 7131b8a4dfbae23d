"""The version that KL is measured to: pinned in the configuration, read from the store once, never trained."""

from __future__ import annotations

import torch
from torch import Tensor

from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.host import load_host
from rollmill.training.batching import MicroBatch
from rollmill.training.config import FORM
from rollmill.training.recompute import recompute
from rollmill.types import Version
from rollmill.weights.store import WeightStore


class Reference:
    def __init__(self, name: str, weights: WeightStore, model: ModelConfig) -> None:
        line, _, number = name.rpartition("@")
        self._version = Version(line, int(number))
        self._weights = weights
        self._model = model
        self._decoder: Decoder | None = None  # made on first use: the run's own version 0 does not exist before

    @torch.no_grad()
    def logprobs(self, part: MicroBatch) -> Tensor:
        """[M]. Experts are chosen live: the routes on record are the policy's choice, not the reference's."""
        if self._decoder is None:
            decoder = Decoder(self._model)
            load_host(decoder, self._weights.load(self._version, FORM))
            self._decoder = decoder
        return recompute(self._decoder, part, replay=None).logprobs_M
