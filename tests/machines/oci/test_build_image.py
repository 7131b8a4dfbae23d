"""Dockerfiles are built by buildah: in namespaces, with limits, on images of a registry on loopback.

The registry has stand-ins: busybox of Debian under names that others gave their images.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmill.errors import TaskError
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.machines.oci.build_image import BuildConfig, Recipe
from rollmill.machines.oci.dockerfile import plan
from rollmill.machines.oci.kept_images import Kept
from tests.machines.oci.test_registry import push, registry

needs_buildah = pytest.mark.skipif(
    not all(map(shutil.which, ("buildah", "docker-registry", "skopeo"))),
    reason="buildah, docker-registry and skopeo are not installed",
)


def test_the_images_that_a_dockerfile_names_are_replaced() -> None:
    text = (
        "# FROM nobody\nARG V=3.12\nARG BASE=python:${V}-slim\nFROM --platform=linux/arm64 $BASE AS One\n"
        "FROM ghcr.io/org/tool:1@sha256:" + "0" * 64 + " \\\n  AS two\nRUN echo FROM x\nFROM one\n"
        "COPY --from=two /a /a\nCOPY --chown=1 --from=alpine /b /b\nCOPY --from=0 /c /c\n"
        "RUN --mount=type=bind,from=debian,target=/d true\n"
    )
    found = plan(text, "Dockerfile")
    assert found.bases == (
        "docker.io/library/python:3.12-slim",
        f"ghcr.io/org/tool:1@sha256:{'0' * 64}",
        "docker.io/library/alpine",
        "docker.io/library/debian",
    )
    kept = [line.split() for line in found.text.splitlines() if line.startswith(("FROM", "COPY")) or "mount" in line]
    assert [" ".join(words) for words in kept] == [
        "FROM localhost/base0 AS One",
        "FROM localhost/base1 AS two",
        "FROM one",
        "COPY --from=two /a /a",
        "COPY --chown=1 --from=localhost/base2 /b /b",
        "COPY --from=0 /c /c",
        "RUN --mount=type=bind,from=localhost/base3,target=/d true",
    ]
    assert plan("FROM scratch\n", "it").bases == ()


@pytest.mark.parametrize(
    ("text", "why"), [("RUN true\n", "it has no FROM"), ("ARG X\nFROM $X\n", "line 2: FROM names the image '[$]X'")]
)
def test_a_dockerfile_that_names_no_image(text: str, why: str) -> None:
    with pytest.raises(TaskError, match=f"D/Dockerfile: {why}"):
        plan(text, "D/Dockerfile")


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory, busybox: str) -> Iterator[str]:
    with registry(tmp_path_factory.mktemp("mirror")) as host:
        push(Path(busybox.removeprefix("oci:")), host, "docker.io/library/debian:bookworm-slim")
        yield host


def recipe(folder: Path, mirror: str, text: str, **settings: object) -> Recipe:
    folder.mkdir(exist_ok=True)
    (folder / "Dockerfile").write_text(f"FROM debian:bookworm-slim\n{text}")
    config = BuildConfig(mirrors={"docker.io": f"{mirror}/docker.io"}, **settings)  # type: ignore[arg-type]
    return Recipe(dockerfile=folder / "Dockerfile", context=folder, settings=config)


@needs_buildah
@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_a_built_image_is_a_machine_at_once(
    tmp_path: Path, images: Path, mirror: str, host: NamespaceHost
) -> None:
    (tmp_path / "secret").mkdir(mode=0o700)
    (tmp_path / "secret" / "key").write_text("of root")
    (tmp_path / "secret" / "key").chmod(0o600)
    text = (
        "COPY data /srv/data\nENV COLOUR=red\n"
        f"RUN cat /proc/self/uid_map > /map; cat /proc/net/dev > /net; cat {tmp_path}/secret/key > /key; true\n"
    )
    its = recipe(tmp_path / "d", mirror, text)
    (tmp_path / "d" / "data").write_text("copied\n")
    its = its.model_copy(update={"environment": {"QUOTED": 'a "b" $HOME \\'}, "directory": "/srv/place"})
    kept = Kept(images)
    image = await asyncio.to_thread(kept.build, "oci:localhost/made", its)
    for name in ("oci:localhost/made", f"oci:localhost/made@{image.digest}"):
        machine = await host.create(name)
        command = 'pwd -P; cat /srv/data; echo "$COLOUR $QUOTED"; cat /map /net; wc -c < /key'
        result = await machine.exec(["sh", "-c", command])
        await machine.close()
        lines = result.output.decode().splitlines()
        assert lines[:3] == ["/srv/place", "copied", 'red a "b" $HOME \\']
        assert lines[3].split()[1] != "0", "root of the build is not root of the host"
        assert [line.split(":")[0].strip() for line in lines if ":" in line] == ["lo"], "loopback alone"
        assert lines[-1] == "0", "a file that only root may read is not read"


@needs_buildah
@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "settings", "why", "hint"),
    [
        (
            "RUN wget -O - http://packages.example.org/\n",
            {},
            r"need a network: packages.example.org \(not on",
            "egress",
        ),
        ("RUN while true; do true; done\n", {"timeout_s": 4.0}, "it took longer than timeout_s = 4 seconds", "limit"),
        ("RUN while dd if=/dev/zero of=/f$((n+=1)) bs=1M count=9; do sleep 1; done\n", {"disk_mb": 48}, "disk_mb", ""),
        ("COPY nothing /\n", {}, "nothing", "correct the Dockerfile"),
    ],
    ids=["network", "forever", "disk", "missing file"],
)
def test_a_dockerfile_that_does_not_work_leaves_nothing(
    tmp_path: Path, images: Path, mirror: str, text: str, settings: dict[str, object], why: str, hint: str
) -> None:
    kept = Kept(images)
    before = sorted(path.name for path in (images / "oci").rglob("*.json"))
    with pytest.raises(TaskError, match=why) as error:
        kept.build("oci:localhost/bad", recipe(tmp_path / "d", mirror, text, **settings))
    assert str(tmp_path / "d" / "Dockerfile") in error.value.message and hint in (error.value.hint or "")
    assert sorted(path.name for path in (images / "oci").rglob("*.json")) == before
    with pytest.raises(TaskError, match="was not built on this host"):
        kept.obtain("oci:localhost/bad")


def test_without_buildah_the_error_says_what_to_install(
    tmp_path: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TaskError, match="buildah is not installed") as error:
        Kept(images).build("oci:localhost/none", recipe(tmp_path / "d", "mirror.example", ""))
    assert "apt-get install buildah" in (error.value.hint or "")
