"""The users of a machine: "root" is a name, not a right."""

from __future__ import annotations

import errno

import pytest

from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.namespace.client import NamespaceHost
from tests.machines.conftest import CONFIG

pytestmark = pytest.mark.asyncio(loop_scope="module")
STATUS = "id -u; whoami; grep -E '^Cap(Prm|Eff|Inh|Amb)|^NoNewPrivs|^Seccomp:' /proc/self/status"
PRIVILEGED = """
import ctypes, os, socket
libc = ctypes.CDLL(None)
calls = [libc.unshare(0x10000000), libc.mount(b'x', b'/tmp', b'tmpfs', 0, None), libc.chroot(b'/tmp'),
         libc.sethostname(b'x', 1), libc.setuid(1000), libc.setgroups(0, None)]
for path in ('/etc/passwd', '/usr/x', '/proc/sys/kernel/hostname', '/proc/self/uid_map', '/proc/1/mem'):
    try: open(path, 'wb', buffering=0).write(b'x'); calls.append(path)
    except OSError: pass
try: os.chown('/work/mine', 5, 5); calls.append('chown')
except OSError: pass
print(set(calls))
"""
BOMB = """
import os, time
made = 0
try:
    for _ in range(200):
        if os.fork() == 0: time.sleep(60)
        made += 1
except OSError: pass
print(made)
"""


async def test_root_is_the_same_user_under_another_name(any_host: NamespaceHost) -> None:
    machine = await any_host.create(BUILT_IN, {"given": b"1"})
    assert machine.capabilities.users == ("user", "root")
    seen = (await machine.exec(["sh", "-c", STATUS], user="root")).output.split()
    assert seen[:2] == [b"0", b"root"]
    assert {int(word, 16) for word in seen[3:10:2]} == {0} and seen[10:] == [b"NoNewPrivs:", b"1", b"Seccomp:", b"2"]
    owns = "echo 2 > given; echo 1 > mine; stat -c %u given mine; python -c 'import os; print(os.getuid())'"
    assert (await machine.exec(["sh", "-c", owns], user="root")).output == b"0\n0\n0\n"
    changes = "echo 3 > mine; rm given; stat -c %u mine; id -u"
    for user in ("user", None):
        result = await machine.exec(["sh", "-c", changes.replace("rm", "rm -f")], user=user)
        assert result.output == b"1000\n1000\n", result
    assert await machine.read("mine") == b"3\n"
    await machine.close()


async def test_root_may_do_nothing_that_the_user_may_not(any_host: NamespaceHost) -> None:
    machine = await any_host.create(BUILT_IN, {"mine": b""})
    assert (await machine.exec(["python", "-c", PRIVILEGED], user="root")).output == b"{-1}\n"
    made = await machine.exec(["python", "-c", BOMB], user="root", timeout_s=20)
    assert made.stopped in ("processes", "memory") or int(made.output) <= CONFIG.processes, made
    assert (await machine.exec(["id", "-u"])).output == b"1000\n"
    process = await machine.start(["sh", "-c", "id -u; sleep 60"], user="root", pty=(24, 80))
    while b"0\r\n" not in (state := await process.state()).output:
        assert state.exit_code is None
    assert (await process.stop()).exit_code is not None
    with pytest.raises(OSError, match="no user 'postgres' here; there are: user, root") as refused:
        await machine.exec(["true"], user="postgres")
    assert refused.value.errno == errno.EPERM
    assert (await machine.exec(["true"])).exit_code == 0
    await machine.close()
