"""Figures as TensorBoard reads them: `tensorboard --logdir runs`. The package tensorboardX writes the files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rollmill.errors import ConfigError
from rollmill.runs.sink import Scalar, Sink

FOLDER = "tensorboard"  # in the run's directory


class TensorBoard(Sink):
    def __init__(self) -> None:
        self._writer: Any = None

    def preflight(self) -> None:
        _summary_writer()

    def open(self, directory: Path, name: str) -> None:
        folder = directory / FOLDER
        for old in folder.glob("events.out.tfevents.*"):  # all of it is written again
            old.unlink()
        self._writer = _summary_writer()(str(folder), flush_secs=1)

    def write(self, scalars: Sequence[Scalar]) -> None:
        for scalar in scalars:
            self._writer.add_scalar(scalar.tag, scalar.value, scalar.step, scalar.at)

    def close(self) -> None:
        self._writer.close()


def _summary_writer() -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        hint = "pip install 'rollmill[tensorboard]'"
        raise ConfigError(f"the package tensorboardX cannot be imported: {error}", hint=hint) from None
    return SummaryWriter
