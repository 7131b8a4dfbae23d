"""Goes through the candidates of a project, and writes those that are tasks.

    OUT/made.jsonl      admitted tasks, one line each: `[tasks] kind = "jsonl"` reads them
    OUT/decided.jsonl    what became of every candidate
    OUT/run.toml         the two sections with which `rollmill tasks check` reads them

A line is written when a candidate is decided. A run that was killed continues: what is decided stays.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rollmill.environments.reward import Reward
from rollmill.environments.rewards.pytest import Pytest
from rollmill.environments.tasks.jsonl import TaskEntry
from rollmill.errors import TaskError
from rollmill.machines.images.build import keep_work, remove_image
from rollmill.machines.images.image import images_directory
from rollmill.machines.machine import MachineHost
from rollmill.rollouts.factory.admit import Ground, admit, hidden_texts
from rollmill.rollouts.factory.edits import Candidate, find_edits
from rollmill.rollouts.factory.history import at_commit, find_commits
from rollmill.rollouts.factory.install import Project, install
from rollmill.rollouts.factory.instruct import TAG, Writer
from rollmill.rollouts.factory.kept_changes import Sessions, find_kept
from rollmill.rollouts.factory.overlap import overlapping
from rollmill.rollouts.factory.sources import Source, get_source
from rollmill.rollouts.factory.stable_tests import Suite, find_suite

KINDS = ("removal", "bug", "history")
KNOWN = "its solution is in a source that `--not-in` names"
_RUN = """\
name = "made-tasks"

[tasks]
kind = "jsonl"
path = "made.jsonl"

[[rewards]]
kind = "pytest"
"""


@dataclass(frozen=True)
class Wishes:
    kinds: Sequence[str] = KINDS
    most: int = 50  # tasks of each kind
    runs: int = 3  # of the suite
    repeat: int = 3  # gradings of the reference, and of doing nothing
    suite_timeout_s: float = 600.0
    seed: int = 0
    requirements: str = ""
    not_in: Sequence[Path] = ()
    sessions: Sessions | None = None  # of users, to make tasks of
    writer: Writer | None = None  # of instructions
    at_once: int = field(default_factory=lambda: os.cpu_count() or 1)


@dataclass
class Yield:
    """What became of a project's tests and candidates."""

    project: str
    stable: int = 0
    apart: int = 0
    dropped_tests: Mapping[str, int] = field(default_factory=dict)
    candidates: Mapping[str, int] = field(default_factory=dict)  # by kind
    decided: dict[str, Counter[str]] = field(default_factory=dict)  # by kind: "" for admitted ones, or why not
    instructions: Counter[str] = field(default_factory=Counter)  # written by a model, or why plain

    def add(self, kind: str, why: str) -> None:
        self.decided.setdefault(kind, Counter())[why] += 1

    def leave_out(self, kind: str, reasons: Counter[str]) -> None:
        """What was none from the beginning."""
        self.candidates = Counter(self.candidates) + Counter({kind: reasons.total()})
        self.decided.setdefault(kind, Counter()).update(reasons)

    def admitted(self, kind: str) -> int:
        return self.decided.get(kind, Counter())[""]


Tell = Callable[[str, int, int, int], None]  # what is done; candidates that are decided, all of them, and tasks


async def make_tasks(given: str, out: Path, wishes: Wishes, machines: MachineHost, tell: Tell) -> Yield:
    """TaskError if the project cannot be used. Finished tasks stay whatever happens."""
    out.mkdir(parents=True, exist_ok=True)
    images_directory().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="rollmill-factory-", ignore_cleanup_errors=True) as temporary:
        tell("get the sources", 0, 0, 0)
        source = get_source(given, Path(temporary))
        kept, left_out = find_kept(source, wishes.sessions) if wishes.sessions else ([], Counter[str]())
        image = f"{source.name}-{_digest(source, wishes.requirements)}"
        tell("install the project", 0, 0, 0)
        project = await install(source, f"{image}.packages", machines, wishes.requirements)
        tell(f"run its suite {wishes.runs} times", 0, 0, 0)
        suite = await find_suite(project, machines, runs=wishes.runs, timeout_s=wishes.suite_timeout_s)
        maker = _Maker(_ground(project, suite, image, {}, ()), out, wishes, machines, tell)
        if wishes.sessions is not None:
            maker.forget_others(kept)
        await maker.run([*kept, *maker.find()])
        if left_out:
            maker.found.leave_out("session", left_out)
    return maker.found


class _Maker:
    def __init__(self, ground: Ground, out: Path, wishes: Wishes, machines: MachineHost, tell: Tell) -> None:
        self._ground, self._wishes, self._machines, self._tell = ground, wishes, machines, tell
        self._tasks, self._decided = out / "made.jsonl", out / "decided.jsonl"
        self._grader: Reward = Pytest()
        suite = ground.suite
        self.found = Yield(ground.project.source.name, len(suite.stable), len(suite.apart), suite.dropped)
        (out / "run.toml").write_text(_RUN)

    def find(self) -> list[Candidate]:
        """In the project itself."""
        wishes, project = self._wishes, self._ground.project
        candidates = find_edits(project, self._ground.suite, wishes.kinds, wishes.seed)
        if "history" in wishes.kinds:
            candidates += find_commits(project, 4 * wishes.most)
        return candidates

    def forget_others(self, kept: Sequence[Candidate]) -> None:
        """Remove tasks of sessions that are no candidates any more: users were forgotten, or took a change back."""
        names = {each.id for each in kept}
        self._drop({line["id"] for line in _lines(self._tasks) if line["family"] == "session"} - names)

    def _drop(self, ids: Collection[str]) -> None:
        """Remove tasks that an earlier run made."""
        tasks = _lines(self._tasks)
        left = [line for line in tasks if line["id"] not in ids]
        if left != tasks:
            draft = self._tasks.with_suffix(".new")
            draft.write_text("".join(json.dumps(line) + "\n" for line in left), encoding="utf-8")
            os.replace(draft, self._tasks)

    async def run(self, candidates: Sequence[Candidate]) -> None:
        wishes = self._wishes
        self.found.candidates = Counter(each.kind for each in candidates)
        known = overlapping([each.solution for each in candidates], wishes.not_in) if wishes.not_in else set()
        self._drop({each.id for each in candidates if each.solution in known})
        admitted = _lines(self._tasks)
        self.found.instructions.update(line["tags"].get(TAG, "plain") for line in admitted)
        done = {line["id"]: line for line in _lines(self._decided) if line["why"]} | {
            line["id"]: {"kind": line["family"], "why": ""} for line in admitted
        }
        names = {each.id for each in candidates}
        for each, line in done.items():
            if each in names:
                self.found.add(line["kind"], line["why"])
        waiting = iter([each for each in candidates if each.id not in done])

        async def work() -> None:
            for candidate in waiting:
                if self.found.admitted(candidate.kind) < wishes.most:
                    await self._decide(candidate, candidate.solution in known)

        await asyncio.gather(*(work() for _ in range(wishes.at_once)))

    async def _decide(self, candidate: Candidate, known: bool) -> None:
        try:
            entry = KNOWN if known else await self._admit(candidate)
        except TaskError as error:
            entry = f"cannot be run: {error.message[:80]}"
        if isinstance(entry, TaskEntry):
            if self.found.admitted(candidate.kind) >= self._wishes.most:
                return  # another one was admitted meanwhile
            self.found.instructions[entry.tags.get(TAG, "plain")] += 1
            _append(self._tasks, entry.model_dump_json(exclude_defaults=True))
        why = entry if isinstance(entry, str) else ""
        _append(self._decided, json.dumps({"id": candidate.id, "kind": candidate.kind, "why": why}))
        self.found.add(candidate.kind, why)
        decided = sum(counts.total() for counts in self.found.decided.values())
        admitted = sum(map(self.found.admitted, self.found.decided))
        self._tell("make tasks", decided, sum(self.found.candidates.values()), admitted)

    async def _admit(self, candidate: Candidate) -> TaskEntry | str:
        ground = self._ground
        if candidate.commit:
            ground = await self._at_commit(candidate)
            touched = [test for test in ground.suite.stable if ground.suite.calls_into(test, candidate.reference)]
            candidate = replace(candidate, tests=tuple(touched or ground.suite.stable))
        entry = await admit(candidate, ground, self._machines, self._grader, repeat=self._wishes.repeat)
        if candidate.commit and isinstance(entry, str):
            remove_image(ground.image)
        if isinstance(entry, str) or self._wishes.writer is None:
            return entry
        return await self._wishes.writer.write(entry, candidate)

    async def _at_commit(self, candidate: Candidate) -> Ground:
        project = at_commit(self._ground.project, candidate.commit)
        wishes = self._wishes
        suite = await find_suite(
            project, self._machines, runs=2, timeout_s=wishes.suite_timeout_s, modules=candidate.tests or None
        )
        name = f"{self._ground.image}.{candidate.commit[:12]}"
        return _ground(project, suite, name, candidate.files, candidate.deleted)


def _ground(project: Project, suite: Suite, image: str, files: Mapping[str, bytes], deleted: Sequence[str]) -> Ground:
    """Make the image: the project with `files` over it, without what is hidden from agents."""
    whole = hidden_texts(project, suite)
    tree = {path: data for path, data in project.files.items() if path not in whole and path not in deleted}
    with tempfile.TemporaryDirectory(prefix=".building-", dir=images_directory()) as temporary:
        work = Path(temporary, "work")
        work.mkdir()
        for path, data in {**tree, **files}.items():
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            (work / path).write_bytes(data)
        keep_work(image, project.image, work)
    return Ground(project, suite, image, whole)


def _digest(source: Source, requirements: str) -> str:
    digest = hashlib.sha256(requirements.encode())
    for path, data in sorted(source.files.items()):
        digest.update(f"{path}\0{hashlib.sha256(data).hexdigest()}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:8]


def _append(path: Path, line: str) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def _lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file; half a line that a killed run left is cut off."""
    if not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        os.truncate(path, len(whole))
    try:
        return [json.loads(line) for line in whole.splitlines()]
    except ValueError as error:
        raise TaskError(f"{path} is no file of the factory: {error}", hint="choose another --out") from None
