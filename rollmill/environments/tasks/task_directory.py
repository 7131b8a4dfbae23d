"""Our own directories: one folder per task.

greet/task.toml        the keys of a JSONL line; `id` is the folder's name if it is left out
greet/instruction.md   the instruction, if task.toml has none
greet/files/           written into the work directory before the agent starts
greet/reference/       files of a solution that must pass
greet/grading/         hidden files, added to `grading.files` of task.toml as text
"""

from __future__ import annotations

import json
import tomllib
from functools import partial
from pathlib import Path
from typing import Any

from rollmill.environments.tasks.jsonl import TaskEntry
from rollmill.environments.tasks.lines import Parsed, collect, validate
from rollmill.environments.tasks.listed import ListedTasks
from rollmill.environments.tasks.task_splits import TaskFileConfig
from rollmill.errors import TaskError

TASK = "task.toml"
_MAX_BYTES = 1 << 26  # of one task


class DirectoryTasks(ListedTasks):
    name = "directory"

    def __init__(self, config: TaskFileConfig) -> None:
        sources = ((str(folder / TASK), partial(_read, folder)) for folder in folders(Path(config.path)))
        super().__init__(*collect(config, sources))


def folders(path: Path) -> list[Path]:
    """The folders of a directory of tasks, but not hidden ones."""
    try:
        return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        hint = "`path` in [tasks] is relative to the directory of the configuration"
        raise TaskError(f"the task directory {path} cannot be read: {error.strerror}", hint=hint) from None


def _read(folder: Path) -> Parsed:
    try:
        tree: dict[str, Any] = tomllib.loads((folder / TASK).read_text(encoding="utf-8"))
        tree.setdefault("id", folder.name)
        if "instruction" not in tree and (folder / "instruction.md").is_file():
            tree["instruction"] = (folder / "instruction.md").read_text(encoding="utf-8")
        files, reference, hidden = (read_tree(folder / name) for name in ("files", "reference", "grading"))
        if hidden:
            grading = tree.setdefault("grading", {})
            texts = {path: data.decode("utf-8") for path, data in hidden.items()}
            tree["grading"] = {**grading, "files": {**grading.get("files", {}), **texts}}
        entry = validate(TaskEntry, json.dumps(tree))
    except OSError as error:
        raise TaskError(f"{error.filename}: {error.strerror}", hint=f"a task is a folder with {TASK}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"not valid: {error}", hint=f"{TASK} is TOML; it and the files of grading/ are UTF-8") from None
    except (TypeError, AttributeError) as error:  # dates, which JSON has not; a table that is a value
        raise TaskError(f"not valid: {error}", hint="quote dates; `grading` and `grading.files` are tables") from None
    if lost := entry.not_handed_in(reference):
        raise TaskError(f"reference/{lost} is not handed in", hint="add it to `submission`")
    return entry.task(files, reference)


def read_tree(directory: Path) -> dict[str, bytes]:
    """The regular files below a directory. TaskError for links: what they point to may not be meant for an agent."""
    found: dict[str, bytes] = {}
    size = 0
    for path in sorted(directory.rglob("*")) if directory.is_dir() else []:
        if path.is_symlink():
            raise TaskError(f"{path} is a link", hint="copy the file")
        if path.is_file():
            size += path.stat().st_size
            if size > _MAX_BYTES:
                raise TaskError(f"{directory} is larger than {_MAX_BYTES >> 20} MiB", hint="use an image")
            found[path.relative_to(directory).as_posix()] = path.read_bytes()
    return found
