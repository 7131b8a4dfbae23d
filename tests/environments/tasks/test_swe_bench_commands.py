"""Instances whose tests are run by a command: of a real repository with its history, and with other test tools.

inflection/ holds the history of https://github.com/jpvanhal/inflection up to 2020 (its licence is in it), and four of
its commits as instances. Their lists of tests are what pytest said before and after each commit.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollmill.environments.episode import Episode
from rollmill.environments.rewards.logged_tests import LoggedTests, LoggedTestsConfig
from rollmill.environments.rewards.pytest import Pytest
from rollmill.environments.task import Task
from rollmill.environments.tasks.swe_bench import SweBenchConfig, SweBenchTasks
from rollmill.errors import TaskError
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.rollouts.check_task import check_task
from tests.environments.tasks.test_swe_bench import clones, instance, load  # noqa: F401

pytestmark = pytest.mark.asyncio(loop_scope="module")
HERE = Path(__file__).parent / "inflection"
PYTEST = "python -m pytest -rA -p no:cacheprovider {test_files}"


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repositories")
    clone = ["git", "clone", "--quiet", "--bare", str(HERE / "repository.bundle"), str(root / "inflection")]
    subprocess.run(clone, check=True)
    return root


def inflection(repositories: Path, image: str, **settings: Any) -> list[Task]:
    given = {"path": str(HERE / "instances.jsonl"), "repositories": str(repositories), "image": image}
    found = SweBenchTasks(SweBenchConfig.model_validate(given | settings))
    assert not found.problems
    return list(found.tasks.values())


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"test_command": PYTEST}], ids=["pytest", "a command"])
async def test_commits_of_a_real_repository(
    repositories: Path, host: NamespaceHost, image_with_pytest: str, settings: dict[str, str]
) -> None:
    reward = LoggedTests() if settings else Pytest()
    tasks = inflection(repositories, image_with_pytest, **settings)
    assert len(tasks) == 4
    for task in tasks:
        checked = await check_task(task, host, reward, repeat=1)
        assert (checked.reference, checked.nothing, checked.problems) == (1.0, 0.0, ()), checked
        assert ("submitted code can print the same" in checked.weak) == bool(settings)


async def test_the_test_patch_comes_last_and_no_test_is_taken_from_the_submission(
    repositories: Path, host: NamespaceHost, image_with_pytest: str
) -> None:
    task = inflection(repositories, image_with_pytest, test_command=PYTEST)[2]
    empty = "import pytest\n\n@pytest.mark.parametrize('a,b', [('potato', 'potatoes')])\n"
    empty += "def test_pluralize_singular(a, b): ...\n"
    cheat = {"test_inflection.py": empty.encode(), "setup.cfg": b"[tool:pytest]\naddopts = -p inflection --co\n"}
    grade = await LoggedTests().grade(Episode(task, cheat, host))
    assert grade.value == 0.0 and grade.parts == {"fail_to_pass": 0.0, "pass_to_pass": 1.0}, grade
    assert grade.evidence["fail_to_pass"] == {task.grading["FAIL_TO_PASS"][0]: "failed"}
    solved = await LoggedTests().grade(Episode(task, dict(task.reference), host))
    assert solved.value == 1.0, solved
    ended = b"import os\nos._exit(0)\n"
    assert (await LoggedTests().grade(Episode(task, {"inflection.py": ended}, host))).value == 0.0


async def test_unittest_by_a_command(tmp_path: Path, clones: Path, host: NamespaceHost) -> None:  # noqa: F811
    """The name of a test is what unittest prints; the file that only pytest reads is not run."""
    lists = {
        "FAIL_TO_PASS": ["test_add (tests.test_ops.Old.test_add)"],
        "PASS_TO_PASS": ["test_neg (tests.test_ops.Old.test_neg)"],
    }
    row = instance(
        clones, **lists, log_parser="unittest", test_command="cd src && python -m unittest -v ../tests/test_ops.py"
    )
    row["test_command"] = "PYTHONPATH=src python -m unittest -v tests/test_ops.py"
    task = load(tmp_path, clones, row).get("acme__calc-1")
    checked = await check_task(task, host, LoggedTests(), repeat=1)
    assert (checked.reference, checked.nothing, checked.problems) == (1.0, 0.0, ()), checked


def by_letters(log: str) -> Iterator[tuple[str, str]]:
    yield from ((line[2:], {"Y": "passed", "N": "failed"}[line[0]]) for line in log.splitlines())


async def test_a_parser_of_ones_own_and_shares(host: NamespaceHost) -> None:
    grading = {
        "kind": "logged_tests",
        "command": ["sh", "-c", "cat told.txt"],
        "log_parser": "letters",
        "FAIL_TO_PASS": ["a", "b"],
    }
    task = Task("t", "tell", files={"told.txt": b"N a\n"}, submission=("told.txt",), grading=grading)
    config = LoggedTestsConfig(partial=True, log_parsers={"letters": f"{__name__}:by_letters"})
    grade = await LoggedTests(config).grade(Episode(task, {"told.txt": b"Y a\nN b\nY b\n"}, host))
    assert (grade.value, grade.parts) == (0.5, {"fail_to_pass": 0.5, "pass_to_pass": 1.0})
    for name in ("letters", "os:system", f"{__name__}:by_letters"):
        with pytest.raises(TaskError, match="no log parser is called"):
            await LoggedTests().grade(Episode(replace(task, grading={**grading, "log_parser": name}), {}, host))


async def test_a_patch_of_files_that_only_the_machine_has(host: NamespaceHost) -> None:
    patch = "--- a/t.sh\n+++ b/t.sh\n@@ -1 +1 @@\n-echo old\n+sh ./main\n"
    grading = {
        "kind": "logged_tests",
        "command": ["sh", "t.sh"],
        "log_parser": "go",
        "patch": patch,
        "FAIL_TO_PASS": ["TestA"],
    }
    task = Task("t", "tell", files={"t.sh": b"echo old\n"}, submission=("main", "t.sh"), grading=grading)
    right = {"main": b"echo '--- PASS: TestA (0.00s)'\n", "t.sh": b"echo mine\n"}
    assert (await LoggedTests().grade(Episode(task, right, host))).value == 1.0
    assert (await LoggedTests().grade(Episode(task, {"main": b"", "t.sh": right["main"]}, host))).value == 0.0
    for wrong, why in (
        (patch.replace("old", "other"), "patch does not apply"),
        (patch.replace("t.sh", "../x"), "'../x'"),
    ):
        bad = replace(task, grading={**grading, "patch": wrong})
        with pytest.raises(TaskError, match=why):
            await LoggedTests().grade(Episode(bad, right, host))


async def test_images_by_template_and_by_instance(tmp_path: Path) -> None:
    row = json.loads((HERE / "instances.jsonl").read_text().splitlines()[0])
    rows = [row, row | {"instance_id": "own", "docker_image": "oci:registry.test/own:1"}]
    (tmp_path / "swe.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    given = {"path": str(tmp_path / "swe.jsonl"), "image": "oci:registry.test/{repo}/{instance_id}:latest"}
    found = SweBenchTasks(SweBenchConfig.model_validate(given | {"test_command": PYTEST})).tasks
    images = [task.image for task in found.values()]
    named = "oci:registry.test/jpvanhal__inflection/jpvanhal__inflection-e32443b:latest"
    assert images == [named, "oci:registry.test/own:1"]
    task = found["own"]
    assert not task.files and task.grading["patch"] == row["test_patch"]
    assert task.grading["command"][-1].endswith(" no:cacheprovider test_inflection.py")
    with pytest.raises(TaskError, match="test_command: there is none"):
        SweBenchTasks(SweBenchConfig.model_validate(given))
