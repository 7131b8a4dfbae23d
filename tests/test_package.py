"""What `pip install rollmill` installs: source archive and wheel are built, and the wheel runs from anywhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_source_archive_makes_a_wheel_that_runs_anywhere(tmp_path: Path) -> None:
    tracked = run(["git", "ls-files", "-z"], ROOT).split("\0")[:-1]
    for name in tracked:
        if (ROOT / name).is_file():
            (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / "tree" / name)
    archive = build("sdist", tmp_path / "tree", tmp_path / "built")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path / "source", filter="data")
    (source,) = (tmp_path / "source").iterdir()
    wheel = build("wheel", source, tmp_path / "built")

    package = {name for name in tracked if name.startswith("rollmill/") and (ROOT / name).is_file()}
    with zipfile.ZipFile(wheel) as opened_wheel:
        shipped = set(opened_wheel.namelist())
    assert "rollmill/py.typed" in shipped
    assert package == {name for name in shipped if name.startswith("rollmill/")}

    python = install(wheel, tmp_path / "environment")
    (elsewhere := tmp_path / "elsewhere").mkdir()
    where = run([python, "-c", "import rollmill; print(rollmill.__file__)"], elsewhere)
    assert Path(where.strip()).is_relative_to(tmp_path / "environment")
    command = python.with_name("rollmill")
    assert "rollmill demo" in run([command, "demo", "--help"], elsewhere)
    assert "SQLite" in run([command, "doctor"], elsewhere)
    assert not list(elsewhere.iterdir())


def build(kind: str, source: Path, target: Path) -> Path:
    """The archive that pip's own way of building makes."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{kind}(sys.argv[1])"
    target.mkdir(exist_ok=True)
    run([sys.executable, "-c", code, target], source)
    (built,) = target.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


def install(wheel: Path, environment: Path) -> Path:
    """The interpreter of a new environment with this wheel; what it needs comes from the environment of the tests."""
    run([sys.executable, "-m", "venv", "--without-pip", environment], wheel.parent)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-index", "--no-deps", wheel]
    run(pip, wheel.parent)
    packages = run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], wheel.parent).strip()
    # a folder that a .pth file names is searched last, and its own .pth files, such as that of this tree, are not read
    Path(packages, "needed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def run(command: list[str | Path], directory: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    ended = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
