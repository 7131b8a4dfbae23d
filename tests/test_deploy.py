"""The files of deploy/ were not run, but they parse, and the commands in them have the options that they use."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml

from rollmill.cli.main import app
from tests.test_repo import ROOT

DEPLOY = ROOT / "deploy"
FILES = sorted(path for path in DEPLOY.iterdir() if path.is_file() and path.suffix != ".md")


def commands(text: str, program: str) -> Iterator[list[str]]:
    """Every use of a program in a script, as words."""
    text = re.sub(r"\\\n\s*", " ", text)
    for line in text.splitlines():
        line = re.sub(r"^\s*(#.*|- )", "", line)
        for found in re.finditer(rf"(?:^|[\s;])({program} [^;&>|]*)", line):
            yield shlex.split(found[1])


def options_of(command: typer.core.TyperCommand) -> set[str]:
    return {option for parameter in command.params for option in parameter.opts}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_commands_have_the_options_that_are_used(path: Path) -> None:
    group = typer.main.get_command(app)
    used = 0
    for _, name, *words in commands(path.read_text(), "rollmill"):
        if name.startswith("-"):
            continue
        command = group.commands[name]  # type: ignore[attr-defined]
        options = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert options <= options_of(command), f"rollmill {name}: {options}"
        used += 1
    assert used or path.name == "Dockerfile"
    scripts = pytest.importorskip("ray.scripts.scripts")
    for _, name, *words in commands(path.read_text(), "ray"):
        options = {word.partition("=")[0] for word in words if word.startswith("--")}
        assert options <= options_of(scripts.cli.commands[name]), f"ray {name}: {options}"


def test_files_parse_and_name_what_exists() -> None:
    image = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^FROM python:3\.1[123]", image, re.MULTILINE) and "USER " in image
    extras = re.findall(r"'\.\[([a-z,]+)\]'", image + (DEPLOY / "skypilot.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert extras and all(re.search(rf"^{extra} = \[", project, re.MULTILINE) for extra in ",".join(extras).split(","))

    job = yaml.safe_load((DEPLOY / "kuberay.yaml").read_text())
    cluster = job["spec"]["rayClusterSpec"]
    assert job["kind"] == "RayJob" and f"ray=={cluster['rayVersion']}" in (ROOT / "constraints.txt").read_text()
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    # KubeRay refuses labels in rayStartParams, and needs Ray's dashboard
    assert [group["labels"]["region"] for group in groups] == ["home", "home", "away"]
    assert not any("labels" in group["rayStartParams"] for group in groups) and "'ray[default]'" in image
    assert all(group["template"]["spec"]["containers"][0]["envFrom"] for group in groups)

    task = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    assert (ROOT / task["envs"]["CONFIGURATION"]).is_file()
    for script in ((DEPLOY / "slurm.sh").read_text(), task["run"]):
        assert subprocess.run([shutil.which("bash") or "bash", "-n", "-c", script], check=False).returncode == 0


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_ray_gives_our_processes_a_usual_priority(path: Path) -> None:
    assert re.search(r"RAY_worker_niceness(=|: |, value: )\"?0\b", path.read_text())


def test_no_file_has_a_secret() -> None:
    for path in FILES:
        assert not re.search(r"(SECRET_ACCESS_KEY|PGPASSWORD)\s*[=:]\s*\S", path.read_text()), path
