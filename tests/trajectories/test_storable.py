"""Whatever models, graders, users and clients produce is stored and read back, or refused with a TrajectoryError.

Fuzzed on SQLite and on PostgreSQL: no other error may be raised, because callers would take it for a store that is
down.
"""

from __future__ import annotations

import itertools
import json
import math
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollmill.errors import TrajectoryError
from rollmill.storage.objects import Objects
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.payload import decode_trajectory, encode_trajectory
from rollmill.trajectories.staleness import Pace
from rollmill.trajectories.storable import DEEPEST_JSON, LONGEST_JSON
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Grade, LedgerState, StepRecord
from tests.trajectories import build
from tests.trajectories.build import start_group

# characters of every kind, including lone surrogates and NUL
TEXT = st.text(st.characters(), max_size=20) | st.sampled_from(["\0", "\ud800", "a\0b\udfff", "x" * 300, "'; --", "%"])
NUMBERS = st.floats() | st.integers() | st.sampled_from([10**400, -(10**400), 1e300, math.nan, math.inf])
LEAVES = st.none() | st.booleans() | NUMBERS | TEXT | st.binary(max_size=4) | st.builds(object) | st.builds(set)
KEYS = TEXT | st.integers() | st.none() | st.tuples(st.integers())
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3))
OBJECTS = st.dictionaries(KEYS, VALUES, max_size=3) | VALUES
EXAMPLES = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
_ids = (f"t{number}" for number in itertools.count())


def deep(levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value]
    return value


def finished(store: TrajectoryStore) -> str:
    id = next(_ids)
    store.create("run", "g", "task", [id], {})
    store.finish(id, "key", None, tokens=1, sampled_tokens=1, segments=1)
    return id


@EXAMPLES
@given(value=NUMBERS | VALUES, parts=OBJECTS, evidence=OBJECTS, grader=TEXT | VALUES)
def test_any_reward_is_stored_or_refused(
    store: TrajectoryStore, value: Any, parts: Any, evidence: Any, grader: Any
) -> None:
    id = finished(store)
    try:
        store.grade(id, Grade(value, parts, evidence, grader))
    except TrajectoryError:
        assert store.get(id).state == "finished" and store.rewards([id]) == {id: []}
        store.fail(id, f"{parts!s:.50}{evidence!r:.50}")
        return
    [(_, stored)] = store.rewards([id])[id]
    assert math.isfinite(stored.value) and all(map(math.isfinite, stored.parts.values()))
    json.dumps(stored.evidence, allow_nan=False)


@EXAMPLES
@given(kind=TEXT, value=st.none() | NUMBERS | VALUES, data=OBJECTS, reason=TEXT)
def test_any_feedback_and_any_reason(store: TrajectoryStore, kind: str, value: Any, data: Any, reason: str) -> None:
    id = finished(store)
    try:
        store.add_feedback(id, kind, value, data)
    except TrajectoryError:
        assert store.feedback(id) == []
    else:
        json.dumps(store.feedback(id)[0].data, allow_nan=False)
    store.quarantine(id, reason)
    assert store.get(id).state == "quarantined"


@EXAMPLES
@given(run=TEXT, group=TEXT, task=TEXT, id=TEXT, provenance=OBJECTS)
def test_any_facts_of_a_new_trajectory(
    store: TrajectoryStore, run: str, group: str, task: str, id: str, provenance: Any
) -> None:
    id = f"{next(_ids)}-{id}"
    try:
        store.create(run, group, task, [id], provenance)
    except TrajectoryError:
        assert id not in {row.id for row in store.list()}
        for call in (store.get, store.load, store.delete, lambda id: store.fail(id, "why")):
            with pytest.raises(TrajectoryError, match="no trajectory"):
                call(id)
        assert store.rewards([id]) == {id: []} and store.feedback(id) == []
    else:
        row = store.get(id)
        assert (row.run, row.group_id, row.task_id) == (run, group, task)
    store.list(run=run, group_id=group, split=task, id_prefix=id)


@EXAMPLES
@given(messages=st.lists(st.dictionaries(TEXT, VALUES, max_size=3), max_size=2), provenance=OBJECTS)
def test_any_payload_that_is_sealed_can_be_read(messages: Any, provenance: Any) -> None:
    made = build.trajectory(messages=messages, provenance=provenance)
    try:
        data = encode_trajectory(made)
    except TrajectoryError:
        return
    decode_trajectory(data)


@pytest.mark.parametrize(
    "evidence",
    [
        {"x": math.nan},
        {"x": [{"y": -math.inf}]},
        {"x": json.loads("1e999")},
        {"x": "y" * LONGEST_JSON},
        {"x": deep(DEEPEST_JSON)},
        {"x": deep(100_000)},
        {"x": {1, 2}},
        {"x": 10**5000},
        "no object",
    ],
)
def test_evidence_that_cannot_be_stored_is_refused(store: TrajectoryStore, evidence: Any) -> None:
    id = finished(store)
    with pytest.raises(TrajectoryError, match="evidence") as caught:
        store.grade(id, Grade(1.0, evidence=evidence))
    assert "finite numbers" in str(caught.value.hint)
    with pytest.raises(TrajectoryError, match="feedback"):
        store.add_feedback(id, "thumb", 1.0, evidence)
    with pytest.raises(TrajectoryError, match="provenance"):
        store.create("run", "g", "task", [next(_ids)], evidence)
    circle: dict[str, Any] = {}
    circle["x"] = circle
    with pytest.raises(TrajectoryError, match="evidence"):
        store.grade(id, Grade(1.0, evidence=circle))
    assert store.rewards([id]) == {id: []} and store.get(id).state == "finished"


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300, 10**400, "1.0x", None])
def test_a_reward_is_a_number_training_can_compute_with(store: TrajectoryStore, value: Any) -> None:
    id = finished(store)
    with pytest.raises(TrajectoryError, match=f"the reward of {id}"):
        store.grade(id, Grade(value))
    with pytest.raises(TrajectoryError, match="parts"):
        store.grade(id, Grade(1.0, {"tests": value}))


def test_strange_output_of_agents_is_kept(store: TrajectoryStore) -> None:
    id = finished(store)
    store.grade(id, Grade(1.0, {"a\0": 1}, {"output": "\x00 half \ud800", "deep": deep(DEEPEST_JSON - 2)}, "g\0"))
    [(_, stored)] = store.rewards([id])[id]
    assert stored == Grade(
        1.0, {"a\0": 1.0}, {"output": "\x00 half \ud800", "deep": deep(DEEPEST_JSON - 2)}, "g\N{SYMBOL FOR NULL}"
    )


@pytest.mark.parametrize("advantage", [math.nan, math.inf])
def test_a_step_pins_finite_numbers(
    store: TrajectoryStore, ledger: Ledger, engine: sa.Engine, objects: Objects, advantage: float
) -> None:
    start_group(ledger, "g", "task", 1, pace=Pace(1, 1, 0), ids=["a"])
    store.finish("a", "key", None, tokens=1, sampled_tokens=1, segments=1)
    reward = store.grade("a", Grade(1.0))
    ledger.group_ready("g")
    with pytest.raises(TrajectoryError, match="advantage of a"):
        ledger.write_step(StepRecord("run", 1, "rl", ("g",), {"a": (reward, 1.0, advantage)}, {}, 0.0))
    assert ledger.steps() == [] and ledger.counts()[LedgerState.admitted] == 1
