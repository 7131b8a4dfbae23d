"""TLS between the processes of a run, with a CA made here; and that nothing listens beyond loopback by itself."""

from __future__ import annotations

import datetime
import ipaddress
import json
import ssl
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from rollmill import tls
from rollmill.errors import ConfigError, MachineError, StorageError
from rollmill.kinds import build
from rollmill.launch.launchers.local import LocalLauncher
from rollmill.machines.remote.client import RemoteConfig, RemoteHost
from rollmill.runs.run import RunDirectory
from rollmill.runs.trust import trusting
from rollmill.storage.objects import Objects
from tests.e2e.test_kill import pid_of
from tests.launch.served import published_run
from tests.runs.conftest import make_config

PEM, PLAIN = serialization.Encoding.PEM, serialization.NoEncryption()


def make_ca(directory: Path, *addresses: str) -> list[str]:
    """Writes ca.pem, and host.pem with host.key for these addresses. Returns them as settings of a run."""
    directory.mkdir(parents=True, exist_ok=True)
    authority, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer, name = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in ("a CA", "a host"))
    now = datetime.datetime.now(datetime.UTC)

    def sign(subject: x509.Name, key: Any, number: int, *extensions: tuple[Any, bool]) -> bytes:
        builder = x509.CertificateBuilder(issuer, subject, key.public_key(), number)
        builder = builder.not_valid_before(now - datetime.timedelta(hours=1))
        builder = builder.not_valid_after(now + datetime.timedelta(days=1))
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(authority, hashes.SHA256()).public_bytes(PEM)

    names = x509.SubjectAlternativeName(
        [x509.DNSName(each) if each[0].isalpha() else x509.IPAddress(ipaddress.ip_address(each)) for each in addresses]
    )
    known = x509.SubjectKeyIdentifier.from_public_key(authority.public_key())
    by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    signs = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    ca = sign(
        issuer, authority, 1, (x509.BasicConstraints(ca=True, path_length=0), True), (known, False), (signs, True)
    )
    (directory / "ca.pem").write_bytes(ca)
    (directory / "host.pem").write_bytes(sign(name, own, 2, (names, False), (by, False)))
    key = own.private_bytes(PEM, serialization.PrivateFormat.PKCS8, PLAIN)
    (directory / "host.key").write_bytes(key)
    files = {"cert": "host.pem", "key": "host.key", "ca": "ca.pem"}
    return [f"tls.{setting}={directory / file}" for setting, file in files.items()]


@pytest.fixture
def trusted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Makes this process trust a CA, until the test ends."""
    monkeypatch.setattr(tls, "_context", None)
    return lambda directory: tls.trust(str(directory / "ca.pem"))


def listening(pid: int) -> set[str]:
    """The addresses at which a process listens on TCP."""
    sockets = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if "socket:" in str(link.readlink())}
    found = set()
    for table, width in (("tcp", 8), ("tcp6", 32)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in sockets:
                words = [bytes.fromhex(local[start : start + 8])[::-1] for start in range(0, width, 8)]
                found.add(str(ipaddress.ip_address(b"".join(words))))
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_with_a_ca_of_its_own(tmp_path: Path, trusted: Callable[[Path], None]) -> None:
    """Store, gateway and engine are real processes. The engine registers at the gateway, and the gateway asks it."""
    settings = make_ca(tmp_path / "tls", "127.0.0.1")
    run = published_run(tmp_path, 1, *settings)
    cluster = LocalLauncher(run)
    roles = {"store": (), "gateway": (), "engine-home": ("line", "rl", "bf16")}
    try:
        for role, arguments in roles.items():
            cluster.start(role, *arguments, service=True)
        context = trusting(run)
        assert context is not None and all(run.url(role).startswith("https://127.0.0.1:") for role in roles)
        while not (served := serves(run, context)):
            cluster.watch()
        assert served == ["https"]
        answer = ask(run, context)
        assert answer["choices"][0]["finish_reason"] in ("stop", "length")
        # who does not trust the CA, or asks in plain HTTP, gets nothing
        with pytest.raises(OSError):
            urllib.request.urlopen(f"{run.url('gateway')}/health", timeout=5)
        for role in roles:
            with pytest.raises(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{run.ports[role]}/health", timeout=5)
        store = run.url("store"), run.secrets["store_token"]
        with pytest.raises(StorageError):
            Objects.open(store[0], token=store[1], patience=1.0).list("")
        trusted(tmp_path / "tls")
        assert Objects.open(store[0], token=store[1]).list("weights/")
        pids = [pid for role in roles if (pid := pid_of(run, role)) is not None]
        assert len(pids) == 3 and [listening(pid) for pid in pids] == [{"127.0.0.1"}] * 3
    finally:
        cluster.stop()


def serves(run: RunDirectory, context: ssl.SSLContext) -> list[str]:
    """The schemes of the engines that are alive; empty if there are none, or if the gateway does not answer."""
    try:
        with urllib.request.urlopen(f"{run.url('gateway')}/health", timeout=5, context=context) as response:
            return [each["url"].partition(":")[0] for each in json.load(response)["engines"] if each["alive"]]
    except OSError:
        return []


def ask(run: RunDirectory, context: ssl.SSLContext) -> Any:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    headers = {"Authorization": f"Bearer {run.secrets['production_key']}"}
    url = f"{run.url('gateway')}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60, context=context) as response:
        return json.load(response)


async def test_machines_of_another_host_need_a_certificate_that_names_it(
    tmp_path: Path, trusted: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the host: it knows no machines."""
    monkeypatch.setenv("ROLLMILL_MACHINES_KEY", "a key of sixteen")

    async def capacity(request: web.Request) -> web.Response:
        return web.json_response({}, status=404)

    for address, complaint in (("127.0.0.1", "404"), ("10.9.8.7", "certificate")):
        make_ca(tmp_path, address)
        app = web.Application()
        app.router.add_get("/{path:.*}", capacity)
        runner = web.AppRunner(app)
        await runner.setup()
        shown = tls.server_context(str(tmp_path / "host.pem"), str(tmp_path / "host.key"))
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=shown).start()
        trusted(tmp_path)
        machines = RemoteHost(RemoteConfig(hosts=[f"https://127.0.0.1:{runner.addresses[0][1]}"]))
        try:
            with pytest.raises(MachineError, match=complaint):
                await machines.start()
        finally:
            await machines.close()
            await runner.cleanup()


ON_RAY = ("cluster.kind=ray", "store=s3://bucket", "database=postgresql://mill@db/mill")


@pytest.mark.parametrize("where", [(), ON_RAY], ids=["local", "ray"])
def test_files_that_cannot_be_used_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[str, ...]
) -> None:
    monkeypatch.setattr("rollmill.launch.launchers.ray.connect", lambda address: None)  # there is no cluster
    monkeypatch.setattr("rollmill.launch.launchers.ray.check_room", lambda ray, config: None)
    config = make_config(*make_ca(tmp_path, "127.0.0.1"), *where)
    build(config.cluster).check(config)
    for name, complaint in (("host.key", "tls.cert"), ("ca.pem", "tls.ca")):
        (tmp_path / name).write_text("nonsense")
        with pytest.raises(ConfigError, match=complaint) as raised:
            build(config.cluster).check(config)
        assert raised.value.hint
        make_ca(tmp_path, "127.0.0.1")
