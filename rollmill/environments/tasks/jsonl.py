"""Our own JSONL: one task per line.

{"id": "greet", "instruction": "Write main.py: greet(name) returns 'hello NAME'.", "submission": ["main.py"],
 "files": {"README.md": "…", "logo.png": {"base64": "…"}}, "reference": {"main.py": "def greet(name): …"},
 "grading": {"kind": "calls", "module": "main.py", "function": "greet", "cases": [[["Ada"], "hello Ada"]]}}
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from rollmill.config import Config
from rollmill.environments.task import Task, WholeDiff
from rollmill.environments.tasks.lines import Parsed, validate
from rollmill.environments.tasks.streamed import Head, StreamedTasks
from rollmill.environments.tasks.task_splits import TaskFileConfig
from rollmill.strict import FreeJson

_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
_STRANGE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def check_path(path: str) -> str:
    """The path in its plain form. ValueError if it is not relative, leaves the work directory or cannot be shown."""
    pure = PurePosixPath(path)
    if not path or pure.is_absolute() or ".." in pure.parts or not pure.parts or _STRANGE.search(path):
        raise ValueError("a path must be relative to the work directory and stay in it")
    return str(pure)


def _check_id(text: str) -> str:
    if _STRANGE.search(text) or text != text.strip():
        raise ValueError("an id has no control characters and no space around it")
    return text


def _check_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text has half a surrogate pair, which is no character") from None
    return text


Text = Annotated[str, AfterValidator(_check_text)]
FilePath = Annotated[str, AfterValidator(check_path)]


class Base64(Config):
    """A file that is not text."""

    base64: str = Field(description="Its bytes in base64.")

    @model_validator(mode="after")
    def _is_base64(self) -> Base64:
        self.decode()
        return self

    def decode(self) -> bytes:
        try:
            return base64.b64decode(self.base64, validate=True)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"not base64: {error}") from None


Files = dict[FilePath, Text | Base64]


class InstructionMessage(Config):
    role: str = Field(pattern="^(system|user|assistant)$", description="Who says it.")
    content: Text = Field(description="The text.")


Instruction = Annotated[Text, Field(min_length=1)] | Annotated[tuple[InstructionMessage, ...], Field(min_length=1)]


class TaskEntry(Config):
    """One task as it is written in a file."""

    id: Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_check_id)] = Field(
        description="The task's name, which no other task has."
    )
    instruction: Instruction = Field(description="What the agent is asked: text, or messages with role and content.")
    files: Files = Field({}, description="Files in the work directory at the start: path to text or base64.")
    submission: tuple[FilePath, ...] | Literal["diff"] = Field(
        (), description='Paths that are handed in for grading, or "diff": whatever changed in the work directory.'
    )
    grading: dict[str, FreeJson] = Field({}, description="What the rewards need to know. Agents never see it.")
    reference: Files = Field({}, description="Files of a solution that must pass. Agents never see them.")
    split: Annotated[str, Field(pattern=_NAME)] | None = Field(None, description="`train`, `heldout` or another split.")
    family: Text = Field("", description="Tasks of one kind; results are shown by family.")
    tags: dict[Text, Text] = Field({}, description="Labels of your own.")
    image: str = Field("host-python", min_length=1, description="Name of the machine image.")
    timeout_s: float | None = Field(None, gt=0, allow_inf_nan=False, description="Seconds that an episode may take.")

    @model_validator(mode="after")
    def _reference_is_handed_in(self) -> TaskEntry:
        if lost := self.not_handed_in(self.reference):
            raise ValueError(f"reference has {lost!r}, which is not handed in: add it to submission")
        return self

    def not_handed_in(self, reference: Iterable[str]) -> str | None:
        """A path of the reference that is not handed in."""
        return None if self.submission == "diff" else next(iter(sorted(set(reference) - set(self.submission))), None)

    def task(self, files: Mapping[str, bytes] | None = None, reference: Mapping[str, bytes] | None = None) -> Parsed:
        """The task, with `files` and `reference` from elsewhere added; and its own split."""
        instruction: Any = self.instruction
        if not isinstance(instruction, str):
            instruction = tuple(message.model_dump() for message in instruction)
        task = Task(
            id=self.id,
            instruction=instruction,
            family=self.family,
            image=self.image,
            files={**contents(self.files), **(files or {})},
            submission=WholeDiff() if self.submission == "diff" else self.submission,
            grading=self.grading,
            reference={**contents(self.reference), **(reference or {})},
            tags=self.tags,
            timeout_s=self.timeout_s,
        )
        return task, self.split


def contents(files: Mapping[str, str | Base64]) -> dict[str, bytes]:
    return {path: text.encode() if isinstance(text, str) else text.decode() for path, text in files.items()}


class JsonlTasks(StreamedTasks):
    name = "jsonl"

    def __init__(self, config: TaskFileConfig) -> None:
        super().__init__(config, _parse, _glance)


def _parse(line: bytes) -> Parsed:
    return validate(TaskEntry, line).task()


def _glance(line: bytes) -> Head:
    """Without a look at files, grading and reference. What is not as it should be is read as a whole, for the error."""
    try:
        tree: Any = json.loads(line)
    except (ValueError, RecursionError):
        tree = None
    if isinstance(tree, dict) and tree.keys() <= TaskEntry.model_fields.keys() and tree.get("instruction"):
        id: Any = tree.get("id")
        split, family = tree.get("split"), tree.get("family", "")
        named = split is None or (isinstance(split, str) and re.fullmatch(_NAME, split))
        texts = isinstance(id, str) and isinstance(family, str) and not _STRANGE.search(f"{id}{family}")
        if named and texts and 0 < len(id) <= 200 and id == id.strip():
            return Head(id, split, family)
    return Head.of(_parse(line))
