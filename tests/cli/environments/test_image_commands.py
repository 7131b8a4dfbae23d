"""`rollmill images`: build, list, remove."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Told


def test_images_are_built_listed_and_removed(
    rollmill: Callable[..., Told], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "store"))
    empty = rollmill("images", "list").out
    assert f"no image in {tmp_path / 'store'}" in empty and "`rollmill images build`" in empty
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "main.py").write_text("x = 1\n")
    built = rollmill("images", "build", "own", "--directory", tmp_path / "files")
    assert built.code == 0 and "own@" in built.out and "MiB" in built.out, built
    listed = rollmill("images", "list")
    assert "own" in listed.out and str(tmp_path / "store") in listed.out
    (tmp_path / "text").write_text("no archive")
    told = rollmill("images", "build", "x", "--oci", tmp_path / "text").err.splitlines()
    assert len(told) == 2 and "is not an archive of an OCI image" in told[0] and "skopeo" in told[1]
    told = rollmill("images", "build", "x", "--directory", tmp_path / "files", "--verify", "false").err.splitlines()
    assert len(told) == 2 and "'false' ended with exit code 1" in told[0] and "hint: " in told[1]
    assert rollmill("images", "rm", "own").code == 0
    again = rollmill("images", "rm", "own")
    assert again.code == 1 and "there is no built image 'own'" in again.err and "Traceback" not in again.err
    assert "--requirements" in rollmill("images", "build", "x").err


def test_an_image_is_for_the_python_of_this_host(
    rollmill: Callable[..., Told], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "store"))
    build = ("images", "build", "own", "--directory", tmp_path, "--python")
    other = rollmill(*build, "3.9")
    assert other.code == 1 and "for Python 3.9 cannot be built here" in other.err and "install Rollmill" in other.err
    assert not (tmp_path / "store").exists()
    assert rollmill(*build, f"{sys.version_info.major}.{sys.version_info.minor}").code == 0
