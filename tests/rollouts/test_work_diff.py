"""Handing in the whole diff of a work directory, whatever the agent did to its machine."""

from __future__ import annotations

import io
import tarfile
from dataclasses import replace
from typing import Any

import pytest

from rollmill.environments.rewards.calls import Calls
from rollmill.environments.rewards.script import Script
from rollmill.environments.task import Task, WholeDiff
from rollmill.environments.task_machine import create_machine
from rollmill.machines.machine import ExecResult
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.rollouts import work_diff
from rollmill.rollouts.check_task import check_task
from rollmill.rollouts.hand_in import HandIn, load_hand_in, store_hand_in, take_hand_in
from rollmill.storage.objects import Objects
from rollmill.types import Grade
from tests.machines.stand_ins import StandInMachine

pytestmark = pytest.mark.asyncio(loop_scope="module")

FILES = {"main.py": b"def f(x):\n    return x\n", "old.txt": b"old", "docs/a.md": b"a", "docs/b.md": b"b", "tool": b""}
SCRIPT = {"kind": "script", "files": {"hidden.sh": "test -f docs && ./run.sh && ! test -e old.txt && cat 'ü b/c.txt'"}}
SCRIPT["command"] = ["sh", "hidden.sh"]


def make_task(grading: Any = SCRIPT, **limits: int) -> Task:
    return Task("t", "change it", files=FILES, submission=WholeDiff(**limits), grading=grading)


async def hand_in(host: NamespaceHost, command: str, task: Task | None = None) -> HandIn:
    task = task or make_task()
    machine = await create_machine(host, task)
    try:
        await machine.exec(["sh", "-c", command], timeout_s=30.0)
        return await take_hand_in(machine, task, host)
    finally:
        await machine.close()


async def grade(host: NamespaceHost, handed_in: HandIn, task: Task | None = None) -> Grade:
    return await Script().grade(handed_in.episode(task or make_task(), host))


async def test_changed_new_and_deleted_files_reach_a_clean_machine(host: NamespaceHost) -> None:
    given = await hand_in(
        host,
        "echo new > main.py; rm old.txt; rm -r docs; echo file > docs; mkdir 'ü b'; echo c > 'ü b/c.txt'; touch same;"
        "printf 'echo ran' > run.sh; chmod +x run.sh tool; ln run.sh linked.sh; mkdir empty",
    )
    assert given.refused is None and given.deleted == ["docs/a.md", "docs/b.md", "old.txt"]
    names = ["docs", "linked.sh", "main.py", "run.sh", "same", "tool", "ü b/c.txt"]
    assert list(given.files) == names and given.files["linked.sh"] == b"echo ran"
    assert given.executable == ["linked.sh", "run.sh", "tool"]
    assert HandIn.model_validate_json(given.model_dump_json()) == given
    reward = await grade(host, given)
    assert reward.solved and reward.evidence["output"] == "ran\nc", reward
    assert not (await grade(host, await hand_in(host, "true"))).solved


LINKED = replace(
    make_task({"kind": "script", "command": ["sh", "h.sh"], "files": {"h.sh": "true"}}),
    executable=("tool", "docs/a.md"),
    links={"docs/first": "a.md", "gone": "old.txt", "plain": "tool"},
)


async def test_programs_and_links_are_those_of_the_task_and_of_the_agent(host: NamespaceHost) -> None:
    assert await hand_in(host, "test -x tool && test $(readlink docs/first) = a.md", LINKED) == HandIn()
    changes = (
        "chmod -x tool; chmod +x main.py; ln -sfn b.md docs/first; rm gone plain old.txt; echo x > plain;"
        "ln -s docs/b.md old.txt; rm -r docs/a.md; mkdir new; ln -s ../main.py new/main; ln -s . 'ü here'"
    )
    given = await hand_in(host, changes, LINKED)
    assert (sorted(given.files), given.executable) == (["main.py", "plain", "tool"], ["main.py"])
    assert given.deleted == ["docs/a.md", "gone"]
    links = {"docs/first": "b.md", "new/main": "../main.py", "old.txt": "docs/b.md", "ü here": "."}
    assert given.links == links and HandIn.model_validate_json(given.model_dump_json()) == given
    checks = ["! test -x tool", "test -x main.py", "! test -L plain", "! test -e gone", "test -f tool"]
    checks += [f"test \"$(readlink '{path}')\" = {target}" for path, target in links.items()]
    script = {"kind": "script", "command": ["sh", "h.sh"], "files": {"h.sh": " && ".join(checks)}}
    reward = await grade(host, given, replace(LINKED, grading=script))
    assert reward.solved, reward


async def test_a_submitted_link_does_not_redirect_a_grading_file(host: NamespaceHost) -> None:
    given = await hand_in(host, "ln -s main.py h.sh", LINKED)
    assert given.links == {"h.sh": "main.py"}
    script = {"kind": "script", "command": ["sh", "h.sh"], "files": {"h.sh": "! test -L h.sh && grep -q def main.py"}}
    assert (await grade(host, given, replace(LINKED, grading=script))).solved


async def test_nothing_changed_is_an_empty_hand_in(host: NamespaceHost) -> None:
    assert await hand_in(host, "touch main.py; cat main.py > x; mv x main.py") == HandIn()


LEFT_OUT = {
    "links that leave": "ln -s /etc/passwd link; ln -s ../x up; ln -s docs/../../x on; rm main.py",
    "pipes and sockets": "mkfifo pipe; python3 -c \"import socket; socket.socket(1).bind('s')\"; rm main.py",
    "names that are no text": "for n in '\\355\\240\\200' '\\377' 'a\\nb'; do touch \"$(printf $n)\"; done; rm main.py",
    "version control and caches": "mkdir -p .git __pycache__ d; touch .git/x __pycache__/m.pyc d/n.pyc; rm main.py",
    "unreadable files": "touch s; chmod 000 s main.py",
}


@pytest.mark.parametrize("command", LEFT_OUT.values(), ids=LEFT_OUT)
async def test_some_files_are_left_out(host: NamespaceHost, command: str) -> None:
    given = await hand_in(host, command)
    assert given == HandIn(deleted=["main.py"])


REFUSED = {
    "too many files": ("for i in $(seq 30); do touch f$i; done", "30 files changed; a hand-in has at most 20"),
    "too many deleted": ("rm -r *; for i in $(seq 16); do touch f$i; done", "21 files changed"),
    "too many bytes": ("head -c 5000 /dev/zero > big", "5000 bytes; a hand-in has at most 4096"),
    "a sparse file": ("truncate -s 9M big", "9437184 bytes"),
    "all inodes": ('python3 -c \'import os\nfor i in range(99999): os.mkdir(str(i)) or open(f"{i}/f", "w")\'', "files"),
}


@pytest.mark.parametrize(("command", "why"), REFUSED.values(), ids=REFUSED)
async def test_a_hand_in_over_the_limits_is_refused_and_earns_nothing(
    host: NamespaceHost, command: str, why: str
) -> None:
    task = make_task(max_files=20, max_bytes=4096)
    given = await hand_in(host, command, task)
    assert given.refused is not None and why in given.refused and not given.files
    reward = await grade(host, given, task)
    assert reward.value == 0.0 and why in reward.evidence["unwritable"]


async def test_everything_deleted_is_graded(host: NamespaceHost) -> None:
    given = await hand_in(host, "rm -rf /work/* /work/.* 2>/dev/null; cd /; rm -rf /work")
    assert given.deleted == sorted(FILES) and not given.files and given.refused is None
    assert (await grade(host, given)).value == 0.0


class Archive(StandInMachine):
    """A machine whose `tar` is the agent's own: it prints what it likes."""

    def __init__(self, output: bytes, **facts: Any) -> None:
        self.result = ExecResult(0, output, **facts)

    async def exec(self, *_: Any, **__: Any) -> ExecResult:
        return self.result


def forged(**attributes: Any) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("../../etc/evil")
        archive.addfile(member)
        member = tarfile.TarInfo("/abs")
        archive.addfile(member)
        member = tarfile.TarInfo("good")
        for name, value in attributes.items():
            setattr(member, name, value)
        archive.addfile(member, io.BytesIO(b"x" * 10))
    return buffer.getvalue()


async def test_a_forged_archive_stays_in_the_work_directory(host: NamespaceHost) -> None:
    machine = Archive(forged(size=10))
    given = await take_hand_in(machine, make_task(), host)
    assert given.files == {"good": b"x" * 10} and len(given.deleted) == len(FILES)
    link = Archive(forged(type=tarfile.LNKTYPE, linkname="../../etc/passwd"))
    assert (await take_hand_in(link, make_task(), host)).files == {}


@pytest.mark.parametrize("output", [b"x" * 5000, forged(size=10)[:1700], b"\0" * 512 + b"y" * 512])
async def test_a_damaged_archive_is_refused_or_empty(host: NamespaceHost, output: bytes) -> None:
    machine = Archive(output)
    given = await take_hand_in(machine, make_task(), host)
    assert not given.files and (given.refused or len(given.deleted) == len(FILES))


async def test_an_agent_that_answers_the_packing_with_an_error_number_earns_nothing(host: NamespaceHost) -> None:
    class Refusing(Archive):
        async def exec(self, *_: Any, **__: Any) -> ExecResult:
            raise OSError(5, "Input/output error")

    machine = Refusing(b"")
    given = await take_hand_in(machine, make_task(), host)
    assert given.refused is not None and "Input/output error" in given.refused and not given.files


async def test_a_ruined_machine_and_a_flood_are_refused(host: NamespaceHost) -> None:
    for facts, why in (({"stopped": "machine"}, "No such file"), ({"truncated": True}, "more than")):
        machine = Archive(b"", **facts)
        given = await take_hand_in(machine, make_task(), host)
        assert given.refused is not None and why in given.refused


async def test_submitted_hooks_of_python_and_pytest_are_no_part_of_the_answer(host: NamespaceHost) -> None:
    grading = {"kind": "calls", "module": "main.py", "function": "f", "cases": [[[7], 17]]}
    task = make_task(grading)
    trick = "import sys; sys.modules['main'] = type('M', (), {'f': staticmethod(lambda x: x + 10)})"
    given = await hand_in(host, f'echo "{trick}" | tee sitecustomize.py conftest.py a.pth > d.py', task)
    assert set(given.files) == {"sitecustomize.py", "conftest.py", "a.pth", "d.py"}, "they are stored"
    assert (await Calls().grade(given.episode(task, host))).value == 0.0
    right = await hand_in(host, "sed -i 's/return x/return x + 10/' main.py", task)
    assert (await Calls().grade(right.episode(task, host))).solved
    gone = await hand_in(host, "rm main.py", task)
    assert (await Calls().grade(gone.episode(task, host))).evidence["missing"] == "main.py"


async def test_a_stored_hand_in_keeps_the_diff(host: NamespaceHost, tmp_path: Any) -> None:
    objects = Objects.open(f"file://{tmp_path}")
    given = await hand_in(host, "rm old.txt; printf 'x' > run.sh; chmod +x run.sh")
    assert load_hand_in(objects, store_hand_in(objects, "t0", given)) == given


async def test_check_task_with_a_reference_command(host: NamespaceHost) -> None:
    grading = {"kind": "script", "command": ["grep", "-q", "a long line of the answer", "out.txt"]}
    task = Task(
        "t",
        "write",
        submission=WholeDiff(),
        grading=grading,
        reference={"/tmp/solution/solve.sh": b"echo a long line of the answer > out.txt"},
        reference_command=["sh", "/tmp/solution/solve.sh"],
    )
    checked = await check_task(task, host, Script())
    assert (checked.reference, checked.nothing, checked.problems) == (1.0, 0.0, ()), checked
    broken = await check_task(replace(task, reference_command=["false"]), host, Script())
    assert "the reference command failed: exit code 1" in broken.problems[0]


async def test_a_link_repeats_its_file_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_diff, "_MAX_ARCHIVE", 100)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        member = tarfile.TarInfo("a")
        member.size = 60
        archive.addfile(member, io.BytesIO(b"x" * 60))
        member = tarfile.TarInfo("b")
        member.type, member.linkname = tarfile.LNKTYPE, "a"
        archive.addfile(member)
    with pytest.raises(work_diff._Refused, match="more than"):
        work_diff._read(buffer.getvalue())


UNWRITABLE = {
    "a link below a file of the task": "rm conftest.py; mkdir conftest.py; ln -s ../main.py conftest.py/x",
    "a link at a path that is too long": 'python3 -c \'import os\nfor i in range(30): os.mkdir("d" * 200); '
    'os.chdir("d" * 200)\nos.symlink("x", "y")\'',
}


@pytest.mark.parametrize("command", UNWRITABLE.values(), ids=UNWRITABLE)
async def test_links_that_cannot_be_made_earn_nothing(host: NamespaceHost, command: str) -> None:
    task = replace(make_task(), files={**FILES, "conftest.py": b""})
    given = await hand_in(host, command, task)
    assert len(given.links) == 1 and given.refused is None
    reward = await grade(host, given, task)
    assert reward.value == 0.0 and "unwritable" in reward.evidence, reward


async def test_a_grading_file_below_a_link_of_the_task_leaves_the_link(host: NamespaceHost) -> None:
    check = 'test "$(readlink notes)" = docs && test -f docs/a.md && ! test -L plain && ! grep -q check tool'
    script = {"kind": "script", "command": ["sh", "notes/h.sh"], "files": {"notes/h.sh": check, "plain": "check"}}
    task = replace(make_task(script), links={"notes": "docs", "plain": "tool"})
    reward = await grade(host, HandIn(), task)
    assert reward.solved, reward
