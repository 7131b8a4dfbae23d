"""The factory with packages that attack this host: an index on loopback, pip, and machines."""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import json
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rollmill.errors import TaskError
from rollmill.machines.images.build import build_image
from rollmill.machines.namespace.client import NamespaceHost
from rollmill.rollouts.factory.install import install
from rollmill.rollouts.factory.sdist import get_sdist
from rollmill.rollouts.factory.sources import Source, get_source

SECRET = "0d5c-a-secret-of-the-caller"
# runs wherever the package is built: it leaves a file outside, and packs what it sees into a module
BACKEND = """
import io, json, os, pathlib, zipfile
outside = pathlib.Path({outside!r})
outside.parent.mkdir(parents=True, exist_ok=True)
outside.write_text("was here")

def get_requires_for_build_wheel(config_settings=None):
    return {asks!r}

def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    for each in {asks!r}:
        __import__(each + "_saw")
    info = "{name}-1.0.dist-info/"
    needs = "".join(f"Requires-Dist: {{each}}\\n" for each in {needs!r})
    files = {{
        "{name}_saw.py": f"SAW = {{dict(os.environ)!r}}\\n",
        info + "METADATA": "Metadata-Version: 2.1\\nName: {name}\\nVersion: 1.0\\n" + needs,
        info + "WHEEL": "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
        info + "RECORD": "",
    }}
    with zipfile.ZipFile(pathlib.Path(wheel_directory, "{name}-1.0-py3-none-any.whl"), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return "{name}-1.0-py3-none-any.whl"
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def attacker(name: str, outside: Path, needs: tuple[str, ...] = (), asks: tuple[str, ...] = ()) -> dict[str, bytes]:
    return {
        "pyproject.toml": PYPROJECT.encode(),
        "backend.py": BACKEND.format(name=name, outside=str(outside), needs=list(needs), asks=list(asks)).encode(),
        "setup.py": f"open({str(outside)!r}, 'w').close()\n".encode(),
    }


def packed(folder: str, files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for path, data in files.items():
            member = tarfile.TarInfo(f"{folder}/{path}")
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
        link = tarfile.TarInfo(f"{folder}/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    return buffer.getvalue()


Publish = Callable[..., None]


@pytest.fixture
def publish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Publish]:
    """Adds an sdist to an index on loopback, which asks for a password and is the one that pip is configured with."""
    root = tmp_path / "index"
    asked: list[str | None] = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.headers.get("Authorization"))
            super().do_GET()

        def log_message(self, *_: object) -> None:
            pass

    def add(name: str, files: dict[str, bytes], *, digest: str = "", version: str = "1.0", facts: str = "") -> None:
        page = root / "simple" / name
        page.mkdir(parents=True, exist_ok=True)
        data = packed(f"{name}-{version}", files)
        (page / f"{name}-{version}.tar.gz").write_bytes(data)
        digest = digest or hashlib.sha256(data).hexdigest()
        with (page / "index.html").open("a") as file:
            file.write(f'<a href="{name}-{version}.tar.gz#sha256={digest}" {facts}>x</a><a href="../up">up</a>\n')

    root.mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=str(root)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:pass%40word@127.0.0.1:{server.server_port}/simple/")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://pypi.org/simple")
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))
    monkeypatch.setenv("SECRET", SECRET)
    try:
        yield add
        assert set(asked) <= {"Basic bWU6cGFzc0B3b3Jk"}, "each question carries the password of the index"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_an_sdist_is_read_and_nothing_of_it_runs(publish: Publish, tmp_path: Path) -> None:
    outside = tmp_path / "outside" / "touched"
    publish("evil", attacker("evil", outside))
    publish("evil", {"new.py": b""}, version="2.0", facts='data-requires-python="&lt;3"')
    publish("evil", {"new.py": b""}, version="3.0", facts='data-yanked=""')
    publish("evil", {"new.py": b""}, version="4.0rc1")
    source = get_source("evil", tmp_path)
    assert source.version == "1.0" and set(source.files) == {"pyproject.toml", "backend.py", "setup.py"}, "no link"
    assert not outside.exists()
    assert get_sdist("evil==4.0rc1").version == "4.0rc1"
    with pytest.raises(TaskError, match="has no sdist of evil==9"):
        get_sdist("evil==9")
    with pytest.raises(TaskError, match=r"does not answer for http://127.0.0.1:\d+/simple/other/: .*404"):
        get_sdist("other")


def test_an_index_that_lies_about_a_digest_is_refused(publish: Publish, tmp_path: Path) -> None:
    publish("liar", {"a.py": b""}, digest="0" * 64)
    with pytest.raises(TaskError, match="is not what the index names by SHA-256"):
        get_sdist("liar")


REFUSED = ["evil @ file:///etc", "evil @ git+https://x.test/${SECRET}", "-r /etc/passwd", "./evil", "https://x.test/e"]


@pytest.mark.parametrize("line", REFUSED)
@pytest.mark.asyncio(loop_scope="module")
async def test_a_project_cannot_name_addresses_or_files_of_this_host(
    line: str, host: NamespaceHost, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))
    settings = f"[build-system]\nrequires = [{json.dumps(line)}]\n"
    with pytest.raises(TaskError, match="is no requirement of a package in the index") as raised:
        await install(Source("evil", {"pyproject.toml": settings.encode()}), "evil.packages", host)
    assert SECRET not in raised.value.message


@pytest.mark.parametrize("line", ["{0}", "evil @ file://{0}", "git+file://{0}#egg=evil"])
def test_pip_starts_no_program_even_if_its_caller_names_one(
    tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROLLMILL_IMAGES", str(tmp_path / "images"))
    package, outside = tmp_path / "package", tmp_path / "outside"
    package.mkdir()
    for path, data in attacker("evil", outside).items():
        (package / path).write_bytes(data)
    subprocess.run(["git", "init", "--quiet", package], check=True)
    listed, wheels = tmp_path / "listed.txt", tmp_path / "wheels"
    wheels.mkdir()
    listed.write_text(line.format(package))
    with pytest.raises(TaskError, match="would be built on this host"):
        build_image("evil", requirements=listed, wheels=wheels)
    assert not outside.exists()


@pytest.mark.slow
@pytest.mark.asyncio(loop_scope="module")
async def test_backends_run_in_machines_and_see_no_secret(
    publish: Publish, host: NamespaceHost, tmp_path: Path
) -> None:
    """The project itself, a dependency that the index has as an sdist alone, and what only the backend asks for."""
    outside = tmp_path / "outside" / "touched"
    publish("evil", attacker("evil", outside, ("worse>=1",), ("tool",)))
    publish("tool", attacker("tool", outside))
    publish("worse", attacker("worse", outside))
    project = await install(get_source("evil", tmp_path), "evil.packages", host)
    assert not outside.exists()
    seen = project.files["evil_saw.py"].decode()
    assert "PATH" in seen and SECRET not in seen and "pass%40word" not in seen
    machine = await host.create("evil.packages")
    try:
        told = await machine.exec(["python", "-c", "import worse_saw; print(worse_saw.SAW)"])
    finally:
        await machine.close()
    assert b"PATH" in told.output and SECRET.encode() not in told.output and b"pass%40word" not in told.output
