"""What a command in a machine can see and reach of the host: nothing."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.namespace.client import NamespaceHost, NamespaceMachine
from tests.machines.conftest import run_python

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_the_hosts_files_are_not_visible(machine: NamespaceMachine, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("secret")
    checkout = Path(__file__).parents[2]
    private = [tmp_path / "run.json", checkout / "rollmill", checkout / "pyproject.toml"]
    private += [path for path in Path.home().iterdir() if Path.home() != Path("/")]
    paths = [str(path) for path in private] + ["/etc/shadow", "/etc/ssl", "/sys/kernel", "/sys/fs", "/var/run"]
    assert await run_python(machine, f"import os; print([p for p in {paths} if os.path.exists(p)])") == "[]"
    made = "import os; print([sorted(os.listdir(p)) for p in ('/home', '/root', '/srv', '/run', '/var/lib')])"
    lists = "[['user'], [], [], ['initctl', 'lock', 'systemd'], ['dpkg']]"
    assert (await run_python(machine, made)).replace("[]]", "['dpkg']]") == lists  # not every host has dpkg
    assert await run_python(machine, "import os; print(os.listdir('/work'), os.listdir('/tmp'))") == "[] []"
    program = "import importlib.util as u; print(u.find_spec('torch'), u.find_spec('rollmill'))"
    assert await run_python(machine, program) == "None None"


async def test_the_hosts_environment_is_not_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OBJECT_STORE_SECRET", "hunter2")
    host = NamespaceHost()
    try:
        machine = await host.create(BUILT_IN)
        program = "import os; print(dict(os.environ)); os.system('cat /proc/*/environ 2>/dev/null')"
        for python in ("python", "/opt/bin/python"):
            assert b"hunter2" not in (await machine.exec([python, "-c", program])).output
    finally:
        await host.close()


async def test_there_is_no_network(machine: NamespaceMachine) -> None:
    assert machine.capabilities.network == "none"
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = (
            "import socket\n"
            f"for address in (('127.0.0.1', {server.getsockname()[1]}), ('1.1.1.1', 53)):\n"
            "    try: socket.create_connection(address, timeout=2); print('connected')\n"
            "    except OSError: pass\n"
            "try: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM); print('vsock')\n"
            "except OSError: pass\n"
            "print([name for _, name in socket.if_nameindex()])"
        )
        assert await run_python(machine, program) == "['lo']"


async def test_only_its_own_processes_are_visible(machine: NamespaceMachine) -> None:
    program = "import os; print(sorted(p for p in os.listdir('/proc') if p.isdigit()) == ['1', str(os.getpid())])"
    assert await run_python(machine, program) == "True"


async def test_commands_have_no_privileges(machine: NamespaceMachine) -> None:
    program = (
        "import os\n"
        "lines = open('/proc/self/status').read().splitlines()\n"
        "status = dict(line.split(':\\t') for line in lines if ':\\t' in line)\n"
        "print(os.getuid(), os.geteuid(), [int(status[c], 16) for c in ('CapPrm', 'CapEff', 'CapInh', 'CapAmb')],"
        " status['NoNewPrivs'], status['Seccomp'])"
    )
    assert await run_python(machine, program) == "1000 1000 [0, 0, 0, 0] 1 2"


async def test_the_system_is_read_only_and_privileged_calls_are_refused(machine: NamespaceMachine) -> None:
    program = (
        "import ctypes, os\n"
        "for path in ('/usr/bin/x', '/etc/passwd', '/opt/bin/python', '/x', '/dev/x', '/proc/sys/kernel/hostname'):\n"
        "    try: open(path, 'w'); print('wrote', path)\n"
        "    except OSError: pass\n"
        "libc = ctypes.CDLL(None)\n"
        "print(libc.unshare(0x10000000), libc.mount(b'x', b'/tmp', b'tmpfs', 0, None), libc.umount2(b'/proc', 2),"
        " libc.chroot(b'/tmp'), libc.sethostname(b'x', 1), libc.setuid(0))"
    )
    assert await run_python(machine, program) == "-1 -1 -1 -1 -1 -1"


async def test_reading_and_writing_never_leave_the_machine(machine: NamespaceMachine, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("secret")
    planted = (
        f"ln -s {secret} outside; ln -s {tmp_path} folder; ln -s /proc/self/maps maps; ln -s loop loop; mkfifo pipe"
    )
    await machine.exec(["sh", "-c", planted])
    for path in ("outside", "folder/secret", f"../../../..{secret}", str(secret)):
        with pytest.raises(FileNotFoundError):
            await machine.read(path)
    for path in ("maps", "pipe", "loop", "/proc/1/environ", "/dev/zero"):
        with pytest.raises(OSError):
            await machine.read(path)
    with pytest.raises(OSError):
        await machine.write("folder/secret", b"changed")
    assert secret.read_text() == "secret"


async def test_machines_do_not_see_each_other(host: NamespaceHost) -> None:
    one, other = await host.create(BUILT_IN), await host.create(BUILT_IN)
    await one.exec(["sh", "-c", "echo secret > /tmp/note; echo secret > /work/note"])
    assert (await other.exec(["sh", "-c", "ls /tmp /work"])).output == b"/tmp:\n\n/work:\n"
    await one.close()
    another = await host.create(BUILT_IN)
    assert (await another.exec(["sh", "-c", "ls /tmp /work"])).output == b"/tmp:\n\n/work:\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="without root there is one user id to give")
async def test_as_root_each_machine_has_user_ids_of_its_own(host: NamespaceHost) -> None:
    maps = [await run_python(await host.create(BUILT_IN), "print(open('/proc/self/uid_map').read())") for _ in range(2)]
    outside = [int(line.split()[1]) for text in maps for line in text.splitlines()]
    assert len(outside) == len(set(outside)) == 4 and min(outside) > 65535  # pid 1's and the commands', of two machines


@pytest.mark.skipif(os.geteuid() != 0, reason="without root there is one user id to give")
async def test_as_root_the_first_process_is_another_user_than_the_commands(machine: NamespaceMachine) -> None:
    with pytest.raises(AssertionError, match="PermissionError"):
        await run_python(machine, "import os; os.kill(1, 0)")
