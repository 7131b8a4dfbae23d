"""Firecracker: its API client against the published contract, the relay of its guests, and why it is not offered here.

stand_in_firecracker.py takes the place of the Firecracker process, because there may be no KVM where these tests run.
Where there is, and Firecracker too, the last test runs real guests.
"""

from __future__ import annotations

import asyncio
import gzip
import lzma
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollmill.errors import MachineError
from rollmill.machines.firecracker import host as hosts
from rollmill.machines.firecracker import launch, reaper
from rollmill.machines.firecracker.api import Api
from rollmill.machines.firecracker.channel import Channel
from rollmill.machines.firecracker.host import FirecrackerConfig, FirecrackerHost
from rollmill.machines.firecracker.launch import FirecrackerParts, command, find_parts, plain_kernel
from rollmill.machines.guest import frames as wire
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.probe import probe
from rollmill.machines.qemu.launch import guard
from rollmill.machines.qemu.parts import Parts, architecture
from rollmill.machines.qemu.relay import PORTS
from tests.machines.stand_in_firecracker import (
    CONTRACT,
    StandInFirecracker,
    serving,
    start_guest,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module")
async def stand_in(tmp_path: Path) -> AsyncIterator[StandInFirecracker]:
    stand_in = StandInFirecracker(tmp_path)
    async with serving(stand_in, tmp_path / "api.sock"):
        yield stand_in


async def test_every_request_is_one_of_the_contract(stand_in: StandInFirecracker, tmp_path: Path) -> None:
    api = Api(tmp_path / "api.sock")
    assert await api.wait() == CONTRACT["version"]
    setting = {"kernel": "kernel", "initrd": "initrd", "arguments": "quiet", "memory_mb": 256, "vsock": "v.sock"}
    with pytest.raises(MachineError, match="refuses PUT /boot-source: there is no kernel"):
        await api.configure(**setting)  # type: ignore[arg-type]
    for name in ("kernel", "initrd"):
        (tmp_path / name).write_bytes(b"x")
    await api.configure(**setting)  # type: ignore[arg-type]
    await api.start()
    with pytest.raises(MachineError, match="not paused"):
        await api.save(state="state", memory="memory")
    await api.pause()
    await api.save(state="state", memory="memory")
    await api.resume()
    with pytest.raises(MachineError, match="not supported after starting"):
        await api.load(state="state", memory="memory")
    await api.close()
    fresh = StandInFirecracker(tmp_path)
    async with serving(fresh, tmp_path / "fresh.sock"):
        api = Api(tmp_path / "fresh.sock")
        await api.load(state="state", memory="memory")
        assert fresh.state == "Running"
        await api.close()
    assert {path for _, path in (*stand_in.asked, *fresh.asked)} == set(CONTRACT["paths"])  # the whole excerpt is used
    api = Api(tmp_path / "gone.sock")
    with pytest.raises(MachineError, match="does not answer"):
        await api.pause()
    await api.close()


async def test_a_guest_is_reached_again_after_its_connections_were_reset(tmp_path: Path) -> None:
    host, vsock = await start_guest(tmp_path)
    channel = Channel()
    with pytest.raises(MachineError, match="port 77 of the guest does not answer"):
        await channel.connect(tmp_path / "v.sock", 77, within_s=0.05)
    loop = asyncio.get_running_loop()
    header = {"op": "exec", "argv": ["sh", "-c", "echo $((6 * 7)); echo x >> seen; cat seen | wc -l"]}
    header |= {"cwd": "/work", "env": {}, "timeout_s": 10.0, "max_output": 1000}
    for number in (1, 2, 3):  # the same machine each time: its file grows
        await channel.connect(tmp_path / "v.sock", PORTS[0], within_s=10.0)
        await loop.sock_sendall(channel.socket, wire.pack({**header, "id": number}))
        data = b""
        while not data.endswith(b"42\n%d\n" % number):
            part = await loop.sock_recv(channel.socket, 4096)
            assert part, data
            data += part
        vsock.reset()
        assert await loop.sock_recv(channel.socket, 1) == b"" if number == 3 else True
        if number < 3:
            await channel.disconnect()
    await channel.close()
    await host.close()


@pytest.mark.slow
async def test_machines_of_a_template_against_the_stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Boot, warm up, save, restore, pause, snapshot, fork, end: the requests and the connections of a whole life."""
    program, kernel = tmp_path / "firecracker", tmp_path / "vmlinux"
    root = Path(__file__).parents[2]
    module = "tests.machines.stand_in_firecracker"
    program.write_text(f'#!/bin/sh\nPYTHONPATH={root} exec {sys.executable} -m {module} "$@"\n')
    program.chmod(0o755)
    kernel.write_bytes(b"\x7fELF")
    guest = Parts(architecture(), "", "", kernel, (), None)
    parts = FirecrackerParts(str(program), None, str(shutil.which("setpriv")), guest)
    monkeypatch.setattr(hosts, "find_parts", lambda kernel: parts)
    short = Path(tempfile.mkdtemp())  # paths of sockets are short
    host = FirecrackerHost(FirecrackerConfig(directory=str(short)))
    machine = await host.create(BUILT_IN, {"main.py": b"print(6 * 7)"})
    assert (await machine.exec(["python", "main.py"])).output == b"42\n"
    await machine.pause()
    await machine.resume()
    snapshot = await machine.snapshot()  # resets its connections
    assert (await machine.exec(["python", "main.py"])).output == b"42\n"
    [fork] = await machine.fork()
    assert (await fork.exec(["true"])).exit_code == 0 and fork.capabilities.snapshot == "full"
    await host.release(snapshot)
    processes = [machine.vm.process, fork.vm.process]
    await host.close()
    assert all(process.poll() is not None for process in processes)
    short.rmdir()  # nothing is left


async def test_it_is_offered_only_where_its_parts_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(launch, "KVM", tmp_path / "kvm")
    host = FirecrackerHost()
    with pytest.raises(MachineError, match="firecracker is not installed"):
        await host.create(BUILT_IN)
    await host.close()
    for program in ("firecracker", "jailer"):
        with pytest.raises(MachineError, match=r"not installed|cannot be opened"):
            find_parts()
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    with pytest.raises(MachineError, match="needs KVM"):
        find_parts()
    (tmp_path / "kvm").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(MachineError, match="vsock modules are not in"):
        find_parts()
    parts = find_parts(kernel=str(tmp_path / "vmlinux"))
    assert parts.guest.kernel == tmp_path / "vmlinux" and parts.guest.modules == ()


async def test_the_command_of_the_jailer_and_without_it(tmp_path: Path) -> None:
    jailed = FirecrackerParts("/opt/firecracker", "/opt/jailer", "/bin/setpriv", None)  # type: ignore[arg-type]
    words = command(jailed, "vm-1", tmp_path, 7777)
    assert words[words.index(str(os.getpid())) + 1] == "/opt/jailer" and words[-3:] == ["--", "--api-sock", "api.sock"]
    for option, value in (("--uid", "7777"), ("--gid", "7777"), ("--id", "vm-1"), ("--exec-file", "/opt/firecracker")):
        assert words[words.index(option) + 1] == value
    assert launch.jail_root(jailed, "vm-1", tmp_path) == tmp_path / "firecracker" / "vm-1" / "root"
    plain = FirecrackerParts("/opt/firecracker", None, "/bin/setpriv", None)  # type: ignore[arg-type]
    words = command(plain, "vm-1", tmp_path, 7777)
    assert words[-5:] == ["/opt/firecracker", "--id", "vm-1", "--api-sock", "api.sock"] and "--no-new-privs" in words


async def test_nothing_begins_whose_parent_has_already_ended() -> None:
    """The kernel does not signal the death of a parent that died before it was asked to."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("no setpriv")
    words = [*guard(setpriv), "echo", "begun", "$0"]
    assert subprocess.run(words, capture_output=True, check=True).stdout == b"begun $0\n"  # noqa: ASYNC221
    words[words.index(str(os.getpid()))] = str(os.getppid())  # what it would see: its parent is another process
    ended = subprocess.run(words, capture_output=True, check=False)  # noqa: ASYNC221
    assert (ended.returncode, ended.stdout) == (1, b"")


async def test_kernels_are_unpacked_into_the_form_that_firecracker_takes() -> None:
    image, elf = b"\0" * 56 + b"ARM\x64" + b"kernel", b"\x7fELF" + b"kernel"
    assert plain_kernel(image) == image and plain_kernel(elf) == elf
    assert plain_kernel(gzip.compress(image)) == image
    packed = lzma.compress(elf)
    bz_image = bytearray(3 * 512 + 100) + packed
    bz_image[0x1F1], bz_image[0x202:0x206] = 2, b"HdrS"
    struct.pack_into("<II", bz_image, 0x248, 100, len(packed))
    assert plain_kernel(bytes(bz_image)) == elf
    packed = gzip.compress(image)
    zboot = b"MZ\0\0zimg" + struct.pack("<II", 64, len(packed)) + b"\0" * 48 + packed
    assert plain_kernel(zboot) == image
    for damaged in (b"", b"nonsense", zboot[:80], bytes(bz_image[:1700]), gzip.compress(b"no kernel")):
        with pytest.raises(MachineError, match="kernel"):
            plain_kernel(damaged)


async def test_the_relay_needs_nothing_that_a_guest_lacks() -> None:
    program = "import sys, rollmill.machines.qemu.relay; print([m for m in sys.modules if 'rollmill' in m])"
    names = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout  # noqa: ASYNC221
    assert "namespace" not in names and "errors" not in names


# In the place of Firecracker and its jailer: a process with a root and a user of its own. It says when it is ready.
JAILED = """
import os, sys, time
os.chroot(sys.argv[1]); os.chdir("/"); os.setresgid(61235, 61235, 61235); os.setresuid(61235, 61235, 61235)
os.write(1, b"r"); os.close(1)
while True: time.sleep(60)
"""
OWNER = f"""
import subprocess, sys, time
from rollmill.machines.firecracker.host import FirecrackerConfig, FirecrackerHost
host = FirecrackerHost(FirecrackerConfig(directory=sys.argv[1]))
root = host._place() / "firecracker" / "vm-1" / "root"
root.mkdir(parents=True)
guest = subprocess.Popen([sys.executable, "-c", {JAILED!r}, str(root)], stdout=subprocess.PIPE, start_new_session=True)
assert guest.stdout.read(1)
print(guest.pid, host._reaper.pid, flush=True)
time.sleep(600)
"""


def start_owner(directory: str) -> tuple[subprocess.Popen[bytes], int, int]:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, directory], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    guest, reaper = map(int, owner.stdout.readline().split())
    return owner, os.pidfd_open(guest), os.pidfd_open(reaper)


async def has_ended(pidfd: int) -> None:
    await asyncio.to_thread(select.select, [pidfd], [], [], 60.0)
    assert select.select([pidfd], [], [], 0)[0]
    os.close(pidfd)


async def test_the_reaper_believes_no_directory_of_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    reaped: list[Path] = []
    monkeypatch.setattr(reaper, "reap", reaped.append)
    for name in ("fc-own", "elsewhere"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    (tmp_path / "fc-link").symlink_to("elsewhere")  # to a directory of ours that has a file of this name
    (tmp_path / "fc-file").touch()
    (tmp_path / "fc-empty").mkdir()
    reaper.reap_abandoned(tmp_path)
    assert reaped == [tmp_path / "fc-own"]
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    reaper.reap_abandoned(tmp_path)
    assert reaped == [tmp_path / "fc-own"], "of another user"
    jail = tmp_path / "fc-own" / "firecracker" / "vm-1" / "root"
    jail.mkdir(parents=True)
    (jail.parent.parent / "vm-2").mkdir()
    (jail.parent.parent / "vm-2" / "root").symlink_to(jail.parent)
    assert reaper._jails(tmp_path / "fc-own") == {(jail.stat().st_dev, jail.stat().st_ino)}, "no link is a jail"


async def test_files_are_deleted_and_nobody_else_deletes_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    taken, real = [], reaper._take

    def take(lock: int) -> bool:
        if not taken:  # another host takes the lock, deletes the directory and gives the lock back in this moment
            taken.append(os.readlink(f"/proc/self/fd/{lock}"))
            shutil.rmtree(os.path.dirname(taken[0]))
        return real(lock)

    monkeypatch.setattr(reaper, "_take", take)
    host = FirecrackerHost(FirecrackerConfig(directory=str(tmp_path)))
    monkeypatch.setattr(hosts, "_LONGEST", 1000)
    place = host._place()
    assert place.is_dir() and (place / "lock").is_file() and str(place) != os.path.dirname(taken[0])
    assert host._reaper is not None
    host._reaper.kill()
    await host.close()
    assert os.listdir(tmp_path) == []


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="jails need root")
async def test_jailed_guests_of_a_killed_process_end() -> None:
    with tempfile.TemporaryDirectory() as directory:
        other, others_guest, others_reaper = start_owner(directory)
        owner, guest, reaper = start_owner(directory)
        owner.kill()
        await has_ended(guest)
        await has_ended(reaper)
        assert len(os.listdir(directory)) == 1
        # the reaper is killed too: the next host finds what is left, and nothing of hosts that live
        owner, guest, reaper = start_owner(directory)
        signal.pidfd_send_signal(reaper, signal.SIGKILL)
        owner.kill()
        owner.wait()
        assert not select.select([guest, others_guest], [], [], 0)[0] and len(os.listdir(directory)) == 2
        host = FirecrackerHost(FirecrackerConfig(directory=directory))
        host._place()
        await has_ended(guest)
        assert len(os.listdir(directory)) == 2
        await host.close()
        assert len(os.listdir(directory)) == 1 and not select.select([others_guest, others_reaper], [], [], 0)[0]
        other.kill()
        await has_ended(others_guest)
        await has_ended(others_reaper)


@pytest.mark.slow
async def test_real_guests_where_firecracker_and_kvm_are_there() -> None:
    """Start, exec, snapshot, restore."""
    try:
        find_parts()
    except MachineError as error:
        pytest.skip(error.message)
    host = FirecrackerHost()
    try:
        able = (await probe(host)).capabilities
    finally:
        await host.close()
    assert (able.kernel, able.snapshot, able.pause, able.architecture) == ("own", "full", True, os.uname().machine)
