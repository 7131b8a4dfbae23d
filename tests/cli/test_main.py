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


# What takes longer to import than a help may take. Modules are counted and not seconds, which depend on the host.
HEAVY = (
    *("aiohttp", "alembic", "jinja2", "numba", "numpy", "obstore", "prometheus_client", "pydantic", "rich"),
    *("safetensors", "sqlalchemy", "tokenizers", "torch", "transformers", "zstandard"),
    *("asyncio", "email", "http.client", "importlib.metadata", "multiprocessing", "sqlite3", "ssl", "unittest"),
)


def modules_after(script: str) -> set[str]:
    show = f"import sys\n{script}\nprint(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True)
    assert "usage" in done.stdout.lower()
    return set(done.stderr.split())


def test_help_imports_no_command() -> None:
    run = "from rollmill.cli.main import main\ntry: main()\nexcept SystemExit: pass"
    loaded = modules_after(f"sys.argv = ['rollmill', '--help']\n{run}")
    assert not set(HEAVY) & loaded
    assert [name for name in loaded if name.startswith("rollmill.cli.")] == ["rollmill.cli.main"]
    assert len(loaded) < 250, len(loaded)


def test_no_help_of_any_command_imports_what_it_does_not_show() -> None:
    """One process shows the help of every command and of all commands below them."""
    loaded = modules_after("""
import typer
from rollmill.cli.main import app

def walk(command, context):
    print(command.get_help(context))
    for name, below in getattr(command, "commands", {}).items():
        walk(below, type(context)(below, info_name=name, parent=context))

root = typer.main.get_command(app)
walk(root, root.context_class(root, info_name="rollmill"))
""")
    assert "rollmill.cli.weights.upkeep" in loaded  # of `rollmill weights mirror`
    assert not set(HEAVY) & loaded
    assert len(loaded) < 300, len(loaded)
