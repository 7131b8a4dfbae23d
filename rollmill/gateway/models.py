"""The names of models that clients may ask for."""

from __future__ import annotations

from collections.abc import Iterable

from rollmill.gateway.router import EngineState

DEFAULT = "rollmill"


def model_names(engines: Iterable[EngineState]) -> list[str]:
    """The default name, which means any engine, and the lines that engines serve."""
    lines = {engine.policy.line for engine in engines if engine.policy is not None}
    return [DEFAULT, *sorted(lines - {DEFAULT})]
