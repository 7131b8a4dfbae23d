"""Autoinstall: an agent sets a repository up in a machine, and a recipe is kept that does it again without the agent.

    image of the repository ──► agent at work ──► the commands it ran: the recipe
                                                       │ replayed in two clean machines; verification passes in both
                                                       ▼
                                        a new image: the work directory after the recipe

The agent's word counts for nothing: only what two clean machines show. Before verification the repository's own files
are put back, so that no test passes because it was changed. If they fail, the agent tries again and reads
why. Everything that the agent and its machine say is untrusted; of the machine only regular files are taken.
"""

from __future__ import annotations

import asyncio
import io
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel

from rollmill.config import validate_config
from rollmill.environments.harness import Harness
from rollmill.environments.harnesses.shell import ShellHarness, bash
from rollmill.environments.rewards.clean import UNASKED
from rollmill.environments.task import Task
from rollmill.errors import TaskError
from rollmill.kinds import build
from rollmill.machines.finish_image import other_name, verify
from rollmill.machines.images import image as images
from rollmill.machines.images.build import build_image, keep_work, remove_image
from rollmill.machines.images.image import ImageRecord
from rollmill.machines.machine import ExecResult, Machine, MachineHost, MachineSection, MachineWrapper
from rollmill.machines.oci.tar import ArchiveError, Tar, safe_path, write_entry
from rollmill.rollouts.agent_endpoint import Endpoint, EndpointProxy
from rollmill.types import Sampling

CLEAN_RUNS = 2
_LARGEST, _MOST_ENTRIES = 200 << 20, 1_000_000  # bytes and files of the work directory
_INSTRUCTION = """\
Set up the repository in the current directory so that each of these commands passes when it is run there by `sh -c`:

{commands}

The commands that you run are replayed in a fresh machine, one after the other, and then the commands above are run.
Only files below the current directory are kept. Before the commands above are run, every file of the repository is put
back as it was.
{failure}"""


class Recipe(BaseModel):
    """recipe.json: how the image was made from another one."""

    base: str
    commands: list[str]
    verify: list[str]


@dataclass
class Installed:
    record: ImageRecord
    recipe: Recipe
    transcripts: list[list[dict[str, Any]]] = field(default_factory=list)  # one per attempt


class _Recorder(MachineWrapper):
    """A machine that remembers the commands of the shell harness."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.commands: list[str] = []

    async def exec(self, argv: Sequence[str], **options: Any) -> ExecResult:
        if list(argv) == bash(argv[-1]):
            self.commands.append(argv[-1])
        return await super().exec(argv, **options)


async def autoinstall(
    name: str,
    base: str,
    commands: Sequence[str],
    *,
    machines: MachineHost,
    harness: Harness,
    proxy: EndpointProxy,
    sampling: Sampling,
    attempts: int = 3,
    timeout_s: float = 1800.0,
) -> Installed:
    """Let the agent set up a machine of the image `base`, and name the result. TaskError if no attempt succeeds."""
    transcripts: list[list[dict[str, Any]]] = []
    failure = ""
    for _ in range(attempts):
        machine = _Recorder(await machines.create(base))
        url, transcript = proxy.open()
        try:
            async with asyncio.timeout(timeout_s * machine.capabilities.slowdown):
                task = Task(id="autoinstall", instruction=_instruction(commands, failure), image=base)
                await harness.run(task, machine, base_url=url, api_key=transcript.key, sampling=sampling)
        except TimeoutError:
            pass  # what it has done by now may be enough
        finally:
            transcripts.append(transcript.messages)
            await machine.close()
        recipe = Recipe(base=base, commands=machine.commands, verify=list(commands))
        try:
            packed = [await _replay(machines, recipe) for _ in range(CLEAN_RUNS)][-1]
            record = await _keep_verified(machines, name, recipe, packed, transcripts)
        except TaskError as error:
            failure = error.message
            continue
        return Installed(record, recipe, transcripts)
    raise TaskError(f"{attempts} attempts to set up {base!r} failed; the last one: {failure}")


async def _keep_verified(
    machines: MachineHost, name: str, recipe: Recipe, packed: bytes, transcripts: list[list[dict[str, Any]]]
) -> ImageRecord:
    """Name the image once a machine of it has passed: what an image does not keep (links, modes, other directories)
    must not be needed."""
    with other_name(name) as unverified:
        record = _keep(unverified, recipe, packed, transcripts)
        machine = await machines.create(unverified)
        try:
            await verify(machine, recipe.verify)
        finally:
            await machine.close()
        images.keep_record(name, record)
    return record


async def install_repository(
    name: str,
    repository: Path,
    commit: str,
    requirements: Path | None,
    commands: Sequence[str],
    endpoint: Endpoint,
    *,
    kind: str = "namespace",
    attempts: int = 3,
) -> Installed:
    """Autoinstall from a repository: an image of it, sealed, then the agent."""
    base = f"{name[:50]}.base"
    section = validate_config(MachineSection, {"kind": kind}, "the kind of machine")
    async with EndpointProxy(endpoint) as proxy:
        await proxy.check()
    build_image(base, repository=repository, commit=commit, requirements=requirements)
    machines: MachineHost = build(section)
    harness = ShellHarness()
    try:
        async with EndpointProxy(endpoint) as proxy:
            return await autoinstall(
                name,
                base,
                commands,
                machines=machines,
                harness=harness,
                proxy=proxy,
                sampling=Sampling(temperature=0.0, max_tokens=4096),
                attempts=attempts,
            )
    finally:
        await harness.close()
        await machines.close()
        remove_image(base)


def _instruction(commands: Sequence[str], failure: str) -> str:
    listed = "\n".join(f"    {command}" for command in commands)
    again = f"\nAn earlier attempt was not enough. In a fresh machine:\n{failure[-3000:]}\n" if failure else ""
    return _INSTRUCTION.format(commands=listed, failure=again)


async def _replay(machines: MachineHost, recipe: Recipe) -> bytes:
    """Run a recipe in a clean machine, then its verification. Returns a tar of the work directory before the latter."""
    machine = await machines.create(recipe.base)
    try:
        start = await _pack(machine)
        for command in recipe.commands:
            await machine.exec(bash(command), timeout_s=600.0 * machine.capabilities.slowdown)
        restored = await machine.exec(["tar", "-xf", "-"], stdin=start, timeout_s=120.0)
        if restored.exit_code != 0:
            raise TaskError("the files of the repository could not be put back", hint="leave them as they are")
        packed = await _pack(machine)
        if hooks := _added_hooks(_names(start), _names(packed)):
            raise TaskError(f"{', '.join(hooks[:5])} would change how tests run", hint="do without files of this name")
        await verify(machine, recipe.verify)
        return packed
    finally:
        await machine.close()


async def _pack(machine: Machine) -> bytes:
    packed = await machine.exec(["tar", "-cf", "-", "."], timeout_s=120.0, max_output=_LARGEST)
    if packed.exit_code != 0 or packed.truncated:
        raise TaskError(f"the work directory has more than {_LARGEST >> 20} MiB, or cannot be read")
    return packed.output


def _names(packed: bytes) -> set[PurePosixPath]:
    try:
        tar = Tar(io.BytesIO(packed), most_bytes=_LARGEST, most_entries=_MOST_ENTRIES)
        return {PurePosixPath(entry.name) for entry in tar if entry.kind != "directory"}
    except ArchiveError as error:
        raise TaskError(f"the work directory of the machine cannot be unpacked: {error}") from None


def _added_hooks(before: set[PurePosixPath], after: set[PurePosixPath]) -> list[str]:
    """New files beside those of the repository that Python or pytest runs or reads unasked."""
    folders = {path.parent for path in before}
    return sorted(str(path) for path in after - before if path.name in UNASKED and path.parent in folders)


def _keep(name: str, recipe: Recipe, packed: bytes, transcripts: list[list[dict[str, Any]]]) -> ImageRecord:
    """One layer with the whole work directory replaces those of the base."""
    root = images.images_directory()
    with tempfile.TemporaryDirectory(prefix=".building-", dir=root) as temporary:
        target = Path(temporary, "work")
        target.mkdir()
        try:
            for entry in (tar := Tar(io.BytesIO(packed), most_bytes=_LARGEST, most_entries=_MOST_ENTRIES)):
                path = safe_path(entry.name)
                if entry.kind == "file" and path is not None:
                    write_entry(target, path, entry.mode, tar)
        except (ArchiveError, OSError) as error:
            raise TaskError(f"the work directory of the machine cannot be unpacked: {error}") from None
        record = keep_work(name, recipe.base, target, recipe.verify)
    place = root / "objects" / record.digest
    (place / "recipe.json").write_text(recipe.model_dump_json(indent=1))
    (place / "transcript.json").write_text(json.dumps(transcripts, indent=1))
    return record
