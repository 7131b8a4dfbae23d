"""What Progress shows of a run's events, in a terminal and in a log."""

from __future__ import annotations

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rollmill.cli.progress import Phase, Progress, State, clock, draw, plain_line
from tests.evals.synthetic import PHASES, demo_run


def screen(state: State, now: float, width: int = 90, failed: bool = False) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(draw(state, "rollmill · demo", 12.0, now, failed))
    return console.file.getvalue()  # type: ignore[attr-defined]


def folded(until: str | None = None, count: int = 0) -> tuple[State, float]:
    """The state after all events, or after the `count`-th event of one kind."""
    state, seen, now = State([Phase(name) for name in PHASES]), 0, 0.0
    for event in sorted(demo_run(steps=20).events, key=lambda event: event["at"]):
        state.fold(event)
        now = event["at"]
        seen += event["kind"] == until
        if until is not None and seen == count:
            break
    return state, now


def test_midtraining_shows_loss_speed_and_time_left() -> None:
    state, now = folded("document_step", 25)
    shown = screen(state, now)
    assert "●  mid-train" in shown and "○  reinforce" in shown
    assert "250/500" in shown and "about 0:26 left" in shown
    assert "loss" in shown and "11,400" in shown and "reward" not in shown


def test_held_out_losses_are_shown_by_source() -> None:
    state, now = folded("document_step", 25)
    assert "held-out" not in screen(state, now)
    for source, loss in (("code", 2.5), ("chats", 1.25), ("code", 2.0)):
        state.fold({"kind": "heldout_loss", "at": now, "step": 9, "source": source, "loss": loss})
    assert "held-out loss code 2.000 · chats 1.250" in plain_line(state, now)


def test_reinforcement_shows_step_reward_solve_rate_staleness_speed_and_versions() -> None:
    state, now = folded("step", 12)
    shown, line = screen(state, now), plain_line(state, now)
    for text in (shown, line):
        assert "12/20" in text and "left" in text
        assert all(word in text for word in ("reward", "solved", "staleness", "(max 3)", "engine-home v11"))
        assert "4,800" in text  # both engines together
        assert "loss" not in text
    assert "✓  mid-train" in shown and "▅" in shown
    assert "held out 42 %" in shown  # what the evaluation before found, beside it


def test_a_wait_for_due_groups_is_shown_until_the_step_is_done() -> None:
    state, now = folded("step", 12)
    state.fold({"kind": "due", "at": now, "step": 13, "groups": ["a", "b"]})
    assert "waits for 2 due groups" in plain_line(state, now)
    state.fold({**state.step, "step": 13})
    assert "waits for" not in plain_line(state, now)


def test_a_finished_run_has_all_phases_ticked_and_names_its_restarts() -> None:
    state, now = folded()
    shown = screen(state, now)
    assert shown.count("✓") == len(PHASES) and "left" not in shown
    assert "held out 87 %" in shown and "engine-away was restarted" in shown
    assert plain_line(state, now) == "waiting"


def test_a_failed_run_says_where() -> None:
    state, now = folded("step", 3)
    shown = screen(state, now, failed=True)
    assert "✗  reinforce" in shown and "○  evaluate after" in shown and "left" not in shown


def test_it_fits_a_narrow_terminal() -> None:
    state, now = folded("step", 12)
    assert max(map(len, screen(state, now, width=44).splitlines())) <= 44


def test_an_old_speed_is_not_shown() -> None:
    state, now = folded("step", 12)
    assert state.tokens_per_s(now) == pytest.approx(4800) and state.tokens_per_s(now + 60) == 0


def test_an_evaluation_shows_how_many_attempts_are_left() -> None:
    state = State([Phase("before"), Phase("after")])
    state.fold({"at": 0.0, "kind": "phase", "phase": "before", "state": "start"})
    state.fold({"at": 0.0, "kind": "eval_progress", "label": "before", "done": 0, "total": 4})
    assert state.current is not None and state.current.seconds_left(1.0) is None  # no pace yet
    assert "0/4" in plain_line(state, 1.0) and "0/4" in screen(state, 1.0)
    state.fold({"at": 2.0, "kind": "eval_progress", "label": "before", "done": 2, "total": 4})
    assert (state.current.done, state.current.total) == (2, 4)
    assert state.current.seconds_left(2.0) == pytest.approx(2.0)
    assert "2/4" in plain_line(state, 2.0) and "about 0:02 left" in screen(state, 2.0)


def test_an_unknown_phase_is_shown_too() -> None:
    state = State([Phase("mid-train")])
    state.fold({"at": 1.0, "kind": "phase", "phase": "control", "state": "start"})
    assert "control" in screen(state, 2.0)


def write(directory: Path, event: dict[str, Any]) -> None:
    directory.mkdir(exist_ok=True)
    with (directory / f"{event['process']}.jsonl").open("a") as file:
        file.write(json.dumps({**event, "at": time.time()}) + "\n")


def test_a_log_gets_lines_as_things_happen(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    events = sorted(demo_run(steps=5).events, key=lambda event: event["at"])
    with Progress(tmp_path / "events", PHASES, "rollmill · demo", console) as progress:
        progress.update()  # before the first event there is not even a directory
        for event in events:
            write(tmp_path / "events", event)
        progress.update()
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.startswith("rollmill · demo\n") and "\x1b" not in text
    for name in PHASES:
        assert f"{name}: started" in text and f"{name}: done in 0:0" in text
    assert "after: held-out family, sampled: 76.2 % solved" in text and "engine-away was restarted" in text


def test_a_terminal_is_redrawn_in_place_and_restored(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, height=30)
    with pytest.raises(KeyboardInterrupt), Progress(tmp_path, PHASES, "rollmill · demo", console) as progress:
        write(tmp_path, {"process": "supervisor", "kind": "phase", "phase": PHASES[0], "state": "start"})
        progress.update()
        raise KeyboardInterrupt
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "●" in text and "✗" in text
    assert "\x1b[?25h" in text  # the cursor is back


def test_a_continued_run_counts_no_pause(tmp_path: Path) -> None:
    """The first part ended an hour ago, two steps after its newest checkpoint."""
    console, began = Console(file=io.StringIO(), force_terminal=False, width=200), time.time() - 4000
    old = [
        {"kind": "phase", "phase": name, "state": state, "at": began}
        for name in PHASES[:2]
        for state in ("start", "end")
    ]
    old += [{"kind": "phase", "phase": PHASES[2], "state": "start", "at": began}]
    old += [{"kind": "step", "step": step, "steps": 20, "at": began + 9 * step} for step in range(1, 13)]
    old += [{"kind": "warning", "text": "of old", "at": began}]
    (tmp_path / "trainer.jsonl").write_text(
        "".join(json.dumps({**event, "process": "trainer"}) + "\n" for event in old)
    )
    with Progress(tmp_path, PHASES, "t", console, continues=True) as progress:
        progress.update()
        state = progress._state
        assert state.current is None and plain_line(state, time.time()) == "waiting"
        assert [phase.end is not None for phase in state.phases[:3]] == [True, True, False]
        now = time.time()
        state.fold({"kind": "phase", "phase": PHASES[2], "state": "start", "at": now})
        assert state.current.seconds(now + 2) == pytest.approx(2)
        for step in (11, 12):
            state.fold({"kind": "step", "step": step, "steps": 20, "at": now + 3 * (step - 10)})
        assert "12/20" in plain_line(state, now + 6) and "about 0:24 left" in plain_line(state, now + 6)
    assert "of old" not in console.file.getvalue() and "done in" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_less_than_a_second_is_not_told() -> None:
    state = State([Phase("rl")])
    state.fold({"at": 0.0, "kind": "phase", "phase": "rl", "state": "start"})
    for step in (1, 2, 3):
        state.fold({"at": 2.0 * step, "kind": "step", "step": step, "steps": 4})
    assert "about 0:02 left" in plain_line(state, 6.0) and "left" not in plain_line(state, 9.0)


def test_untrusted_text_is_not_markup(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    with Progress(tmp_path, PHASES, "t", console):
        write(tmp_path, {"process": "trainer", "kind": "warning", "text": "[bold]no[/bold] [link=x]"})
    assert "[bold]no[/bold] [link=x]" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (59.6, "1:00"), (125, "2:05"), (3725, "1:02:05")])
def test_clock(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


def test_the_time_left_never_grows_within_a_step() -> None:
    phase = Phase("rl", start=0.0)
    for step in range(1, 4):
        phase.count(step, 10, at=10.0 * step)
    left = [phase.seconds_left(30.0 + waited) for waited in (0.0, 4.0, 10.0, 40.0)]
    assert left == [70.0, 66.0, 60.0, 60.0]
