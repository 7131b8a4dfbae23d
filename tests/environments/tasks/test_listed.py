"""Finite task sets: what is read, in which order and split, and what each mistake in a file is answered with."""

from __future__ import annotations

import base64
import itertools
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from rollmill.config import load_config
from rollmill.demo import CONFIG as DEMO
from rollmill.environments.tasks import lines
from rollmill.environments.tasks.jsonl import JsonlTasks
from rollmill.environments.tasks.task_directory import DirectoryTasks
from rollmill.environments.tasks.task_splits import TaskFileConfig
from rollmill.errors import ConfigError, TaskError
from rollmill.kinds import build
from rollmill.runs.preflight import check_tasks
from rollmill.runs.run import RunConfig, RunDirectory

GRADING = {"kind": "calls", "module": "main.py", "function": "f", "cases": [[[1], 2]]}


def entry(id: str, **more: Any) -> dict[str, Any]:
    return {"id": id, "instruction": f"do {id}", "submission": ["main.py"], "grading": GRADING, **more}


def write(path: Path, *rows: Any) -> TaskFileConfig:
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return TaskFileConfig(path=str(path))


def test_every_epoch_has_every_task_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    rows = [entry(f"t{number}") for number in range(20)]
    tasks = JsonlTasks(write(tmp_path / "a.jsonl", *rows, entry("held", split="heldout")))
    ids = [task.id for task in itertools.islice(tasks.train(3), 60)]
    epochs = [ids[:20], ids[20:40], ids[40:]]
    assert all(sorted(epoch) == sorted(row["id"] for row in rows) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    moved = JsonlTasks(write(tmp_path / "b.jsonl", *reversed(rows)))
    assert [task.id for task in itertools.islice(moved.train(3), 60)] == ids
    assert [task.id for task in itertools.islice(moved.train(4), 60)] != ids


def test_a_held_out_list_stays_when_tasks_are_added(tmp_path: Path) -> None:
    rows = [entry(f"h{number}", split="heldout") for number in range(9)]
    few = JsonlTasks(write(tmp_path / "a.jsonl", *rows))
    more = JsonlTasks(write(tmp_path / "b.jsonl", entry("t"), *reversed(rows)))
    assert few.heldout("heldout", 5) == more.heldout("heldout", 5) and len(few.heldout("heldout", 99)) == 9
    assert few.heldout("fresh", 5) == []
    with pytest.raises(TaskError, match="no training task"):
        few.train(0)
    with pytest.raises(TaskError, match="not held out"):
        more.heldout("train", 1)
    with pytest.raises(TaskError, match=r"no task 'x'"):
        few.get("x")


def test_everything_a_line_can_say(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "go"}]
    files = {"a/b.txt": "text é", "logo": {"base64": base64.b64encode(b"\x00\xff").decode()}}
    more = {"family": "x", "tags": {"area": "web"}, "image": "mine", "timeout_s": 5, "reference": {"main.py": "1"}}
    task = JsonlTasks(write(tmp_path / "a.jsonl", entry("a", instruction=messages, files=files, **more) | {})).get("a")
    assert task.messages == messages and task.files == {"a/b.txt": "text é".encode(), "logo": b"\x00\xff"}
    assert (task.family, task.tags, task.image, task.timeout_s) == ("x", {"area": "web"}, "mine", 5.0)
    assert task.reference == {"main.py": b"1"} and task.submission == ("main.py",) and task.grading == GRADING


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ('{"id": "a"', "not valid JSON.*each line is one JSON object"),
        ("\ufeff{}", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"id": "a", "timeout_s": 1e999, "instruction": "x"}', "timeout_s"),
        ('{"id": "a", "instruction": "\\ud800"}', "instruction|JSON"),
        ("[]", "valid dictionary|object"),
        (entry("a", instructions="x"), "unknown key 'instructions'; did you mean 'instruction'"),
        ({"id": "a"}, "instruction: Field required"),
        (entry("a", instruction=""), "instruction"),
        (entry(""), "id: "),
        (entry("a\n"), "id: .*control characters"),
        (entry("a", files={"../x": ""}), "files.*stay in it"),
        (entry("a", files={"/etc/x": ""}), "files.*stay in it"),
        (entry("a", files={"x": 3}), "files.x"),
        (entry("a", files={"x": {"base64": "??"}}), "files.x.*not base64"),
        (entry("a", submission=["a/../../x"]), "submission.*stay in it"),
        (entry("a", reference={"other.py": ""}), "'other.py', which is not handed in: add it to submission"),
        (entry("a", grading={"x": float("inf")}), "grading"),
        (entry("a", timeout_s=0), "timeout_s"),
        (entry("a", split="a b"), "split"),
        (entry("b"), r"task 'b' is also at .*a\.jsonl:1; give one of them another id"),
    ],
)
def test_a_bad_line_is_named_and_the_others_load(
    tmp_path: Path, row: Any, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        tasks = JsonlTasks(write(tmp_path / "a.jsonl", entry("b"), "", row, entry("c")))
    assert [task.id for task in tasks.listed()] == ["b", "c"]
    (problem,) = tasks.problems
    assert problem.startswith(f"{tmp_path}/a.jsonl:3: ") and len(problem) < 1100
    assert re.search(told, problem), problem
    assert problem in caplog.text


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", 1000)
    long = entry("long", family="x" * 5000)
    tasks = JsonlTasks(write(tmp_path / "a.jsonl", entry("a"), long, entry("b")))
    assert [task.id for task in tasks.listed()] == ["a", "b"] and ":2: longer than" in tasks.problems[0]


def test_a_file_without_a_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"no task, the first problem: .*a\.jsonl:1"):
        JsonlTasks(write(tmp_path / "a.jsonl", "{"))
    with pytest.raises(TaskError, match="has no task"):
        JsonlTasks(write(tmp_path / "a.jsonl"))
    with pytest.raises(TaskError, match="cannot be read: No such file"):
        JsonlTasks(TaskFileConfig(path=str(tmp_path / "none.jsonl")))
    with pytest.raises(TaskError, match="cannot be read: Is a directory"):
        JsonlTasks(TaskFileConfig(path=str(tmp_path)))


def test_splits_by_hash(tmp_path: Path) -> None:
    config = write(tmp_path / "a.jsonl", *(entry(f"t{n}") for n in range(400)), entry("own", split="fresh"))
    counts = JsonlTasks(config.model_copy(update={"heldout_share": 0.1})).splits()
    assert counts["fresh"] == 1 and 20 <= counts["heldout"] <= 60 and counts["train"] == 400 - counts["heldout"]
    grown = write(tmp_path / "b.jsonl", *(entry(f"t{n}") for n in range(500))).model_copy(update={"heldout_share": 0.1})
    few, more = JsonlTasks(config.model_copy(update={"heldout_share": 0.1})), JsonlTasks(grown)
    assert all(more.get(task.id).split == task.split for task in few.listed() if task.id != "own")


def test_splits_by_list(tmp_path: Path) -> None:
    rows = [entry("a"), entry("b"), entry("c", split="heldout"), entry("d", split="train"), entry("e", split="train")]
    config = write(tmp_path / "a.jsonl", *rows)
    (tmp_path / "ids.txt").write_text("b\n\nc\ne\nmissing\n")
    tasks = JsonlTasks(config.model_copy(update={"heldout": str(tmp_path / "ids.txt")}))
    assert {task.id: task.split for task in tasks.listed()} == {
        "a": "train",
        "b": "heldout",
        "c": "heldout",
        "d": "train",
    }
    two, unmet = tasks.problems
    assert "a.jsonl:5: task 'e' says split 'train', but" in two and "puts it into 'heldout'" in two
    assert "ids.txt:5: no task has the id 'missing'" in unmet
    with pytest.raises(ValueError, match="not both"):
        TaskFileConfig(path="x", heldout="y", heldout_share=0.5)
    with pytest.raises(TaskError, match=r"list of held-out tasks .* cannot be read"):
        JsonlTasks(config.model_copy(update={"heldout": str(tmp_path / "none")}))


def test_a_folder_per_task(tmp_path: Path) -> None:
    for name in ("good", "toml", "link", "lost", "none", "date"):
        (tmp_path / name / "files" / "sub").mkdir(parents=True)
        (tmp_path / name / "task.toml").write_text('instruction = "go"\nsubmission = ["main.py"]\n')
    good = tmp_path / "good"
    (good / "task.toml").write_text(
        'submission = ["main.py"]\n[grading]\nkind = "script"\ncommand = ["python3", "t.py"]'
    )
    (good / "instruction.md").write_text("Do it.")
    (good / "files/sub/x.bin").write_bytes(b"\xff")
    for folder in ("reference", "grading"):
        (good / folder).mkdir()
    (good / "reference/main.py").write_text("right")
    (good / "grading/t.py").write_text("import main")
    (tmp_path / "toml/task.toml").write_text("x = ")
    (tmp_path / "link/files/passwd").symlink_to("/etc/passwd")
    (tmp_path / "lost/reference").mkdir()
    (tmp_path / "lost/reference/other.py").write_text("")
    (tmp_path / "none/task.toml").unlink()
    (tmp_path / "date/task.toml").write_text('instruction = "x"\nfamily = 2020-01-01\n')
    tasks = DirectoryTasks(TaskFileConfig(path=str(tmp_path)))
    task = tasks.get("good")
    assert (task.instruction, task.files, task.reference) == ("Do it.", {"sub/x.bin": b"\xff"}, {"main.py": b"right"})
    grading = {"kind": "script", "command": ["python3", "t.py"], "files": {"t.py": "import main"}}
    assert task.grading == grading and list(tasks.tasks) == ["good"]
    told = dict(zip(("date", "link", "lost", "none", "toml"), tasks.problems, strict=True))
    assert all(f"{tmp_path}/{name}/task.toml: " in problem for name, problem in told.items())
    assert "quote dates" in told["date"] and "is a link" in told["link"] and "task.toml: No such" in told["none"]
    assert "reference/other.py is not handed in" in told["lost"] and "not valid" in told["toml"]


def test_paths_start_in_the_directory_of_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").mkdir()
    write(tmp_path / "own" / "t.jsonl", entry("a"), entry("b"))
    (tmp_path / "own" / "ids.txt").write_text("b\n")
    text = DEMO.read_text().replace("rollmill.demo.micro_repos:MicroRepos", "jsonl")
    (tmp_path / "own" / "run.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    config = load_config(RunConfig, Path("own/run.toml"), ["tasks.path=t.jsonl", "tasks.heldout=ids.txt"])
    run = RunDirectory.create(tmp_path / "runs", config)
    monkeypatch.chdir("/")
    tasks = build(RunDirectory.open(run.path).config.tasks)  # type: ignore[arg-type]
    assert isinstance(tasks, JsonlTasks) and tasks.splits() == {"train": 1, "heldout": 1}
    with pytest.raises(ConfigError, match="unknown key 'pth'; did you mean 'path'"):
        load_config(RunConfig, tmp_path / "own" / "run.toml", ["tasks.pth=t.jsonl"])
    with pytest.raises(ConfigError, match="path"):
        load_config(RunConfig, tmp_path / "own" / "run.toml", ["tasks.path=3"])


def test_a_constructor_that_raises_is_named(tmp_path: Path) -> None:
    (tmp_path / "raising_tasks.py").write_text(
        "from rollmill import ListedTasks\nclass Own(ListedTasks):\n    def __init__(self) -> None:\n        1 / 0\n"
    )
    (tmp_path / "run.toml").write_text(
        DEMO.read_text().replace("rollmill.demo.micro_repos:MicroRepos", "raising_tasks:Own")
    )
    config = load_config(RunConfig, tmp_path / "run.toml")
    with pytest.raises(ConfigError, match=r'kind = "raising_tasks:Own": Own raised ZeroDivisionError'):
        build(config.tasks)  # type: ignore[arg-type]


def test_a_split_without_tasks_is_named_before_the_run_begins(tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl", entry("a"), entry("b", split="heldout"))
    (tmp_path / "run.toml").write_text(DEMO.read_text().replace("rollmill.demo.micro_repos:MicroRepos", "jsonl"))
    settings = ["tasks.path=t.jsonl", "evals.fresh_tasks=0"]
    with pytest.raises(TaskError, match=r"no tasks in the split 'heldout_family', which \[evals\] measures"):
        check_tasks(load_config(RunConfig, tmp_path / "run.toml", settings))
    check_tasks(load_config(RunConfig, tmp_path / "run.toml", [*settings, "evals.family_tasks=0"]))
