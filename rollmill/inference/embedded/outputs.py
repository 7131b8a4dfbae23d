"""What every runner takes and gives: one step of the decoder, or a burst of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from rollmill.inference.embedded.generation import Generation
from rollmill.inference.embedded.scheduler import Work
from rollmill.models.config import ModelConfig
from rollmill.models.decoder import Decoder
from rollmill.models.kernels.fused import fp32_linear


@dataclass(frozen=True)
class StepOutput:
    """The result of a step, on the device that computed it."""

    work: list[Work]  # in the order of `routes`: groups of similar shape together
    routes: Tensor | None  # see `narrow_routes`; the rows of each work, in order
    logits: Tensor  # FP32 [M, vocab], of `sampled_rows`

    def host_routes(self) -> np.ndarray | None:
        """uint8 or uint16 [N, moe layers, k]. Waits for the device."""
        if self.routes is None:
            return None
        routes = self.routes.cpu().numpy()
        return routes if routes.dtype == np.uint8 else routes.view(np.uint16)


def sampled_rows(work: Sequence[Work]) -> list[int]:
    """The positions after which a token is drawn: the last of each work that completes its context, and before it one
    per guessed token. A twin has no positions, so its row is that of the work before it."""
    ends = itertools.accumulate(item.count for item in work)
    return [
        row
        for end, item in zip(ends, work, strict=True)
        if item.completes
        for row in range(end - 1 - len(item.drafts), end)
    ]


class BurstOutput(NamedTuple):
    """The result of a burst on the host: K steps of B rows."""

    tokens_KB: np.ndarray  # int32
    logprobs_KB: np.ndarray  # FP32
    routes: np.ndarray | None  # uint8 or uint16 [K, B, moe layers, k]
    seconds: float  # that the device took


class StepRunner(Protocol):
    model: Decoder

    def run(self, work: Sequence[Work]) -> StepOutput: ...


@runtime_checkable
class BurstRunner(StepRunner, Protocol):
    """Runs several decode steps without the host too. For devices on which a step is short beside the host's part."""

    def warm_up(self, rows: int, tokens: int, guessed: int) -> None:
        """Compiles and records the decode steps of up to `rows` sequences, steps of up to `tokens` positions of
        prompts, and steps with guesses of up to `guessed` positions, so that no request waits for it."""
        ...

    def launch(
        self, rows: Sequence[Generation | None], starts: Sequence[int] | None, steps: int
    ) -> Callable[[], BurstOutput]:
        """Starts a burst (see `bursts`): `steps` steps of one position per row, each with the token that the step
        before drew. `starts` are the rows' first positions; None goes on where the last burst ends. Rows of None are
        computed and mean nothing. The result waits for the device. It is valid until the launch after the next."""
        ...


def narrow_routes(routes: Tensor | None, config: ModelConfig) -> Tensor | None:
    """Routes as they are recorded: one byte each, or two bytes for more than 256 experts (signed, for torch)."""
    return None if routes is None else routes.to(torch.uint8 if config.experts <= 256 else torch.int16)


def fp32_logits(model: Decoder, hidden_MW: Tensor) -> Tensor:
    """FP32 logits [M, vocab], as the trainer computes them on this device: not rounded, without an FP32 copy of the
    head."""
    return fp32_linear(hidden_MW, model.embedding if model.head is None else model.head, model.exact)
