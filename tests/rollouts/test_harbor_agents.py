"""Agents of Harbor through a real gateway, in real machines. The model is a script; the agent is Harbor's own.

The image is a stand-in: bash, tmux and busybox of Debian. Agents that go wrong are classes of this test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from rollmill.chat.format import assistant_message
from rollmill.chat.formats.compact import CompactFormat
from rollmill.environments.packages.harbor import HarborAgentConfig, HarborAgentHarness
from rollmill.environments.rewards.harbor import HarborReward
from rollmill.environments.task import Task
from rollmill.environments.tasks.harbor import HarborConfig, HarborTasks
from rollmill.errors import TaskError
from rollmill.rollouts.rollout_context import RolloutContext
from tests.gateway.test_frameworks import interpreter
from tests.machines.oci.making import fetch_packages, run, tar_tree, unpack_packages, write_layout
from tests.rollouts.world import World

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
PACKAGES = Path(__file__).with_name("harbor.txt")
WRONG = """
import asyncio, os

from harbor.agents.nop import NopAgent


class Raises(NopAgent):
    async def run(self, instruction, environment, context):
        await environment.exec("echo HELLO > loud.txt")
        raise ZeroDivisionError("the agent is broken")


class Hangs(NopAgent):
    async def run(self, instruction, environment, context):
        await environment.exec("sleep 1000.75")


class Setup(NopAgent):
    async def setup(self, environment):
        raise RuntimeError("no tmux")


class Dies(NopAgent):
    async def run(self, instruction, environment, context):
        os._exit(3)


class Floods(NopAgent):
    async def run(self, instruction, environment, context):
        await asyncio.gather(*(environment.exec("sleep 1") for _ in range(17)))


class Files(NopAgent):
    async def run(self, instruction, environment, context):
        here = environment.trial_paths.trial_dir / "tree"
        (here / "deep").mkdir(parents=True)
        (here / "deep" / "a").write_bytes(b"\\xff")
        await environment.upload_dir(here, "/app/tree")
        await environment.exec("cp -r tree second; ln -s /etc/passwd second/link; mkfifo second/pipe")
        await environment.download_file("/app/second/deep/a", here / "one")
        assert (here / "one").read_bytes() == b"\\xff"
        for wrong in (environment.call({"exec": 5}), environment.download_file("/nowhere", here / "no"),
                      environment.exec("sleep 1000", timeout_sec=1), environment.call({"write": "/app/x", "data": "?",
                      "executable": False}), environment.exec("true", env={"A=1; touch loud.txt; B": "x"})):
            try:
                await wrong
            except RuntimeError:
                continue
            raise AssertionError("it was done")
        try:
            await environment.download_dir("/app/second", here / "got")
        except Exception:
            assert not (here / "got" / "link").exists()
        else:
            raise AssertionError("a link out of the tree was taken")
        await environment.exec("rm second/link")
        await environment.download_dir("/app/second", here / "got")
        assert [path.name for path in (here / "got").iterdir()] == ["deep"]
        secrets = [name for name in os.environ if "SECRET" in name or "PGPASSWORD" in name]
        assert not secrets, secrets
        await environment.exec("echo HELLO > loud.txt")
"""


def python_312() -> str:
    """Harbor needs it. A version manager may have a program of that name that starts nothing."""
    managed = [*map(str, Path.home().glob(".pyenv/versions/3.12*/bin/python3.12"))]
    for program in (shutil.which("python3.12"), *managed):
        if program and subprocess.run([program, "-c", ""], capture_output=True, check=False).returncode == 0:
            return program
    pytest.skip("Harbor needs Python 3.12")


@pytest.fixture
async def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/wrong.py").write_text(WRONG)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "modules"))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    return str(await interpreter(str(PACKAGES), python_312()))


@pytest_asyncio.fixture(loop_scope="module")
async def task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Task:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))
    names = ["bash", "tmux", "busybox-static", "ncurses-base", "libc-bin"]
    tree = unpack_packages(fetch_packages(names, tmp_path / "packages", needed=True), tmp_path / "tree")
    program = next(path for path in (tree / "bin/busybox", tree / "usr/bin/busybox") if path.exists())
    for name in run(program, "--list").split():
        if not (tree / "usr/bin" / name).exists():
            (tree / "usr/bin" / name).symlink_to("busybox")
    (tree / "app").mkdir()
    (tree / "app/quiet.txt").write_text("hello\n")
    layout = write_layout(tmp_path / "layout", [tar_tree(tree)], WorkingDir="/app", Env=["LANG=C.UTF-8"])
    folder = tmp_path / "tasks/loud"
    for name, text in {
        "task.toml": f'[environment]\ndocker_image = "oci:{layout}"\nnetwork_mode = "no-network"\n',
        "instruction.md": "Write the greeting of /app/quiet.txt in capitals to /app/loud.txt.\n",
        "tests/test.sh": "#!/bin/sh\nif grep -qx HELLO /app/loud.txt; then echo 1; else echo 0; fi "
        "> /logs/verifier/reward.txt\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return replace(HarborTasks(HarborConfig(path=str(tmp_path / "tasks"))).get("loud"), image=f"oci:{layout}")


@contextlib.asynccontextmanager
async def context_of(world: World, python: str, agent: str, **options: object) -> AsyncIterator[RolloutContext]:
    harness = HarborAgentHarness(HarborAgentConfig(python=python, agent=agent, options=options))
    await asyncio.to_thread(harness.preflight)
    yield replace(world.context, harness=harness, grader=HarborReward(), timeout_s=300.0)
    await harness.close()


def says(world: World, *answers: dict[str, object]) -> None:
    format = CompactFormat(world.tokenizer)
    world.says(*(format.render_answer(assistant_message(json.dumps(answer), []), []) for answer in answers))


async def test_harbors_terminal_agent_solves_a_task(world: World, python: str, task: Task) -> None:
    keys = [{"keystrokes": "tr a-z A-Z < quiet.txt > loud.txt\n", "duration": 1.0}]
    done = {"analysis": "a", "plan": "p", "commands": [], "task_complete": True}
    says(world, {"analysis": "a", "plan": "p", "commands": keys}, done, done)
    async with context_of(world, python, "terminus-2", record_terminal_session=False) as context:
        outcome = await world.play(task, "t0", context)
    assert outcome.reward is not None and outcome.reward.value == 1.0, outcome
    assert outcome.result is not None and (outcome.result.stop, outcome.result.turns) == ("done", 3)
    trajectory = world.context.trajectories.load("t0")
    assert [message["role"] for message in trajectory.messages] == ["user", "assistant"] * 3
    assert "/app/quiet.txt in capitals" in str(trajectory.messages[0]["content"])
    assert "tr a-z" in str(trajectory.messages[2]["content"]), "its terminal"


async def test_agents_that_go_wrong_end_with_a_reason(world: World, python: str, task: Task) -> None:
    async with context_of(world, python, "wrong:Raises") as context:
        raised = await world.play(task, "raises", context)
        assert raised.result is not None and raised.result.stop == "error", raised
        assert "ZeroDivisionError: the agent is broken" in raised.result.note
        assert raised.reward is not None and raised.reward.value == 1.0, "its work is graded as it stands"
    async with context_of(world, python, "wrong:Hangs") as context:
        hung = await world.play(task, "hangs", replace(context, timeout_s=8.0))
        assert hung.result is not None and hung.result.stop == "time" and hung.reward is not None, hung
        assert hung.reward.value == 0.0
    for agent, why in {
        "Setup": "agent wrong:Setup of Harbor: RuntimeError: no tmux",
        "Dies": "its process ended, exit code 3",
        "Floods": "more than 16 calls at once",
    }.items():
        async with context_of(world, python, f"wrong:{agent}") as context:
            failed = await world.play(task, agent, context)
            world.check_failed(failed, why)
    async with context_of(world, python, "wrong:Files") as context:
        fine = await world.play(task, "files", context)
        assert fine.result is not None and fine.result.stop == "done", fine
        assert fine.reward is not None and fine.reward.value == 1.0


async def test_an_agent_that_is_not_there(python: str) -> None:
    for name, why in {"wrong:Nobody": "Nobody", "terminus-9": "terminus-9"}.items():
        with pytest.raises(TaskError, match=why):
            await asyncio.to_thread(HarborAgentHarness(HarborAgentConfig(python=python, agent=name)).preflight)
