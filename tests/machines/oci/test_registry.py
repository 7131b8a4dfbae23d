"""Images are pulled from a real registry process on loopback, and from one that lies."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rollmill import tls
from rollmill.errors import TaskError
from rollmill.machines.oci import registry_client
from rollmill.machines.oci.image_reference import parse
from rollmill.machines.oci.kept_images import Kept
from rollmill.machines.oci.registry_client import Registry, _is_safe
from rollmill.storage.objects import Objects
from tests.launch.test_tls import make_ca
from tests.machines.oci.making import entry, run, tar_of, write_layout
from tests.storage.serving import new_bucket, s3_environment, s3_server

pytestmark = pytest.mark.skipif(
    not all(map(shutil.which, ("docker-registry", "skopeo", "perl"))),
    reason="docker-registry, skopeo and perl are not installed",
)
USER, PASSWORD = "ann", "a-secret-word"
_CONFIG = """\
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: {directory}/registry}}}}
http: {{addr: "127.0.0.1:{port}", {tls}}}
{auth}
"""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def registry(directory: Path, auth: str = "", tls: str = "") -> Iterator[str]:
    port = free_port()
    directory.mkdir(parents=True, exist_ok=True)
    config = directory / "config.yml"
    config.write_text(_CONFIG.format(directory=directory, port=port, auth=auth, tls=tls))
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", str(config)], stdout=log, stderr=log)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def open_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with registry(tmp_path_factory.mktemp("registry")) as host:
        yield host


LAYERS = [tar_of([entry(f"file{number}", os.urandom(300_000))]) for number in range(3)]


def push(layout: Path, host: str, name: str, *options: str) -> None:
    run(
        "skopeo",
        "--insecure-policy",
        "copy",
        "--dest-tls-verify=false",
        *options,
        f"oci:{layout}:latest",
        f"docker://{host}/{name}",
    )


@pytest.mark.parametrize("packing", ["gzip", "zstd"])
def test_an_image_is_pulled_by_tag_and_by_digest(tmp_path: Path, open_registry: str, packing: str) -> None:
    layout = write_layout(tmp_path / "layout", LAYERS, packing=packing, Env=["A=1"])
    push(layout, open_registry, f"shop/{packing}:v1")
    kept = Kept(tmp_path / "images")
    found = kept.obtain(f"oci:{open_registry}/shop/{packing}:v1")
    assert found.bytes == 900_000 and found.environment == {"A": "1"}
    again = Kept(tmp_path / "others").obtain(f"oci:{open_registry}/shop/{packing}@{found.digest}")
    assert again.layers == found.layers
    trees = [kept.trees / layer.removeprefix("sha256:") for layer in found.layers]
    assert [len((tree / f"file{number}").read_bytes()) for number, tree in enumerate(trees)] == [300_000] * 3
    blobs = [path for path in (kept.root / "blobs/sha256").iterdir() if path.is_file()]
    assert len(blobs) == 2, "a layer is not kept twice"


def test_dockers_own_media_types(tmp_path: Path, open_registry: str) -> None:
    push(write_layout(tmp_path / "layout", LAYERS[:1]), open_registry, "docker:v1", "--format", "v2s2")
    assert Kept(tmp_path / "images").obtain(f"oci:{open_registry}/docker:v1").bytes == 300_000


def test_what_is_here_is_not_asked_for_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "images")
    with registry(tmp_path / "registry") as host:
        push(write_layout(tmp_path / "one", LAYERS[:1]), host, "shop:v1")
        first = kept.obtain(f"oci:{host}/shop:v1")
        push(write_layout(tmp_path / "two", LAYERS[:2]), host, "shop:v1")
        assert kept.obtain(f"oci:{host}/shop:v1").digest == first.digest, "a run sees one image under one name"
        second = kept.fetch(f"oci:{host}/shop:v1")
        assert second.digest != first.digest and kept.obtain(f"oci:{host}/shop:v1").digest == second.digest
    assert kept.obtain(f"oci:{host}/shop:v1").digest == second.digest
    with pytest.raises(TaskError, match="does not answer") as error:
        kept.fetch(f"oci:{host}/shop:v1")
    assert host in str(error.value) and error.value.hint
    assert kept.obtain(f"oci:{host}/shop:v1").digest == second.digest


def test_names_that_are_not_there(tmp_path: Path, open_registry: str) -> None:
    for name in ("absent:v1", "absent@sha256:" + "0" * 64):
        with pytest.raises(TaskError, match=f"{open_registry} has no manifests/"):
            Kept(tmp_path / "images").obtain(f"oci:{open_registry}/{name}")
    assert not list((tmp_path / "images/oci").glob("names/*"))


def test_who_asks_is_told_to_the_registry_and_to_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    salt = "$2y$04$abcdefghijklmnopqrstuu"
    hashed = run("perl", "-e", "print crypt($ARGV[0], $ARGV[1])", PASSWORD, salt)
    (tmp_path / "htpasswd").write_text(f"{USER}:{hashed}\n")
    auth = f"auth: {{htpasswd: {{realm: test, path: {tmp_path}/htpasswd}}}}"
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    with registry(tmp_path / "registry", auth) as host:
        push(write_layout(tmp_path / "one", LAYERS[:1]), host, "shop:v1", "--dest-creds", f"{USER}:{PASSWORD}")
        name = f"oci:{host}/shop:v1"
        with pytest.raises(TaskError, match="does not give") as error:
            Kept(tmp_path / "a").obtain(name)
        assert "ROLLMILL_REGISTRY_PASSWORD" in str(error.value.hint)
        (tmp_path / "docker").mkdir()
        both = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        (tmp_path / "docker/config.json").write_text(json.dumps({"auths": {host: {"auth": both}}}))
        assert Kept(tmp_path / "b").obtain(name).bytes == 300_000
        (tmp_path / "docker/config.json").unlink()
        for key, value in {"": host, "_USER": USER, "_PASSWORD": PASSWORD}.items():
            monkeypatch.setenv(f"ROLLMILL_REGISTRY{key}", value)
        kept = Kept(tmp_path / "c")
        assert kept.obtain(name).bytes == 300_000
        monkeypatch.setenv("ROLLMILL_REGISTRY_PASSWORD", f"not-{PASSWORD}")
        with pytest.raises(TaskError) as error:
            Kept(tmp_path / "d").obtain(name)
    said = caplog.text + "".join(capfd.readouterr()) + str(error.value)
    written = b"".join(path.read_bytes() for path in kept.root.rglob("*.json"))
    for secret in (PASSWORD, both):
        assert secret not in said and secret.encode() not in written


class _Stand(BaseHTTPRequestHandler):
    """A registry that does what a real one would not. Its answers are those of `self.server.plan`."""

    def do_GET(self) -> None:
        self.server.asked.append((self.path, dict(self.headers)))  # type: ignore[attr-defined]
        self.server.plan(self)  # type: ignore[attr-defined]

    def log_message(self, *_: Any) -> None:
        pass

    def say(self, status: int, data: bytes = b"", cut: int | None = None, **headers: str) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data[:cut])


@contextlib.contextmanager
def stand_in(plan: Any) -> Iterator[Any]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Stand)
    server.plan, server.asked = plan, []  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def serve(layout: Path) -> Any:
    """Answers with what is in a layout."""
    manifest = json.loads((layout / "index.json").read_bytes())["manifests"][0]["digest"]

    def plan(stand: _Stand) -> None:
        kind, _, name = stand.path.removeprefix("/v2/shop/").partition("/")
        digest = manifest if kind == "manifests" and ":" not in name else name
        data = (layout / "blobs/sha256" / digest.removeprefix("sha256:")).read_bytes()
        start = stand.headers.get("Range")
        if start is not None:
            first = int(start.removeprefix("bytes=").rstrip("-"))
            return stand.say(206, data[first:])
        stand.say(200, data)

    return plan


@pytest.fixture
def layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(registry_client, "_PAUSE_S", 0.01)
    return write_layout(tmp_path / "layout", LAYERS, packing="")


def name_of(server: Any) -> str:
    return f"oci:127.0.0.1:{server.server_address[1]}/shop:v1"


def is_layer(path: str, layout: Path) -> bool:
    blob = layout / "blobs/sha256" / path.rpartition(":")[2]
    return "/blobs/" in path and blob.stat().st_size > 100_000


def test_a_blob_that_was_cut_off_is_continued(tmp_path: Path, layout: Path) -> None:
    honest, cut = serve(layout), set()

    def plan(stand: _Stand) -> None:
        if is_layer(stand.path, layout) and stand.path not in cut:
            cut.add(stand.path)
            data = (layout / "blobs/sha256" / stand.path.rpartition(":")[2]).read_bytes()
            stand.say(200, data, cut=100_000)
            stand.connection.shutdown(socket.SHUT_RDWR)
        else:
            honest(stand)

    with stand_in(plan) as server:
        assert Kept(tmp_path / "images").obtain(name_of(server)).bytes == 900_000
        ranges = sorted(headers["Range"] for _, headers in server.asked if "Range" in headers)
    assert ranges == ["bytes=100000-"] * 3


def test_a_registry_that_lies_is_named(tmp_path: Path, layout: Path) -> None:
    honest = serve(layout)

    def other_bytes(stand: _Stand) -> None:
        if not is_layer(stand.path, layout):
            return honest(stand)
        data = (layout / "blobs/sha256" / stand.path.rpartition(":")[2]).read_bytes()
        stand.say(200, b"x" + data[1:])

    def more_bytes(stand: _Stand) -> None:
        if not is_layer(stand.path, layout):
            return honest(stand)
        stand.say(200, bytes(2_000_000))

    def other_manifest(stand: _Stand) -> None:
        index = json.dumps({"manifests": [{"digest": f"sha256:{'0' * 64}"}]})
        stand.say(200, index.encode() if stand.path.endswith("v1") else b"{}")

    def endless_manifest(stand: _Stand) -> None:
        stand.say(200, bytes(5 << 20))

    def elsewhere(stand: _Stand) -> None:
        stand.say(307, Location="http://192.0.2.1/blob") if is_layer(stand.path, layout) else honest(stand)

    def no_image(stand: _Stand) -> None:
        stand.say(200, b"<html>")

    for number, (plan, words) in enumerate(
        [
            (other_bytes, "sent sha256:"),
            (more_bytes, "more bytes than"),
            (other_manifest, "sent sha256:"),
            (endless_manifest, "more than 4 MiB"),
            (elsewhere, "not HTTPS"),
            (no_image, "damaged"),
        ]
    ):
        with stand_in(plan) as server, pytest.raises(TaskError) as error:
            Kept(tmp_path / str(number)).obtain(name_of(server))
        assert words in str(error.value) and "127.0.0.1" in str(error.value), (plan, error.value)
        root = tmp_path / str(number) / "oci"
        assert not list(root.glob("names/*")) and not list(root.glob("images/*")), "nothing is half there"


def test_a_token_is_fetched_and_sent_to_the_registry_alone(
    tmp_path: Path, layout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = serve(layout)
    blobs: dict[str, bytes] = {}

    def mirror(stand: _Stand) -> None:
        stand.say(200, blobs[stand.path])

    def plan(stand: _Stand) -> None:
        if stand.path.startswith("/token"):
            return stand.say(200, b'{"token": "one-token"}')
        if stand.headers.get("Authorization") != "Bearer one-token":
            realm = f"http://127.0.0.1:{stand.connection.getsockname()[1]}/token"
            return stand.say(
                401, WWW_Authenticate=f'Bearer realm="{realm}",service="here",scope="repository:shop:pull"'
            )
        if is_layer(stand.path, layout):
            blobs[f"/{stand.path[-64:]}"] = (layout / "blobs/sha256" / stand.path[-64:]).read_bytes()
            return stand.say(307, Location=f"http://localhost:{other.server_address[1]}/{stand.path[-64:]}")
        honest(stand)

    with stand_in(mirror) as other, stand_in(plan) as server:
        monkeypatch.setenv("ROLLMILL_REGISTRY", f"127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("ROLLMILL_REGISTRY_USER", USER)
        monkeypatch.setenv("ROLLMILL_REGISTRY_PASSWORD", PASSWORD)
        assert Kept(tmp_path / "images").obtain(name_of(server)).bytes == 900_000
        tokens = [(path, headers) for path, headers in server.asked if path.startswith("/token")]
        assert tokens[0][0] == "/token?service=here&scope=repository%3Ashop%3Apull"
        assert base64.b64decode(tokens[0][1]["Authorization"].split()[1]) == f"{USER}:{PASSWORD}".encode()
        assert len(other.asked) == 3 and not any("Authorization" in headers for _, headers in other.asked)


def test_a_busy_registry_is_asked_again(tmp_path: Path, layout: Path) -> None:
    honest = serve(layout)
    refused: list[str] = []

    def plan(stand: _Stand) -> None:
        if len(refused) < 3:
            refused.append(stand.path)
            return stand.say(429 if len(refused) == 1 else 503)
        honest(stand)

    with stand_in(plan) as server:
        assert Kept(tmp_path / "images").obtain(name_of(server)).bytes == 900_000


def test_plain_http_is_for_this_computer_alone() -> None:
    here, elsewhere = ("127.0.0.1:5", "localhost:5"), ("192.0.2.1:5", "127.0.0.1.x.example")
    assert all(Registry(parse(f"oci:{host}/a:b"), Path())._base.startswith("http://") for host in here)
    assert all(Registry(parse(f"oci:{host}/a:b"), Path())._base.startswith("https://") for host in elsewhere)


@pytest.mark.parametrize(
    ("url", "by_others", "by_ours"),
    [
        ("https://192.0.2.1/blob", True, True),
        ("http://192.0.2.1/blob", False, False),
        ("https://localhost/admin", False, True),
        ("http://127.0.0.1:8500/v1/kv", False, True),
        ("http://[::1]/", False, True),
        ("file:///etc/passwd", False, False),
    ],
)
def test_a_registry_elsewhere_does_not_lead_to_this_computer(url: str, by_others: bool, by_ours: bool) -> None:
    assert (_is_safe(url, here=False), _is_safe(url, here=True)) == (by_others, by_ours)


async def test_many_who_want_an_image_at_once_pull_it_once(tmp_path: Path, layout: Path) -> None:
    kept = Kept(tmp_path / "images")
    with stand_in(serve(layout)) as server:
        found = await asyncio.gather(*(asyncio.to_thread(kept.obtain, name_of(server)) for _ in range(6)))
        assert len({each.digest for each in found}) == 1
        assert len([path for path, _ in server.asked if "/blobs/" in path]) == 4


@pytest.mark.slow
def test_of_two_hosts_one_asks_the_registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two directories of images are two hosts; the store is a server process that speaks S3."""
    for key, value in s3_environment(s3_server()).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(registry_client, "_TRIES", 1)
    store = new_bucket()
    with registry(tmp_path / "registry") as host:
        push(write_layout(tmp_path / "base", LAYERS[:1]), host, "base:v1")
        push(write_layout(tmp_path / "shop", LAYERS), host, "shop:v1")
        shop, base = f"oci:{host}/shop:v1", f"oci:{host}/base:v1"
        first = Kept(tmp_path / "a")
        first.obtain(base)  # before there was a store: its layer is here, and not there
        found = Kept(tmp_path / "a", store).obtain(shop)
    second = Kept(tmp_path / "b", store)
    assert second.obtain(shop) == found and second._whole(found)
    named = f"oci:{host}/shop@{found.digest}"
    with pytest.raises(TaskError, match="does not answer"):
        Kept(tmp_path / "c", store).obtain(base)  # nobody has written it
    with pytest.raises(TaskError, match="does not answer"):
        Kept(tmp_path / "c", store).obtain(named)
    objects = Objects.open(store)
    largest = max(objects.list("images/oci/blobs/"), key=lambda key: objects.head(key) or 0)
    objects.put(largest, b"something else")
    with pytest.raises(TaskError, match="has sha256:"):
        Kept(tmp_path / "d", store).obtain(shop)
    assert not list((tmp_path / "d").rglob("images/*.json")), "nothing is half there"


def test_a_registry_with_a_certificate_of_an_own_ca(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a registry on this computer may be asked by HTTP, so this one has a name, which leads to loopback here."""
    make_ca(tmp_path / "tls", "registry.test")
    found = socket.getaddrinfo

    def look_up(name: str, *arguments: Any, **options: Any) -> Any:
        return found("127.0.0.1" if name == "registry.test" else name, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(registry_client, "_TRIES", 1)
    monkeypatch.setattr(tls, "_context", None)
    for key in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.delenv(key, raising=False)
    files = f'tls: {{certificate: "{tmp_path}/tls/host.pem", key: "{tmp_path}/tls/host.key"}}'
    with registry(tmp_path / "registry", tls=files) as host:
        layout = write_layout(tmp_path / "layout", LAYERS)
        push(layout, host, "shop:v1")
        name = f"oci:registry.test:{host.partition(':')[2]}/shop:v1"
        with pytest.raises(TaskError, match="CERTIFICATE_VERIFY_FAILED"):
            Kept(tmp_path / "a").obtain(name)
        tls.trust(str(tmp_path / "tls/ca.pem"))
        assert Kept(tmp_path / "b").obtain(name).bytes == 900_000
        other = name.replace("registry.test", "localhost")
        with pytest.raises(TaskError):  # it is asked by HTTP
            Kept(tmp_path / "c").obtain(other)
