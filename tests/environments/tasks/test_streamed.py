"""A file of tasks is indexed in one pass and read task by task: counted, not timed."""

from __future__ import annotations

import itertools
import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmill.environments.sampler import Draw, Results
from rollmill.environments.samplers.frontier import Frontier, FrontierConfig
from rollmill.environments.samplers.uniform import Uniform
from rollmill.environments.tasks import jsonl, streamed
from rollmill.environments.tasks.jsonl import JsonlTasks
from rollmill.environments.tasks.lines import read_jsonl
from rollmill.environments.tasks.listed import ListedTasks
from rollmill.environments.tasks.mixed import MixedTasks
from rollmill.environments.tasks.task_splits import TaskFileConfig
from rollmill.errors import StorageError, TaskError
from rollmill.storage.objects import Objects
from tests.hub import Hub, running_hub
from tests.storage.serving import new_bucket, s3_environment, s3_server


def write(path: Path, count: int, **more: object) -> TaskFileConfig:
    """Tasks in an order that is not that of their ids; every tenth is held out."""
    order = random.Random(3).sample(range(count), count)
    rows = (
        {"id": f"t{n}", "instruction": "Do it.", "family": f"f{n % 7}", "split": None if n % 10 else "heldout", **more}
        for n in order
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return TaskFileConfig(path=str(path))


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """The lines that were read as tasks."""
    lines, parse = list[bytes](), jsonl._parse

    def counted(line: bytes) -> object:
        lines.append(line)
        return parse(line)

    monkeypatch.setattr(jsonl, "_parse", counted)
    monkeypatch.setattr(streamed, "CHECKED", 50)
    return lines


def in_memory(config: TaskFileConfig) -> ListedTasks:
    return ListedTasks(*read_jsonl(config, lambda line: jsonl.validate(jsonl.TaskEntry, line).task()))


def test_tasks_of_an_object_store_are_fetched_again_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**s3_environment(s3_server()), "XDG_CACHE_HOME": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("rollmill.storage.fetched._PART", 1000)  # several requests
    bucket = new_bucket()
    url, objects = f"{bucket}/tasks.jsonl", Objects.open(bucket)
    with pytest.raises(StorageError, match="there is no object"):
        JsonlTasks(TaskFileConfig(path=url))
    for count in (40, 60):
        expected = JsonlTasks(write(tmp_path / "a.jsonl", count))
        objects.put("tasks.jsonl", (tmp_path / "a.jsonl").read_bytes())
        for _ in range(2):
            found = JsonlTasks(TaskFileConfig(path=url))
            assert [found.get(f"t{n}") for n in range(count)] == [expected.get(f"t{n}") for n in range(count)]
    assert len(list((tmp_path / "cache" / "rollmill" / "fetched").rglob("*.jsonl"))) == 2


def test_tasks_from_parquet_are_those_from_jsonl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a file, and from a dataset of a small hub on loopback (tests/hub.py)."""
    import pyarrow
    import pyarrow.parquet

    config = write(tmp_path / "a.jsonl", 300, files={"a.py": "x"}, grading={"kind": "calls", "cases": [[["1"], ["2"]]]})
    rows = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    rows = [{**row, "timeout_s": None if n else 2.5} for n, row in enumerate(rows)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[::-1]), tmp_path / "a.parquet")
    expected = [JsonlTasks(config).get(f"t{n}") for n in range(300)]
    found = JsonlTasks(TaskFileConfig(path=str(tmp_path / "a.parquet")))
    assert [found.get(f"t{n}") for n in range(300)] == expected and not found.problems
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with running_hub(Hub({"datasets/acme/tasks": {"a.parquet": (tmp_path / "a.parquet").read_bytes()}})) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        found = JsonlTasks(TaskFileConfig(path="hf://datasets/acme/tasks/a.parquet"))
    assert [found.get(f"t{n}") for n in range(300)] == expected
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(TaskError, match=r"b\.parquet is no whole Parquet file"):
        JsonlTasks(TaskFileConfig(path=str(tmp_path / "b.parquet")))


def test_the_choices_are_those_of_tasks_in_memory(tmp_path: Path, parsed: list[bytes]) -> None:
    config = write(tmp_path / "a.jsonl", 300)
    held, tasks = in_memory(config), JsonlTasks(config)
    assert list(tasks.listed()) == list(held.listed()) and tasks.splits() == held.splits()
    assert tasks.train_ids() == held.train_ids() and tasks.heldout("heldout", 9) == held.heldout("heldout", 9)
    assert list(itertools.islice(tasks.train(4), 600)) == list(itertools.islice(held.train(4), 600))
    assert list(itertools.islice(tasks.train_from(4, 555), 9)) == list(itertools.islice(held.train(4), 555, 564))
    for one, other in ((tasks, held), (MixedTasks({"e": tasks}, {"e": 1.0}), MixedTasks({"e": held}, {"e": 1.0}))):
        first, second, results = Frontier(FrontierConfig()), Frontier(FrontierConfig()), Results()
        parts = (one.parts["e"], other.parts["e"]) if isinstance(one, MixedTasks) else (one, other)  # type: ignore[union-attr]
        for index in range(100):
            draw = Draw(index, 7, index / 100, results)
            task = first.choose(parts[0], draw)
            assert task == second.choose(parts[1], draw)
            for attempt in range(4):
                results.of(task.id).add(reward=attempt % 2, solved=False, turns=1, tokens=1)


@pytest.mark.parametrize("count", [1_000, 100_000])
def test_the_pass_and_each_choice_read_what_they_need(tmp_path: Path, parsed: list[bytes], count: int) -> None:
    tasks = JsonlTasks(write(tmp_path / "a.jsonl", count))
    assert len(parsed) == 50 and tasks.problems == []
    parsed.clear()
    uniform, frontier, results = Uniform(), Frontier(FrontierConfig()), Results()
    frontier.check(tasks)
    assert not parsed
    for index in range(40):
        uniform.choose(tasks, Draw(index, 7, 0.0, results))
        task = frontier.choose(tasks, Draw(index, 7, index / 40, results))
        results.of(task.id).add(reward=index % 2, solved=False, turns=1, tokens=1)
    assert len(parsed) == 80, "one per choice"
    parsed.clear()
    resumed = Uniform().choose(tasks, Draw(39, 7, 0.0, results))
    assert resumed == uniform.choose(tasks, Draw(39, 7, 0.0, results)) and len(parsed) == 1
    tasks.get("t7"), tasks.heldout("heldout", 5)
    assert len(parsed) == 1 + 1 + 5


def test_memory_per_task_does_not_depend_on_what_tasks_hold(tmp_path: Path, parsed: list[bytes]) -> None:
    kept = []
    for count in (2_000, 12_000):
        config = write(tmp_path / "a.jsonl", count, files={"main.py": "x" * 500})
        parsed.clear()
        tracemalloc.start()
        tasks = JsonlTasks(config)
        parsed.clear()
        kept.append(tracemalloc.get_traced_memory()[0])
        tracemalloc.stop()
        assert len(tasks.by_rank().family_T) == 0.9 * count
    assert (kept[1] - kept[0]) / 10_000 < 50, "bytes per task"


def test_a_line_behind_the_checked_ones_is_named_when_it_is_asked_for(tmp_path: Path, parsed: list[bytes]) -> None:
    path = tmp_path / "a.jsonl"
    config = write(path, 60)
    rows = [
        {"id": "a", "instruction": "Do it.", "files": {"../x": ""}},  # not seen in the pass
        {"id": "b", "instruction": "Do it.", "file": {}},
        {"id": "b\n", "instruction": "Do it."},
        {"id": "t7", "instruction": "Do it."},
        "{",
        {"id": "c", "instruction": "Do it.", "split": "a b"},
        {"id": "d", "instruction": "Do it."},
    ]
    with path.open("a") as file:
        file.writelines(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    tasks = JsonlTasks(config)
    assert [problem.partition(": ")[0] for problem in tasks.problems] == [f"{path}:{n}" for n in (62, 63, 64, 65, 66)]
    assert "did you mean 'files'" in tasks.problems[0] and f"'t7' is also at {path}:" in tasks.problems[2]
    with pytest.raises(TaskError, match=r"a\.jsonl:61: files.*stay in it"):
        tasks.get("a")
    assert tasks.get("d").id == "d" and len(list(tasks.listed())) == 61
    assert f"{path}:61: files" in tasks.problems[-1] and len(tasks.problems) == 6
    mixed = MixedTasks({"e": tasks}, {"e": 1.0})
    assert mixed.problems[-1].startswith(f"e: {path}:61: ")


def test_a_file_that_is_replaced_is_read_on_and_one_that_is_changed_is_told(tmp_path: Path) -> None:
    config = write(tmp_path / "a.jsonl", 20)
    tasks = JsonlTasks(config)
    before = list(tasks.listed())
    write(tmp_path / "b.jsonl", 5)
    (tmp_path / "b.jsonl").rename(tmp_path / "a.jsonl")
    assert list(tasks.listed()) == before and len(list(JsonlTasks(config).listed())) == 5
    changed = JsonlTasks(config)
    text = (tmp_path / "a.jsonl").read_text()
    (tmp_path / "a.jsonl").write_text(text.replace('"t3"', '"u3"'))
    with pytest.raises(TaskError, match=r"a\.jsonl:\d has become another task, 'u3'") as raised:
        changed.get("t3")
    assert "the file was changed" in str(raised.value.hint)
