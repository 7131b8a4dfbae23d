"""Services in images: real PostgreSQL and Redis, declared as the guide declares them, written to in isolation."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollmill.errors import ConfigError, MachineError, TaskError
from rollmill.machines.finish_image import build_with_services
from rollmill.machines.images import image as images
from rollmill.machines.images import services
from rollmill.machines.images.build import build_image
from rollmill.machines.images.services import Service, read_services
from rollmill.machines.machine import ExecResult, Machine, ProcessState
from rollmill.machines.namespace.client import NamespaceConfig
from rollmill.machines.qemu.host import QemuConfig, QemuHost
from rollmill.machines.qemu.parts import find_parts
from tests.machines.conftest import start_host
from tests.machines.stand_ins import StandInMachine

GUIDE = Path(__file__).parents[3] / "docs/machine-images.md"
PSQL = "$(echo /usr/lib/postgresql/*/bin)/psql -h /tmp -U app -d postgres -Atqc"


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[Service]]:
    """Builds the image `db` with the services of the guide."""
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))

    def build(store: str) -> list[Service]:
        if shutil.which("redis-server") is None or not list(Path("/usr/lib/postgresql").glob("*/bin/postgres")):
            pytest.skip("redis-server and postgresql are not installed")
        (tmp_path / "services.toml").write_text(
            re.findall(r"```toml\n(\[\[services.*?)```", GUIDE.read_text(), re.S)[0]
        )
        services = read_services(tmp_path / "services.toml")
        (tmp_path / "files").mkdir()
        (tmp_path / "files" / "main.py").write_text("x = 1\n")
        record = build_with_services("db", services, lambda name: build_image(name, directory=tmp_path / "files"))
        assert [layer.place for layer in record.layers] == ["work", "services"] and images.built_names() == ["db"]
        images.push_image("db", store)
        return services

    return build


async def sh(machine: Machine, command: str) -> str:
    result = await machine.exec(["sh", "-c", command], timeout_s=60.0 * machine.capabilities.slowdown)
    assert result.exit_code == 0, result
    return result.output.decode().strip()


async def write(machine: Machine, name: str) -> None:
    await sh(machine, f"{PSQL} \"insert into item values ('{name}')\"")
    await sh(machine, f"redis-cli rpush items {name}")


async def items(machine: Machine) -> tuple[str, str]:
    return await sh(machine, f"{PSQL} 'select name from item'"), await sh(machine, "redis-cli lrange items 0 -1")


async def check_isolation(machine: Machine, other: Machine) -> None:
    """What a machine's services hold is in its forks, and what forks write afterwards is in no other machine."""
    await write(machine, "parent")
    first, second = await machine.fork(2)
    await write(first, "one")
    await write(second, "two")
    assert await items(first) == ("parent\none",) * 2
    assert await items(second) == ("parent\ntwo",) * 2
    assert await items(machine) == ("parent",) * 2
    assert await items(other) == ("", "")
    for each in (first, second):
        await each.close()


@pytest.mark.slow
async def test_services_of_namespace_machines(
    build: Callable[[str], list[Service]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = await start_host(NamespaceConfig(image_store=str(tmp_path / "store")))
    if "memory" not in host.limits["control_groups"]:
        pytest.skip("PostgreSQL needs shared memory, which machines have only where a control group counts it")
    await asyncio.to_thread(build, str(tmp_path / "store"))
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "other-host"))  # which fetches the image with its services
    try:
        machine, other = await host.create("db"), await host.create("db")
        assert await machine.read("main.py") == b"x = 1\n" and await sh(machine, "ls") == "main.py"
        await check_isolation(machine, other)
        # the agent ruins a service of its own: no failure of the infrastructure, also not in a fork
        await sh(machine, "redis-cli shutdown nosave; rm -r ~/services/redis")
        [fork] = await machine.fork()
        assert (await fork.exec(["redis-cli", "ping"])).exit_code != 0
        assert await sh(fork, f"{PSQL} 'select name from item'") == "parent"
    finally:
        await host.close()


@pytest.mark.slow
async def test_services_are_part_of_a_virtual_machines_memory(
    build: Callable[[str], list[Service]], tmp_path: Path
) -> None:
    try:
        find_parts()
    except MachineError as error:
        pytest.skip(str(error))
    await asyncio.to_thread(build, str(tmp_path / "store"))
    host = QemuHost(QemuConfig(memory_mb=512))
    try:
        machine, other = await host.create("db"), await host.create("db")
        await check_isolation(machine, other)
    finally:
        await host.close()


@pytest.mark.slow
async def test_a_web_server_serves_what_its_own_machine_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))
    get = "python -c \"import urllib.request as r; print(r.urlopen('http://127.0.0.1:8000/page').read().decode())\""
    start = "exec python -m http.server 8000 --bind 127.0.0.1"
    web = Service(name="web", prepare="printf built > page", start=start, ready=get)
    await asyncio.to_thread(build_with_services, "web", [web], lambda name: build_image(name))
    host = await start_host()
    try:
        machine, other = await host.create("web"), await host.create("web")
        await sh(machine, "printf parent > ~/services/web/page")
        [fork] = await machine.fork()
        await sh(fork, "printf fork > ~/services/web/page")
        assert [await sh(each, get) for each in (machine, other, fork)] == ["parent", "built", "fork"]
    finally:
        await host.close()


def test_a_service_that_does_not_work_is_refused_when_the_image_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))
    for service, error, why in (
        (Service(name="web", start="echo no such port; exit 3", ready="false"), MachineError, "exit code 3.*such port"),
        (Service(name="web", start="sleep 9", ready="false", ready_s=0.1), MachineError, "not ready"),
        (Service(name="web", start="sleep 9", ready="true", prepare="exit 4"), TaskError, "prepare.*exit code 4"),
    ):
        with pytest.raises(error, match=f"(?s){why}"):
            build_with_services("web", [service], lambda name: build_image(name))
        assert images.built_names() == []
    file = tmp_path / "services.toml"
    for text, why in (
        ("", "services"),
        ('[[services]]\nname = "a"\nstart = "x"\nready = "y"\nfiles = ["/etc/shadow"]', "below /usr"),
        ('[[services]]\nname = "a"\nstart = "x"\nready = "y"\nfiles = ["/usr/../etc/shadow"]', "below /usr"),
        ('[[services]]\nname = "a"\nstart = "x"\nready = "y"\n' * 2, "same name"),
        ('[[services]]\nname = "a"\nstart = "x"\nredy = "y"', "ready"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=why):
            read_services(file)


class HaltedMachine(StandInMachine):
    """Its services were halted by the agent: the command that stops them takes all the time it is given."""

    def __init__(self) -> None:
        self.given: list[float] = []
        self.killed = 0

    async def exec(self, *_: Any, timeout_s: float, **__: Any) -> ExecResult:
        self.given.append(timeout_s)
        await asyncio.sleep(timeout_s)
        return ExecResult(-9, b"", stopped="time")

    async def start(self, *_: Any, **__: Any) -> Any:
        return self

    async def state(self) -> ProcessState:
        return ProcessState(None, b"", False, None)

    async def stop(self) -> None:
        self.killed += 1


async def test_services_that_the_agent_halted_cost_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(services, "_START_AGAIN_S", 0.1)
    machine: Any = HaltedMachine()
    service = Service(name="db", start="exec db", ready="db ready", stop="db stop")
    running = services.RunningServices(machine, [service, service.model_copy(update={"name": "cache"})])
    running._processes = {"db": machine, "cache": machine}
    await running.stop(within_s=0.2)
    assert machine.killed == 2 and 0.0 < sum(machine.given) <= 0.2
    async with asyncio.timeout(30.0):
        await running.start_again()  # nothing is ready in its time, and that is no error
