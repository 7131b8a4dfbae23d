"""Images of one's own: built by content, seen by their own machines only, and never missed without a remedy."""

from __future__ import annotations

import os
import zipfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from rollmill.errors import TaskError
from rollmill.machines.images.build import build_image, list_images, remove_image
from rollmill.machines.images.image import BUILT_IN, images_directory, load_image
from rollmill.machines.namespace.client import NamespaceHost
from tests.machines.conftest import CONFIG, run_python, start_host

pytestmark = pytest.mark.asyncio(loop_scope="module")

_GREET = "import sys\n\n\ndef main():\n    print('hello', *sys.argv[1:])\n"


def make_wheel(
    directory: Path, name: str, modules: dict[str, str], entry: str = "", *, version: str = "1.0", script: str = ""
) -> Path:
    """A wheel as pip downloads one, without a network. `entry` is the function of its program."""
    wheel = directory / f"{name}-{version}-py3-none-any.whl"
    facts = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in modules.items():
            archive.writestr(path, text)
        archive.writestr(f"{facts}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        archive.writestr(f"{facts}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        if entry:
            archive.writestr(f"{facts}/entry_points.txt", f"[console_scripts]\n{script or name} = {entry}\n")
        archive.writestr(f"{facts}/RECORD", "")
    return wheel


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of images with one of each kind."""
    root = tmp_path_factory.mktemp("images")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLMILL_IMAGES", str(root / "store"))
        # `json` would break machine hosts that import from images before the standard library
        modules = {"greet.py": _GREET, "json/__init__.py": "raise SystemExit('imported from an image')\n"}
        requirements = root / "requirements.txt"
        requirements.write_text(f"# of ours\n{make_wheel(root, 'greet', modules, 'greet:main')}\n")
        files = root / "files"
        (files / "source").mkdir(parents=True)
        (files / "source" / "a.py").write_text("a = 1\n")
        (files / "run.sh").write_text("#!/bin/sh\n")
        (files / "run.sh").chmod(0o755)
        build_image("greeter", requirements=requirements)
        build_image("files", directory=files)
    return root


@pytest.fixture(autouse=True)
def use_store(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(store / "store"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def image_host() -> AsyncIterator[NamespaceHost]:
    host = await start_host(CONFIG)
    yield host
    await host.close()


async def test_an_image_that_was_removed_and_built_again_while_machines_run(
    tmp_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))
    digests = []
    host = await start_host(CONFIG)
    try:
        for _ in range(2):
            digests.append(build_image("own", requirements=store / "requirements.txt").digest)
            machine = await host.create("own")
            assert (await machine.exec(["greet", "you"])).output == b"hello you\n"
            remove_image("own")
    finally:
        await host.close()
    assert digests[0] == digests[1]


async def test_the_machines_of_an_image_have_its_packages_and_programs(image_host: NamespaceHost) -> None:
    machine = await image_host.create("greeter", {"x": b"1"})
    assert (await machine.exec(["greet", "you"])).output == b"hello you\n"
    for python in ("python", "/opt/bin/python"):  # warm and cold
        result = await machine.exec([python, "-c", "import greet; print(greet.__file__)"])
        assert result.output == b"/opt/packages/greet.py\n", result
    assert (await machine.exec(["sh", "-c", "echo x > /opt/packages/greet.py"])).exit_code != 0
    assert await machine.read("x") == b"1"
    (copy,) = await machine.fork()
    assert (await copy.exec(["greet"])).output == b"hello\n"
    assert machine.image == copy.image == load_image("greeter", None).reference


async def test_other_machines_see_nothing_of_it(image_host: NamespaceHost) -> None:
    machine = await image_host.create(BUILT_IN)
    assert await run_python(machine, "import os; print(os.path.exists('/opt/packages'))") == "False"
    assert (await machine.exec(["greet"])).exit_code == 127 and machine.image == BUILT_IN
    machine = await image_host.create("files", {"source/b.py": b"b = 2\n"})
    listing = await machine.exec(["find", ".", "-type", "f"])
    assert sorted(listing.output.decode().split()) == ["./run.sh", "./source/a.py", "./source/b.py"]


async def test_the_same_content_is_kept_once(store: Path) -> None:
    first = load_image("greeter", None)
    again = build_image("again", requirements=store / "requirements.txt")
    assert again.digest == first.digest and len(list((images_directory() / "objects").iterdir())) == 2
    assert [name for name, _ in list_images()] == ["again", "files", "greeter"]
    assert remove_image("again") == 0 and load_image("greeter", None) == first  # the other name keeps it
    changed = store / "changed"
    changed.mkdir()
    (changed / "source.py").write_text("a = 2\n")
    other = build_image("changed", directory=changed)
    assert other.digest != load_image("files", None).digest and other.bytes > 0
    assert remove_image("changed") == other.bytes and not (images_directory() / "objects" / other.digest).exists()


async def test_an_image_that_is_gone_is_named_with_the_remedy(image_host: NamespaceHost, store: Path) -> None:
    machine = await image_host.create("files")
    empty = store / "empty"
    empty.mkdir()
    gone = build_image("gone", directory=empty)
    (images_directory() / "objects" / gone.digest / "image.json").unlink()
    with pytest.raises(TaskError, match=r"damaged(.|\n)*`rollmill images build gone"):
        await image_host.create("gone")
    assert ("gone", None) in list_images()
    remove_image("gone")
    for name in ("gone", "../names/files", "files/../files", "", "a\0b"):
        with pytest.raises(TaskError, match=r"does not exist(.|\n)*images build(.|\n)*host-python"):
            await image_host.create(name)
    assert (await machine.exec(["true"])).exit_code == 0  # nothing else is lost


async def test_an_image_for_another_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollmill.machines.images.image.python_platform", lambda _root=None: "3.99 linux-other")
    with pytest.raises(TaskError, match=r"3\.99"):
        load_image("greeter", None)


async def test_images_that_cannot_be_built(store: Path) -> None:
    wrong = store / "wrong.txt"
    wrong.write_text(f"{store}/no-such-wheel-1.0-py3-none-any.whl\n")
    for arguments, words in (
        ({"requirements": wrong}, "pip could not install"),
        ({"requirements": store / "absent"}, "is not a file"),
        ({"directory": store / "absent"}, "is not a directory"),
    ):
        with pytest.raises(TaskError, match=words):
            build_image("wrong", **arguments)
    with pytest.raises(TaskError, match="cannot be the name"):
        build_image("../x", directory=store)
    assert "wrong" not in [name for name, _ in list_images()]
    assert not [path for path in images_directory().iterdir() if path.name.startswith(".building")]


async def test_large_files_and_links_of_an_image(store: Path) -> None:
    large = store / "large"
    large.mkdir()
    (large / "data").write_bytes(os.urandom(2 << 20))
    (large / "link").symlink_to("/etc/passwd")
    build_image("large", directory=large)
    assert sorted(load_image("large", None).files) == ["data"]
    with pytest.raises(TaskError, match=r"1 MiB(.|\n)*image_mb"):
        load_image("large", None, max_bytes=1 << 20)
    remove_image("large")


def test_the_directory_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROLLMILL_IMAGES", "images")
    assert images_directory() == tmp_path / "images"
