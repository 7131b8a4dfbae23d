"""Programs of the npm registry: installed once under build/npm, pinned, without running a script of any package."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from pathlib import Path

CACHE = Path(__file__).parents[2] / "build" / "npm"


async def run(*argv: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    """Standard output of a program that must end with exit code 0."""
    pipe = asyncio.subprocess.PIPE
    nothing = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(*argv, env=env, cwd=cwd, stdin=nothing, stdout=pipe, stderr=pipe)
    output, errors = await process.communicate()
    assert process.returncode == 0, (output + errors).decode(errors="replace")[-4000:]
    return output.decode()


async def node() -> tuple[int, ...]:
    return tuple(int(part) for part in (await run("node", "--version")).strip()[1:].split("."))


async def installed(name: str, *packages: str, optional: bool = True) -> Path:
    """The directory `node_modules` with these packages ("NAME@VERSION"). `optional`: with the native programs that
    packages bring for each platform."""
    place = CACHE / name
    if not place.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=CACHE))
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
        options += [] if optional else ["--omit=optional"]
        await run("npm", "install", "--prefix", fresh, *options, *packages)
        try:
            fresh.rename(place)
        except OSError:  # another test process was faster
            shutil.rmtree(fresh)
    for package in packages:
        wanted, _, version = package.rpartition("@")
        found = json.loads((place / "node_modules" / wanted / "package.json").read_text())["version"]
        assert found == version, f"{place} has {wanted} {found}, not {version}: remove the directory"
    return place / "node_modules"
