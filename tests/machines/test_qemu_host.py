"""What the host of virtual machines does around a guest: seeds and time for every clone, and KVM with a deadline.

No guest runs here. A small program stands in for QEMU: it answers its monitor, and for the guest's first process.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rollmill.errors import MachineError
from rollmill.machines.images.image import BUILT_IN, Image
from rollmill.machines.machine import Capabilities, Snapshot
from rollmill.machines.qemu import host as hosts
from rollmill.machines.qemu import initramfs, launch, ram
from rollmill.machines.qemu.host import QemuConfig, QemuHost, Template
from rollmill.machines.qemu.launch import Shape
from rollmill.machines.qemu.parts import ARCHITECTURES, Parts
from rollmill.machines.qemu.vm import Saved

STAND_IN = """#!{python} -IS
import json, os, re, select, sys
sys.path.insert(0, {code!r})
import frames as wire
words = " ".join(sys.argv)
monitor, init = (int(re.search("id=%s,fd=([0-9]+)" % name, words)[1]) for name in ("monitor", "init"))
def note(**fields):
    with open({log!r}, "a") as file:
        file.write(json.dumps(fields) + "\\n")
if "-incoming" not in words:
    accelerator = re.search("-accel ([a-z]+)", words)[1]
    note(accelerator=accelerator, pid=os.getpid())
    if accelerator == "tcg":
        sys.exit(1)
os.write(monitor, b'{{"QMP": {{}}}}\\n')
asked = open(monitor, "rb", buffering=0, closefd=False)
while True:
    for ready in select.select([monitor, init], [], [])[0]:
        if ready == monitor:
            line = asked.readline()
            if not line:
                sys.exit(0)
            answer = {{"return": {{"status": "paused"}}, "id": json.loads(line)["id"]}}
            os.write(monitor, json.dumps(answer).encode() + b"\\n")
        else:
            header, body = wire.receive(init)
            if header["op"] == "ping":  # the guest does not boot
                continue
            note(**header, seed=body.hex())
            wire.send(init, wire.pack({{"id": header["id"]}}))
"""


class StandInQemu:
    """The parts of a virtual machine, with a program that is no QEMU. It writes down what it was asked."""

    def __init__(self, directory: Path) -> None:
        self._log, program = directory / "log", directory / "qemu"
        self._log.touch()
        code = Path(launch.__file__).parents[1] / "guest"
        (directory / "code").mkdir()
        shutil.copy(code / "frames.py", directory / "code")
        text = STAND_IN.format(python=sys.executable, code=str(directory / "code"), log=str(self._log))
        program.write_text(text)
        program.chmod(0o755)
        setpriv = shutil.which("setpriv") or pytest.skip("setpriv is not installed")
        architecture = ARCHITECTURES[os.uname().machine]
        self.parts = Parts(architecture, str(program), setpriv, Path(os.devnull), (), None)

    def notes(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandInQemu:
    stand_in = StandInQemu(tmp_path)
    monkeypatch.setattr(hosts, "find_parts", lambda architecture, disks: stand_in.parts)
    monkeypatch.setattr(initramfs, "build", lambda *_, **__: 0)
    monkeypatch.setattr(launch, "_may_use", lambda user: False)  # another user could not write into tmp_path
    return stand_in


async def test_every_clone_gets_a_seed_of_its_own_and_the_time(
    stand_in: StandInQemu, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = Saved(ram.create(4096), b"devices", 0.0)
    able = Capabilities(kernel="own", snapshot="full", pause=True)

    async def template(_: QemuHost, image: Image) -> Template:
        return Template(Shape(stand_in.parts, "tcg", 256), saved, able, 0.0)

    monkeypatch.setattr(QemuHost, "template", template)
    host, began = QemuHost(), time.time_ns()
    try:
        machines = [await host.create(BUILT_IN)]
        assert [note["op"] for note in stand_in.notes()] == ["renew"], "before anyone has the machine"
        machines.append(await host.create(BUILT_IN))
        for _ in range(2):  # as forks are made
            machines.append(await host.create(BUILT_IN, snapshot=Snapshot(BUILT_IN, saved)))
        await machines[0].pause()
        await machines[0].resume()
        await asyncio.gather(*(machine.close() for machine in machines))
    finally:
        await host.close()
        saved.close()
    notes = stand_in.notes()
    assert [note["restored"] for note in notes] == [True, True, True, True, False]
    seeds = [bytes.fromhex(note["seed"]) for note in notes]
    assert len(set(seeds)) == 5 and all(len(seed) == 64 and len(set(seed)) > 16 for seed in seeds)
    times = [began, *(note["time_ns"] for note in notes), time.time_ns()]
    assert times == sorted(times)


async def test_kvm_is_used_if_a_guest_boots_in_time(
    stand_in: StandInQemu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here it boots with neither: with KVM nothing answers, and without it QEMU ends at once."""
    (tmp_path / "kvm").touch(0o666)
    monkeypatch.setitem(hosts._BOOT_S, "kvm", 0.05)

    whys: list[str] = []

    async def tried(device: Path, config: QemuConfig | None = None) -> list[str]:
        before, files = len(stand_in.notes()), set(os.listdir("/proc/self/fd"))
        monkeypatch.setattr(launch, "KVM", device)
        host = QemuHost(config)
        for _ in range(2):
            with pytest.raises(MachineError, match="a virtual machine did not start"):
                await host.create(BUILT_IN)
        assert not host._running
        whys.append(host.why_no_kvm or "")
        await host.close()
        await asyncio.sleep(0)
        assert set(os.listdir("/proc/self/fd")) <= files
        notes = stand_in.notes()[before:]
        assert not any(Path(f"/proc/{note['pid']}").exists() for note in notes)
        return [note["accelerator"] for note in notes]

    assert await tried(tmp_path / "kvm") == ["kvm", "tcg", "tcg"], "not tried again for the next template"
    assert await tried(tmp_path / "absent") == ["tcg", "tcg"]
    assert await tried(tmp_path / "kvm", QemuConfig(accelerator="kvm")) == ["kvm", "kvm"]
    assert await tried(tmp_path / "kvm", QemuConfig(accelerator="tcg")) == ["tcg", "tcg"]
    assert "no guest boots with KVM" in whys[0] and "there is no" in whys[1] and whys[2:] == ["", ""]


def test_the_code_of_a_guest_needs_no_other_code() -> None:
    program = "import sys, rollmill.machines.qemu.init; print(*[m for m in sys.modules if m.startswith('rollmill.')])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    shipped = {f"rollmill.machines.qemu.{name.removesuffix('.py')}" for name in initramfs._GUEST_CODE}
    imported = [name for name in run.stdout.split() if not name.startswith("rollmill.machines.guest")]
    assert set(imported) == {"rollmill.machines", "rollmill.machines.qemu", *shipped}


def test_nothing_begins_whose_parent_has_already_ended() -> None:
    """The kernel does not signal the death of a parent that died before it was asked to."""
    setpriv = shutil.which("setpriv")
    if setpriv is None:
        pytest.skip("no setpriv")
    words = [*launch.guard(setpriv), "echo", "begun", "$0"]
    assert subprocess.run(words, capture_output=True, check=True).stdout == b"begun $0\n"
    words[words.index(str(os.getpid()))] = str(os.getppid())  # what it would see: its parent is another process
    ended = subprocess.run(words, capture_output=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, b"")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives QEMU a user of its own")
def test_kvm_that_only_root_may_open_is_not_for_qemu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path / "kvm"
    device.touch()
    monkeypatch.setattr(launch, "KVM", device)
    monkeypatch.setattr(launch, "_may_use", lambda user: True)
    shape = Shape(Parts(ARCHITECTURES["x86_64"], "qemu", "setpriv", Path(os.devnull), (), None), "kvm", 256)
    for group, mode, opens in (
        (0, 0o600, False),
        (0, 0o660, False),
        (993, 0o640, False),
        (993, 0o660, True),
        (0, 0o666, True),
    ):
        os.chown(device, 0, group)
        device.chmod(mode)
        why = launch.why_no_kvm()
        assert (why is None) == opens and (opens or "chgrp kvm" in str(why)), (group, mode, why)
        words = launch._guard(shape)
        assert ("993" in words) == (group == 993) and ("--clear-groups" in words) == (group == 0), "never that of root"
