"""Events: every kind is declared, nothing makes `emit` raise, and a crash or a full disk costs one line at most."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmill import telemetry
from rollmill.events import EVENTS
from tests.test_repo import MODULES, tree


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(telemetry, "_file", None)
    monkeypatch.setattr(telemetry, "_process", "main")
    return tmp_path / "events"


def test_events_go_nowhere_before_they_are_opened(events: Path) -> None:
    telemetry.emit("step", step=1)
    assert not events.exists() and telemetry.read_events(events) == []


def test_events_are_read_back_in_time_order_with_numbers_as_numbers(events: Path) -> None:
    telemetry.open_events(events, "trainer")
    telemetry.emit("step", step=np.int64(1), reward=np.float32(0.5), path=Path("x"))
    with telemetry.busy("step", step=2):
        pass
    (events / "engine.jsonl").write_text(json.dumps({"at": 0.0, "process": "engine", "kind": "engine"}) + "\n")
    first, second, third = telemetry.read_events(events)
    assert first["kind"] == "engine"
    assert (second["process"], second["step"], second["reward"], second["path"]) == ("trainer", 1, 0.5, "x")
    assert third["what"] == "step" and third["start"] <= third["end"] <= third["at"]


def test_steps_of_older_runs_have_the_name_of_today(events: Path) -> None:
    events.mkdir()
    (events / "trainer.jsonl").write_text('{"at": 1.0, "kind": "midtrain_step", "stage": "sft", "step": 1}\n')
    assert telemetry.read_events(events) == [{"at": 1.0, "kind": "document_step", "stage": "sft", "step": 1}]


def test_busy_is_recorded_when_the_work_fails(events: Path) -> None:
    telemetry.open_events(events, "trainer")
    with pytest.raises(RuntimeError), telemetry.busy("step"):
        raise RuntimeError
    assert [event["what"] for event in telemetry.read_events(events)] == ["step"]


def test_a_line_cut_short_costs_only_itself(events: Path) -> None:
    events.mkdir()
    good = json.dumps({"at": 1.0, "process": "engine", "kind": "a"}) + "\n"
    (events / "engine.jsonl").write_bytes(good.encode() + b'{"at": 2.0, "kind": "b", "tex\xc3')
    telemetry.open_events(events, "engine")  # the process is started again after the crash
    telemetry.emit("c")
    (events / "other.jsonl").write_text('17\n[]\n{"kind": "no time"}\n')
    assert [event["kind"] for event in telemetry.read_events(events)] == ["a", "c"]


def test_threads_do_not_interleave(events: Path) -> None:
    telemetry.open_events(events, "gateway")
    writers = [
        threading.Thread(target=lambda: [telemetry.emit("x", text="y" * 3000) for _ in range(100)]) for _ in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert len(telemetry.read_events(events)) == 400


def test_tail_returns_only_what_is_new(events: Path) -> None:
    tail = telemetry.EventTail(events)
    assert tail.poll() == []
    telemetry.open_events(events, "trainer")
    telemetry.emit("a")
    assert [event["kind"] for event in tail.poll()] == ["a"]
    telemetry.emit("b")
    with (events / "trainer.jsonl").open("a") as file:
        file.write('{"at": 9e9, "kind"')
    assert [event["kind"] for event in tail.poll()] == ["b"]
    with (events / "trainer.jsonl").open("a") as file:
        file.write(': "c"}\n')
    assert [event["kind"] for event in tail.poll()] == ["c"]
    assert tail.poll() == []


def test_tail_starts_over_when_a_run_does(events: Path) -> None:
    telemetry.open_events(events, "trainer")
    telemetry.emit("a", text="x" * 100)
    tail = telemetry.EventTail(events)
    tail.poll()
    (events / "trainer.jsonl").write_text(json.dumps({"at": 1.0, "kind": "fresh"}) + "\n")
    assert [event["kind"] for event in tail.poll()] == ["fresh"]


def test_a_full_disk_does_not_stop_the_work(events: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():  # only Linux has it; elsewhere there is no honest way to fill a disk here
        return
    script = (
        "from pathlib import Path; from rollmill import telemetry\n"
        f"telemetry.open_events(Path({str(events)!r}), 'trainer')\n"
        "telemetry._file = open('/dev/full', 'ab', buffering=0)\n"
        "telemetry.emit('step', step=1)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


class Hostile:
    """An object that a task could put into a field: looking at it raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def cycle() -> list[Any]:
    inside: list[Any] = []
    inside.append(inside)
    return inside


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (float("nan"), None),
        (float("inf"), None),
        (np.float32("nan"), None),
        ({"rate": [1.5, float("-inf")]}, {"rate": [1.5, None]}),
        ("a\ud800b", "a\ufffdb"),
        ("\ud83d\ude00", "\U0001f600"),
        ({"\udfff": 1, (1, 2): 2}, {"\ufffd": 1, "(1, 2)": 2}),
        (10**30, "an integer of 100 bits"),
        ([1 << 100_000], ["an integer of 100001 bits"]),
        (b"\xff", "b'\\xff'"),
        ({1}, "{1}"),
        (np.int16(3), 3),
        (True, True),
    ],
    ids=range(13),
)
def test_odd_values_are_written_as_plain_json(events: Path, value: Any, read: Any) -> None:
    telemetry.open_events(events, "dispatcher")
    telemetry.emit("rollout", reason=value)
    (line,) = (events / "dispatcher.jsonl").read_text().splitlines()
    event = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert event["reason"] == read and event["reason"].__class__ is read.__class__
    event["reason"] and str(event["reason"]).encode()  # can be printed


@pytest.mark.parametrize("value", [Hostile(), {"deep": Hostile()}, {Hostile(): 1}, cycle()])
def test_a_value_that_cannot_be_written_costs_no_exception(events: Path, value: Any) -> None:
    telemetry.open_events(events, "dispatcher")
    telemetry.emit("rollout", reason=value)
    telemetry.emit("rollout", reason="next")
    first, second = telemetry.read_events(events)
    assert first["kind"] == "rollout" and second["reason"] == "next"


def test_long_text_is_cut(events: Path) -> None:
    telemetry.open_events(events, "dispatcher")
    telemetry.emit("rollout", reason="x" * 10_000_000, by_task={"y" * 1_000_000: []})
    assert (events / "dispatcher.jsonl").stat().st_size < 100_000
    assert telemetry.read_events(events)[0]["reason"].endswith("… (10000000 characters)")


def test_fields_cannot_take_the_place_of_time_process_and_kind(events: Path) -> None:
    telemetry.open_events(events, "trainer")
    telemetry.emit("step", **{"at": "never", "kind": "other", "process": 1, "step": 1})
    (event,) = telemetry.read_events(events)
    assert (event["kind"], event["process"], event["step"]) == ("step", "trainer", 1)


# --- declarations

MEND = "declare it in EVENTS (rollmill/events.py), then run scripts/reference"


def emit_calls() -> Iterator[tuple[str, ast.Call]]:
    for name, path in MODULES.items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("telemetry.emit", "telemetry.busy"):
                yield f"{name}:{node.lineno}", node


def test_every_event_is_declared() -> None:
    emitted: dict[str, set[str]] = {"busy": {"start", "end", "what"}}
    spread = set()  # kinds with fields that only running shows
    for where, call in emit_calls():
        kind = "busy"
        if ast.unparse(call.func) == "telemetry.emit":
            assert isinstance(call.args[0], ast.Constant), f"{where}: the kind of an event is a literal"
            kind = str(call.args[0].value)
        assert kind in EVENTS, f"{where}: event {kind!r} is not declared: {MEND}"
        names = {keyword.arg for keyword in call.keywords if keyword.arg is not None}
        assert names <= EVENTS[kind].fields.keys(), f"{where}: {names - EVENTS[kind].fields.keys()}: {MEND}"
        emitted.setdefault(kind, set()).update(names)
        if any(keyword.arg is None for keyword in call.keywords):
            spread.add(kind)
    assert EVENTS.keys() == emitted.keys(), "EVENTS declares events that nothing emits"
    for kind in EVENTS.keys() - spread:
        assert emitted[kind] == EVENTS[kind].fields.keys(), f"{kind}: EVENTS declares fields that nothing emits"


def test_fields_found_only_by_running_are_declared() -> None:
    from rollmill.evals.evaluation import EvalResult
    from rollmill.training.diagnostics import distance, mismatch_figures, token_figures
    from rollmill.training.numerics.router_replay import RouterMeasures
    from rollmill.training.optimizers.master_optimizer import Update

    assert EVENTS["eval"].fields.keys() == {field.name for field in fields(EvalResult)}
    update = Update(0.0, 0.0, True).figures()
    step = {
        **token_figures([]), **mismatch_figures(np.empty(0), {}), **distance("reference", np.empty(0)),
        **RouterMeasures().figures(), **update,
    }  # fmt: skip
    assert step.keys() <= EVENTS["step"].fields.keys(), MEND
    document_step = {**RouterMeasures().load_figures(), **update}
    assert document_step.keys() <= EVENTS["document_step"].fields.keys(), MEND


def test_a_warning_is_repeated_at_most_once_a_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry.open_events(tmp_path, "trainer")
    for step in range(3):
        telemetry.emit("warning", step=step, text=f"groups_missing is {step + 1}, above 0: the step ran short")
        telemetry.emit("warning", step=step, text="the disk is slow")
    monkeypatch.setattr(telemetry, "_REPEAT_S", 0.0)
    telemetry.emit("warning", step=3, text="groups_missing is 4, above 0: the step ran short")
    steps = [(event["step"], event["text"][:14]) for event in telemetry.read_events(tmp_path)]
    assert steps == [(0, "groups_missing"), (0, "the disk is sl"), (3, "groups_missing")]
