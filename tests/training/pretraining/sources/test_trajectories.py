"""Trajectories as a source: exactly the sampled tokens, only of those that earned a reward."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollmill.chat.tokenizer import Tokenizer
from rollmill.config import LocalPath
from rollmill.errors import ConfigError
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.training.pretraining.mixture import Part, choose
from rollmill.training.pretraining.source import SourceContext
from rollmill.training.pretraining.sources.trajectories import Trajectories, TrajectoryDocuments, TrajectorySettings
from rollmill.trajectories.payload import encode_trajectory, seal_facts
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Grade, Segment
from tests.trajectories import build

Context = Callable[..., SourceContext]


def add(
    store: TrajectoryStore,
    objects: Objects,
    id: str,
    segments: list[Segment],
    reward: float,
    split: str,
    run: str = "run/rl",
) -> None:
    store.create(run, "", "bug/7", [id], {"split": split})
    trajectory = build.trajectory(id, segments=segments)
    objects.create(f"trajectories/{id}", encode_trajectory(trajectory))
    store.finish(id, f"trajectories/{id}", None, **seal_facts(trajectory))
    store.grade(id, Grade(reward))


@pytest.fixture
def run(tmp_path: Path, compact: Tokenizer) -> Path:
    """Rewards 1, 1 (a copy), 0.4, 0 and a held-out one. The first was asked again: its last answer was abandoned."""
    path = tmp_path / "other"
    path.mkdir()
    (path / "run.json").write_text(json.dumps({"id": "run", "config": {}}))
    compact.save(path / "tokenizer.json")
    objects, store = (
        Objects.open(path / "store"),
        TrajectoryStore(open_database(f"sqlite:///{path}/mill.db"), objects_of(path)),
    )
    first = build.segment()
    again = build.segment("s1", 12, ((9, 12),), parent=(first, 9), cause="retry", seed=5)
    for span in again.spans:
        span.started_at += 10
    add(store, objects, "a", [first, again], 1.0, "train")
    add(store, objects, "b", [first, again], 1.0, "train")
    add(store, objects, "c", [build.segment(seed=3)], 0.4, "train")
    add(store, objects, "d", [build.segment(seed=4)], 0.0, "train")
    add(store, objects, "e", [build.segment(seed=6)], 1.0, "heldout")
    return path


def objects_of(path: Path) -> Objects:
    return Objects.open(path / "store")


def opened(context: SourceContext, run: Path, **settings: Any) -> TrajectoryDocuments:
    return Trajectories(TrajectorySettings(run=LocalPath(run), **settings)).documents(context)


def test_exactly_the_sampled_tokens_of_the_way_to_the_outcome(run: Path, context: Context) -> None:
    documents = opened(context(), run)
    first = build.segment()
    assert documents.count == 4
    start, again = documents.read(0, 0), documents.read(1, 0)
    assert start.tokens == first.tokens.tolist()
    assert [place for place, flag in enumerate(start.learnt) if flag] == [4, 5, 6], "the abandoned answer is not learnt"
    assert [place for place, flag in enumerate(again.learnt) if flag] == [9, 10, 11]
    (chosen,) = choose([Part("trajectories", documents)])
    assert chosen.duplicates == 2 and chosen.training is not None and chosen.training.tolist() == [0, 1]


def test_the_reward_decides_and_the_list_is_kept(run: Path, context: Context) -> None:
    assert opened(context(), run, min_reward=0.3).count == 5
    store = TrajectoryStore(open_database(f"sqlite:///{run}/mill.db"), objects_of(run))
    add(store, objects_of(run), "f", [build.segment(seed=9)], 1.0, "train")
    documents = opened(context(), run, min_reward=0.3)
    assert documents.count == 5, "the other run may go on"
    store.delete("c")
    assert documents.read(4, 0) == ([], [], ["trajectory left out: trajectories"])


def test_a_long_one_is_cut_after_an_answer(run: Path, context: Context) -> None:
    cut = opened(context(max_context=11), run).read(0, 0)
    assert cut.tokens == build.segment().tokens.tolist()[:7] and cut.notes == ["trajectory cut"]


def test_another_tokenizer_is_refused(run: Path, context: Context, hermes: Tokenizer) -> None:
    with pytest.raises(ConfigError, match="has another tokenizer"):
        opened(context(hermes), run)
    with pytest.raises(ConfigError, match="holds no run"):
        opened(context(), run / "store")


def test_of_a_database_that_runs_share_only_the_runs_own_are_used(run: Path, context: Context) -> None:
    url = f"sqlite:///{run}/mill.db"
    (run / "run.json").write_text(json.dumps({"id": "run", "config": {"database": url}}))
    store = TrajectoryStore(open_database(url), objects_of(run))
    add(store, objects_of(run), "f", [build.segment(seed=9)], 1.0, "train", run="running/rl")
    add(store, objects_of(run), "g", [build.segment(seed=10)], 1.0, "train", run="run")
    documents = opened(context(), run)
    assert {segment[0] for segment in documents._segments} == {"a", "b", "g"}
