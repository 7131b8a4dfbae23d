"""OCI images of Debian's packages, made once; and a directory of images of this session's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollmill.machines.namespace.client import NamespaceHost, NamespaceMachine
from tests.machines.conftest import start_host
from tests.machines.oci.making import (
    busybox_layer,
    entry,
    fetch_packages,
    link,
    tar_of,
    tar_tree,
    unpack_packages,
    write_layout,
)

_PACKAGES = (
    "python3",
    "python3-pytest",
    "bash",
    "coreutils",
    "grep",
    "sed",
    "findutils",
    "less",
    "ncurses-base",
    "util-linux",
)


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where OCI images are unpacked."""
    root = tmp_path_factory.mktemp("images")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLMILL_IMAGES", str(root))
        yield root


@pytest.fixture(scope="session")
def debian(tmp_path_factory: pytest.TempPathFactory, images: Path) -> str:
    """Debian with a Python, pytest and a shell of its own. The scripts of its packages did not run."""
    place = tmp_path_factory.mktemp("debian")
    tree = unpack_packages(fetch_packages(_PACKAGES, place / "packages", needed=True), place / "tree")
    people = b"root:x:0:0:root:/root:/bin/bash\nuser:x:1000:1000:,,,:/home/user:/bin/bash\n"
    own = [link("usr/bin/sh", "bash"), link("usr/bin/python", "python3"), entry("etc/passwd", people)]
    own += [entry("home/"), entry("home/user/", uid=1000, gid=1000)]
    layers = [tar_tree(tree), tar_of(own)]
    return f"oci:{write_layout(place / 'layout', layers, User='user', Env=['PYTHONDONTWRITEBYTECODE=1'])}"


@pytest.fixture(scope="session")
def busybox(tmp_path_factory: pytest.TempPathFactory, images: Path) -> str:
    """A shell and tools in one static program, two layers, and a work directory of its own."""
    place = tmp_path_factory.mktemp("busybox")
    top = tar_of(
        [
            entry("app/", uid=1000, gid=1000),
            entry("app/main.txt", b"from the image\n", uid=1000, gid=1000),
            entry("usr/share/.wh.doc"),
            entry("root/", mode=0o700),
            entry("usr/bin/as-root", b"#!/bin/sh\nid -u\n", mode=0o4755),
            link("escape", "../../../../../../etc"),
        ]
    )
    return f"oci:{write_layout(place / 'layout', [busybox_layer(place), top], WorkingDir='/app', Env=['COLOUR=blue'])}"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(images: Path) -> AsyncIterator[NamespaceHost]:
    host = await start_host()
    yield host
    await host.close()


@pytest_asyncio.fixture(loop_scope="module")
async def machine(host: NamespaceHost, busybox: str) -> AsyncIterator[NamespaceMachine]:
    machine = await host.create(busybox)
    yield machine
    await machine.close()
