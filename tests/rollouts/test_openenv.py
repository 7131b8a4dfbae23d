"""Environments of OpenEnv through a real gateway. The model is a script; the server has an environment of its own.

The server is the environment that `openenv init` writes: it echoes, and pays for length. Others here go wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollmill.config import load_config
from rollmill.environments.packages.openenv import OpenEnvConfig, OpenEnvHarness, OpenEnvTasks, action_of
from rollmill.environments.packages.reported import Reported
from rollmill.errors import ConfigError, TaskError
from rollmill.rollouts.rollout import Outcome
from rollmill.runs.run import RunConfig
from tests.gateway.npm import run
from tests.gateway.test_frameworks import interpreter
from tests.rollouts.test_verifiers import says
from tests.rollouts.world import FailingHost, World
from tests.test_repo import ROOT

PACKAGES = Path(__file__).with_name("openenv.txt")


@pytest.fixture
async def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The server of the template is echo_env.server.app:app."""
    found = await interpreter(str(PACKAGES))
    await run(found.with_name("openenv"), "init", "echo_env", "--output-dir", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return str(found)


def server(app: str) -> tuple[str, ...]:
    return ("python", "-m", "uvicorn", app, "--port", "{port}", "--log-level", "warning")


@contextlib.asynccontextmanager
async def harness_of(config: OpenEnvConfig) -> AsyncIterator[OpenEnvHarness]:
    harness = OpenEnvHarness(config)
    yield harness
    await harness.close()


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_the_environment_of_the_template_is_played_and_graded(world: World, python: str) -> None:
    config = OpenEnvConfig(python=python, server=server("echo_env.server.app:app"), max_turns=2, tasks=4)
    task = OpenEnvTasks(config).get("openenv/3")
    assert task.grading["reset"] == {"seed": 3}
    async with harness_of(config) as harness:
        await asyncio.to_thread(harness.preflight)
        context = replace(
            world.context, harness=harness, grader=Reported(), machines=FailingHost(lambda asked: True), timeout_s=120.0
        )
        says(world, "hello", '```json\n{"message": "hello, you"}\n```')
        # the server of the template has room for one: the other episode waits for it
        played = await asyncio.gather(*(world.play(task, name, context) for name in ("one", "two")))
        for outcome in played:
            assert outcome.reward is not None and outcome.result is not None, outcome.reason
            assert outcome.reward.value == pytest.approx(1.5) and outcome.result.stop == "max_turns"
            assert outcome.reward.parts == pytest.approx({"turn.0": 0.5, "turn.1": 1.0})
        texts = [message["content"] for message in world.context.trajectories.load("one").messages]
        assert texts[0] == '{"echoed_message": "Echo Env environment ready!", "message_length": 0}'
        assert texts[1] == "hello" and '"echoed_message": "hello"' in texts[2]
        says(world, '{"massage": "hello"}', '{"message": [1]}')
        refused = await world.play(task, "refused", context)
        assert refused.reward is not None and refused.reward.value == 0.0, refused.reason
        assert refused.reward.evidence["refused"] == 2 and refused.result is not None
        assert refused.result.bad_tool_calls == 2
        assert "does not take this action" in str(world.context.trajectories.load("refused").messages)


BROKEN = '''
import time
from typing import Any

from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Say(Action):
    text: str
    times: int


class Seen(Observation):
    text: Any = ""


class Broken(Environment):
    """Goes wrong as its reset or its action says."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=0, how=""):
        if how == "reset":
            raise ZeroDivisionError("the package is broken")
        return Seen(text="ready")

    def step(self, action):
        how = action.text
        if how == "raises":
            raise ZeroDivisionError("the package is broken")
        if how == "hangs":
            time.sleep(1000)
        if how == "dies":
            import os

            os._exit(1)
        rewards = {"none": None, "nan": float("nan"), "infinite": float("inf"), "huge": 1e300}
        text = "x" * (1 << 28) if how == "large" else {"n": 1 << 70} if how == "number" else "ok"
        return Seen(text=text, reward=rewards.get(how, 2), done=True)

    @property
    def state(self):
        return State()


app = create_app(Broken, Say, Seen, max_concurrent_envs=8)
'''


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_server_that_misbehaves_fails_its_episode_and_no_other(
    world: World, python: str, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    config = OpenEnvConfig(python=python, server=server("broken:app"), tasks=2, request_deadline_s=2.0)
    async with harness_of(config) as harness:
        context = replace(world.context, harness=harness, grader=Reported(), timeout_s=120.0)

        async def play(how: str, id: str = "", *, reset: str = "", **changes: Any) -> Outcome:
            says(world, f'{{"text": "{how}", "times": 1}}')
            task = OpenEnvTasks(config.model_copy(update={"reset": {"how": reset}})).get("openenv/0")
            return await world.play(task, id or f"{how}{reset}", replace(context, **changes))

        fine = await play("fine")
        assert fine.reward is not None and fine.reward.value == 2.0, fine.reason
        world.check_failed(await play("", reset="reset"), "the package is broken")
        for how, why in {
            "raises": "the package is broken",
            "none": "gave no reward in 1 steps",
            "huge": "its reward cannot be used",
            "number": "its answer cannot be used",
            "large": "too big",
        }.items():
            failed = await play(how)
            world.check_failed(failed, why)
            assert "openenv python -m uvicorn broken:app" in str(failed.reason)
        for how in ("nan", "infinite"):  # JSON of the server has no such number: it says null
            world.check_failed(await play(how), "gave no reward")
        world.check_failed(await play("hangs", timeout_s=2.0), "its time was over before")
        assert (await play("fine", "beside")).reward is not None, "the process goes on"
        world.check_failed(await play("dies"), "openenv python")
        again = [await play("fine", f"again{number}") for number in range(3)]  # as a run tries an episode again
        assert again[-1].reward is not None, "the server is started again"
    gone = OpenEnvConfig(python=python, url="http://127.0.0.1:9", tasks=2, request_deadline_s=1.0)
    async with harness_of(gone) as harness:
        failed = await world.play(OpenEnvTasks(gone).get("openenv/0"), "gone", replace(context, harness=harness))
        world.check_failed(failed, "Failed to connect to ws://127.0.0.1:9/ws")


@pytest.mark.slow
async def test_a_server_that_is_gone_is_an_error_before_a_run_begins(python: str) -> None:
    config = OpenEnvConfig(python=python, url="http://127.0.0.1:9")
    with pytest.raises(TaskError, match=r"openenv http://127.0.0.1:9: URLError: .*refused"):
        await asyncio.to_thread(OpenEnvHarness(config).preflight)
    ended = OpenEnvConfig(python=python, server=("python", "-c", "raise SystemExit(5)"))
    with pytest.raises(TaskError, match="its server ended with exit code 5"):
        await asyncio.to_thread(OpenEnvHarness(ended).preflight)
    unknown = OpenEnvConfig(python=python, server=("no-such-program",))
    with pytest.raises(TaskError, match="no-such-program"):
        await asyncio.to_thread(OpenEnvHarness(unknown).preflight)


def test_a_package_that_is_not_installed_is_an_error_with_the_remedy() -> None:
    with pytest.raises(TaskError, match="No module named 'openenv'") as absent:
        OpenEnvHarness(OpenEnvConfig(url="http://127.0.0.1:9")).preflight()
    assert "set `python` to an interpreter that has it" in str(absent.value.hint)
    with pytest.raises(TaskError, match="No such file") as nowhere:
        OpenEnvHarness(OpenEnvConfig(python="/no/python", url="http://127.0.0.1:9")).preflight()
    assert "`python`" in str(nowhere.value.hint)


def test_tasks_and_rewards_come_with_the_harness(tmp_path: Path) -> None:
    shutil.copyfile(ROOT / "examples" / "micro.toml", source := tmp_path / "run.toml")
    text = source.read_text().replace('[tasks]\nkind = "rollmill.demo.micro_repos:MicroRepos"\n', "")
    text = text.replace(
        'kind = "rollmill.demo.coding:CodingHarness"', 'kind = "openenv"\nurl = "http://h"\npython = "p"'
    )
    source.write_text(text)
    config = load_config(RunConfig, source)
    assert config.tasks is not None and config.tasks.kind == "openenv" and config.rewards[0].kind == "reported"
    assert getattr(config.tasks, "python", None) == getattr(config.harness, "python", None) == str(tmp_path / "p")
    again = RunConfig.model_validate_json(config.model_dump_json())
    assert again.tasks == config.tasks and again.rewards == config.rewards
    with_length = load_config(RunConfig, source, ['rewards=[{kind="reported"}, {kind="length", weight=0.1}]'])
    assert [reward.kind for reward in with_length.rewards] == ["reported", "length"]
    with pytest.raises(ConfigError, match="set `url` or `server`"):
        load_config(RunConfig, source, ["harness.url="])


@pytest.mark.parametrize(
    ("answer", "field", "action"),
    [
        ("hello", "message", {"message": "hello"}),
        ('{"a": 1}', "message", {"a": 1}),
        ('```json\n{"a": [1]}\n```', None, {"a": [1]}),
        ('["a"]', "message", {"message": '["a"]'}),
        ("NaN", "n", {"n": "NaN"}),
        ('{"a": NaN}', "n", {"n": '{"a": NaN}'}),
        ('{"a": 1e999}', "n", {"n": '{"a": 1e999}'}),
        ("[" * 100_000, "n", {"n": "[" * 100_000}),
        ("\ud800", "n", {"n": "?"}),
        ("hello", None, {"answer": "hello"}),
        ("", "message", {"message": ""}),
    ],
)
def test_whatever_the_model_writes_is_an_action(answer: str, field: str | None, action: dict[str, Any]) -> None:
    assert action_of(answer, field) == action
