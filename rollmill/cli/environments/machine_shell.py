"""`rollmill machines shell`: a terminal in a machine of an image, or in one as an episode left it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from rollmill.config import validate_config
from rollmill.environments.environment import build_tasks, environment_of
from rollmill.environments.rewards.clean import DoesNotFit, clean_machine
from rollmill.errors import ConfigError
from rollmill.kinds import build
from rollmill.machines.machine import Machine, MachineSection, Process
from rollmill.rollouts.hand_in import load_hand_in
from rollmill.runs.opening import open_with_index
from rollmill.trajectories.trajectory_store import TrajectoryStore

_KEPT = 1 << 18  # bytes of output that a machine keeps: of a flood between two looks the middle is not shown
_LOOK_S = 0.03
_CUT = re.compile(rb"\n\[\xe2\x80\xa6 (\d+) bytes cut\]\n")


@contextlib.asynccontextmanager
async def machine_of(image: str, kind: str) -> AsyncIterator[Machine]:
    host = build(validate_config(MachineSection, {"kind": kind}, "--kind"))
    try:
        machine = await host.create(image)
        try:
            yield machine
        finally:
            await machine.close()
    finally:
        await host.close()


@contextlib.asynccontextmanager
async def machine_of_episode(run_dir: Path, trajectory: str) -> AsyncIterator[Machine]:
    """As graders get it: the files of the task, and over them what the episode handed in."""
    run = open_with_index(run_dir)
    objects = run.objects()
    row = TrajectoryStore(run.database(), objects).get(trajectory)
    if row.submission_key is None:
        raise ConfigError(f"the episode {trajectory} handed in nothing", hint="`rollmill trajectories show` tells why")
    given, task = load_hand_in(objects, row.submission_key), build_tasks(run.config).get(row.task_id)
    host = build(environment_of(run.config, task).machine)
    try:
        async with clean_machine(given.episode(task, host), {}, program=None) as machine:
            yield machine
    except DoesNotFit as error:
        raise ConfigError(f"what the episode {trajectory} handed in cannot be written: {error}") from None
    finally:
        await host.close()


async def run_command(machine: Machine, command: str) -> int:
    result = await machine.exec(["sh", "-c", command], timeout_s=3600.0, max_output=1 << 24)
    sys.stdout.buffer.write(result.output)
    sys.stdout.flush()
    return result.exit_code if result.exit_code >= 0 else 128 - result.exit_code


async def attach(machine: Machine) -> int:
    """Connect this terminal with a shell in the machine, until the shell ends. Returns its exit code."""
    columns, rows = shutil.get_terminal_size()
    shell = ["sh", "-c", "command -v bash > /dev/null && exec bash -l; exec sh"]
    process = await machine.start(shell, pty=(rows, columns), max_output=_KEPT)
    loop, typed = asyncio.get_running_loop(), asyncio.Queue[bytes]()
    with _raw_terminal():
        loop.add_reader(0, lambda: typed.put_nowait(os.read(0, 4096)))
        loop.add_signal_handler(signal.SIGWINCH, typed.put_nowait, b"")
        typing = asyncio.create_task(_type(process, typed))
        try:
            return await _show(process)
        finally:
            loop.remove_reader(0)
            loop.remove_signal_handler(signal.SIGWINCH)
            typing.cancel()


async def _type(process: Process, typed: asyncio.Queue[bytes]) -> None:
    with contextlib.suppress(OSError):  # the shell has ended
        while True:
            if data := await typed.get():
                await process.write(data)
            else:  # the window has another size
                columns, rows = shutil.get_terminal_size()
                await process.resize(rows, columns)


async def _show(process: Process) -> int:
    seen = 0
    while True:
        state = await process.state()
        new, seen = _since(state.output, seen, truncated=state.truncated)
        sys.stdout.buffer.write(new)
        sys.stdout.flush()
        if state.exit_code is not None:
            return max(state.exit_code, 0)
        await asyncio.sleep(_LOOK_S)


def _since(output: bytes, seen: int, *, truncated: bool) -> tuple[bytes, int]:
    """What came after the first `seen` bytes, and how many there are now. A line replaces the middle of much output."""
    cut = _CUT.search(output, _KEPT // 2) if truncated else None
    if cut is None:
        return output[seen:], len(output)
    tail = output[cut.end() :]
    size = _KEPT // 2 + int(cut[1]) + len(tail)
    return tail[-(size - seen) :] if size > seen else b"", size


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    before = termios.tcgetattr(0)
    tty.setraw(0)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
