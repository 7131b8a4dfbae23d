"""Machines for Harbor: what its environments promise, on a real machine; and a whole trial where `harbor` is installed.

Harbor needs Python 3.12, and Rollmill is tested with 3.11 too. There, the class is held to the signatures of Harbor's
abstract class, which contracts/harbor.json keeps.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollmill.environments import harbor
from rollmill.machines import background_shell as module
from rollmill.machines.background_shell import BackgroundShell
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.namespace.client import NamespaceConfig
from tests.machines.conftest import start_host
from tests.machines.oci.making import busybox_layer, entry, tar_of, write_layout
from tests.machines.oci.test_registry import push, registry

pytestmark = pytest.mark.asyncio(loop_scope="module")
CONTRACT = Path(__file__).parent / "contracts" / "harbor.json"
ADAPTER = Path(harbor.__file__).parent / "environment.py"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shell() -> AsyncIterator[BackgroundShell]:
    host = await start_host(NamespaceConfig(memory_mb=128, disk_mb=32, processes=48))
    made = BackgroundShell(await host.create(BUILT_IN, {"main.py": b"print(1)"}), "/work")
    await made.start()
    yield made
    await host.close()


async def test_commands_as_harbor_wants_them(shell: BackgroundShell) -> None:
    done = await shell.exec("pwd; cat main.py; echo $COLOUR >&2; exit 3", env={"COLOUR": "it's /app red"})
    assert done == ("/work\nprint(1)", "it's /app red\n", 3)
    assert (await shell.exec("false || cat", cwd="/tmp")).exit_code == 0, "no input, not ours"
    assert (await shell.exec("true", cwd="/nowhere")).exit_code == 126
    large = await shell.exec("head -c 6000000 /dev/zero | tr '\\0' x; echo end >&2")
    assert (len(large.stdout), large.stderr) == (4 << 20, "end\n")
    # what one command leaves in the background, the next one uses; another one at the same time does not wait
    await shell.exec(
        "mkfifo pipe; nohup sh -c 'while true; do read x < pipe; echo got $x >> heard; done' > /dev/null &"
    )
    slow = asyncio.create_task(shell.exec("sleep 1; echo slow"))
    assert (
        await shell.exec("echo word > pipe; until grep -q word heard; do sleep .05; done; cat heard")
    ).exit_code == 0
    assert not slow.done() and (await slow).stdout == "slow\n"


async def test_a_command_that_takes_too_long_ends(shell: BackgroundShell) -> None:
    with pytest.raises(TimeoutError):
        await shell.exec("sleep 1000.5 & sleep 1000.5", timeout_s=0.5)
    assert (await shell.exec("ps ax | grep -c '[s]leep 1000.5'")).stdout == "0\n"
    assert (await shell.exec("ls -A /tmp/.harbor")).stdout.split()[-2:] == ["orders", "ready"], "nothing is left"


async def test_files_and_directories(shell: BackgroundShell, tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    (tests / "deep").mkdir(parents=True)
    (tests / "test.sh").write_text("#!/bin/bash\ncat /tmp/tests/deep/data > /tmp/logs/verifier/reward.txt; ls /work\n")
    (tests / "test.sh").chmod(0o755)
    (tests / "deep" / "data").write_bytes(b"\xff\x00 /tests")
    await shell.upload_dir(tests, "/tmp/tests")
    await shell.exec("mkdir -p /tmp/logs/verifier && chmod 777 /tmp/logs/verifier")
    assert (await shell.exec("/tmp/tests/test.sh")).stdout.split() == ["heard", "main.py", "pipe"]
    await shell.download_file("/tmp/logs/verifier/reward.txt", tmp_path / "reward.txt")
    assert (tmp_path / "reward.txt").read_bytes() == b"\xff\x00 /tests", "what is no text stays as it is"
    with pytest.raises(FileNotFoundError):
        await shell.download_dir("/tmp/logs/nothing", tmp_path / "none")
    await shell.exec("cd /tmp/logs/verifier; ln -s /etc/passwd link; mkfifo fifo; mkdir empty; ln reward.txt second")
    await shell.download_dir("/tmp/logs/verifier", tmp_path / "got")
    got = {path.name for path in (tmp_path / "got").iterdir()}
    assert got == {"empty", "reward.txt", "second"}, "no symbolic link leaves the machine"


async def test_a_command_that_changes_what_is_its_result_is_killed() -> None:
    for answer in (b"", b"x y\n", b"1\n", b"1 2 3\n", b"\xff\n"):
        assert module._parsed(answer).exit_code == 137
    assert module._parsed(b"0 -5\nabc") == ("", "abc", 0) and module._parsed(b"0 99\nabc") == ("abc", "", 0)


async def test_an_agent_that_ends_the_keeper_only_ends_its_own_commands(shell: BackgroundShell) -> None:
    """What it did is graded: no command raises, and those of the verifier still run."""
    other = asyncio.create_task(shell.exec("sleep 1000"))
    await shell.exec("until ps ax | grep '[s]leep 1000'; do sleep 0.05; done")
    faked = "echo x > /tmp/.harbor/$(basename $0 .sh).code; sleep 1000"
    for command in ("kill -9 -1; sleep 1000", "rm -rf /tmp/.harbor", faked):
        done = await shell.exec(command)
        assert (done.stdout, done.exit_code) == ("", 137) and done.stderr, command
        assert (await shell.exec("cat main.py")).stdout == "print(1)", command
    assert (await other).exit_code == 137
    # what ran on in the background does it between two commands
    later = "nohup sh -c 'until [ -e /tmp/go ]; do sleep 0.05; done; rm -rf /tmp/go {}' > /dev/null 2>&1 &"
    await shell.exec(later.format("/tmp/.harbor; touch /tmp/.harbor"))
    await shell.machine.write("/tmp/go", b"")
    while (await shell.machine.exec(["test", "-f", "/tmp/.harbor"])).exit_code:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert [(await shell.exec("cat main.py")).exit_code for _ in range(2)] == [137, 0]
    await shell.exec(later.format("; kill -9 -1"))
    await shell.machine.write("/tmp/go", b"")
    assert shell._keeper is not None
    while (await shell._keeper.state()).exit_code is None:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    assert (await shell.exec("cat main.py")).stdout == "print(1)"


async def test_the_adapter_has_the_signatures_of_harbors_abstract_class() -> None:
    """Read, not imported: `harbor` may not be installed. The contract is Harbor's, version in the file."""
    contract = json.loads(CONTRACT.read_text())
    tree = ast.parse(ADAPTER.read_text())
    adapter = next(node for node in tree.body if isinstance(node, ast.ClassDef))
    assert [ast.unparse(base) for base in adapter.bases] == [contract["class"].rpartition(".")[2]]
    methods = {node.name: node for node in adapter.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    for name, wanted in contract["abstract"].items():
        arguments = [each.arg for each in methods[name].args.args]
        assert (isinstance(methods[name], ast.AsyncFunctionDef), arguments) == (wanted["async"], wanted["arguments"])
    assert contract["used"] == sorted(set(contract["used"]) & contract_names(tree)), "what it uses of Harbor"


def contract_names(tree: ast.Module) -> set[str]:
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return attributes | {
        name.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for name in node.names
    }


async def test_the_contract_is_that_of_the_installed_harbor() -> None:
    base = pytest.importorskip("harbor.environments.base", reason="harbor needs Python 3.12").BaseEnvironment
    contract = json.loads(CONTRACT.read_text())
    found = {}
    for name in sorted(base.__abstractmethods__):
        function = getattr(base, name)
        found[name] = {
            "async": inspect.iscoroutinefunction(function),
            "arguments": list(inspect.signature(function).parameters),
        }
    assert found == contract["abstract"]


async def test_a_whole_trial_of_harbor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Harbor's own code runs a task with its oracle agent, and one with an agent that does nothing. The task's
    Dockerfile is built on a stand-in: Debian's busybox under the name of a Python image."""
    trials = pytest.importorskip("harbor.trial.trial", reason="harbor needs Python 3.12")
    from harbor.models.trial.config import TrialConfig

    await (await start_host()).close()  # skips where there are no machines
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))
    shim = entry("usr/bin/bash", b'#!/bin/sh\nexec sh "$@"\n', mode=0o755)
    layout = write_layout(tmp_path / "layout", [busybox_layer(tmp_path), tar_of([shim])])
    mirrors = contextlib.ExitStack()
    host = mirrors.enter_context(registry(tmp_path / "registry"))
    push(layout, host, "docker.io/library/python:3.13")
    task = tmp_path / "greet"
    for name, text in {
        "task.toml": '[environment]\nnetwork_mode = "no-network"\nmemory_mb = 256\nstorage_mb = 64\n[verifier]\n'
        "timeout_sec = 120.0\n[agent]\ntimeout_sec = 120.0\n",
        "instruction.md": "Write hello to /app/greeting.txt.\n",
        "environment/Dockerfile": "FROM python:3.13\nWORKDIR /app\nCOPY start.txt .\n",
        "environment/start.txt": "from the Dockerfile\n",
        "solution/solve.sh": "#!/bin/bash\ncat start.txt && echo hello > /app/greeting.txt\n",
        "tests/test.sh": "#!/bin/bash\necho checking; sleep 1000 &\n"
        "if grep -qx hello /app/greeting.txt; then r=1; else r=0; fi; echo $r > /logs/verifier/reward.txt\n",
    }.items():
        (task / name).parent.mkdir(parents=True, exist_ok=True)
        (task / name).write_text(text)
    rewards = {}
    for agent in ("oracle", "nop"):
        config = {
            "task": {"path": str(task)},
            "trials_dir": str(tmp_path / "trials"),
            "agent": {"name": agent},
            "environment": {
                "import_path": "rollmill.environments.harbor.environment:RollmillEnvironment",
                "kwargs": {"build": {"mirrors": {"docker.io": f"{host}/docker.io"}}},
            },
        }
        trial = await trials.Trial.create(TrialConfig.model_validate(config))
        result = await trial.run()
        assert result.exception_info is None, result.exception_info
        rewards[agent] = result.verifier_result.rewards
    mirrors.close()
    assert rewards == {"oracle": {"reward": 1.0}, "nop": {"reward": 0.0}}
    logs = [path.read_text() for path in (tmp_path / "trials").rglob("test-stdout.txt")]
    assert [log.splitlines()[0] for log in logs] == ["checking"] * 2
