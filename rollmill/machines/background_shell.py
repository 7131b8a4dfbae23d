"""A machine as a container is used: commands whose background processes live on, and files anywhere.

Commands of a machine end with everything they started. Harbor's agents start servers and terminal multiplexers with
one command, and use them with the next. So one process, the keeper, is started in the machine and runs the commands:
what they leave behind is the keeper's, and lives as long as the machine.

    we write N.sh, send N to the keeper, and wait for N.code; then N.out and N.err are what it printed

Commands can end the keeper, because they run as the same user. That is their doing and no failure of the machine: the
command counts as killed, and another keeper is started for the next one.
"""

from __future__ import annotations

import asyncio
import itertools
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rollmill.errors import MachineError
from rollmill.machines.file_trees import get_tree
from rollmill.machines.machine import Machine, Process

_PLACE = "/tmp/.harbor"  # noqa: S108  in a machine
_KEEPER = f"""mkdir -p {_PLACE} && cd {_PLACE} && mkfifo orders && exec 3<>orders && touch ready
shell=$(command -v bash || echo sh)
while read -r order <&3; do
    setsid "$shell" -c 'exec 3<&-; echo $$ > "$0.pid"; "$1" "$0.sh" > "$0.out" 2> "$0.err" < /dev/null
        echo $? > "$0.part"; mv "$0.part" "$0.code"' "$order" "$shell" &
done
"""
_WAIT = f"""cd {_PLACE} || exit 3
n=0; until [ -e "$0.code" ] || [ $n -ge 40 ]; do sleep 0.05; n=$((n + 1)); done
[ -e "$0.code" ] || exit 75
out=$(wc -c < "$0.out"); [ "$out" -le "$1" ] || out=$1
echo "$(cat "$0.code") $out"; head -c "$out" "$0.out"; head -c "$1" "$0.err"; rm -f "$0".*
"""
_NOT_YET = 75
_KILLED, _WHY = 137, "the command, or another one at the same time, has ended what runs commands in this machine\n"
_MOST_OUTPUT = 4 << 20  # bytes of stdout, and of stderr; the rest is lost
_LARGEST_FILE = 1 << 28
_SHORT_S = 60.0  # for a command of ours
_LONGEST_S = 7 * 86400.0


class Done(NamedTuple):
    stdout: str
    stderr: str
    exit_code: int


class BackgroundShell:
    """Commands of one machine. `cwd` is where they begin."""

    def __init__(self, machine: Machine, cwd: str) -> None:
        self.machine = machine
        self._cwd = cwd
        self._numbers = itertools.count(1)
        self._keeper: Process | None = None
        self._starting = asyncio.Lock()

    async def start(self) -> None:
        """Start the keeper."""
        self._keeper = await self.machine.start(["sh", "-c", _KEEPER])
        await self._run(["sh", "-c", f"until [ -e {_PLACE}/ready ]; do sleep 0.02; done"])

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        stdin: bytes = b"",
    ) -> Done:
        """TimeoutError: it took longer, and it and its session have been ended. MachineError: the machine has ended."""
        keeper = await self._running_keeper()
        number = str(next(self._numbers))
        variables = [f"export {name}={shlex.quote(value)}" for name, value in (env or {}).items()]
        lines = [*variables, f"cd {shlex.quote(cwd or self._cwd)} || exit 126"]
        if stdin:
            await self.machine.write(f"{_PLACE}/{number}.in", stdin)
            lines += [f"exec < {_PLACE}/{number}.in"]
        lines += [command]
        script = "\n".join([*lines, ""]).encode("utf-8", "replace")
        slowdown = self.machine.capabilities.slowdown
        try:
            async with asyncio.timeout((timeout_s or _LONGEST_S) * slowdown):
                return await self._finish(number, script, keeper)
        except (TimeoutError, asyncio.CancelledError):
            end = f'pid=$(cat {_PLACE}/"$0.pid") && kill -s KILL -- "-$pid"; rm -f {_PLACE}/"$0".*'
            await asyncio.shield(self._run(["sh", "-c", end, number]))
            raise

    async def _running_keeper(self) -> Process:
        async with self._starting:
            if self._keeper is None:
                await self.start()
        keeper = self._keeper
        assert keeper is not None
        if (await keeper.state()).exit_code is not None:
            await self._replace(keeper)
        return self._keeper or keeper

    async def _replace(self, keeper: Process) -> None:
        """Start another keeper, unless that has been done."""
        async with self._starting:
            if self._keeper is keeper:
                await keeper.stop()
                await self._run(["rm", "-rf", _PLACE])
                await self.start()

    async def _finish(self, number: str, script: bytes, keeper: Process) -> Done:
        order = f'[ -p {_PLACE}/orders ] && echo "$0" > {_PLACE}/orders'
        try:
            await self.machine.write(f"{_PLACE}/{number}.sh", script)
            waits = not await self._run(["sh", "-c", order, number], check=False)
        except OSError:  # earlier commands have left no place for it
            waits = False
        argv = ["sh", "-c", _WAIT, number, str(_MOST_OUTPUT)]
        while waits:
            result = await self.machine.exec(argv, timeout_s=self._limit_s(), max_output=2 * _MOST_OUTPUT + 4096)
            if result.exit_code == 0:
                return _parsed(result.output)
            waits = result.exit_code == _NOT_YET or (result.exit_code < 0 and result.stopped != "time")  # or killed
            waits = waits and keeper is self._keeper and (await keeper.state()).exit_code is None
        await self._replace(keeper)
        return Done("", _WHY, _KILLED)

    async def upload_file(self, source: Path, target: str) -> None:
        await self.machine.write(target, source.read_bytes())
        if source.stat().st_mode & 0o100:
            await self._run(["chmod", "+x", "--", target])

    async def upload_dir(self, source: Path, target: str) -> None:
        """Regular files, and directories that have any."""
        await self._run(["mkdir", "-p", "--", target])
        for path in sorted(source.rglob("*")):
            if path.is_file():
                await self.upload_file(path, f"{target.rstrip('/')}/{path.relative_to(source).as_posix()}")

    async def download_file(self, source: str, target: Path) -> None:
        data = await self.machine.read(source, max_bytes=_LARGEST_FILE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    async def download_dir(self, source: str, target: Path) -> None:
        """The files below a directory. Nothing that a machine packed is written outside of `target`."""
        await get_tree(self.machine, source, target)

    def _limit_s(self) -> float:
        return _SHORT_S * self.machine.capabilities.slowdown

    async def _run(self, argv: list[str], *, check: bool = True) -> str:
        """A short command of ours. Returns what it said if it failed, or MachineError."""
        result = await self.machine.exec(argv, cwd="/", timeout_s=self._limit_s())
        if result.exit_code == 0:
            return ""
        said = f"{result.output.decode('utf-8', 'replace')[-300:]} (exit code {result.exit_code}, {result.stopped})"
        if check:
            raise MachineError(f"{argv[0]} failed in a machine of a Harbor task: {said}")
        return said


def _parsed(output: bytes) -> Done:
    """What `_WAIT` printed. The machine's own commands could have changed any of it."""
    first, _, rest = output.partition(b"\n")
    try:
        code, size = (int(word) for word in first.split())
    except ValueError:
        return Done("", f"the command has changed what was to be its result: {first[:100]!r}\n", _KILLED)
    size = max(size, 0)
    return Done(rest[:size].decode("utf-8", "replace"), rest[size:].decode("utf-8", "replace"), code)
