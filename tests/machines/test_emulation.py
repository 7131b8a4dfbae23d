"""Programs of another architecture in namespace machines (namespace/emulation.py)."""

from __future__ import annotations

import asyncio
import platform
import struct
import subprocess
from pathlib import Path

import pytest

from rollmill.errors import MachineError, TaskError
from rollmill.machines import probe
from rollmill.machines.agent_machine import AgentMachineConfig
from rollmill.machines.guest import linux as kernel
from rollmill.machines.images.image import BUILT_IN, Image
from rollmill.machines.machine import Machine
from rollmill.machines.namespace import client, emulation
from rollmill.machines.namespace.client import NamespaceHost, NamespaceMachine, Seen, emulated
from rollmill.machines.qemu import setup

pytestmark = pytest.mark.asyncio(loop_scope="module")
OTHER = emulation.other()


async def test_the_smallest_program_runs_on_this_host(tmp_path: Path) -> None:
    """So what the probe tries is a real program, and not its emulator's forgiveness."""
    (tmp_path / "hello").write_bytes(probe.program(platform.machine()))
    (tmp_path / "hello").chmod(0o755)
    done = subprocess.run([tmp_path / "hello"], capture_output=True, check=False)  # noqa: ASYNC221
    assert (done.returncode, done.stdout) == (probe.EXIT_CODE, probe.WORDS)
    assert emulation.interpreter_of(tmp_path / "hello") is None
    loader = emulation.interpreter_of(Path("/proc/self/exe"))
    assert loader is None or Path(loader).exists()


async def test_programs_of_another_architecture_run_in_their_machine_alone(tmp_path: Path, host: NamespaceHost) -> None:
    if why := emulation.missing(OTHER):
        pytest.skip(why)
    probe.write_tree(tmp_path / "tree", OTHER)
    tmp_path.chmod(0o755)
    for path in tmp_path.parents[:2]:
        path.chmod(0o755)
    other = NamespaceHost(sees=Seen(root=str(tmp_path / "tree"), architecture=OTHER))
    try:
        machine = await other.create(BUILT_IN)
        assert machine.capabilities.architecture == OTHER
        result = await machine.exec(["hello"])
        assert (result.exit_code, result.output) == (probe.EXIT_CODE, probe.WORDS)
        assert (await machine.exec(["python3", "-c", "1"])).exit_code == 127, "it has no Python of its own"
        (fork,) = await machine.fork()
        assert (await fork.exec(["/bin/hello"])).output == probe.WORDS
        for _ in range(16):  # in each slot more than once: the rule of a machine is not in the way of the next one
            again = await other.create(BUILT_IN)
            assert (await again.exec(["hello"])).output == probe.WORDS
            await again.close()
        # a rule belongs to the machine: no other machine has it, and no command can change it
        if not _has_rule_for_all(tmp_path / "tree/usr/bin/hello"):
            plain = await host.create(BUILT_IN, {"hello": probe.program(OTHER)})
            assert (await plain.exec(["sh", "-c", "chmod +x hello; ./hello"])).exit_code != probe.EXIT_CODE
            await plain.close()
    finally:
        await other.close()
    assert await probe.try_emulation(OTHER) is None


def _has_rule_for_all(program: Path) -> bool:
    """Whether this whole host runs programs of the other architecture: then all its machines do."""
    try:
        return subprocess.run([program], capture_output=True, check=False).returncode == probe.EXIT_CODE
    except OSError:
        return False


async def test_slowdown_is_measured_once_and_leaves_no_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    host = NamespaceHost()
    obtain_real, create_real = client.obtain_image, host.create
    measured, made = list[Machine](), list[NamespaceMachine]()

    async def obtain(name: str, config: AgentMachineConfig) -> Image:
        if name == "other":
            return Image(name, root=str(tmp_path), architecture=OTHER)
        return await obtain_real(name, config)

    async def create(name: str) -> NamespaceMachine:
        """A machine of this host in the place of either."""
        if name == BUILT_IN and len(made) == 1:
            raise MachineError("no second machine")
        made.append(await create_real(BUILT_IN))
        return made[-1]

    async def measure(machine: Machine, plain: Machine) -> float:
        measured.append(machine)
        return 7.0

    monkeypatch.setattr(emulation, "missing", lambda architecture: None)
    monkeypatch.setattr(emulation, "measure_slowdown", measure)
    monkeypatch.setattr(client, "obtain_image", obtain)
    monkeypatch.setattr(host, "create", create)
    try:
        with pytest.raises(MachineError, match="no second machine"):
            await host.slowdown("other")
        assert made[0]._closed
        assert await asyncio.gather(*(host.slowdown("other") for _ in range(3))) == [7.0] * 3
        assert len(measured) == 1 and len(made) == 3 and all(machine._closed for machine in made)
    finally:
        await host.close()


async def test_the_emulator_comes_from_either_package_of_debian(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    static = probe.program(OTHER)
    dynamic = bytearray(static)  # its words are the path of a loader
    struct.pack_into("<I", dynamic, 64, 3)
    for at, value in ((72, len(static) - len(probe.WORDS)), (96, len(probe.WORDS))):
        struct.pack_into("<Q", dynamic, at, value)
    name, plain = emulation.names_of(OTHER)
    debian_12 = {"qemu-user": (plain, bytes(dynamic)), "qemu-user-static": (name, static)}
    debian_13 = {"qemu-user": (plain, static)}
    neither = {"qemu-user": (plain, bytes(dynamic)), "qemu-user-static": (plain, bytes(dynamic))}
    packages: dict[str, tuple[str, bytes]] = {}

    def run(command: list[str], *, cwd: str | None = None, env: dict[str, str] | None = None) -> str:
        """In the place of apt-get and dpkg-deb."""
        if command[0] == "apt-get":
            Path(str(cwd), f"{command[-1]}.deb").touch()
            return ""
        program, data = packages[Path(command[2]).stem]
        Path(command[-1], "usr/bin").mkdir(parents=True)
        Path(command[-1], "usr/bin", program).write_bytes(data)
        return ""

    monkeypatch.setattr(setup, "_run", run)
    monkeypatch.setattr("shutil.which", lambda program: program)
    for each in (debian_12, debian_13):
        packages.clear()
        packages.update(each)
        setup._fetch_emulator(OTHER, tmp_path)
        assert (tmp_path / name).read_bytes() == static
        (tmp_path / name).unlink()
    packages.update(neither)
    with pytest.raises(MachineError, match="that needs no library"):
        setup._fetch_emulator(OTHER, tmp_path)


async def test_a_host_that_starts_later_ends_no_machine_of_another_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of image has a machine host of its own; the first machine may be of any of them."""
    (tmp_path / "packages").mkdir()
    real, image = client.obtain_image, Image("a", packages=str(tmp_path / "packages"))

    async def obtain(name: str, config: AgentMachineConfig) -> Image:
        return image if name == "a" else await real(name, config)

    monkeypatch.setattr(client, "obtain_image", obtain)
    host = NamespaceHost()
    try:
        first = await host.create("a")
        second = await host.create(BUILT_IN)
        assert [(await machine.exec(["true"])).exit_code for machine in (first, second)] == [0, 0]
    finally:
        await host.close()


async def test_an_image_says_what_this_host_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emulation, "find", lambda architecture: None)
    with pytest.raises(TaskError, match=f"image 'a' is for {OTHER}, and"):
        emulated(Image("a", root="/absent", architecture=OTHER))
    assert emulated(Image("a", root="/absent", architecture=platform.machine())) is None
    host = NamespaceHost()  # no machine is started to find out that nothing is emulated
    assert (await host.slowdown(BUILT_IN), await host.slowdown("absent"), host._process) == (1.0, 1.0, None)
    assert emulation.missing("vax") == "no emulator for 'vax' is known"
    monkeypatch.setattr(kernel, "has_capability", lambda capability: False)
    monkeypatch.setattr(emulation, "find", lambda architecture: "/emulator")
    assert (emulation.missing(OTHER) or "").startswith(("only root", "Linux 6.7", "the kernel has no binfmt_misc"))
