"""Builds a Dockerfile with buildah into an OCI layout. A Dockerfile is untrusted code: see build_sandbox.py.

The images that it names are fetched beforehand, each blob verified, from their registry or its mirror. What it copies
is a copy of the context. Its commands reach the network by a proxy alone, which programs find in `http_proxy` and
`https_proxy`; the names on the list are all that it leads to. Time, disk and processes are limited.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import platform
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from rollmill.config import Config
from rollmill.errors import TaskError
from rollmill.machines.egress import ENTRY, Egress
from rollmill.machines.oci import dockerfile, documents
from rollmill.machines.oci.documents import Manifest
from rollmill.machines.oci.image_reference import PREFIX, parse
from rollmill.machines.oci.oci_layout import Layout
from rollmill.machines.oci.registry_client import Registry

_LOOK_S = 0.5  # between two looks at a build
_SHARE = 10  # the disk is measured for at most one part in so many of the time
_MOST_SAID = 1500  # characters of what a build printed that stand in an error
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]|\x1b\[[0-9;]*m")


class BuildConfig(Config):
    """How Dockerfiles are built."""

    mirrors: dict[str, str] = Field(
        {},
        description='Where the images of a registry are fetched instead: {"docker.io" = "mirror.example/docker.io"}. '
        "An image NAME of the registry is NAME below it.",
    )
    egress: list[Annotated[str, Field(pattern=ENTRY)]] = Field(
        [],
        description="Names that RUN steps may reach through a proxy: NAME, NAME:PORT or *.NAME; no port: 80 and 443. "
        "Empty: none.",
    )
    egress_inside: bool = Field(
        False, description="These names may lead to addresses of a private network, such as a mirror of packages."
    )
    timeout_s: float = Field(1800.0, gt=0, description="Seconds that one build may take, without fetching its images.")
    disk_mb: int = Field(16384, ge=16, description="Most MiB that one build may write, its images included.")
    processes: int = Field(1024, ge=16, description="Most processes and threads of one build.")


class Recipe(Config):
    """What an image is built from."""

    dockerfile: Path = Field(description="Its path.")
    context: Path = Field(description="The directory whose files it copies.")
    content: str = Field("", description="Digest of both; a context that has changed since is refused. Empty: any.")
    text: str = Field("", description="Instead of the content of `dockerfile`.")
    environment: dict[str, str] = Field({}, description="Added to the ENV of the image.")
    directory: str = Field("", description="Its WORKDIR instead of the Dockerfile's.")
    settings: BuildConfig = Field(BuildConfig(), description="How it is built.")

    @property
    def key(self) -> str:
        """The same for two recipes that build the same."""
        facts = [self.content, self.environment, self.directory, self.settings.mirrors, platform.machine()]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def content_of(context: Path, text: str) -> str:
    """Digest of a Dockerfile and its context: every path, mode, link and byte."""
    total = hashlib.sha256(text.encode())
    for folder, names, files in os.walk(context):
        names.sort()
        for name in sorted([*names, *files]):
            path = os.path.join(folder, name)
            status = os.lstat(path)
            if not _is_taken(status):
                continue
            total.update(f"\0{os.path.relpath(path, context)}\0{status.st_mode:o}\0".encode("utf-8", "surrogateescape"))
            if stat.S_ISLNK(status.st_mode):
                total.update(os.fsencode(os.readlink(path)))
            elif stat.S_ISREG(status.st_mode):
                with open(path, "rb") as file:
                    total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _is_taken(status: os.stat_result) -> bool:
    return any(kind(status.st_mode) for kind in (stat.S_ISREG, stat.S_ISDIR, stat.S_ISLNK))


@contextlib.contextmanager
def built(recipe: Recipe) -> Iterator[Layout]:
    """The layout of what a recipe builds, as long as the caller is inside. TaskError names the Dockerfile, what is
    wrong and the remedy."""
    buildah = shutil.which("buildah")
    if buildah is None:
        raise TaskError(
            f"buildah is not installed: {recipe.dockerfile} cannot be built",
            hint="apt-get install buildah uidmap; or build it elsewhere and use the archive: oci:ARCHIVE.tar",
        )
    place = Path(tempfile.mkdtemp(prefix="rollmill-build-"))
    try:
        _fill(place, recipe)
        command = _Build(place, recipe, buildah)
        asyncio.run(command.run())
        yield Layout(place / "out", str(recipe.dockerfile))
    finally:
        _remove(place, buildah)


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(f"{path} cannot be read: {error}", hint="a Dockerfile is text in UTF-8") from None


def _fill(place: Path, recipe: Recipe) -> None:
    """Put the context, the Dockerfile and the images that it names into the directory of a build."""
    text = recipe.text or read_text(recipe.dockerfile)
    if not recipe.context.is_dir():
        raise TaskError(f"{recipe.context} is not a directory", hint="the context has the files that COPY names")

    def left_out(folder: str, names: list[str]) -> list[str]:
        return [name for name in names if not _is_taken(os.lstat(os.path.join(folder, name)))]

    try:
        shutil.copytree(recipe.context, place / "context", symlinks=True, ignore=left_out)
    except (OSError, shutil.Error) as error:
        raise TaskError(f"{recipe.context} cannot be copied: {str(error)[:300]}", hint="is the disk full?") from None
    if recipe.content and content_of(place / "context", text) != recipe.content:
        raise TaskError(f"{recipe.context} has changed since its task was read", hint="start again")
    plan = dockerfile.plan(text, str(recipe.dockerfile))
    for number, name in enumerate(plan.bases):
        fetch_layout(_mirrored(name, recipe.settings.mirrors), place / f"base{number}", recipe.dockerfile)
    added = [f"ENV {name}={_quoted(value)}" for name, value in recipe.environment.items()]
    added += [f"WORKDIR {_quoted(recipe.directory)}"] if recipe.directory else []
    (place / "Dockerfile").write_text("\n".join([plan.text, *added, ""]), encoding="utf-8")
    for name in ("storage", "run", "tmp", "home"):
        (place / name).mkdir()


def _quoted(text: str) -> str:
    return '"' + re.sub(r'(["\\$])', r"\\\1", text) + '"'


def _mirrored(name: str, mirrors: dict[str, str]) -> str:
    registry, _, rest = name.partition("/")
    return f"{mirrors[registry].rstrip('/')}/{rest}" if registry in mirrors else name


def fetch_layout(name: str, place: Path, asked_by: Path) -> None:
    """Write an image of a registry as an OCI layout."""
    try:
        with Registry(parse(f"{PREFIX}{name}"), place / "blobs" / "sha256") as registry:
            found = registry.manifest(parse(f"{PREFIX}{name}").tag)
            data = registry.document(found)
            manifest = documents.read(Manifest, data, f"the manifest of {name}")
            for blob in (manifest.config, *manifest.layers):
                registry.blob(blob)
    except TaskError as error:
        hint = f"{error.hint}; `mirrors` says where images of its registry are"
        raise TaskError(f"{asked_by}: FROM {name}: {error.message}", hint=hint) from None
    kind = json.loads(data).get("mediaType") or "application/vnd.oci.image.manifest.v1+json"
    listed = {"mediaType": kind, "digest": found.digest, "size": len(data)}
    (place / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [listed]}))
    (place / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')


class _Build:
    """One run of buildah, watched."""

    def __init__(self, place: Path, recipe: Recipe, buildah: str) -> None:
        self._place, self._recipe, self._limits = place, recipe, recipe.settings
        storage = ["--storage-driver", "overlay", "--root", f"{place}/storage", "--runroot", f"{place}/run"]
        self._buildah = [buildah, *storage]
        self._log = place.with_name(f"{place.name}.log")  # of the proxy; out of the build's reach

    def _order(self, given: int) -> str:
        bases = sorted(path.name for path in self._place.glob("base*"))
        commands = [[*self._buildah, "pull", "--quiet", f"oci:{name}"] for name in bases]
        build = ["build", "--isolation", "chroot", "--format", "docker", "--pull-never", "--file", "Dockerfile"]
        commands += [[*self._buildah, *build, "--tag", "localhost/built", "context"]]
        commands += [[*self._buildah, "push", "--quiet", "--disable-compression", "localhost/built", "oci:out"]]
        environment = {
            "PATH": os.environ.get("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
            "HOME": f"{self._place}/home",
            "TMPDIR": f"{self._place}/tmp",  # noqa: S108
            "XDG_RUNTIME_DIR": f"{self._place}/run",
            "_CONTAINERS_USERNS_CONFIGURED": "done",  # buildah makes no users of its own
        }
        return json.dumps(
            {
                "socket": given,
                "place": str(self._place),
                "place_users": os.geteuid() == 0,
                "disk": self._limits.disk_mb << 20,
                "processes": self._limits.processes,
                "commands": commands,
                "environment": environment,
            }
        )

    async def run(self) -> None:
        ours, theirs = socket.socketpair()
        words = [] if os.geteuid() == 0 else ["buildah", "unshare"]
        words += [sys.executable, "-P", "-m", "rollmill.machines.oci.build_sandbox", self._order(theirs.fileno())]
        with ours, theirs:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
            theirs.close()
            said: deque[str] = deque(maxlen=60)
            reading = asyncio.create_task(self._read(process, said))
            serving = asyncio.create_task(self._serve(ours))
            try:
                stopped = await self._watch(process)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
                serving.cancel()
                await asyncio.wait([reading, serving], timeout=5.0)
        refused = self._refused()
        if stopped or process.returncode:
            raise self._failure(stopped, "".join(said), refused)

    async def _read(self, process: asyncio.subprocess.Process, said: deque[str]) -> None:
        assert process.stdout is not None
        while data := await process.stdout.read(1 << 16):
            said.append(_CONTROL.sub("", data.decode("utf-8", "replace")))

    async def _serve(self, ours: socket.socket) -> None:
        """The proxy, at the port that the build has for it."""
        ours.setblocking(False)
        while True:
            with contextlib.suppress(BlockingIOError):
                _, files, _, _ = socket.recv_fds(ours, 1, 1)
                break
            await asyncio.sleep(0.01)
        if not files:
            return
        limits, name = self._limits, str(self._recipe.dockerfile)
        listener = socket.socket(fileno=files[0])
        proxy = Egress(listener, limits.egress, str(self._log), name, inside=limits.egress_inside)
        await proxy.start()
        try:
            await asyncio.Event().wait()
        finally:
            await proxy.close()

    async def _watch(self, process: asyncio.subprocess.Process) -> str:
        """Wait for the end. Returns the limit that was reached, if one was."""
        began, took, measured = time.monotonic(), 0.0, 0.0
        while process.returncode is None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _LOOK_S)
            now = time.monotonic()
            if process.returncode is None and now - began > self._limits.timeout_s:
                return f"it took longer than timeout_s = {self._limits.timeout_s:g} seconds"
            if process.returncode is None and now - measured > took * _SHARE:
                size = await asyncio.to_thread(_size, self._place)
                measured, took = time.monotonic(), time.monotonic() - now
                if size > self._limits.disk_mb << 20:
                    return f"it wrote more than disk_mb = {self._limits.disk_mb} MiB"
        return ""

    def _refused(self) -> list[str]:
        """Names that were asked for and are not on the list, or lead inside."""
        found = {}
        with contextlib.suppress(OSError):
            for line in self._log.read_text().splitlines():
                facts = json.loads(line)
                if "host" in facts and "refused" in facts:
                    found[f"{facts['host']} ({facts['refused']})"] = True
            self._log.unlink()
        return list(found)[:10]

    def _failure(self, stopped: str, said: str, refused: list[str]) -> TaskError:
        what = f"{self._recipe.dockerfile} was not built"
        if stopped:
            hint = "raise the limit if the Dockerfile is right: `--timeout`, `--disk-mb`, or `build` of [tasks]"
            return TaskError(f"{what}: {stopped}", hint=hint)
        if refused:
            names = ", ".join(refused)
            hint = "if you trust it with these names: `--egress NAME` each, and `--egress-inside` for a mirror in a "
            hint += "private network; or `build.egress` and `build.egress_inside` of [tasks]"
            return TaskError(f"{what}: its RUN steps need a network: {names}. {said[-_MOST_SAID:].strip()}", hint=hint)
        hint = "correct the Dockerfile; what buildah printed last is above"
        return TaskError(f"{what}: {said[-_MOST_SAID:].strip()}", hint=hint)


def _size(place: Path) -> int:
    """Bytes on the disk. What disappears meanwhile counts nothing."""
    total = 0
    for folder, _, names in os.walk(place, onerror=None):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512
    return total


def _remove(place: Path, buildah: str) -> None:
    """Also what belongs to users that only the build has."""
    if os.geteuid() != 0:
        subprocess.run([buildah, "unshare", "rm", "-rf", str(place)], capture_output=True, check=False)
    shutil.rmtree(place, ignore_errors=True)
