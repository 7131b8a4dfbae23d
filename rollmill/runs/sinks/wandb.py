"""Figures for Weights & Biases. Offline unless told: files in RUN/wandb, which `wandb sync` uploads when you want it.

The package is not part of Rollmill: `pip install wandb`. It is imported when a run starts that names this sink.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from rollmill.config import Config
from rollmill.errors import ConfigError
from rollmill.runs.sink import Scalar, Sink


class WandbSettings(Config):
    project: str = Field("rollmill", min_length=1, description="The project that the run is listed under.")
    mode: Literal["offline", "online"] = Field(
        "offline",
        description="`offline` writes files and opens no connection. `online` sends the figures as they come.",
    )


class WeightsAndBiases(Sink):
    def __init__(self, config: WandbSettings) -> None:
        self._config = config
        self._run: Any = None
        self._groups: set[str] = set()

    def preflight(self) -> None:
        _wandb()

    def open(self, directory: Path, name: str) -> None:
        wandb = _wandb()
        self._run = wandb.init(
            project=self._config.project, name=name, dir=str(directory), mode=self._config.mode, reinit="create_new"
        )

    def write(self, scalars: Sequence[Scalar]) -> None:
        rows: dict[tuple[str, int], dict[str, float]] = {}
        for scalar in scalars:
            group = scalar.tag.rpartition("/")[0]
            rows.setdefault((group, scalar.step), {})[scalar.tag] = scalar.value
        for (group, step), row in rows.items():
            if group not in self._groups:  # each group has steps of its own
                self._groups.add(group)
                self._run.define_metric(f"{group}/step")
                self._run.define_metric(f"{group}/*", step_metric=f"{group}/step")
            self._run.log({**row, f"{group}/step": step})

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def _wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(f"the package wandb cannot be imported: {error}", hint="pip install wandb") from None
    return wandb
