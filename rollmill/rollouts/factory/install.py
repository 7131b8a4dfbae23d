"""From files to machines in which the project's tests run.

The project's wheel is built in a machine. Its modules are left out of the image: they stay in the work directory alone,
as with an editable install, so no copy of a solution lies elsewhere. What only the build makes (compiled extensions, a
file with the version) is added to the work directory. The image keeps metadata, entry points and scripts, and what pip
installs: dependencies, pytest, and what the project names for its tests.
"""

from __future__ import annotations

import email
import io
import re
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from rollmill.errors import TaskError
from rollmill.machines.finish_image import other_name
from rollmill.machines.images.build import build_image
from rollmill.machines.machine import WORK, MachineHost
from rollmill.rollouts.factory.sources import Source

_BUILD_S = 600.0
_LARGEST = 1 << 28  # bytes of a wheel
_WHEELS = "/tmp/wheels"  # noqa: S108  of a machine
_BUILD = f"python -m pip wheel -q --no-build-isolation --no-deps --no-index --wheel-dir {_WHEELS} . && ls {_WHEELS}"
_TESTS = re.compile(r"tests?|testing")  # names of extras and dependency groups
_PLUGIN = re.compile(r"(pytest[\w.-]*|hypothesis)\b", re.I)  # taken from every extra and group
_REQUIREMENTS = re.compile(r"(tests?/|requirements/)?((tests?|dev)-requirements|requirements-(tests?|dev)|tests?)\.txt")
_OF_PYTEST = ("pytest", "iniconfig", "packaging", "pluggy", "pygments", "Pygments")
# of real interpreters, which tests or an agent's shell start; the grader has `paths`
_SITE = "import sys\n\nsys.path += {paths!r}\n"


@dataclass(frozen=True)
class Project:
    source: Source
    files: dict[str, bytes] = field(repr=False)  # the source, and what its build generates
    paths: list[str]  # in which its modules lie
    image: str  # what it needs, without the project


async def install(source: Source, name: str, machines: MachineHost, requirements: str = "") -> Project:
    """Build the project and an image `name` for its tests. TaskError says which step failed."""
    with tempfile.TemporaryDirectory(prefix="rollmill-factory-") as temporary:
        place = Path(temporary)
        settings = _pyproject(source.files)
        lines = ["pytest", *_plugins(settings, source.files), *requirements.splitlines()]
        files, paths = dict(source.files), ["."]
        if "build-system" in settings or "project" in settings or "setup.py" in files:
            wheel = await _build_wheel(source, settings, name, machines, place)
            files, paths = _place_modules(source.files, wheel)
            if _metadata(wheel)["Name"] in _OF_PYTEST:
                raise TaskError(
                    f"pytest itself needs {source.name}, so its tests cannot run without an installed copy of it",
                    hint="no tasks can be made of this project",
                )
            lines.insert(0, _strip(wheel, paths, place))
        listed = place / "requirements.txt"
        listed.write_text("\n".join(dict.fromkeys(lines)) + "\n")
        build_image(name, requirements=listed)
    return Project(source, files, paths, name)


async def _build_wheel(
    source: Source, settings: Mapping[str, Any], name: str, machines: MachineHost, place: Path
) -> zipfile.ZipFile:
    needed = settings.get("build-system", {}).get("requires", ["setuptools", "wheel"])
    (place / "build.txt").write_text("\n".join(["pip", *needed]) + "\n")
    work = place / "work"
    for path, data in source.files.items():
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        (work / path).write_bytes(data)
    with other_name(name) as builder:
        build_image(builder, directory=work, requirements=place / "build.txt")
        machine = await machines.create(builder)
        try:
            env = {"SETUPTOOLS_SCM_PRETEND_VERSION": source.version, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
            limit_s = _BUILD_S * machine.capabilities.slowdown
            built = await machine.exec(["sh", "-c", _BUILD], env=env, timeout_s=limit_s)
            if built.exit_code != 0 or built.stopped is not None:
                why = f"stopped by {built.stopped}" if built.stopped else built.output.decode("utf-8", "replace")[-800:]
                raise TaskError(f"the wheel of {source.name} cannot be built in a machine: {why.strip()}")
            name = PurePosixPath(built.output.decode("utf-8", "replace").split()[-1]).name
            wheel = zipfile.ZipFile(io.BytesIO(await machine.read(f"{_WHEELS}/{name}", max_bytes=_LARGEST)))
            wheel.filename = name
            return wheel
        except (OSError, zipfile.BadZipFile, IndexError) as error:
            raise TaskError(f"the wheel of {source.name} cannot be read: {error}") from None
        finally:
            await machine.close()


def _place_modules(source: Mapping[str, bytes], wheel: zipfile.ZipFile) -> tuple[dict[str, bytes], list[str]]:
    """The source with the files that only the wheel has, and the directories in which modules lie."""
    roots: dict[str, str] = {}  # of a module at the top: the directory that it lies in
    modules = [name for name in wheel.namelist() if not _is_metadata(name) and not name.endswith("/")]
    for name in modules:
        places = [path for path in source if path == name or path.endswith(f"/{name}")]
        if places:
            root = min(places, key=len)[: -len(name)].rstrip("/") or "."
            roots.setdefault(name.partition("/")[0], root)
    paths = list(dict.fromkeys([*roots.values(), "."]))
    files = dict(source)
    for name in modules:
        path = str(PurePosixPath(roots.get(name.partition("/")[0], paths[0]), name))
        if path not in source and ".." not in PurePosixPath(path).parts:
            files[path] = wheel.read(name)
    return files, paths


def _strip(wheel: zipfile.ZipFile, paths: list[str], place: Path) -> str:
    """The same wheel without modules, as a line of a requirements file."""
    name = str(wheel.filename)
    kept = [each for each in wheel.namelist() if _is_metadata(each) and not each.endswith(("/", "/RECORD"))]
    record = next((each for each in wheel.namelist() if each.endswith(".dist-info/RECORD")), None)
    with zipfile.ZipFile(place / name, "w") as stripped:
        for each in kept:
            stripped.writestr(each, wheel.read(each))
        stripped.writestr("sitecustomize.py", _SITE.format(paths=[f"{WORK}/{path}" for path in paths if path != "."]))
        names = [*kept, "sitecustomize.py", *([record] if record else [])]
        if record:
            stripped.writestr(record, "".join(f"{each},,\n" for each in names))
    metadata = _metadata(wheel)
    extras = [extra for extra in metadata.get_all("Provides-Extra", []) if _TESTS.fullmatch(extra)]
    return f"{place / name}[{','.join(extras)}]" if extras else str(place / name)


def _metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    name = next((each for each in wheel.namelist() if each.endswith(".dist-info/METADATA")), None)
    if name is None:
        raise TaskError("the wheel of the project has no METADATA", hint="does `pip wheel .` work?")
    return email.message_from_bytes(wheel.read(name))


def _is_metadata(name: str) -> bool:
    return name.partition("/")[0].endswith((".dist-info", ".data"))


def _pyproject(files: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        return tomllib.loads(files.get("pyproject.toml", b"").decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TaskError(f"pyproject.toml cannot be read: {error}") from None


def _plugins(settings: Mapping[str, Any], files: Mapping[str, bytes]) -> list[str]:
    """What tests need: groups and files named after tests, and plugins of pytest from all others."""
    found: list[str] = []
    groups = {**settings.get("project", {}).get("optional-dependencies", {}), **settings.get("dependency-groups", {})}
    for path, data in files.items():
        if _REQUIREMENTS.fullmatch(path):
            groups[path] = [line.partition(" #")[0].strip() for line in data.decode("utf-8", "replace").splitlines()]
    for group, lines in groups.items():
        whole = _TESTS.fullmatch(group) or (group in files and _TESTS.search(group))
        texts = [line for line in lines if isinstance(line, str) and re.match(r"\w", line)]
        found += [line for line in texts if whole or _PLUGIN.match(line)]
    return list(dict.fromkeys(found))
