"""What an episode left: the files that its task names, and how it ended. Stored before the seal and graded later."""

from __future__ import annotations

import contextlib
import json

from pydantic import BaseModel, ConfigDict, ValidationError

from rollmill.environments.episode import Submission
from rollmill.environments.harness import HarnessResult
from rollmill.environments.machine import WORK, Machine
from rollmill.environments.task import Task
from rollmill.errors import ObjectExists, TrajectoryError
from rollmill.storage.objects import Objects


class HandIn(BaseModel):
    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", frozen=True)

    files: dict[str, bytes]
    result: HarnessResult | None = None
    seconds: float = 0.0


async def take_files(machine: Machine, task: Task) -> Submission:
    """Read the declared paths. A file that the agent deleted or made unreadable is left out."""
    files = {}
    for path in task.submission:
        with contextlib.suppress(OSError):
            files[path] = await machine.read(f"{WORK}/{path}")
    return files


def hand_in_key(trajectory: str) -> str:
    return f"submissions/{trajectory}.json"


def store_hand_in(objects: Objects, trajectory: str, handed_in: HandIn) -> str:
    key = hand_in_key(trajectory)
    with contextlib.suppress(ObjectExists):  # stored before a crash: the first one counts
        objects.create(key, handed_in.model_dump_json().encode())
    return key


def load_hand_in(objects: Objects, key: str) -> HandIn:
    data = objects.get(key)
    try:
        tree = json.loads(data)
        if isinstance(tree, dict) and not isinstance(tree.get("files"), dict):  # 0.1.0 stored the files alone
            tree = {"files": tree}
        return HandIn.model_validate_json(json.dumps(tree))
    except (ValueError, RecursionError) as error:
        why = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise TrajectoryError(
            f"the submission {key} is damaged: {why}", hint="its trajectory cannot be graded"
        ) from None
