"""Environments of verifiers through a real gateway. The model is a script; the package has an environment of its own.

The game is Hangman of TextArena, as verifiers ships it. Its list of words cannot be downloaded here, so it gets a short
one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollmill.chat.format import assistant_message
from rollmill.chat.formats.compact import CompactFormat
from rollmill.environments.packages.reported import Reported
from rollmill.environments.packages.verifiers import VerifiersConfig, VerifiersHarness, VerifiersTasks
from rollmill.errors import TaskError
from rollmill.rollouts.rollout import Outcome
from tests.gateway.test_frameworks import interpreter
from tests.rollouts.world import FailingHost, World

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
PACKAGES = Path(__file__).with_name("verifiers.txt")
LOCAL = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
HANGMAN = {"taskset": {"id": "textarena", "game": "Hangman-v0"}, "player": LOCAL}


@pytest.fixture
async def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    words = tmp_path / "nltk" / "corpora" / "words"
    words.mkdir(parents=True)
    for name in ("README", "en", "en-basic"):
        (words / name).write_text("cat\n")
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return str(await interpreter(str(PACKAGES)))


def says(world: World, *texts: str) -> None:
    format = CompactFormat(world.tokenizer)
    world.says(*(format.render_answer(assistant_message(text, []), []) for text in texts))


@contextlib.asynccontextmanager
async def harness_of(config: VerifiersConfig) -> AsyncIterator[VerifiersHarness]:
    harness = VerifiersHarness(config)
    yield harness
    await harness.close()


async def test_a_game_of_the_package_is_played_and_graded(world: World, python: str) -> None:
    config = VerifiersConfig(python=python, variables=("NLTK_DATA",), env=HANGMAN, tasks=3, heldout_share=0.0)
    tasks = await asyncio.to_thread(VerifiersTasks, config)
    assert tasks.train_ids() == ["textarena/0", "textarena/1", "textarena/2"]
    task = tasks.get("textarena/0")
    assert [message["role"] for message in task.messages] == ["system", "user"] and "Hangman" in str(task.messages)
    async with harness_of(config) as harness:
        no_machine = FailingHost(lambda asked: True)
        context = replace(world.context, harness=harness, grader=Reported(), machines=no_machine, timeout_s=300.0)
        says(world, "I try [C].", "then [A]", "and [T]")
        won, lost = await asyncio.gather(world.play(task, "won", context), world.play(task, "also", context))
        assert won.solved and won.result is not None and (won.result.stop, won.result.turns) == ("done", 3), won
        assert lost.solved and no_machine.asked == 0
        assert won.reward is not None and won.reward.parts == {"reward.game_reward": 1.0}
        assert "Congratulations" in won.reward.evidence["info"]["game_outcome"]
        trajectory = world.context.trajectories.load("won")
        assert [m["role"] for m in trajectory.messages] == ["system", *["user", "assistant"] * 3]
        says(world, "no letter")
        bad = await world.play(task, "bad", context)
        assert bad.reward is not None and bad.reward.value == 0.0, bad
        print(bad.reward)


# Tasks that go wrong in one way each: the name of the task says how.
BROKEN = """
import time

import verifiers.v1 as vf


class Data(vf.TaskData):
    how: str = ""


class Broken(vf.Task[Data]):
    async def setup(self, trace, runtime):
        if self.data.how == "raises":
            raise ZeroDivisionError("the package is broken")
        if self.data.how == "hangs":
            time.sleep(1000)
        if self.data.how == "dies":
            import os

            os._exit(3)
        trace.info["text"] = "x" * (1 << 30 if self.data.how == "gigabyte" else 1)

    @vf.reward
    async def good(self, trace) -> float:
        return {"nan": float("nan"), "infinite": float("inf"), "huge": 1e300}.get(self.data.how, 1.0)


class Config(vf.TasksetConfig):
    how: list[str] = []


class Tasks(vf.Taskset[Broken, Config]):
    def load(self):
        if self.config.how == ["unloadable"]:
            raise FileNotFoundError("no dataset")
        prompt = "x" * (1 << 25) if self.config.how == ["large"] else "hello"
        return [Broken(Data(id=how, how=how, prompt=prompt), self.config.task) for how in self.config.how]


__all__ = ["Tasks"]
"""


async def test_a_package_that_misbehaves_fails_its_episode_and_no_other(
    world: World, python: str, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)
    kinds = ["raises", "hangs", "dies", "gigabyte", "nan", "infinite", "huge", "none"]
    config = VerifiersConfig(
        python=python, env={"taskset": {"id": "broken", "how": kinds}, "agent": LOCAL}, heldout_share=0.0
    )
    tasks = await asyncio.to_thread(VerifiersTasks, config)
    says(world, "hello")
    async with harness_of(config) as harness:
        context = replace(world.context, harness=harness, grader=Reported(), timeout_s=300.0)

        async def play(how: str, **changes: Any) -> Outcome:
            return await world.play(tasks.get(f"broken/{how}"), how, replace(context, **changes))

        fine = await play("none")
        assert fine.reward is not None and fine.reward.value == 1.0, fine.reason
        for how, why in {
            "raises": "the package is broken",
            "nan": "its reward 'good' is nan",
            "infinite": "its reward 'good' is inf",
            "huge": "its reward cannot be used",
            "dies": "its process ended, exit code 3",
        }.items():
            failed = await play(how)
            world.check_failed(failed, why)
            assert failed.lost and "verifiers broken" in str(failed.reason)
        large = await play("gigabyte")
        assert large.reward is not None and large.reward.evidence["info"] == {"left_out": f"{(1 << 30) + 12} bytes"}
        late = await play("hangs", timeout_s=3.0)
        world.check_failed(late, "its time was over before the environment reported a reward")
        again = await world.play(tasks.get("broken/none"), "again", context)
        assert again.reward is not None and again.reward.value == 1.0, "another process answers"


async def test_a_dataset_that_is_not_there(python: str, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text(BROKEN)

    def load(*how: str, **changes: Any) -> VerifiersTasks:
        env = {"taskset": {"id": "broken", "how": list(how)}, "agent": LOCAL}
        return VerifiersTasks(VerifiersConfig.model_validate({"python": python, "env": env, **changes}))

    for how, why in {
        "unloadable": "verifiers broken: FileNotFoundError: no dataset",
        "large": "its first 1 tasks have 33554",
    }.items():
        with pytest.raises(TaskError, match=why):
            await asyncio.to_thread(load, how)
    with pytest.raises(TaskError, match="has no task"):
        await asyncio.to_thread(load)
    with pytest.raises(TaskError, match="unknown_setting"):
        await asyncio.to_thread(load, env={"taskset": {"id": "broken", "unknown_setting": 1}})
    with pytest.raises(TaskError, match="there_is_none") as absent:
        await asyncio.to_thread(load, env={"taskset": {"id": "there_is_none"}})
    assert "python" in str(absent.value.hint)
