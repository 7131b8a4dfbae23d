"""Which tasks are held out, and the settings that every kind of task file shares.

    split of a task    decided by
    its own field      the task says `split`
    `heldout`          a file with one id per line: these are held out
    `heldout_share`    a hash of the id: about this share is held out

A task that says one split itself and is put into another by the list would be in two splits: it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from pydantic import Field, model_validator

from rollmill.config import Config, LocalPath
from rollmill.environments.tasks.listed import TRAIN, digest
from rollmill.errors import TaskError

HELDOUT = "heldout"


class TaskFileConfig(Config):
    path: LocalPath = Field(
        description="The file or directory with the tasks. A relative path starts in the configuration's directory. "
        "A file may be `.parquet` instead of `.jsonl`, or hf://datasets/OWNER/NAME@COMMIT/FILE, or "
        "s3://BUCKET/FILE."
    )
    heldout: LocalPath | None = Field(
        None, description="A file with one task id per line: these tasks are held out, all others are for training."
    )
    heldout_share: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Share of the tasks that is held out, chosen by a hash of the id. For tasks that name no split.",
    )

    @model_validator(mode="after")
    def _one_rule(self) -> TaskFileConfig:
        if self.heldout is not None and self.heldout_share is not None:
            raise ValueError("set heldout or heldout_share, not both: a task could be in two splits")
        return self


class Splits:
    """Assigns splits. `own` is the split that the task itself names, or None."""

    def __init__(self, config: TaskFileConfig) -> None:
        self._config = config
        self._listed = dict(_read_ids(Path(config.heldout))) if config.heldout is not None else None
        self._met: set[str] = set()

    def split_of(self, task_id: str, own: str | None) -> str:
        """The split of a task. TaskError if it would be in two."""
        listed = None
        if self._listed is not None:
            listed = HELDOUT if task_id in self._listed else TRAIN
            if listed == HELDOUT:
                self._met.add(task_id)
        elif own is None and self._config.heldout_share is not None:
            listed = HELDOUT if digest("split", task_id) < self._config.heldout_share else TRAIN
        if own is not None and listed is not None and own != listed:
            raise TaskError(
                f"task {task_id!r} says split {own!r}, but {self._config.heldout} puts it into {listed!r}",
                hint="remove its field `split`, or change the list",
            )
        return own or listed or TRAIN

    def unmet(self) -> Iterable[str]:
        """A problem for each id of the list that no task has."""
        for task_id, line in (self._listed or {}).items():
            if task_id not in self._met:
                yield f"{self._config.heldout}:{line}: no task has the id {task_id!r}; remove or correct the line"


def _read_ids(path: Path) -> Iterator[tuple[str, int]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield line.strip(), number
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"the list of held-out tasks {path} cannot be read: {error}", hint="one id per line") from None
