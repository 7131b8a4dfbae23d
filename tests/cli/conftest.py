from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from rollmill.cli.main import main


class Told(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def rollmill(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Told]:
    """The command as a shell runs it: arguments in, exit code and output back."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> Told:
        monkeypatch.setattr(sys, "argv", ["rollmill", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit:
            main()
        return Told(int(exit.value.code or 0), *capsys.readouterr())

    return run
