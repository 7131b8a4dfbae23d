"""Mid-training: next-token cross-entropy on documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from rollmill.training.config import MidtrainConfig
from rollmill.training.pretraining.mixture import open_mixture
from rollmill.training.pretraining.source import SourceSection
from rollmill.training.stage import StageContext

if TYPE_CHECKING:
    from rollmill.training.pretraining.document_objective import MidtrainObjective


class MidtrainSettings(MidtrainConfig):
    sources: tuple[SourceSection, ...] = Field(min_length=1, description="Where documents come from.")


class Midtrain:
    def __init__(self, config: MidtrainSettings) -> None:
        self._config = config

    def objective(self, context: StageContext) -> MidtrainObjective:
        from rollmill.training.pretraining.document_objective import MidtrainObjective  # torch

        return MidtrainObjective(
            self._config,
            open_mixture(self._config.sources, context),
            max_context=context.model.max_context,
            tokens_per_microbatch=context.tokens_per_microbatch,
            steps=context.steps,
        )
