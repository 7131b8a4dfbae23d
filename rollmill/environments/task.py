"""Task: what the agent is asked, which machine image it starts on, how it is graded."""

from __future__ import annotations

import hashlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

Message = Mapping[str, Any]  # {"role": …, "content": …}, as in OpenAI's chat format


@dataclass(frozen=True)
class WholeDiff:
    """Hand in everything that changed in the work directory: changed, new and deleted files.

    A hand-in that is larger than a limit is refused and earns nothing. Symbolic links that leave the work directory,
    devices, version control (`.git`) and Python's caches are left out.
    """

    max_files: int = 1000  # changed, new and deleted files and links
    max_bytes: int = 1 << 24  # of all changed and new files


@dataclass(frozen=True)
class Needs:
    """What a task asks of its machines. A machine that has less is an error that names the field of `file`."""

    file: str  # that asks for it
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    network: Sequence[str] | None = None  # the names that may be reached, and no others; None: any
    health: str | None = None  # a shell command: a machine is ready when it passes
    health_timeout_s: float = 30.0
    health_tries: int = 1
    health_pause_s: float = 5.0


@dataclass(frozen=True)
class Task:
    """`grading` and `reference` never enter a machine that the agent can touch."""

    id: str
    instruction: str | Sequence[Message]  # a user message, or several messages
    split: str = "train"
    family: str = ""  # tasks of one kind; results are shown by family
    image: str = "host-python"  # name of a machine image
    files: Mapping[str, bytes] = field(default_factory=dict)  # written over the image; relative to the work directory
    submission: Sequence[str] | WholeDiff = ()  # paths that are handed in for grading, or the whole diff
    grading: Mapping[str, Any] = field(default_factory=dict)  # for the rewards
    reference: Mapping[str, bytes] = field(default_factory=dict)  # files of a solution that must pass
    reference_command: Sequence[str] = ()  # then run in the work directory; for solutions that are programs
    tags: Mapping[str, str] = field(default_factory=dict)
    timeout_s: float | None = None  # seconds of an episode; None: as the run says
    executable: Sequence[str] = ()  # paths of `files` that may be run as programs
    environment: str = ""  # the environment that plays and grades it, where a run has several
    links: Mapping[str, str] = field(default_factory=dict)  # symbolic links in the work directory: path → target
    needs: Needs | None = None
    processes: bool = False  # what its commands leave running lives on, and is there when rewards see the final state

    @cached_property
    def digest(self) -> str:
        """Of what is played and graded: instruction, image, files, links, what is handed in, grading. Another id,
        split, tag, reference or time limit makes no other task."""
        content: dict[str, Any] = {
            "instruction": self.messages,
            "image": self.image,
            "files": {path: hashlib.sha256(data).hexdigest() for path, data in self.files.items()},
            "submission": vars(self.submission) if isinstance(self.submission, WholeDiff) else list(self.submission),
            "grading": self.grading,
        }
        if self.executable:
            content["executable"] = sorted(self.executable)
        if self.links:
            content["links"] = self.links
        if self.processes:
            content["processes"] = True
        return hashlib.sha256(json.dumps(content, sort_keys=True, default=_plain).encode()).hexdigest()

    @property
    def paths(self) -> Sequence[str]:
        """The paths that are handed in; none if it is the whole diff."""
        return () if isinstance(self.submission, WholeDiff) else self.submission

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The instruction as messages."""
        if isinstance(self.instruction, str):
            return [{"role": "user", "content": self.instruction}]
        return [dict(message) for message in self.instruction]


def _plain(value: Any) -> Any:
    """What JSON cannot write, in a form that is the same in every process."""
    if isinstance(value, Mapping):
        return {str(key): inner for key, inner in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    return list(value) if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray) else repr(value)


class TaskSet(ABC):
    """A named, reproducible source of tasks: base class. `name`, `train`, `heldout` and `get` are needed."""

    name: str
    problems: Sequence[str] = ()  # tasks that could not be read, and why: `rollmill tasks check` shows them

    @abstractmethod
    def train(self, seed: int) -> Iterator[Task]:
        """An endless stream of training tasks; the same seed gives the same stream."""

    def train_from(self, seed: int, start: int) -> Iterator[Task]:
        """The stream of `train` without its first `start` tasks."""
        return itertools.islice(self.train(seed), start, None)

    @abstractmethod
    def heldout(self, split: str, count: int) -> list[Task]:
        """At most `count` tasks of a split that shares no task with training."""

    @abstractmethod
    def get(self, task_id: str) -> Task:
        """The task with this id. TaskError if there is none."""

    def train_ids(self) -> list[str] | None:
        """The ids of the training tasks; None: they are endless. Samplers that choose by results need them."""
        return None

    def listed(self) -> Iterable[Task] | None:
        """All tasks of all splits; None: they are endless."""
        return None
