"""Processes with a terminal: real interactive programs, typed into as a person would."""

from __future__ import annotations

import errno

import pytest

from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.machine import Process
from rollmill.machines.namespace.client import NamespaceHost, NamespaceMachine
from rollmill.machines.qemu.host import QemuHost
from tests.machines.test_processes import until
from tests.machines.virtual import qemu_host  # noqa: F401

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def converse(process: Process) -> None:
    """Types into `python -i`."""
    await until(process, b">>> ")
    await process.write(b"answer = 6 * 7\nprint('it', 'is', answer)\n")
    assert b"it is 42" in (await until(process, b"it is 42")).output
    await process.resize(40, 132)
    await process.write(b"import os; print(tuple(os.get_terminal_size()), os.ttyname(0), os.environ['TERM'])\n")
    assert b"(132, 40) /dev/pts/0 xterm-256color" in (await until(process, b"(132, 40)")).output
    await process.write(b"import time; print('wai' + 'ting'); time.sleep(600)\n")
    await until(process, b"waiting")  # what is typed behind a Ctrl-C that nobody has read is dropped
    await process.write(b"\x03")  # Ctrl-C
    await until(process, b"KeyboardInterrupt")
    await process.write(b"print('still', 'here')\n")
    await until(process, b"still here")
    await process.write(b"\x04")  # Ctrl-D


async def test_python_is_used_interactively(any_host: NamespaceHost) -> None:
    machine = await any_host.create(BUILT_IN)
    process = await machine.start(["python", "-i", "-q"], pty=(24, 80), env={"PYTHON_BASIC_REPL": "1"})
    await converse(process)
    state = await until(process, b"never said")
    assert state.exit_code == 0, state
    with pytest.raises(OSError):
        await process.write(b"more")
    assert (await machine.exec(["true"])).exit_code == 0
    await machine.close()


async def test_a_pager_shows_what_fits_on_the_screen_and_follows_its_size(machine: NamespaceMachine) -> None:
    await machine.write("text", b"".join(b"line %d of many\n" % number for number in range(500)))
    if (await machine.exec(["less", "--version"])).exit_code == 127:
        pytest.skip("this host has no less")
    process = await machine.start(["less", "text"], pty=(10, 80))
    first = await until(process, b"line 8 ")
    assert b"line 12 " not in first.output
    await process.resize(30, 80)
    await until(process, b"line 20 ")
    await process.write(b"G")
    await until(process, b"line 499 ")
    assert (await machine.exec(["cat", "text"])).exit_code == 0, "commands run beside it"
    await process.write(b"q")
    assert (await until(process, b"never said")).exit_code == 0


async def test_terminals_belong_to_the_user_and_a_flood_holds_nobody_up(any_host: NamespaceHost) -> None:
    machine = await any_host.create(BUILT_IN)
    shell = await machine.start(
        ["sh", "-c", "stat -c %U $(tty); read word; echo got $word"], pty=(24, 80), stdin=b"x\n"
    )
    assert b"user\r\n" in (await until(shell, b"got x")).output
    flood = await machine.start(["yes"], pty=(24, 80), max_output=100)
    assert (await until(flood, b"bytes cut")).truncated
    assert (await machine.exec(["sh", "-c", "sleep 0.2; echo here"])).output == b"here\n"
    await flood.stop()
    plain = await machine.start(["sleep", "60"])
    with pytest.raises(OSError) as refused:
        await plain.write(b"x")
    assert refused.value.errno == errno.ENOTTY
    for size in ((-1, 80), (1 << 20, 80)):
        with pytest.raises(OSError):
            await machine.start(["true"], pty=size)
    await plain.stop()
    with pytest.raises(OSError):
        await plain.resize(1, 1)
    await machine.close()


@pytest.mark.slow
async def test_python_is_used_interactively_in_a_virtual_machine(qemu_host: QemuHost) -> None:  # noqa: F811
    machine = await qemu_host.create(BUILT_IN)
    process = await machine.start(["python", "-i", "-q"], pty=(24, 80))
    await converse(process)
    assert (await until(process, b"never said")).exit_code == 0
    await machine.close()
