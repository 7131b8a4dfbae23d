"""`rollmill trajectories export`: the OpenAI form can be read back, Parquet has the exact tokens."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from rollmill.chat.formats.choice import format_of
from rollmill.chat.formats.compact import SPECIAL_TOKENS
from rollmill.chat.rendered_conversation import render_conversation
from rollmill.chat.tokenizer import Tokenizer, train_tokenizer
from rollmill.cli.experience.trajectory_commands import app
from rollmill.config import LocalPath, load_config
from rollmill.demo import CONFIG as DEMO
from rollmill.errors import ConfigError
from rollmill.runs.run import RunConfig, RunDirectory
from rollmill.storage.database import open_database
from rollmill.storage.objects import Objects
from rollmill.training.pretraining.source import SourceContext
from rollmill.training.pretraining.sources.conversations import Conversations, ConversationSettings
from rollmill.trajectories.payload import encode_trajectory, seal_facts
from rollmill.trajectories.trajectory_store import TrajectoryStore
from rollmill.types import Grade, TrafficClass
from tests.trajectories import build

PATH = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": PATH}}]


def calls(*arguments: str) -> list[dict[str, Any]]:
    return [{"id": "x", "type": "function", "function": {"name": "read", "arguments": each}} for each in arguments]


MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Fix «über»"},
    {"role": "assistant", "content": None, "tool_calls": calls('{"path": "a.py"}', '{"path": "b.py"}')},
    {"role": "tool", "content": "def a(): …"},
    {"role": "tool", "content": "def b(): …"},
    {"role": "assistant", "content": "Again.", "tool_calls": calls("{broken")},
    {"role": "tool", "content": "error"},
    {"role": "assistant", "content": "Done."},
]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Rewards 1, 0.25 and 0 of tasks a, b and b; one whose payload is lost; one that is quarantined; one that runs."""
    run = RunDirectory.create(tmp_path, load_config(RunConfig, DEMO, ['name="demo"']))
    objects = Objects.open(run.home_store)
    store = TrajectoryStore(open_database(run.database_url), objects)
    for id, task, reward in (
        ("t1", "a/1", 1.0),
        ("t2", "b/1", 0.25),
        ("t3", "b/2", 0.0),
        ("t4", "c", 1.0),
        ("t5", "d", 1.0),
    ):
        store.create(run.id, "g", task, [id], {"split": "train"})
        made = build.trajectory(id, task_id=task, messages=MESSAGES, provenance={"split": "train", "tools": TOOLS})
        if id != "t4":
            objects.create(f"trajectories/{id}", encode_trajectory(made))
        store.finish(id, f"trajectories/{id}", None, **seal_facts(made))
        store.grade(id, Grade(reward, {"tests": reward}, grader="tests"))
    store.quarantine("t5", "a secret")
    store.create(run.id, "g", "e", ["t6"], {"split": "train"})
    return run


def call(*arguments: Any) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_openai_form_is_read_back_with_the_same_tokens(run: RunDirectory, tmp_path: Path) -> None:
    out = tmp_path / "out" / "all.jsonl"
    told = call("export", run.path, out)
    assert "3 trajectories" in told and all(
        f"left out: 1 {reason}" in told for reason in ("payload cannot be read", "quarantined", "running")
    )
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    first = lines[0]
    assert [line["metadata"]["trajectory"] for line in lines] == ["t1", "t2", "t3"] and first["tools"] == TOOLS
    assert first["metadata"]["reward"] == 1.0 and first["metadata"]["rewards"][0]["parts"] == {"tests": 1.0}
    ids = [call["id"] for message in first["messages"] for call in message.get("tool_calls", [])]
    assert ids == ["call_0", "call_1", "call_2"]
    assert [each["tool_call_id"] for each in first["messages"] if each["role"] == "tool"] == ids
    tokenizer = Tokenizer(train_tokenizer(["Fix"], 300, SPECIAL_TOKENS))
    context = SourceContext(tokenizer, format_of(tokenizer), 4096, 1, 0, tmp_path / "index")
    documents = Conversations(ConversationSettings(path=LocalPath(out))).documents(context)
    assert documents.count == 3 and not documents.skipped
    expected = render_conversation(MESSAGES, TOOLS, context.format)
    assert documents.read(0, 0) == (expected.tokens, expected.learnt, ())


@pytest.mark.parametrize(
    ("filters", "ids"),
    [
        (["--reward", "0.2.."], ["t1", "t2"]),
        (["--solved"], ["t1"]),
        (["--task", "b"], ["t2", "t3"]),
        (["--state", "graded", "--sort", "reward", "--limit", "2"], ["t1", "t2"]),
    ],
)
def test_filters(run: RunDirectory, tmp_path: Path, filters: list[str], ids: list[str]) -> None:
    call("export", run.path, tmp_path / "out.jsonl", *filters)
    lines = (tmp_path / "out.jsonl").read_text().splitlines()
    assert [json.loads(line)["metadata"]["trajectory"] for line in lines] == ids


def test_parquet_has_the_exact_tokens(run: RunDirectory, tmp_path: Path) -> None:
    call("export", run.path, tmp_path / "out.parquet", "--format", "parquet")
    rows = pyarrow.parquet.read_table(tmp_path / "out.parquet").to_pylist()
    expected = build.trajectory("t1").segments
    assert len(rows) == 9 and [row["segment"] for row in rows[:3]] == ["s0", "s1", "s2"]
    for row, segment in zip(rows, expected, strict=False):
        assert row["tokens"] == segment.tokens.tolist() and row["sampled"] == segment.sampled.tolist()
        assert row["policy"] == segment.policy.tolist() and row["policies"] == [vars(p) for p in segment.policies]
        assert np.array_equal(np.array(row["logprobs"], np.float32), segment.logprobs, equal_nan=True)
        assert (row["parent"], row["shared_tokens"]) == (segment.parent or (None, 0)) and row["cause"] == segment.cause
    assert rows[0]["reward"] == 1.0 and json.loads(rows[0]["messages"]) == MESSAGES
    assert json.loads(rows[0]["tools"]) == TOOLS and json.loads(rows[0]["rewards"])[0]["grader"] == "tests"


def test_exports_that_are_refused(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "there").write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        call("export", run.path, tmp_path / "there")
    assert (tmp_path / "there").read_text() == "mine"
    with pytest.raises(ConfigError, match="--format 'csv' is unknown"):
        call("export", run.path, tmp_path / "out", "--format", "csv")
    with pytest.raises(ConfigError, match="cannot be written"):
        call("export", run.path, tmp_path / "there" / "out")
    real = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("pyarrow"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"pip install 'rollmill\[parquet\]'"):
        call("export", run.path, tmp_path / "out", "--format", "parquet")
    assert not list(tmp_path.glob("*out*")), "nothing is left behind"


def test_what_nobody_may_train_on_is_left_out_unless_it_is_asked_for(run: RunDirectory, tmp_path: Path) -> None:
    """An export is the way to a dataset: with held-out tasks in it, nothing measures what was learnt from it."""
    objects = Objects.open(run.home_store)
    store = TrajectoryStore(open_database(run.database_url), objects)
    for id, key, facts in (
        ("held", run.id, {"split": "heldout"}),
        ("eval", f"{run.id}/eval-before", {"split": "train"}),
        ("live", "production", {"run": run.id, "consent": "train"}),
        ("private", "production", {"run": run.id, "consent": "store"}),
        ("silent", "production", {"run": run.id}),
    ):
        traffic: TrafficClass = "production" if key == "production" else "rollout"
        store.create(key, "g", "a/9", [id], facts, traffic)
        made = build.trajectory(id, task_id="a/9", messages=MESSAGES)
        objects.create(f"trajectories/{id}", encode_trajectory(made))
        store.finish(id, f"trajectories/{id}", None, **seal_facts(made))
        store.grade(id, Grade(1.0))

    def exported(*options: str) -> tuple[list[str], str]:
        out = tmp_path / f"{len(list(tmp_path.glob('*.jsonl')))}.jsonl"
        told = call("export", run.path, out, "--solved", *options)
        return [json.loads(line)["metadata"]["trajectory"] for line in out.read_text().splitlines()], told

    names, told = exported()
    assert names == ["t1", "live"]
    for reason in ("1 of the split heldout", "1 of an evaluation", "2 without consent to training"):
        assert f"left out: {reason}" in told
    assert exported("--split", "heldout")[0] == ["held"]
    assert exported("--everything")[0] == ["t1", "held", "eval", "live", "private", "silent"]
    assert exported("--everything", "--limit", "2")[0] == ["t1", "held"]
