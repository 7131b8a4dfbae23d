"""The guides to rewards and to debugging, executed as a newcomer would, and the examples with tasks and rewards."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill.config import load_config
from rollmill.environments.episode import Episode
from rollmill.environments.part_sections import RewardsFile
from rollmill.environments.task import Task
from rollmill.kinds import build
from rollmill.machines.namespace.client import NamespaceHost
from tests.cli.conftest import Told
from tests.cli.test_init import shell
from tests.cli.test_own_agent import Endpoint, endpoint  # noqa: F401
from tests.machines.oci.making import busybox_layer, fetch_packages, unpack_packages, write_layout
from tests.machines.oci.test_registry import push, registry
from tests.test_repo import ROOT

GUIDES, EXAMPLES = ROOT / "docs" / "guides", ROOT / "examples"
PROBLEMS = [
    (
        "Write a function to add three to a number.",
        "def f(x):\n    return x + 3\n",
        ["assert f(1) == 4", "assert f(0) == 3"],
    ),
    ("Write a function to double a number.", "def double(x):\n    return 2 * x\n", ["assert double(4) == 8"]),
    ("Write a function to find the largest.", "def most(a):\r\n    return max(a)\r\n", ["assert most([1, 3]) == 3"]),
]


def blocks(guide: str, url: str, count: int) -> list[str]:
    found = re.findall(r"```bash\n(.*?)```", (GUIDES / guide).read_text(), re.S)
    assert len(found) == count, "a new block must be executed too"
    return [block.replace("http://127.0.0.1:8000/v1", url) for block in found]


@pytest.mark.slow
def test_the_guide_to_debugging_works_word_by_word(tmp_path: Path, endpoint: str) -> None:  # noqa: F811
    printed = shell("\n".join(blocks("debugging-an-environment.md", endpoint, 4)) + " 2>&1", tmp_path)
    assert "32 of 32 tasks are all right" in printed and "tasks check ended with 1" in printed
    assert "the reference does not solve it" in printed and "doing nothing solves it" in printed
    assert "notes/solution.txt shows reference main.py" in printed and "0 of 3 tasks are all right, 1 prob" in printed
    assert "task plus-3" in printed and "ended: answer" in printed and "0/4" in printed, printed[-3000:]


@pytest.mark.slow
def test_the_guide_to_a_reward_works_word_by_word(tmp_path: Path, endpoint: str) -> None:  # noqa: F811
    steps = blocks("your-own-reward.md", endpoint, 5)
    printed = shell("\n".join([*steps[:2], steps[4], steps[2]]), tmp_path)
    assert printed.count("32 of 32 tasks are all right") == 2
    assert "reward tidy cannot protect: Files outside" in printed and "tidy" in printed.rpartition("ended:")[2]
    assert "reward documented cannot protect: A docstring that says nothing" in printed
    assert "documented" in printed.rpartition("ended:")[2], printed[-2000:]


@pytest.mark.slow
def test_the_guides_last_step_grades_a_run_again(tmp_path: Path, endpoint: str) -> None:  # noqa: F811
    steps = blocks("your-own-reward.md", endpoint, 5)
    printed = shell("\n".join([*steps[:2], steps[3]]), tmp_path)
    assert "nothing is recorded" in printed and "recorded as grading 1" in printed, printed[-2000:]


def copied(name: str, directory: Path) -> Path:
    shutil.copytree(EXAMPLES / name, directory / name)
    return directory / name / "run.toml"


def test_the_mbpp_example_runs_small(
    rollmill: Callable[..., Told],
    tmp_path: Path,
    endpoint: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = copied("mbpp", tmp_path).with_name("small.toml")
    rows = [
        {"task_id": number, "text": text, "code": code, "test_list": tests, "split": "train" if number else "heldout"}
        for number, (text, code, tests) in enumerate(PROBLEMS)
    ]
    source.with_name("mbpp.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    told = rollmill("tasks", "check", source, "--repeat", 1)
    assert told.code == 0 and "3 of 3 tasks are all right" in told.out, told
    monkeypatch.setattr(Endpoint, "answer", "Here it is:\n\n```python\ndef f(x):\n    return x + 3\n```\n")
    told = rollmill("rollout", source, "--model", endpoint, "--task", "mbpp/0")
    assert told.code == 0 and "solved" in told.out and "length" in told.out, told
    told = rollmill("eval", source, "--model", endpoint, "--attempts", 2)
    assert told.code == 0 and "2/2" in told.out and "heldout_family" not in told.out, told


def test_the_example_of_a_reward_runs_small(
    rollmill: Callable[..., Told],
    tmp_path: Path,
    endpoint: str,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = copied("own_reward", tmp_path)
    told = rollmill("tasks", "check", source, "--repeat", 1)
    assert told.code == 0 and "3 of 3 tasks are all right" in told.out and "1.3" in told.out, told
    assert "reward calm cannot protect: It counts exclamation marks." in told.out
    monkeypatch.setattr(Endpoint, "answer", "Done!!\n```python\ndef triple(x):\n    return 3 * x\n```\n")
    told = rollmill("rollout", source, "--model", endpoint, "--task", "triple")
    assert told.code == 0 and "documented" in told.out and "undocumented" in told.out, told
    assert "2/2" in rollmill("eval", source, "--model", endpoint, "--attempts", 2).out


@pytest.mark.parametrize(
    ("source", "value"),
    [
        (b"def f(x: int) -> int:\n    'Doc.'\n    return x\ndef g(): pass\n", 0.5),
        (b"", 0.0),
        (b"def f(:\n", 0.0),
        (b"\0", 0.0),
        (b"\xff\xfe", 0.0),
        (b"(" * 5000, 0.0),
    ],
)
async def test_the_reward_of_the_example_takes_whatever_is_handed_in(
    tmp_path: Path, source: bytes, value: float
) -> None:
    text = '[[rewards]]\nkind = "my_rewards:Documented"\n'
    (tmp_path / "r.toml").write_text(f'modules = "{EXAMPLES / "own_reward"}"\n{text}')
    (section,) = load_config(RewardsFile, tmp_path / "r.toml").rewards
    reward = await build(section).grade(Episode(Task("t", "x"), {"main.py": source}, NamespaceHost()))
    assert reward.value == value


@pytest.mark.slow
def test_the_guide_to_tasks_from_a_repository_works_word_by_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))
    (tmp_path / "here").mkdir()
    printed = shell("\n".join(blocks("tasks-from-your-repository.md", "", 4)), tmp_path / "here")
    assert "shop: 3 stable tests, 3 of them run apart" in printed and "Make this change:" in printed, printed
    listed = [json.loads(line) for line in (tmp_path / "here/shop-tasks/made.jsonl").read_text().splitlines()]
    assert {task["family"] for task in listed} == {"removal", "bug", "history"}
    assert f"{len(listed)} of {len(listed)} tasks are all right, 0 problems" in printed, printed
    assert printed.rstrip().endswith("checks them again") and "0 tasks in fresh-tasks" in printed


@pytest.mark.slow
@pytest.mark.skipif(
    not all(map(shutil.which, ("buildah", "docker-registry", "skopeo"))),
    reason="buildah, docker-registry and skopeo are not installed",
)
def test_the_guide_to_harbor_folders_works_word_by_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in: Debian's busybox under the name of a Debian image, in a registry on loopback."""
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))
    with registry(tmp_path / "registry") as host:
        push(
            write_layout(tmp_path / "layout", [busybox_layer(tmp_path)]), host, "docker.io/library/debian:bookworm-slim"
        )
        text = "\n".join(blocks("bring-a-harbor-folder.md", "", 3)).replace("mirror.example", host)
        (tmp_path / "here").mkdir()
        printed = shell(text, tmp_path / "here")
    assert "1 of 1 tasks are all right" in printed and "\n/app\nhello\n" in printed, printed
    assert "oci:localhost/hello@sha256:" in printed


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("umoci") is None, reason="umoci is not installed")
def test_the_guide_to_docker_images_works_word_by_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree = unpack_packages(fetch_packages(["busybox-static"], tmp_path / "packages"), tmp_path / "tree")
    (tmp_path / "programs").mkdir()
    shutil.copy(next(path for path in tree.glob("**/bin/busybox")), tmp_path / "programs/busybox")
    monkeypatch.setenv("PATH", f"{tmp_path}/programs:{os.environ['PATH']}")
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))
    (tmp_path / "here").mkdir()
    printed = shell("\n".join(blocks("bring-your-docker-image.md", "", 3)), tmp_path / "here")
    assert "uid=0" in printed and "\n/app\nfrom the image\nblue\n" in printed, printed
    assert "oci:shop:v1" in printed and "removed oci:shop:v1" in printed and "0.0 MiB freed" in printed
    assert not list((tmp_path / "images/oci/trees").glob("[0-9a-f]*"))
