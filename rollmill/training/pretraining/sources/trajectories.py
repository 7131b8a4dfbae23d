"""Trajectories of a run that earned a reward: exactly the tokens that were sampled, never tokenised again.

    [[stages.sources]]
    kind = "trajectories"
    run = "runs/first"
    min_reward = 1.0

Each segment is a document. Sampled tokens on the way to the outcome are learnt (training/rl/credit.py). Which
trajectories these are is decided once, when the stage begins; the other run may go on.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import Field

from rollmill.chat.rendered_conversation import RenderedConversation
from rollmill.chat.tokenizer import Tokenizer
from rollmill.config import Config, LocalPath
from rollmill.errors import ConfigError, StorageError, TrainingError, TrajectoryError
from rollmill.storage.objects import store_of_run
from rollmill.training.pretraining.source import Document, Documents, SourceContext
from rollmill.training.pretraining.sources.files import digest
from rollmill.training.rl.credit import credit_of

if TYPE_CHECKING:
    from rollmill.trajectories.trajectory_store import TrajectoryStore
    from rollmill.types import Segment

_KEPT = "trajectories.json"


class TrajectorySettings(Config):
    run: LocalPath = Field(description="Directory of the run whose trajectories are learnt from.")
    min_reward: float = Field(1.0, description="Least reward that a trajectory must have earned.")
    split: str = Field("train", description="Only trajectories of tasks of this split.")


class Trajectories:
    def __init__(self, config: TrajectorySettings) -> None:
        self._config = config

    def documents(self, context: SourceContext) -> TrajectoryDocuments:
        from rollmill.storage.database import open_database
        from rollmill.storage.objects import Objects
        from rollmill.trajectories.trajectory_store import TrajectoryStore

        run = Path(self._config.run)
        database, run_id, objects = _read_run(run)
        if not context.tokenizer.same_as(Tokenizer.load(run / "tokenizer.json")):
            raise ConfigError(
                f"{run} has another tokenizer than this run, so its tokens mean something else here",
                hint="`rollmill trajectories export --format openai`, then a source of the kind conversations",
            )
        url = database or f"sqlite:///{run / 'mill.db'}"
        if database is None and not (run / "mill.db").exists():
            raise ConfigError(f"{run} has no trajectories", hint="name a run that has done rollouts")
        store = TrajectoryStore(open_database(url), Objects.open(objects))
        kept = _open_list(context.directory, self._config.model_dump(mode="json"), lambda: self._choose(store, run_id))
        return TrajectoryDocuments(store, kept, context)

    def _choose(self, store: TrajectoryStore, run_id: str | None) -> dict[str, Any]:
        """The segments to learn from, with their digests, and how many trajectories cannot be used."""
        from rollmill.trajectories.query import TrajectoryQuery

        query = TrajectoryQuery(state="graded", split=self._config.split, reward=(self._config.min_reward, None))
        # the trajectories of a stage are keyed by run and stage
        mine = (row for row in store.find(query) if run_id in (None, row.run, row.run.partition("/")[0]))
        found = [row.id for row in mine if row.may_train]
        segments: list[list[Any]] = []
        skipped: Counter[str] = Counter()
        problems: list[str] = []
        for id in sorted(found):
            try:
                trajectory = store.load(id)
            except (TrajectoryError, StorageError) as error:
                skipped["payload cannot be read"] += 1
                problems += [f"{id}: {error.message}"][: 20 - len(problems)]
                continue
            for number, rendered in enumerate(_rendered(trajectory.segments)):
                if any(rendered.learnt):
                    content = np.asarray(rendered.tokens, "<i4").tobytes() + bytes(rendered.learnt)
                    segments.append([id, number, *digest(content)])
        return {"segments": segments, "skipped": dict(skipped), "problems": problems}


class TrajectoryDocuments(Documents):
    def __init__(self, store: TrajectoryStore, kept: dict[str, Any], context: SourceContext) -> None:
        self._store, self._context = store, context
        self._segments: list[list[Any]] = kept["segments"]
        self.skipped: Counter[str] = Counter(kept["skipped"])
        self.problems: list[str] = kept["problems"]

    @property
    def count(self) -> int:
        return len(self._segments)

    def digests(self) -> np.ndarray:
        return np.array([segment[2:4] for segment in self._segments], np.uint64).reshape(-1, 2)

    def read(self, number: int, epoch: int) -> Document:
        id, segment = self._segments[number][:2]
        try:
            rendered = _rendered(self._store.load(id).segments)[segment]
        except (TrajectoryError, StorageError) as error:  # deleted since: it must not be learnt from
            return Document([], [], [f"trajectory left out: {error.boundary}"])
        if len(rendered.tokens) <= self._context.max_context:
            return Document(rendered.tokens, rendered.learnt)
        cut = rendered.cut(self._context.max_context)
        return Document(cut.tokens, cut.learnt, ["trajectory cut" if cut.ends else "trajectory left out: too long"])


def _rendered(segments: Sequence[Segment]) -> list[RenderedConversation]:
    """Tokens as sampled, and which are learnt: sampled, and on the way to the outcome."""
    credits = credit_of(segments, "path")
    return [
        RenderedConversation(
            segment.tokens.tolist(),
            (segment.sampled & (credit > 0)).tolist(),
            [span.end for span in segment.spans],
        )
        for segment, credit in zip(segments, credits, strict=True)
    ]


def _read_run(run: Path) -> tuple[str | None, str | None, Path | str]:
    """The database that a run shares with others and its id there (None and None: its own database); its store."""
    try:
        saved = json.loads((run / "run.json").read_text())
        database, store = saved["config"].get("database"), saved["config"].get("store")
        objects = store_of_run(store, saved["id"]) if store else run / "store"
        return database, saved.get("id") if database else None, objects
    except (OSError, ValueError, KeyError, AttributeError):
        raise ConfigError(f"{run} holds no run", hint="`rollmill runs` lists the runs there are") from None


def _open_list(directory: Path, settings: Any, choose: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    path = directory / _KEPT
    if path.exists():
        kept: dict[str, Any] = json.loads(path.read_text())
        if kept["settings"] != settings:
            raise TrainingError(
                "the source of trajectories has other settings than when the stage began",
                hint="restore them, or start a run with another name",
            )
        return kept
    chosen = {"settings": settings, **choose()}
    directory.mkdir(parents=True, exist_ok=True)
    draft = directory / f"{_KEPT}.{os.getpid()}"
    draft.write_text(json.dumps(chosen))
    os.replace(draft, path)
    return chosen
