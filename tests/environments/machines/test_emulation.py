"""Programs of another architecture in namespace machines (namespace/emulation.py)."""

from __future__ import annotations

import platform
import subprocess
from pathlib import Path

import pytest

from rollmill.environments.machines import emulation_probe
from rollmill.environments.machines.images import BUILT_IN, Image, Places
from rollmill.environments.machines.namespace import client, emulation
from rollmill.environments.machines.namespace.client import NamespaceHost, emulated
from rollmill.errors import TaskError

pytestmark = pytest.mark.asyncio(loop_scope="module")
OTHER = emulation.other()


async def test_the_smallest_program_runs_on_this_host(tmp_path: Path) -> None:
    """So what the probe tries is a real program, and not its emulator's forgiveness."""
    (tmp_path / "hello").write_bytes(emulation_probe.program(platform.machine()))
    (tmp_path / "hello").chmod(0o755)
    done = subprocess.run([tmp_path / "hello"], capture_output=True, check=False)  # noqa: ASYNC221
    assert (done.returncode, done.stdout) == (emulation_probe.EXIT_CODE, emulation_probe.WORDS)
    assert emulation.interpreter_of(tmp_path / "hello") is None
    loader = emulation.interpreter_of(Path("/proc/self/exe"))
    assert loader is None or Path(loader).exists()


async def test_programs_of_another_architecture_run_in_their_machine_alone(tmp_path: Path, host: NamespaceHost) -> None:
    if why := emulation.missing(OTHER):
        pytest.skip(why)
    emulation_probe.write_tree(tmp_path / "tree", OTHER)
    tmp_path.chmod(0o755)
    for path in tmp_path.parents[:2]:
        path.chmod(0o755)
    other = NamespaceHost(sees=(None, str(tmp_path / "tree"), OTHER))
    try:
        machine = await other.create(BUILT_IN)
        assert machine.capabilities.architecture == OTHER
        result = await machine.exec(["hello"])
        assert (result.exit_code, result.output) == (emulation_probe.EXIT_CODE, emulation_probe.WORDS)
        assert (await machine.exec(["python3", "-c", "1"])).exit_code == 127, "it has no Python of its own"
        (fork,) = await machine.fork()
        assert (await fork.exec(["/bin/hello"])).output == emulation_probe.WORDS
        # a rule belongs to the machine: no other machine has it, and no command can change it
        plain = await host.create(BUILT_IN, {"hello": emulation_probe.program(OTHER)})
        assert (await plain.exec(["sh", "-c", "chmod +x hello; ./hello"])).exit_code != emulation_probe.EXIT_CODE
        await plain.close()
    finally:
        await other.close()
    assert await emulation_probe.try_emulation(OTHER) is None


async def test_a_host_that_starts_later_ends_no_machine_of_another_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each kind of image has a machine host of its own; the first machine may be of any of them."""
    (tmp_path / "packages").mkdir()
    real, image = client.obtain_image, Image("a", packages=str(tmp_path / "packages"))

    async def obtain(name: str, places: Places) -> Image:
        return image if name == "a" else await real(name, places)

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
