"""What a Dockerfile says about a task's start: its base image, its work directory, the files it copies there.

Nothing is built. `RUN` and the like are the business of the named machine image that the Dockerfile is mapped to.
"""

from __future__ import annotations

import json
import posixpath
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from rollmill.errors import TaskError


@dataclass(frozen=True)
class Dockerfile:
    base: str  # the image of the last FROM
    workdir: str
    files: dict[str, Path] = field(default_factory=dict)  # relative to the work directory → where it is now
    outside: tuple[str, ...] = ()  # where it copies files to, if not into the work directory


def read_dockerfile(path: Path, default_workdir: str = "/app") -> Dockerfile:
    """The last stage of a Dockerfile. TaskError for one that cannot be read."""
    base, workdir = "", ""
    copies: list[tuple[str, list[str], str]] = []  # work directory, sources, destination
    for name, rest in _instructions(path):
        words = _words(path, rest)
        if name == "FROM":
            base = next((word for word in words if not word.startswith("--")), "")
            workdir, copies = "", []
        elif name == "WORKDIR" and words:
            workdir = posixpath.join(workdir or "/", words[0])
        elif name in ("COPY", "ADD") and not any(word.startswith("--from=") for word in words):
            *sources, target = [word for word in words if not word.startswith("--")] or [""]
            copies.append((workdir or "/", sources, target))
    if not base:
        raise TaskError(f"{path}: it has no FROM", hint="a Dockerfile starts with FROM")
    workdir = posixpath.normpath(workdir or default_workdir)
    files: dict[str, Path] = {}
    outside: list[str] = []
    for place, sources, target in copies:
        for name, source in _copied(path, sources, posixpath.join(place, target)):
            if name.startswith(workdir.rstrip("/") + "/"):
                files[posixpath.relpath(name, workdir)] = source
            else:
                outside.append(name)
    return Dockerfile(base, workdir, files, tuple(dict.fromkeys(outside)))


def _instructions(path: Path) -> list[tuple[str, str]]:
    """Instructions in capitals with their arguments; comments are left out, continued lines are joined."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} cannot be read: {error}", hint="it is text in UTF-8") from None
    found: list[tuple[str, str]] = []
    joined = ""
    for line in lines:
        if line.lstrip().startswith("#"):
            continue
        joined += line.rstrip()
        if joined.endswith("\\"):
            joined = joined[:-1] + " "
            continue
        name, _, rest = joined.strip().partition(" ")
        joined = ""
        if name:
            found.append((name.upper(), rest.strip()))
    return found


def _words(path: Path, text: str) -> list[str]:
    try:
        if text.startswith("["):
            return [str(word) for word in json.loads(text)]
        return shlex.split(text)
    except ValueError:
        return text.split()  # of an instruction that is not looked at, such as RUN with a quote in a here-document


def _copied(path: Path, sources: list[str], target: str) -> list[tuple[str, Path]]:
    """Absolute paths in the container and the files of the build context that they come from."""
    found: list[tuple[str, Path]] = []
    for source in sources:
        if "://" in source:
            raise TaskError(f"{path}: it adds {source}", hint="put the file beside the Dockerfile, or into the image")
        places = sorted(path.parent.glob(source.strip("/") or "*")) if source not in (".", "./") else [path.parent]
        if not places:
            raise TaskError(f"{path}: there is no {source!r} to copy", hint="it must be beside the Dockerfile")
        for place in places:
            inside = [each for each in sorted(place.rglob("*")) if each.is_file()] if place.is_dir() else []
            found += [(posixpath.join(target, each.relative_to(place).as_posix()), each) for each in inside]
            if place.is_file():
                whole = target.endswith(("/", "/.")) or target == "." or len(sources) > 1 or len(places) > 1
                found.append((posixpath.join(target, place.name) if whole else target, place))
    return [(posixpath.normpath(name), each) for name, each in found if each.name != "Dockerfile"]
