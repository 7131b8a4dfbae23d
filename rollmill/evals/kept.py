"""The attempts of an evaluation that is not complete, one object each: a process that is killed loses only those in
progress. Objects are create-only, and are removed when the results are recorded."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from dataclasses import asdict

from rollmill.environments.harness import HarnessResult
from rollmill.environments.task import Task
from rollmill.errors import ObjectExists
from rollmill.rollouts.rollout import Outcome, as_id
from rollmill.storage.objects import Objects
from rollmill.types import Grade


class Kept:
    def __init__(self, objects: Objects, folder: str) -> None:
        self._objects, self._folder = objects, folder

    async def get(self, part: str, task: Task, number: int, make: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """Attempt `number` at a task: the one that is kept, or the one that `make` makes. An attempt that the
        infrastructure lost is not kept. A task that was changed is another one."""
        name = as_id(f"{task.digest[:16]}-{task.id}")
        key = f"{self._folder}/{as_id(part)}/{name}/{number}.json"
        found = await asyncio.to_thread(self._read, key)
        if found is not None:
            return found
        outcome = await make()
        if outcome.reward is not None:
            await asyncio.to_thread(self._write, key, outcome)
        return outcome

    def clear(self) -> None:
        self._objects.delete_all(self._objects.list(self._folder))

    def _read(self, key: str) -> Outcome | None:
        if self._objects.head(key) is None:
            return None
        try:
            tree = json.loads(self._objects.get(key))
            reward, result, versions = tree.pop("reward"), tree.pop("result"), tree.pop("versions")
            return Outcome(
                reward=Grade(**reward),
                result=HarnessResult(**result) if result else None,
                versions=(int(versions[0]), int(versions[1])) if versions else None,
                **tree,
            )
        except (ValueError, LookupError, TypeError, AttributeError):  # damaged: the attempt is made again
            return None

    def _write(self, key: str, outcome: Outcome) -> None:
        assert outcome.reward is not None
        grade = outcome.reward
        reward = {"value": grade.value, "parts": dict(grade.parts)}  # the trajectory has the evidence
        tree = {
            "trajectory": outcome.trajectory,
            "reward": reward,
            "result": asdict(outcome.result) if outcome.result else None,
            "tokens": outcome.tokens,
            "seconds": outcome.seconds,
            "asked": outcome.asked,
            "versions": outcome.versions,
        }
        with contextlib.suppress(ObjectExists):  # a damaged one stays as it is
            self._objects.create(key, json.dumps(tree).encode())
