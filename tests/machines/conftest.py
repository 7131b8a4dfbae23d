"""Real machines for the tests of environments. One machine host serves all tests of a module, in one event loop:

pytestmark = pytest.mark.asyncio(loop_scope="module")
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rollmill.errors import MachineError
from rollmill.machines.images import image as images
from rollmill.machines.images import layers
from rollmill.machines.images.image import BUILT_IN
from rollmill.machines.machine import ExecResult
from rollmill.machines.namespace.client import NamespaceConfig, NamespaceHost, NamespaceMachine

CONFIG = NamespaceConfig(memory_mb=128, disk_mb=16, processes=32)
# A machine host without control groups and without spare user ids, as an ordinary user has it. It is started as an
# ordinary user too: the kernel never limits the processes of the real root, so a fork bomb would have no end.
BARE = """#!/bin/sh
exec unshare --mount sh -c '
    mount -t tmpfs -o ro none /sys/fs/cgroup
    exec setpriv --reuid=61234 --regid=61234 --clear-groups --bounding-set=-setuid --inh-caps=-all "$@"
' - {python} "$@"
"""


async def start_host(config: NamespaceConfig = CONFIG) -> NamespaceHost:
    host = NamespaceHost(config)
    try:
        await host.start()
    except MachineError as error:
        if error.message.startswith("cannot enter namespaces"):
            pytest.skip(str(error))
        raise
    return host


async def start_bare_host(directory: Path, config: NamespaceConfig = CONFIG) -> NamespaceHost:
    if os.geteuid() != 0:
        return await start_host(config)
    wrapper = directory / "python"
    wrapper.write_text(BARE.format(python=sys.executable))
    wrapper.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(wrapper))
        host = await start_host(config)
    assert host.limits["control_groups"] == [] and not host.limits["separate_users"]
    return host


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host() -> AsyncIterator[NamespaceHost]:
    host = await start_host()
    yield host
    await host.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bare_host(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[NamespaceHost]:
    host = await start_bare_host(tmp_path_factory.mktemp("bare"))
    yield host
    await host.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def image_with_pytest(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """The name of an image with pytest, made of the packages of this environment: a test needs no network."""
    import _pytest
    import iniconfig
    import packaging
    import pluggy
    import pygments

    root = tmp_path_factory.mktemp("images")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLMILL_IMAGES", str(root))
        place = root / "making" / "packages"
        for module in (pytest, _pytest, pluggy, iniconfig, packaging, pygments):
            source = Path(str(module.__file__)).parent
            shutil.copytree(source, place / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        site = Path(str(pytest.__file__)).parent.parent
        shutil.copy(site / "py.py", place)
        for facts in site.glob("pluggy-*.dist-info"):  # pluggy asks for its version
            shutil.copytree(facts, place / facts.name)
        layer = layers.keep(place, root)
        parts = [images.LayerRecord(place="packages", digest=layer.digest, bytes=layer.bytes)]
        digest = images.digest_of(parts)
        images.keep_record("tested", images.ImageRecord(digest=digest, python=images.python_platform(), layers=parts))
        yield "tested"


@pytest.fixture(params=["host", "bare_host"])
def any_host(request: pytest.FixtureRequest) -> NamespaceHost:
    return request.getfixturevalue(request.param)


@pytest_asyncio.fixture(loop_scope="module")
async def machine(host: NamespaceHost) -> AsyncIterator[NamespaceMachine]:
    machine = await host.create(BUILT_IN)
    yield machine
    await machine.close()


@pytest.fixture
def slow_commands(host: NamespaceHost, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """New machines of `host` declare that they are 20 times slower. Returns the options that their commands get."""
    seen: list[dict[str, Any]] = []
    real = NamespaceMachine.exec

    async def exec(self: NamespaceMachine, argv: Sequence[str], **options: Any) -> ExecResult:
        seen.append(options)
        return await real(self, argv, **options)

    monkeypatch.setattr(host, "measured_slowdown", 20.0)
    monkeypatch.setattr(NamespaceMachine, "exec", exec)
    return seen


async def run_python(
    machine: NamespaceMachine, program: str, *, timeout_s: float = 20.0, env: Mapping[str, str] | None = None
) -> str:
    """The output of a program, which must exit with 0."""
    result = await machine.exec(["python", "-c", program], timeout_s=timeout_s, env=env)
    assert result.exit_code == 0, result
    return result.output.decode().strip()
