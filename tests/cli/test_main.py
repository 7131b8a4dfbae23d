from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmill import __version__
from rollmill.cli import main as command
from tests.cli.conftest import Told
from tests.cli.test_runs import finished_run
from tests.test_repo import ROOT

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


@pytest.mark.parametrize("command", ["keys create", "images build", "train", "trajectories admit"])
def test_examples_can_be_copied_from_a_narrow_screen(
    rollmill: Callable[..., Told], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line.rstrip() for line in rollmill(*command.split(), "--help").out.split("Options:")[0].splitlines()]
    whole = "\n".join(lines).replace(" \\\n", " ").splitlines()
    examples = [" ".join(line.split()) for line in whole if line.startswith(f"    rollmill {command} ")]
    assert max(map(len, lines)) <= 80
    text = "".join(path.read_text() for path in (ROOT / "rollmill" / "cli").rglob("*.py"))
    assert examples and all(f"        {example}\n" in text for example in examples)


def test_an_unknown_command_is_a_usage_error(rollmill: Callable[..., Told]) -> None:
    assert rollmill("trane").code == 2


def _obey_modes() -> None:
    """Root without the right to ignore file modes."""
    libc = ctypes.CDLL(None)
    for capability in (1, 2) if os.geteuid() == 0 else ():  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        assert libc.prctl(24, capability) == 0  # PR_CAPBSET_DROP


@pytest.mark.skipif(sys.platform != "linux", reason="capabilities")
@pytest.mark.parametrize("command", ["rm --yes RUN", "train --resume RUN steps=9", "serve RUN"])
def test_a_directory_that_may_not_be_written_is_two_lines(command: str, tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    run.path.chmod(0o500)
    arguments = [sys.executable, "-c", "from rollmill.cli.main import main; main()"]
    arguments += command.replace("RUN", str(run.path)).split()
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, preexec_fn=_obey_modes)
    run.path.chmod(0o700)
    assert done.returncode == 1, done
    error, hint = done.stderr.splitlines()
    assert str(run.path) in error and error.endswith(": Permission denied")
    assert "check the owner and the permissions" in hint


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


def test_the_list_of_commands_says_what_each_does() -> None:
    """The list is a table, so that `--help` imports no command: its sentences are those of the commands themselves."""
    for name, (_, meaning) in command.COMMANDS.items():
        assert command.Loaded()[name].get_short_help_str(1000) == meaning


def test_help_imports_little() -> None:
    """What `rollmill --help` loads: modules are counted, because seconds depend on the host."""
    show = "import sys; sys.argv = ['rollmill', '--help']\nfrom rollmill.cli.main import main\n"
    tell = "try: main()\nexcept SystemExit: print(*sys.modules, file=sys.stderr)\n"
    done = subprocess.run([sys.executable, "-c", show + tell], capture_output=True, text=True, check=True)
    loaded = done.stderr.split()
    assert "usage" in done.stdout.lower() and "rollmill.cli.main" in loaded
    assert not {"asyncio", "sqlite3", "pydantic", "sqlalchemy", "numpy", "torch", "aiohttp"} & set(loaded)
    assert not {"rich", "markdown_it", "pygments"} & set(loaded)
    assert not [name for name in loaded if name.startswith("rollmill.cli.") and name != "rollmill.cli.main"]
    assert len(loaded) < 250, len(loaded)
