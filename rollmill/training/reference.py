"""The version that KL is measured to: pinned in the configuration, read from the store once, never trained."""

from __future__ import annotations

import torch
from torch import Tensor

from rollmill.models.decoder import Decoder
from rollmill.models.device import decoder_like
from rollmill.models.host import load_host, round_to_form_
from rollmill.training.batching import MicroBatch
from rollmill.training.lineage import form_held
from rollmill.training.parallel.rows import shards_of
from rollmill.training.recompute import recompute
from rollmill.types import Version
from rollmill.weights.store import WeightStore


class Reference:
    def __init__(self, name: str, weights: WeightStore) -> None:
        line, _, number = name.rpartition("@")
        self._version = Version(line, int(number))
        self._weights = weights
        self._decoder: Decoder | None = None  # made on first use: the run's own version 0 does not exist before

    @torch.no_grad()
    def logprobs(self, model: Decoder, part: MicroBatch) -> Tensor:
        """[M], computed as `model` computes. Experts are chosen live: the routes on record are the policy's choice."""
        if self._decoder is None:
            shards = shards_of(model)
            decoder = (
                decoder_like(model) if shards is None else Decoder(model.config, model.embedding.dtype, model.form)
            )
            form = form_held(self._weights, self._version, model.form)
            load_host(decoder, self._weights.load(self._version, form))
            if form != model.form:
                round_to_form_(decoder.named_parameters(), model.form)
            if shards is not None:
                from rollmill.training.parallel.shard import shard_decoder

                shard_decoder(decoder, shards.world, shards.meshes, model.embedding.device)
            self._decoder = decoder
        return recompute(self._decoder, part, replay=None).logprobs_M
