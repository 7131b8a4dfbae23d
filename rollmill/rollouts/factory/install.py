"""From files to machines in which the project's tests run.

The project's wheel is built in a machine, and so is that of a package that the index has as an sdist alone: no code of
a package runs on this host. The modules of the project are left out of the image: they stay in the work directory
alone, as with an editable install, so no copy of a solution lies elsewhere. What only the build makes (compiled
extensions, a file with the version) is added to the work directory. The image keeps metadata, entry points and scripts,
and what pip installs: dependencies, pytest, and what the project names for its tests.
"""

from __future__ import annotations

import contextlib
import email
import re
import shutil
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from pydantic import BaseModel, Field, TypeAdapter

from rollmill.errors import TaskError
from rollmill.machines.finish_image import other_name
from rollmill.machines.images.build import build_image
from rollmill.machines.machine import WORK, Machine, MachineHost
from rollmill.rollouts.factory.sdist import get_sdist, parse_requirement
from rollmill.rollouts.factory.sources import Source

_BUILD_S = 600.0
_MOST_MADE = 20  # wheels that the index does not have
_MISSING = re.compile(r"No matching distribution found for ([^\n]+?)(?: \(from [^\n]*\))?$", re.M)
_WHEEL = re.compile(r"[\w.+]+(-[\w.+]+){4,5}\.whl")
_LINES = TypeAdapter(list[str])
_LARGEST = 1 << 28  # bytes of a wheel, packed and unpacked
_WHEELS = "/tmp/wheels"  # noqa: S108  of a machine
_BUILD = f"python -m pip wheel -q --no-build-isolation --no-deps --no-index --wheel-dir {_WHEELS} . && ls {_WHEELS}"
# packages that only the backend names, such as Cython
_ASK = """\
import json, pathlib, tomllib
from pip._vendor.pyproject_hooks import BuildBackendHookCaller
file = pathlib.Path("pyproject.toml")
system = tomllib.loads(file.read_text()).get("build-system", {}) if file.exists() else {}
backend = system.get("build-backend", "setuptools.build_meta:__legacy__")
found = BuildBackendHookCaller(".", backend, system.get("backend-path")).get_requires_for_build_wheel()
print("\\n" + json.dumps(found))
"""
_TESTS = re.compile(r"tests?|testing")  # names of extras and dependency groups
_PLUGIN = re.compile(r"(pytest[\w.-]*|hypothesis)\b", re.I)  # taken from every extra and group
# options in the settings of pytest without which it refuses to start, or skips tests
_NAMED_BY = {b"--cov": "pytest-cov", b"asyncio_mode": "pytest-asyncio"}
_SETTINGS = ("pytest.ini", "setup.cfg", "tox.ini", "pyproject.toml")
_REQUIREMENTS = re.compile(r"(tests?/|requirements/)?((tests?|dev)-requirements|requirements-(tests?|dev)|tests?)\.txt")
_OF_PYTEST = ("pytest", "iniconfig", "packaging", "pluggy", "pygments", "Pygments")
# of real interpreters, which tests or an agent's shell start; the grader has `paths`
_SITE = "import sys\n\nsys.path += {paths!r}\n"


class _BuildSystem(BaseModel):
    requires: list[str] = ["setuptools", "wheel"]


class _ProjectTable(BaseModel):
    optional_dependencies: dict[str, list[str]] = Field({}, alias="optional-dependencies")


class _Pyproject(BaseModel):
    build_system: _BuildSystem | None = Field(None, alias="build-system")
    project: _ProjectTable | None = None
    dependency_groups: dict[str, list[Any]] = Field({}, alias="dependency-groups")


@dataclass(frozen=True)
class Project:
    source: Source
    files: dict[str, bytes] = field(repr=False)  # the source, and what its build generates
    paths: list[str]  # in which its modules lie
    image: str  # what it needs, without the project


async def install(source: Source, name: str, machines: MachineHost, requirements: str = "") -> Project:
    """Build the project and an image `name` for its tests. TaskError says which step failed."""
    with tempfile.TemporaryDirectory(prefix="rollmill-factory-") as temporary, contextlib.ExitStack() as builders:
        place = Path(temporary)
        packages = _Packages(place, machines, builders)
        settings = _pyproject(source.files)
        lines = ["pytest", *_plugins(settings, source.files), *requirements.splitlines()]
        files, paths = dict(source.files), ["."]
        if settings.build_system or settings.project or "setup.py" in files:
            wheel = await packages.build_wheel(source)
            files, paths = _place_modules(source.files, wheel)
            if _metadata(wheel)["Name"] in _OF_PYTEST:
                raise TaskError(
                    f"pytest itself needs {source.name}, so its tests cannot run without an installed copy of it",
                    hint="no tasks can be made of this project",
                )
            lines.insert(0, _strip(wheel, paths, place))
        await packages.build_image(name, lines)
    return Project(source, files, paths, name)


class _Packages:
    """Installs packages. pip takes wheels alone on this host; those that the index does not have are made in machines
    from sdists, and kept in a folder for pip."""

    def __init__(self, place: Path, machines: MachineHost, builders: contextlib.ExitStack) -> None:
        """`builders` removes the images of builds at its end: two of them may share a layer that machines have open."""
        self._place, self._machines, self._builders = place, machines, builders
        self._wheels = place / "wheels"
        self._wheels.mkdir()
        self._made: list[str] = []  # requirements for which a wheel was made

    async def build_image(self, name: str, lines: list[str], directory: Path | None = None) -> None:
        listed = self._place / f"{name}.txt"
        listed.write_text("\n".join(dict.fromkeys(lines)) + "\n")
        while True:
            try:
                build_image(name, directory=directory, requirements=listed, wheels=self._wheels)
                return
            except TaskError as error:
                missing = _MISSING.search(error.message)
                if missing is None or missing[1] in self._made or len(self._made) == _MOST_MADE:
                    raise
            self._made.append(missing[1])
            sdist = get_sdist(missing[1])
            wheel = await self.build_wheel(Source(sdist.name, sdist.files, sdist.version))
            shutil.copy(str(wheel.filename), self._wheels)

    async def build_wheel(self, source: Source) -> zipfile.ZipFile:
        system = _pyproject(source.files).build_system or _BuildSystem()
        needed = ["pip", *(str(parse_requirement(line)) for line in system.requires)]
        place = Path(tempfile.mkdtemp(dir=self._place))
        for path, data in source.files.items():
            (place / "work" / path).parent.mkdir(parents=True, exist_ok=True)
            (place / "work" / path).write_bytes(data)
        machine = await self._builder(source, needed, place)
        try:
            if more := await _asked(machine):
                await machine.close()
                machine = await self._builder(source, [*needed, *more], place)
            return await _build(source, machine, place)
        except (OSError, zipfile.BadZipFile, IndexError) as error:
            raise TaskError(f"the wheel of {source.name} cannot be read: {error}") from None
        finally:
            await machine.close()

    async def _builder(self, source: Source, needed: list[str], place: Path) -> Machine:
        builder = self._builders.enter_context(other_name(source.name))
        await self.build_image(builder, needed, place / "work")
        return await self._machines.create(builder)


async def _asked(machine: Machine) -> list[str]:
    """What the project's backend wants for a build, beside what pyproject.toml names. Nothing if it cannot be asked:
    then the build says why."""
    told = await machine.exec(["python", "-c", _ASK], timeout_s=_BUILD_S * machine.capabilities.slowdown)
    if told.exit_code != 0:
        return []
    try:
        lines = _LINES.validate_json(told.output.strip().rpartition(b"\n")[2])
    except ValueError:
        return []
    return [str(parse_requirement(line)) for line in lines]


async def _build(source: Source, machine: Machine, place: Path) -> zipfile.ZipFile:
    """The wheel that `pip wheel` makes in a machine. Untrusted: what it holds, its name and its size."""
    env = {"SETUPTOOLS_SCM_PRETEND_VERSION": source.version, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    built = await machine.exec(["sh", "-c", _BUILD], env=env, timeout_s=_BUILD_S * machine.capabilities.slowdown)
    if built.exit_code != 0 or built.stopped is not None:
        why = f"stopped by {built.stopped}" if built.stopped else built.output.decode("utf-8", "replace")[-800:]
        raise TaskError(f"the wheel of {source.name} cannot be built in a machine: {why.strip()}")
    name = PurePosixPath(built.output.decode("utf-8", "replace").split()[-1]).name
    if not _WHEEL.fullmatch(name):
        raise TaskError(f"the build of {source.name} made {name[:100]!r}, which is no name of a wheel")
    (place / name).write_bytes(await machine.read(f"{_WHEELS}/{name}", max_bytes=_LARGEST))
    wheel = zipfile.ZipFile(place / name)
    if sum(each.file_size for each in wheel.infolist()) > _LARGEST:
        raise TaskError(f"the wheel of {source.name} has more than {_LARGEST >> 20} MiB")
    return wheel


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
    name = Path(str(wheel.filename)).name
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
    for line in metadata.get_all("Requires-Dist", []):
        with contextlib.suppress(InvalidRequirement):
            marker = Requirement(line).marker
            if marker is not None and not any(marker.evaluate({"extra": each}) for each in ("", *extras)):
                continue  # pip does not take it
        parse_requirement(line)
    return f"{place / name}[{','.join(extras)}]" if extras else str(place / name)


def _metadata(wheel: zipfile.ZipFile) -> email.message.Message:
    name = next((each for each in wheel.namelist() if each.endswith(".dist-info/METADATA")), None)
    if name is None:
        raise TaskError("the wheel of the project has no METADATA", hint="does `pip wheel .` work?")
    return email.message_from_bytes(wheel.read(name))


def _is_metadata(name: str) -> bool:
    return name.partition("/")[0].endswith((".dist-info", ".data"))


def _pyproject(files: Mapping[str, bytes]) -> _Pyproject:
    try:
        return _Pyproject.model_validate(tomllib.loads(files.get("pyproject.toml", b"").decode()))
    except ValueError as error:
        raise TaskError(f"pyproject.toml cannot be read: {error}") from None


def _plugins(settings: _Pyproject, files: Mapping[str, bytes]) -> list[str]:
    """What tests need: groups and files named after tests, plugins of pytest from all others and from its settings."""
    texts = [files.get(path, b"") for path in _SETTINGS]
    found = [plugin for option, plugin in _NAMED_BY.items() if any(option in text for text in texts)]
    groups = {**(settings.project.optional_dependencies if settings.project else {}), **settings.dependency_groups}
    for path, data in files.items():
        if _REQUIREMENTS.fullmatch(path):
            groups[path] = [line.partition(" #")[0].strip() for line in data.decode("utf-8", "replace").splitlines()]
    for group, lines in groups.items():
        whole = _TESTS.fullmatch(group) or (group in files and _TESTS.search(group))
        for line in lines:
            with contextlib.suppress(TaskError):  # options, addresses and other groups are left out
                text = str(parse_requirement(line if isinstance(line, str) else ""))
                found += [text] if whole or _PLUGIN.match(text) else []
    return list(dict.fromkeys(found))
