"""What a Dockerfile builds on: the images that it names, found and replaced by those that were fetched beforehand.

Nothing else of it is read here: buildah does that.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rollmill.errors import TaskError

_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?::?-([^}]*))?\}|([A-Za-z_]\w*))")
_ARG = re.compile(r"(?i:ARG)\s+([A-Za-z_]\w*)(?:=(.*))?")
_FROM = re.compile(r"(?i)^(\s*FROM\s+(?:--\S+\s+)*)(\S+)(?:\s+AS\s+(\S+))?")
_COPIED = re.compile(r"(?i)^(\s*(?:COPY|ADD)\s+(?:--\S+\s+)*?--from=)(\S+)")
_MOUNTED = re.compile(r"(?i)(--mount=\S*?\bfrom=)([^,\s]+)")


class Plan(NamedTuple):
    text: str  # with `localhost/base0`, `localhost/base1` … for the images
    bases: tuple[str, ...]  # what these stand for, with registry


def plan(text: str, what: str) -> Plan:
    """Replace the images that a Dockerfile names. TaskError names `what` and the line."""
    arguments: dict[str, str] = {}
    stages: set[str] = set()
    bases: dict[str, str] = {}
    lines: list[str] = []
    count = 0

    def stand_in(name: str, number: int) -> str:
        if name in stages or name.lower() in stages or name == "scratch" or (name.isdigit() and int(name) < count):
            return name
        if "$" in name or not name:
            hint = "give the ARG a default before the first FROM"
            raise TaskError(f"{what}: line {number}: FROM names the image {name!r}, which has no value", hint=hint)
        return bases.setdefault(full_name(name), f"localhost/base{len(bases)}")

    for number, line in _instructions(text):
        if count == 0 and (found := _ARG.fullmatch(line.strip())):
            arguments[found[1]] = _expanded((found[2] or "").strip("\"'"), arguments)
        if found := _FROM.match(line):
            its = stand_in(_expanded(found[2].strip("\"'"), arguments), number)
            start = re.sub(r"(?i)--platform=\S+\s+", "", found[1])  # the bases are of this host's platform
            line = start + its + line[found.end(2) :]
            count += 1
            stages |= {found[3].lower()} if found[3] else set()
        elif found := _COPIED.match(line):
            line = found[1] + stand_in(_expanded(found[2], arguments), number) + line[found.end(2) :]
        elif line.lstrip()[:4].upper() == "RUN ":
            line = _MOUNTED.sub(lambda found, at=number: found[1] + stand_in(found[2], at), line)  # type: ignore[misc]
        lines.append(line)
    if not count:
        raise TaskError(f"{what}: it has no FROM", hint="a Dockerfile begins with FROM and the name of an image")
    return Plan("\n".join([*lines, ""]), tuple(bases))


def _instructions(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers. Those that continue a FROM are joined with it: the others stay as they are."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        line, first = lines[at], at + 1
        while re.match(r"(?i)\s*FROM\b", line) and line.rstrip().endswith("\\") and at + 1 < len(lines):
            at += 1
            line = line.rstrip()[:-1] + " " + lines[at].strip()
        yield first, line
        at += 1


def _expanded(text: str, arguments: Mapping[str, str]) -> str:
    """With the values of ARG. A name without a value stays as it is."""
    return _VARIABLE.sub(lambda found: arguments.get(found[1] or found[3]) or found[2] or found[0], text)


def full_name(name: str) -> str:
    """A name as Docker reads it: without a registry it is one of docker.io."""
    registry, slash, _ = name.partition("/")
    if slash and ("." in registry or ":" in registry or registry == "localhost"):
        return name
    return f"docker.io/{name}" if slash else f"docker.io/library/{name}"
