"""`rollmill trajectories list | show` over a run directory and over a database."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rollmill.chat.tokenizer import Tokenizer, train_tokenizer
from rollmill.cli.experience.trajectory_commands import app
from rollmill.config import load_config
from rollmill.demo import CONFIG as DEMO
from rollmill.errors import ConfigError, TrajectoryError
from rollmill.gateway.recording.entries import encode_open, encode_turn
from rollmill.gateway.sessions.segments import Turn
from rollmill.gateway.sessions.sessions import parse_facts
from rollmill.gateway.wire.answer import Answer
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.trajectories.ledger import Ledger
from rollmill.trajectories.payload import encode_trajectory, seal_facts
from rollmill.trajectories.staleness import Pace
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Grade, Sampling, Span
from tests.trajectories import build
from tests.trajectories.build import start_group

CALL = {"name": "edit", "arguments": '{"path": "clamp.py", "new": "if x:\\n    return hi"}'}
MESSAGES = [
    {"role": "user", "content": "Fix clamp"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": CALL}]},
    {"role": "tool", "name": "edit", "content": "ok \x1b[2J\u202eevil [bold]text[/bold]"},
    {"role": "assistant", "content": "Done."},
]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """Four trajectories of a group: one solved, one failed, one not solved, one running."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    run = RunDirectory.create(Path("runs"), load_config(RunConfig, DEMO, ['name="demo"']))
    engine, objects = open_database(run.database_url), Objects.open(run.home_store)
    store = TrajectoryStore(engine, objects)
    ids = [f"demo-1-{number}" for number in range(4)]
    provenance = {"split": "train", "family": "bug", "image": "python"}
    start_group(Ledger(engine, "demo"), "demo-1", "bug/7", 4, pace=Pace(1, 1, 0), ids=ids, provenance=provenance)
    solved = build.trajectory(ids[0], segments=[build.segment()], messages=MESSAGES)
    solved.provenance["image"] = "python@sha256:0a1b"  # the index has the name alone: it is written before the machine
    objects.create("trajectories/0", encode_trajectory(solved))
    store.finish(ids[0], "trajectories/0", None, **seal_facts(solved))
    store.grade(ids[0], Grade(1.0, {"tests": 0.75}, {"output": "3 passed"}, "calls"))
    store.add_feedback(ids[0], "thumb", 1.0, {"by": "somebody"})
    store.fail(ids[1], "machine: no namespaces\nhint: run the doctor")
    store.finish(ids[2], "trajectories/lost", None, tokens=9, sampled_tokens=4, segments=1)
    store.grade(ids[2], Grade(0.0))
    store.create("demo", "", "heldout/1", ["eval-1"], {"split": "heldout"})
    return run


def call(*arguments: Any) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_list(run: RunDirectory) -> None:
    everything = call("list", run.path)
    assert [line.split()[0] for line in everything.splitlines()[1:]] == ["eval-1", *(f"demo-1-{n}" for n in range(4))]
    solved = next(line for line in everything.splitlines() if line.startswith("demo-1-0"))
    assert solved.split()[1:8] == ["graded", "1", "bug/7", "train", "6/12", "rl@3–4", *solved.split()[7:8]]
    failed = call("list", "--state", "failed")  # the newest run under runs/
    assert "demo-1-1" in failed and "no namespaces" in failed and "demo-1-0" not in failed
    assert "eval-1" in call("list", "--split", "heldout", "--database", f"sqlite:///{run.path}/mill.db")
    with pytest.raises(ConfigError, match=r"no trajectory has the split 'trian'[\s\S]*splits here: heldout, train"):
        call("list", run.path, "--split", "trian")
    assert "--limit 8 shows them" in call("list", "--limit", 2)
    assert "no trajectories match" in call("list", "--state", "quarantined")


def test_a_person_takes_a_trajectory_out_of_training_and_back(run: RunDirectory) -> None:
    assert (
        call("quarantine", run.path, "demo-1-0", "--reason", "it deleted the test").strip() == "demo-1-0: quarantined"
    )
    told = call("list", run.path, "--state", "quarantined")
    assert "it deleted the test" in told and listed(run.path, "--state", "quarantined") == ["demo-1-0"]
    assert "it deleted the test" in call("show", "demo-1-0", run.path)
    assert "left out: 1 quarantined" in call("export", run.path, "all.jsonl", "--everything")
    assert call("quarantine", run.path, "demo-1-0", "--release").strip() == "demo-1-0: released"
    assert "demo-1-0" in listed(run.path, "--state", "graded")
    with pytest.raises(ConfigError, match="--reason, or --release"):
        call("quarantine", run.path, "demo-1-0")
    with pytest.raises(TrajectoryError, match="demo-1-1 is failed"):
        call("quarantine", run.path, "demo-1-1", "--reason", "no")
    store = TrajectoryStore(open_database(run.database_url), Objects.open(run.home_store))
    store.finish("demo-1-3", "trajectories/lost", None, tokens=9, sampled_tokens=4, segments=1)
    with pytest.raises(TrajectoryError, match="demo-1-3 is being graded"):
        call("quarantine", run.path, "demo-1-3", "--reason", "no")


def listed(*arguments: Any) -> list[str]:
    return [json.loads(line)["id"] for line in call("list", "--json", *arguments).splitlines()]


def test_list_filters_and_sorts(run: RunDirectory) -> None:
    assert listed("--solved") == listed("--reward", "0.5..") == ["demo-1-0"]
    assert listed("--failed") == listed("--state", "failed") == ["demo-1-1"]
    assert listed("--reward", "0") == listed("--reward", "..0.5") == listed("--length", "5..10") == ["demo-1-2"]
    assert listed("--task", "bug/") == [f"demo-1-{number}" for number in range(4)]
    assert listed("--task", "heldout/1") == ["eval-1"]
    assert listed("--version", "3") == listed("--version", "rl@4") == listed("--version", "4..9") == ["demo-1-0"]
    assert listed("--version", "5..") == listed("--version", "main@3") == []
    assert listed("--sort", "reward")[:2] == listed("--sort", "length")[:2] == ["demo-1-0", "demo-1-2"]
    assert listed("--sort", "task")[-1] == "eval-1" == listed("--sort", "oldest", "--limit", 5)[-1]
    assert listed("--sort", "version", "--limit", 1) == ["demo-1-0"]
    row = json.loads(call("list", "--json", "--solved"))
    assert (row["reward"], row["tokens"], row["provenance"]["family"]) == (1.0, 12, "bug")


def test_list_never_cuts_an_id(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "demo-after-0a1b2c-heldout_family-sampled-0123-45"
    store = TrajectoryStore(open_database(run.database_url), Objects.open(run.home_store))
    store.create("demo", "", "a task with a name of some length", [long], {"split": "heldout_family"})
    store.fail(long, "a reason " * 50)
    for columns, terminal in (("40", "1"), ("80", "1"), ("40", "0")):
        monkeypatch.setenv("COLUMNS", columns)
        monkeypatch.setenv("FORCE_COLOR" if terminal == "1" else "NO_COLOR", "1")
        assert long in call("list") and long in call("show", long)
        assert terminal == "1" or "a task with a name of some length" in call("list")
        monkeypatch.delenv("FORCE_COLOR", raising=False)


def test_list_fits_a_terminal(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TrajectoryStore(open_database(run.database_url), Objects.open(run.home_store))
    monkeypatch.setenv("FORCE_COLOR", "1")
    for long in ("demo-0a1b2c-rl-31-3", "demo-after-0a1b2c-heldout_family-sampled-0123-45"):
        store.create("demo", "", "a task with a name", [long], {"split": "heldout_family"})
        store.fail(long, "a reason " * 50)
        for columns in (80, 110, 160):
            monkeypatch.setenv("COLUMNS", str(columns))
            lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in call("list").splitlines()]
            assert max(map(len, lines)) <= columns, lines
            line = next(line for line in lines if line.startswith(long))
            assert line.split()[1] == "failed" and " a reas" in line
            assert ("a task with a name" in line) == (columns > 80 or len(long) < 20), lines


def test_show_finds_an_id_in_any_run(run: RunDirectory) -> None:
    other = RunDirectory.create(Path("runs"), load_config(RunConfig, DEMO, ['name="other"']))
    os.utime(other.path / "run.json", (2e9, 2e9))  # the newest, and without trajectories
    assert "demo-1-0 graded" in call("show", "demo-1-0")
    with pytest.raises(ConfigError, match="has no trajectories yet"):
        call("show", "demo-1-0", other.path)
    with pytest.raises(TrajectoryError, match=r"no trajectory begins with 'nobody' in runs/demo[\s\S]*list"):
        call("show", "nobody", run.path)


def test_show_an_open_session(run: RunDirectory) -> None:
    """Shows what is in the gateway's log; the gateway may be writing the next entry."""
    facts = parse_facts({"trajectory": "demo-1-3", "run": "demo"})
    answer = Answer([5, 6], [-0.1, -0.2], [0, 0], build.POLICIES[:1], [], [], "stop", True, MESSAGES[3])
    answer.spans = [Span(3, 5, Sampling(), "stop", "engine-0", "home", "rollout", 1.0, 2.0, 0)]
    data = encode_open(facts) + encode_turn("demo-1-3", Turn("demo-1-3.0", [MESSAGES[0]], [1, 2, 3], answer))
    (run.path / "gateway").mkdir()
    (run.path / "gateway" / "sessions.log").write_bytes(data + data[:40])
    text = call("show", "demo-1-3")
    assert "demo-1-3 running" in text and "Fix clamp" in text and "assistant  rl@3 · 2 tokens" in text


def test_show_prints_the_conversation(run: RunDirectory) -> None:
    text = call("show", "demo-1-0", run.path)
    for part in (
        "demo-1-0 graded 1",
        "bug/7 · bug · train",
        "python@sha256:0a1b",
        "demo · admitted",
        "demo-1  1 failed 0 running",
        "assistant  rl@3 → rl@4 · 3 tokens",  # the weights changed in the middle of the first answer
        "assistant  rl@4 · 3 tokens",
        "engine-0 (home)",
        "▶ edit\n    path: clamp.py\n    new: \n      if x:\n          return hi",
        "Done.",
        "calls  tests 0.75",
        "output: 3 passed",
        "feedback  thumb 1",
    ):
        assert part in text, part
    assert "[bold]text[/bold]" in text  # not interpreted as markup
    assert "\x1b" not in text and "\u202e" not in text  # and no control characters for the terminal


def test_show_tokens(run: RunDirectory) -> None:
    Tokenizer(train_tokenizer(["def clamp(x, lo, hi): return max(lo, min(x, hi))"], 300, ["<end>"])).save(run.tokenizer)
    text = call("show", "demo-1-0", "--tokens")
    assert "segment s0 (start)" in text and text.count("⟨rl@3⟩") == text.count("⟨rl@4⟩") == 1


def test_show_takes_the_beginning_of_an_id(run: RunDirectory) -> None:
    assert "eval-1 running" in call("show", "ev")
    with pytest.raises(TrajectoryError, match="4 trajectories begin with 'demo'"):
        call("show", "demo")
    with pytest.raises(TrajectoryError, match="no trajectory begins with '%'"):
        call("show", "%")


def test_show_without_a_payload_or_with_a_damaged_one(run: RunDirectory) -> None:
    assert "hint: run the doctor" in call("show", "demo-1-1")
    broken = call("show", "demo-1-2")
    assert "payload cannot be read" in broken and "reward #2  0" in broken


def test_long_messages_are_cut_unless_full(run: RunDirectory) -> None:
    store = TrajectoryStore(open_database(run.database_url), Objects.open(run.home_store))
    long = build.trajectory(
        "long", segments=[build.segment()], messages=[{"role": "tool", "content": "x" * 9000 + "end"}]
    )
    store.create("demo", "", "", ["long"], {})
    Objects.open(run.home_store).create("trajectories/long", encode_trajectory(long))
    store.finish("long", "trajectories/long", None, **seal_facts(long))
    assert "characters left out" in call("show", "long") and "xend" in call("show", "long")
    assert "characters left out" not in call("show", "long", "--full")


def test_answers_that_are_not_in_the_messages_are_shown_separately(run: RunDirectory) -> None:
    """A client that rewrote its history: three segments, and a conversation with only one of the answers."""
    store = TrajectoryStore(open_database(run.database_url), Objects.open(run.home_store))
    edited = build.trajectory("edited", messages=[{"role": "assistant", "content": "hm"}] * 9)
    store.create("demo", "", "", ["edited"], {})
    Objects.open(run.home_store).create("trajectories/edited", encode_trajectory(edited))
    store.finish("edited", "trajectories/edited", None, **seal_facts(edited))
    text = call("show", "edited")
    assert "3 (start,summary,sub_agent)" in text and "s1 (summary)  rl@3 → rl@4 · 3 tokens" in text


def test_mistakes(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, message in (
        (["list", "--state", "sleeping"], "no state 'sleeping'"),
        (["list", "--sort", "beauty"], "--sort 'beauty' is unknown"),
        (["list", "--reward", "much"], "--reward 'much' is not a range"),
        (["list", "--failed", "--state", "graded"], "exclude each other"),
        (["list", tmp_path / "nowhere"], "holds no run"),
        (["list", "--database", "sqlite:///nowhere.db"], "does not exist"),
        (["show", "x", "--database", f"sqlite:///{run.path}/mill.db"], "needs --objects"),
        (["show", "demo-1-0", "--tokens"], "tokenizer"),
        (["show", run.path, "demo-1-0"], "is a run, not the id of a trajectory"),
    ):
        with pytest.raises(ConfigError, match=message):
            call(*arguments)
    monkeypatch.chdir("/")
    with pytest.raises(ConfigError, match="no run under runs/"):
        call("list")
