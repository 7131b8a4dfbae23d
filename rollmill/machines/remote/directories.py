"""E2B's calls about files and directories, answered by a small program in the machine.

What the program prints comes from the machine and is not trusted: it is checked, and has a bounded size.
"""

from __future__ import annotations

import posixpath
from typing import Any

from pydantic import Field

from rollmill.machines.machine import WORK, Machine
from rollmill.machines.remote.rpc import RpcError, text
from rollmill.strict import StrictModel, parse_json

_LOOK_S = 30.0
_MOST_BYTES = 1 << 24
_PROGRAM = """
import datetime, grp, json, os, pwd, shutil, stat, sys

def name(find, number):
    try:
        return find(number)[0]
    except KeyError:
        return str(number)

def entry(path):
    found = os.lstat(path)
    link = os.readlink(path) if stat.S_ISLNK(found.st_mode) else None
    kind = "DIRECTORY" if stat.S_ISDIR(found.st_mode) else "SYMLINK" if link is not None else "FILE"
    when = datetime.datetime.fromtimestamp(found.st_mtime, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    facts = {"name": os.path.basename(path) or "/", "type": "FILE_TYPE_" + kind, "path": path,
             "size": str(found.st_size), "mode": stat.S_IMODE(found.st_mode),
             "permissions": stat.filemode(found.st_mode),
             "owner": name(pwd.getpwuid, found.st_uid), "group": name(grp.getgrgid, found.st_gid),
             "modifiedTime": when}
    return facts | ({"symlinkTarget": link} if link is not None else {})

def walk(path, depth):
    found = []
    for each in sorted(os.listdir(path)):
        inside = os.path.join(path, each)
        found.append(entry(inside))
        if depth > 1 and os.path.isdir(inside) and not os.path.islink(inside):
            found += walk(inside, depth - 1)
    return found

def answer(operation, path, other, depth):
    if operation == "ListDir":
        return walk(path, depth)
    if operation == "MakeDir":
        os.makedirs(path)
    elif operation == "Move":
        os.replace(path, other)
        path = other
    elif operation == "Remove":
        shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)
        return []
    return [entry(path)]

try:
    print(json.dumps({"entries": answer(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))}))
except FileNotFoundError as error:
    print(json.dumps({"code": "not_found", "message": str(error)}))
except FileExistsError as error:
    print(json.dumps({"code": "already_exists", "message": str(error)}))
except OSError as error:
    print(json.dumps({"code": "invalid_argument", "message": str(error)}))
"""


class Entry(StrictModel):
    name: str
    type: str
    path: str
    size: str
    mode: int
    permissions: str
    owner: str
    group: str
    modifiedTime: str
    symlinkTarget: str | None = None


class Answer(StrictModel):
    entries: list[Entry] = Field([], max_length=100_000)
    code: str | None = None
    message: str = ""


async def answer(machine: Machine, operation: str, fields: dict[str, Any]) -> dict[str, Any]:
    """RpcError as the program in the machine found it, or because it answered nonsense."""
    if operation not in ("ListDir", "Stat", "MakeDir", "Move", "Remove"):
        raise RpcError("unimplemented", f"{operation} is not offered here")
    path = text(fields, "source" if operation == "Move" else "path")
    other = text(fields, "destination") if operation == "Move" else ""
    depth = fields.get("depth", 1)
    if not isinstance(depth, int) or not 0 <= depth <= 32:
        raise RpcError("invalid_argument", "'depth' must be a number up to 32")
    found = await _run(machine, operation, _whole(path), _whole(other) if other else "", max(depth, 1))
    entries = [entry.model_dump(exclude_none=True) for entry in found.entries]
    if operation == "ListDir":
        return {"entries": entries}
    return {"entry": entries[0]} if entries else {}


async def _run(machine: Machine, operation: str, path: str, other: str, depth: int) -> Answer:
    result = await machine.exec(
        ["python", "-c", _PROGRAM, operation, path, other, str(depth)],
        timeout_s=_LOOK_S * machine.capabilities.slowdown,
        max_output=_MOST_BYTES,
    )
    try:
        if result.exit_code != 0 or result.truncated:
            raise ValueError(result.output[-300:].decode("utf-8", "replace"))
        found = parse_json(result.output, Answer)
    except ValueError as error:
        raise RpcError("internal", f"the machine did not answer: {error}") from None
    if found.code is not None:
        raise RpcError(found.code, found.message)
    return found


def _whole(path: str) -> str:
    if "\0" in path:
        raise RpcError("invalid_argument", "a path with a null byte")
    return posixpath.normpath(posixpath.join(WORK, path))
