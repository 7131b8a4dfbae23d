"""The embedded engine as a kind of `[[engines]]`. Configurations are read without torch: `open` imports it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollmill.inference.engine import EngineContext

if TYPE_CHECKING:
    from rollmill.inference.embedded.engine import EmbeddedEngine


class Embedded:
    def open(self, context: EngineContext) -> EmbeddedEngine:
        from rollmill.inference.embedded.engine import EmbeddedEngine

        return EmbeddedEngine(
            context.model,
            context.settings,
            name=context.name,
            region=context.region,
            device=context.device,
            form=context.form,
            exact=context.exact,
            tokenizer=context.tokenizer,
        )
