from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from rollmill import __version__
from tests.cli.conftest import Told

COMMANDS = (
    *("demo", "train", "eval", "serve", "runs", "status", "logs", "stop", "rm"),
    *("model", "weights", "trajectories", "config", "doctor"),
)


def test_help_lists_every_command(rollmill: Callable[..., Told]) -> None:
    told = rollmill("--help")
    assert told.code == 0
    assert all(f" {command} " in told.out for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(rollmill: Callable[..., Told], command: str) -> None:
    told = rollmill(command, "--help")
    assert told.code == 0 and f"rollmill {command}" in told.out


def test_version_and_short_help(rollmill: Callable[..., Told]) -> None:
    told = rollmill("--version")
    assert told.code == 0 and told.out == f"rollmill {__version__}\n"
    for arguments in (["-h"], ["train", "-h"], ["weights", "log", "-h"]):
        told = rollmill(*arguments)
        assert told.code == 0 and "Usage" in told.out
    assert "--install-completion" in rollmill("-h").out


def test_an_unknown_command_is_a_usage_error(rollmill: Callable[..., Told]) -> None:
    assert rollmill("trane").code == 2


def test_an_error_is_two_lines_and_exit_code_1() -> None:
    """In its own process: only the message may reach the terminal."""
    done = subprocess.run(
        [sys.executable, "-c", "from rollmill.cli.main import main; main()", "train", "absent.toml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    error, hint = done.stderr.splitlines()
    assert error == "error: config: absent.toml does not exist" and hint.startswith("hint: ")
