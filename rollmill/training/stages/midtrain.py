"""Mid-training: next-token cross-entropy on documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from rollmill.kinds import build
from rollmill.training.config import MidtrainConfig
from rollmill.training.source import Source, SourceSection
from rollmill.training.stage import StageContext

if TYPE_CHECKING:
    from rollmill.training.objectives.midtrain import MidtrainObjective


class MidtrainSettings(MidtrainConfig):
    sources: tuple[SourceSection, ...] = Field(min_length=1, description="Where documents come from.")


class Midtrain:
    def __init__(self, config: MidtrainSettings) -> None:
        self._config = config

    def objective(self, context: StageContext) -> MidtrainObjective:
        from rollmill.training.objectives.midtrain import MidtrainObjective  # torch

        source: Source = build(self._config.sources[0])
        return MidtrainObjective(
            self._config,
            source.documents(context.tokenizer, context.format),
            seed=context.seed,
            max_context=context.model.max_context,
            tokens_per_microbatch=context.tokens_per_microbatch,
        )
