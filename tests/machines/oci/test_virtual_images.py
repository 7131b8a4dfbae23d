"""OCI images in virtual machines: tests of images in namespace machines once more, and what only disks can do."""

from __future__ import annotations

import hashlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollmill.errors import MachineError, TaskError
from rollmill.machines.oci.kept_images import Kept
from rollmill.machines.qemu import parts
from rollmill.machines.qemu.host import QemuConfig, QemuHost, QemuMachine
from tests.machines.oci import test_image_machines
from tests.machines.oci.making import busybox_layer, entry, link, run, tar_of, write_layout
from tests.machines.oci.test_image_machines import as_root, sh
from tests.machines.virtual import qemu_host  # noqa: F401

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
_ALSO_HERE = (
    "test_the_whole_root_is_the_image",
    "test_files_of_a_task_lie_in_the_workdir",
    "test_links_of_an_image_lead_nowhere_else",
    "test_machines_of_one_image_do_not_see_each_other_and_leave_it_as_it_is",
    "test_snapshots_and_forks_carry_all_that_was_written",
    "test_a_snapshot_keeps_owners",
    "test_setuid_programs_give_nothing",
    "test_a_static_program_needs_nothing_else",
    "test_programs_of_musl_run_with_their_own_loader",
    "test_a_server_at_a_low_port",
)
globals().update({name: getattr(test_image_machines, name) for name in _ALSO_HERE})
FORBIDDEN = test_image_machines.test_what_root_of_an_image_cannot_do.pytestmark[0].args[1]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def host(qemu_host: QemuHost, images: Path) -> QemuHost:  # noqa: F811
    return qemu_host


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def machine(host: QemuHost, busybox: str) -> AsyncIterator[QemuMachine]:
    machine = await host.create(busybox)
    yield machine
    await machine.close()


async def test_what_root_of_an_image_cannot_do(machine: QemuMachine) -> None:
    for command in FORBIDDEN:
        if not command.startswith("unshare"):  # the kernel is the guest's own
            result = await machine.exec(["sh", "-c", f"{command} 2>/dev/null"], timeout_s=60)
            assert result.exit_code != 0 and result.stopped is None, command
    assert await sh(machine, "cat /dev/vda /dev/vdb 2>&1 | grep -c denied") == "2"


async def test_commands_are_root_only_if_they_are_asked_to_be(host: QemuHost, tmp_path: Path) -> None:
    """Also those for which a process waits already."""
    machine = await host.create(f"oci:{write_layout(tmp_path / 'layout', [busybox_layer(tmp_path)], User='app')}")
    for user, number in ((None, "1000"), ("root", "0"), ("user", "1000"), (None, "1000"), ("root", "0")):
        await machine.prepare()
        assert await sh(machine, "id -u; touch /etc/mine 2>/dev/null || echo refused", user=user) == (
            number if number == "0" else f"{number}\nrefused"
        )
    await machine.close()


async def test_an_image_in_use_is_not_removed(machine: QemuMachine, images: Path) -> None:
    with pytest.raises(TaskError, match="used by machines"):
        Kept(images).collect()
    assert (await sh(machine, "cat /app/main.txt")) == "from the image"


async def test_a_command_that_takes_all_memory_is_ended_for_it(machine: QemuMachine) -> None:
    """And does not have the programs of the image read again and again until its time is over."""
    result = await machine.exec(["sh", "-c", "a=x; while :; do a=$a$a; done"], timeout_s=60)
    assert result.stopped == "memory" and result.seconds < 50
    assert await sh(machine, "cat main.txt") == "from the image"


async def test_an_image_that_cannot_be_a_root_says_why(host: QemuHost, tmp_path: Path) -> None:
    layer = tar_of([entry("fake/"), link("proc", "fake")])
    with pytest.raises(MachineError, match="the image has no directory /proc"):
        await host.create(f"oci:{write_layout(tmp_path / 'layout', [layer])}")


async def test_a_kernel_that_was_fetched_without_modules_for_disks_has_a_remedy(
    busybox: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "DISK_MODULES", ())
    host = QemuHost(QemuConfig(memory_mb=256, disk_mb=16, accelerator="tcg"))
    with pytest.raises(MachineError, match="a virtual machine did not start") as failed:
        await host.create(busybox)
    assert failed.value.hint == parts.SETUP
    await host.close()


async def test_an_image_and_what_is_written_may_be_larger_than_the_memory(tmp_path: Path, images: Path) -> None:
    size = 600 << 20
    content = os.urandom(1 << 20) * (size >> 20)
    layers = [busybox_layer(tmp_path), tar_of([entry("big", content)])]
    host = QemuHost(QemuConfig(memory_mb=384, disk_mb=1024, processes=32))
    machine = await host.create(f"oci:{write_layout(tmp_path / 'layout', layers, packing='')}")
    try:
        await sh(machine, "dd if=/big of=/copy bs=1M 2> /dev/null")
        digest = hashlib.md5(content[: 1 << 20], usedforsecurity=False).hexdigest()
        assert await sh(machine, "dd if=/copy bs=1M skip=599 2> /dev/null | md5sum") == f"{digest}  -"
        [fork] = await machine.fork()
        assert await sh(fork, "stat -c %s /copy; rm /copy; ls /copy 2>&1 | grep -c 'No such'") == f"{size}\n1"
        assert await sh(machine, "dd if=/copy bs=1M skip=300 count=1 2> /dev/null | md5sum") == f"{digest}  -"
    finally:
        await host.close()


@as_root
async def test_a_host_without_room_is_an_infrastructure_failure(
    tmp_path: Path, busybox: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small").mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=16m", "none", tmp_path / "small")
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "small"))
    monkeypatch.setattr(QemuMachine, "_grace_s", 5.0)
    host = QemuHost(QemuConfig(memory_mb=256, disk_mb=64, processes=32))
    try:
        machine = await host.create(busybox)
        with pytest.raises(MachineError, match="the host has no room") as failed:
            await machine.exec(["dd", "if=/dev/zero", "of=/big", "bs=1M", "count=40", "conv=fsync"], timeout_s=20)
        assert "ROLLMILL_IMAGES" in str(failed.value.hint)
    finally:
        await host.close()
        run("umount", tmp_path / "small")
