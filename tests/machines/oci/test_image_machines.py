"""Machines that are an OCI image: what they see, who they are, what they cannot do, and what stays shared."""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from rollmill.errors import MachineError, TaskError
from rollmill.machines.lasting import LastingMachine
from rollmill.machines.machine import Machine, release
from rollmill.machines.namespace.client import NamespaceConfig, NamespaceHost, NamespaceMachine
from rollmill.machines.oci.kept_images import Kept
from tests.machines.conftest import BARE, start_host
from tests.machines.oci.making import busybox_layer, entry, fetch_packages, link, run, tar_of, write_layout

pytestmark = pytest.mark.asyncio(loop_scope="module")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has user ids to give")


async def sh(machine: Machine, command: str, *, user: str | None = None) -> str:
    result = await machine.exec(["sh", "-c", command], user=user, timeout_s=120.0)
    assert result.exit_code == 0, result
    return result.output.decode().strip()


async def test_the_whole_root_is_the_image(machine: NamespaceMachine) -> None:
    assert (
        await sh(machine, "pwd; cat main.txt; echo $COLOUR $HOME; readlink /work")
        == "/app\nfrom the image\nblue /root\n/app"
    )
    names = set((await sh(machine, "ls /")).split())
    assert names == {
        "app",
        "bin",
        "dev",
        "escape",
        "etc",
        "lib",
        "lib64",
        "proc",
        "root",
        "sbin",
        "sys",
        "tmp",
        "usr",
        "work",
    }
    assert await sh(machine, "ls /usr/share | grep -c doc || true") == "0", "the upper layer removed it"
    assert await sh(machine, "which python python3 bash || true") == "", "nothing of the host is on PATH"
    assert await machine.read("main.txt") == b"from the image\n" == await machine.read("/work/main.txt")
    found = await sh(machine, "cat /proc/*/maps /proc/mounts /proc/*/environ 2>/dev/null | grep -c python || true")
    assert found == "0"
    assert await sh(machine, "ls -A /proc/1") == "cgroup\ncmdline\ncomm\nstat\nstatm\nstatus"


async def test_files_of_a_task_lie_in_the_workdir(host: NamespaceHost, busybox: str) -> None:
    machine = await host.create(busybox, {"task/file": b"1", "/etc/motd": b"hello"})
    assert await sh(machine, "cat /app/task/file /etc/motd") == "1hello"
    packed = await machine.pack("/work", max_bytes=1 << 20, timeout_s=10)
    assert b"main.txt" in packed and b"task/file" in packed
    await machine.close()


@as_root
async def test_root_of_an_image_is_root_of_its_files_and_not_of_the_host(machine: NamespaceMachine) -> None:
    assert await sh(machine, "id -u; touch /root/a && chown 5:7 /root/a && stat -c '%u %g' /root/a") == "0\n5 7"
    await sh(machine, "echo bob:x:1001:1001::/:/bin/sh >> /etc/passwd")
    await sh(machine, "su bob -c 'id -un; touch /tmp/his; ! touch /etc/his 2>/dev/null'")
    assert await sh(machine, "stat -c %U /tmp/his") == "bob"
    outside = [line.split() for line in (await sh(machine, "cat /proc/self/uid_map")).splitlines()]
    assert [(int(inside), int(count)) for inside, _, count in outside] == [(0, 65536)]
    process = await machine.start(["sleep", "60.5"])
    real = [path for path in Path("/proc").glob("[0-9]*") if b"60.5" in _cmdline(path)]
    users = {os.stat(path).st_uid for path in real}
    assert real and all(user >= 1 << 24 for user in users), "a user of the host that nobody else has"
    await process.stop()


def _cmdline(path: Path) -> bytes:
    try:
        return (path / "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    "command",
    [
        "mknod /tmp/null c 1 3",
        "mount -t tmpfs none /tmp",
        "mount -o remount,rw,dev,suid /",
        "umount /proc",
        "chroot / true",
        "unshare -U true",
        "hostname other",
        "cat /proc/1/environ",
        "kill -9 1 && false",
        "echo 1 > /proc/sys/kernel/panic",
        "echo x > /dev/new",
        "rm -rf /dev/null",
        "ls /opt/layers",
        "dmesg",
        "insmod x",
        "nice -n -5 true && false",
    ],
)
async def test_what_root_of_an_image_cannot_do(machine: NamespaceMachine, command: str) -> None:
    result = await machine.exec(["sh", "-c", f"{command} 2>/dev/null"])
    assert result.exit_code != 0 and result.stopped is None
    assert (await machine.exec(["true"])).exit_code == 0


@as_root
async def test_setuid_programs_give_nothing(host: NamespaceHost, tmp_path: Path, busybox: str) -> None:
    layers = [busybox_layer(tmp_path), tar_of([entry("usr/bin/as-root", b"", mode=0o4755)])]
    image = f"oci:{write_layout(tmp_path / 'layout', layers, User='app')}"
    machine = await host.create(image)
    await sh(machine, "cat /usr/bin/busybox > /usr/bin/as-root && chmod 4755 /usr/bin/as-root", user="root")
    assert await sh(machine, "id -u; stat -c '%u %a' /usr/bin/as-root") == "1000\n0 4755"
    assert "0" not in (await sh(machine, "/usr/bin/as-root id -u 2>&1 || true")).split()
    assert await sh(machine, "id -u; id -g; id -G") == "1000\n1000\n1000 77"
    assert (
        await sh(machine, "grep -E 'CapEff|NoNewPrivs' /proc/self/status")
        == "CapEff:\t0000000000000000\nNoNewPrivs:\t1"
    )
    assert "overlay / overlay rw,nosuid,nodev" in await sh(machine, "cat /proc/mounts")
    await machine.close()


async def test_links_of_an_image_lead_nowhere_else(machine: NamespaceMachine, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of the host")
    await sh(machine, f"ln -s {tmp_path}/secret /app/out; ln -s / /app/root")
    for path in ("out", f"/escape/../{tmp_path}/secret", f"root/{tmp_path}/secret"):
        with pytest.raises(FileNotFoundError):
            await machine.read(path)
    await machine.write("/escape/planted", b"1")
    assert await sh(machine, "cat /etc/planted") == "1" and not Path("/etc/planted").exists()


async def test_machines_of_one_image_do_not_see_each_other_and_leave_it_as_it_is(
    host: NamespaceHost, busybox: str, images: Path
) -> None:
    before = _digest(images)
    one, other = await asyncio.gather(host.create(busybox), host.create(busybox))
    await sh(one, "rm -rf /usr/share /app/main.txt; echo 1 > /etc/mine; chmod 777 /etc; echo x >> /etc/passwd")
    assert await sh(other, "ls /etc/mine /app/main.txt 2>&1 | cat; ls -d /usr/share; stat -c %a /etc")  # still there
    assert (
        "of the image" not in await sh(other, "cat /etc/passwd") and await other.read("main.txt") == b"from the image\n"
    )
    assert (await one.exec(["ls", "/usr/share"])).exit_code != 0
    assert (await other.exec(["ls", "/etc/mine"])).exit_code != 0
    await asyncio.gather(one.close(), other.close())
    assert _digest(images) == before


def _digest(root: Path) -> str:
    found = hashlib.sha256()
    for folder, names, leaves in os.walk(root):
        names.sort()
        for name in sorted([*names, *leaves]):
            status = os.lstat(os.path.join(folder, name))
            found.update(
                f"{folder}/{name} {status.st_mode} {status.st_uid} {status.st_mtime_ns} {status.st_ctime_ns}\n".encode()
            )
    return found.hexdigest()


async def test_snapshots_and_forks_carry_all_that_was_written(host: NamespaceHost, busybox: str) -> None:
    machine = await host.create(busybox, {"task": b"1"})
    await sh(
        machine,
        "echo new > /etc/new; rm /app/main.txt; rm -rf /usr/share; mkdir /usr/share; ln -s /etc/new /srv-link;"
        "echo two > /tmp/a; ln /tmp/a /tmp/b; chmod 4711 /tmp/a; rm /usr/bin/wc;"
        "mkdir -p /deep/er; echo /deep > /deep/er/f",
    )
    seen = "cat /etc/new /srv-link /tmp/b /deep/er/f task; ls -A /app /usr/share; stat -c '%a %h' /tmp/a;"
    seen += "which wc || echo none"
    expected = await sh(machine, seen)
    assert "main.txt" not in expected and expected.endswith("4711 2\nnone")
    for copy in [*await machine.fork(2), await host.create(busybox, snapshot=await machine.snapshot())]:
        assert await sh(copy, seen) == expected
        await sh(copy, "echo changed > /etc/new")
        [again] = await copy.fork(1)
        assert await sh(again, "cat /etc/new; ls /usr/share") == "changed"
        await asyncio.gather(copy.close(), again.close())
    assert await sh(machine, seen) == expected
    await machine.close()


@as_root
async def test_a_snapshot_keeps_owners(host: NamespaceHost, busybox: str) -> None:
    machine = await host.create(busybox)
    await sh(machine, "echo 1 > /tmp/a; chown 33:44 /tmp/a; chown -h 5:5 /work; chmod 600 /tmp/a")
    [copy] = await machine.fork(1)
    assert await sh(copy, "stat -c '%u:%g %a' /tmp/a; stat -c %u /work") == "33:44 600\n5"
    await asyncio.gather(copy.close(), machine.close())


async def test_a_static_program_needs_nothing_else(host: NamespaceHost, tmp_path: Path, images: Path) -> None:
    """As images without a distribution are made: no shell, no library, no /etc, no /tmp."""
    tree = tmp_path / "tree"
    tree.mkdir()
    busybox_layer(tree)
    programs = [tree / "tree" / name / "busybox" for name in ("usr/bin", "bin")]
    program = next(path for path in programs if path.is_file())
    layer = tar_of([entry("busybox", program.read_bytes(), mode=0o755)])
    machine = await host.create(f"oci:{write_layout(tmp_path / 'layout', [layer])}", {"file": b"1"})
    assert (await machine.exec(["/busybox", "cat", "file"])).output == b"1"
    assert (await machine.exec(["sh", "-c", "true"])).exit_code == 127
    process = await machine.start(["/busybox", "echo", "ran"])
    async with asyncio.timeout(30):
        while (state := await process.state()).exit_code is None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    assert state.output == b"ran\n"
    await machine.close()


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc makes a program for musl")
async def test_programs_of_musl_run_with_their_own_loader(host: NamespaceHost, tmp_path: Path, images: Path) -> None:
    """Debian's musl and busybox in the place of Alpine."""
    packages = fetch_packages(["musl", "musl-dev"], tmp_path / "musl")
    tree = tmp_path / "musl-tree"
    tree.mkdir()
    for package in packages:
        run("dpkg-deb", "-x", package, tree)
    headers, starts, library = (next(tree.glob(f"{name}*-linux-musl")) for name in ("usr/include/", "usr/lib/", "lib/"))
    loader = f"lib/ld-musl-{platform.machine()}.so.1"
    source = tmp_path / "hello.c"
    source.write_text('#include <stdio.h>\nint main(void) { printf("hello from musl\\n"); return 0; }\n')
    options: list[str | Path] = [
        "-nostdinc",
        "-isystem",
        headers,
        "-nostdlib",
        "-no-pie",
        f"-Wl,-dynamic-linker,/{loader}",
    ]
    objects: list[str | Path] = [starts / "crt1.o", source, f"-L{library}", "-lc"]
    run("gcc", *options, *objects, "-o", tmp_path / "hello")
    base = busybox_layer(tmp_path)
    files = {"usr/bin/hello": tmp_path / "hello", f"usr/{loader}": library / "libc.so"}
    top = tar_of([entry(name, path.read_bytes(), mode=0o755) for name, path in files.items()])
    machine = await host.create(f"oci:{write_layout(tmp_path / 'layout', [base, top])}")
    assert await sh(machine, "hello; cat /proc/self/maps | grep -c libc.so.6 || true") == "hello from musl\n0"
    await machine.close()


async def test_a_directory_that_machines_need_may_be_no_link(host: NamespaceHost, tmp_path: Path) -> None:
    for name in ("proc", "dev", "etc"):
        layer = tar_of([entry("fake/"), link(name, "fake")])
        with pytest.raises(Exception, match=f"the image has no directory /{name}"):
            await host.create(f"oci:{write_layout(tmp_path / name, [layer])}")


async def test_a_server_at_a_low_port(machine: NamespaceMachine) -> None:
    await machine.write("/www/index.html", b"served")
    process = await machine.start(["busybox", "httpd", "-f", "-p", "80", "-h", "/www"])
    assert (
        await sh(machine, "for i in 1 2 3 4 5 6 7 8 9; do wget -qO- http://localhost/ && break; sleep 0.2; done")
        == "served"
    )
    await process.stop()


async def test_processes_of_all_users_of_a_machine_are_bounded_together(host: NamespaceHost, busybox: str) -> None:
    """A fork bomb that changes its user, too."""
    machine = await host.create(busybox)
    bomb = "bomb() { for i in 1 2 3 4 5 6 7 8; do su app -c 'sleep 30' & sleep 30 & done; };"
    bomb += "bomb; bomb; bomb; bomb; bomb; bomb; wait"
    result = await machine.exec(["sh", "-c", bomb], timeout_s=10)
    assert result.stopped in ("processes", "time") or b"fork" in result.output
    assert (await machine.exec(["true"])).exit_code == 0
    await machine.close()


_UNPACK = """
import sys
import tempfile
from pathlib import Path
from rollmill.machines.oci.kept_images import Kept
Kept(Path(sys.argv[1])).obtain(sys.argv[2])
"""


@as_root
async def test_without_root_there_is_one_user_and_all_files_are_its_own(
    busybox: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ordinary user of the host unpacks and runs an image: no user ids are given to it, nothing is asked of root."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:  # others may enter it, unlike tmp_path
        place = Path(temporary)
        shutil.copytree(busybox.removeprefix("oci:"), place / "layout")
        (place / "images").mkdir()
        (place / "python").write_text(BARE.format(python=sys.executable))
        for path in (place, *place.rglob("*")):
            path.chmod(0o755)
            os.chown(path, 61234, 61234)
        command = ["setpriv", "--reuid=61234", "--regid=61234", "--clear-groups", sys.executable, "-c", _UNPACK]
        image, variables = f"oci:{place}/layout", {"PYTHONPATH": str(Path(__file__).parents[3])}
        run(*command, place / "images", image, env={**os.environ, **variables}, cwd="/")
        monkeypatch.setenv("ROLLMILL_IMAGES", str(place / "images"))
        monkeypatch.setattr(sys, "executable", str(place / "python"))
        host = NamespaceHost(NamespaceConfig(memory_mb=128, disk_mb=16))
        machine = await host.create(image, {"task": b"1"})
        assert await sh(machine, "id -u; id -g; pwd; cat main.txt task") == "0\n0\n/app\nfrom the image\n1"
        await sh(machine, "touch /etc/mine /root/mine; rm -rf /usr/share; mkdir /usr/share")
        [copy] = await machine.fork(1)
        assert await sh(copy, "ls /etc/mine /root/mine; ls /usr/share") == "/etc/mine\n/root/mine"
        assert (await sh(machine, "cat /proc/self/uid_map")).split() == ["0", "0", "1"]
        assert (await machine.exec(["mount", "-t", "tmpfs", "none", "/tmp"])).exit_code != 0
        await host.close()


async def test_images_in_use_are_not_removed(images: Path, busybox: str) -> None:
    host = await start_host(NamespaceConfig(memory_mb=128, disk_mb=16))
    machine = await host.create(busybox)
    kept = Kept(images)
    with pytest.raises(TaskError, match="used by machines"):
        kept.remove(busybox)
    await machine.close()
    await host.close()


async def test_what_commands_leave_lives_on_and_grading_gets_it(host: NamespaceHost, busybox: str) -> None:
    machine = LastingMachine(await host.create(busybox))
    try:
        await machine.exec(["sh", "-c", "echo up > state; httpd -f -p 8080 &"])
        heard = await machine.exec(["sh", "-c", "cat; wget -q -O - 127.0.0.1:8080/state"], stdin=b"said ")
        assert (heard.exit_code, heard.output) == (0, b"said up\n")
        assert (await machine.exec(["sleep", "60"], timeout_s=0.2)).stopped == "time"
    finally:
        left = machine.keep()
        await machine.close()
    heard = await left.state.exec(["wget", "-q", "-O", "-", "127.0.0.1:8080/state"])
    assert heard.output == b"up\n", "closed is not ended"
    await release(host, left)
    with pytest.raises(MachineError):
        await left.state.exec(["true"])
