"""Images of a registry, by the protocol of the OCI distribution specification: manifests, tokens, blobs.

A registry is untrusted: every document and blob is checked against its digest, and nothing larger than announced is
read. A blob that was cut off is continued where it stopped. Plain HTTP is spoken only to this computer itself.
"""

from __future__ import annotations

import base64
import contextlib
import email.message
import hashlib
import http.client
import ipaddress
import json
import os
import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rollmill.errors import TaskError
from rollmill.machines.oci import documents
from rollmill.machines.oci.documents import Descriptor
from rollmill.machines.oci.image_reference import Reference
from rollmill.machines.oci.registry_credentials import Credentials, find_credentials
from rollmill.machines.oci.unpack_layers import alone
from rollmill.tls import own_context

_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_HOSTS = {"docker.io": "registry-1.docker.io", "index.docker.io": "registry-1.docker.io"}  # where their API is
_TIMEOUT_S = 30.0  # without a byte
_TRIES, _PAUSE_S = 5, 0.5
_BUSY = (429, 500, 502, 503, 504)
_LARGEST = 16 << 30  # bytes of a layer as it is packed
_CHUNK = 1 << 20
_PARAMETER = re.compile(r'([a-z]+)="([^"]*)"')


class Registry:
    """One image of a registry."""

    def __init__(self, reference: Reference, blobs: Path) -> None:
        """`blobs`: the directory that gets what is fetched."""
        self._reference, self._blobs = reference, blobs
        host = _HOSTS.get(reference.registry, reference.registry)
        self._here = _is_here(host)
        self._base = f"{'http' if self._here else 'https'}://{host}/v2/{reference.name}"
        self._what = f"oci:{reference.text}"
        self._authorization: str | None = None
        direct = [urllib.request.ProxyHandler({})] if self._here else []
        secure = urllib.request.HTTPSHandler(context=own_context())
        self._opener = urllib.request.build_opener(_Redirects(self._here), secure, *direct)

    def __enter__(self) -> Registry:
        self._blobs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *_: object) -> None:
        """Layers have been unpacked, or will be asked for again."""

    def manifest(self, tag: str) -> Descriptor:
        """The manifest of this host's architecture, behind the tag or the digest of the reference."""
        found = self._manifest(self._reference.digest or tag)
        for _ in range(3):
            data = self.document(found)
            if not documents.is_index(data, f"the manifest of {self._what}"):
                return found
            index = documents.read(documents.Index, data, f"the index of {self._what}")
            found = self._manifest(documents.choose(index, self._what).digest)
        raise TaskError(f"the index of {self._what} leads to no manifest", hint="push the image again")

    def document(self, descriptor: Descriptor) -> bytes:
        path = self._path(descriptor.digest)
        if not path.exists():
            path = self.blob(descriptor, most=documents.MOST_BYTES)
        return path.read_bytes()

    def blob(self, descriptor: Descriptor, *, most: int = _LARGEST) -> Path:
        """The file of a blob, fetched if it is not here."""
        path = self._path(descriptor.digest)
        part = path.with_name(f".{path.name}.part")
        most = min(most, descriptor.size or most)
        with alone(self._blobs, path.name):  # another process may fetch the same
            if path.exists():
                return path
            with part.open("ab") as file:
                self._fetch(descriptor.digest, file, part, most)
            with part.open("rb") as whole:
                found = hashlib.file_digest(whole, "sha256").hexdigest()
            if found != path.name:
                part.unlink()
                raise self._lied(descriptor.digest, found)
            part.rename(path)
        return path

    def _fetch(self, digest: str, file: IO[bytes], part: Path, most: int) -> None:
        """Get the rest of a blob. Whatever has arrived stays for the next try."""
        for number in range(_TRIES):
            have = part.stat().st_size
            if have and have == most:
                return
            headers = {"Range": f"bytes={have}-"} if have else {}
            try:
                with self._open(f"/blobs/{digest}", headers) as answer:
                    if have and answer.status != 206:  # from the beginning
                        file.truncate(0)
                        have = 0
                    self._receive(answer, file, most - have, digest)
                return
            except (OSError, http.client.HTTPException) as error:
                if number == _TRIES - 1:
                    raise self._gone(error) from None
                time.sleep(_PAUSE_S * 2**number)
            finally:
                file.flush()

    def _receive(self, answer: Any, file: IO[bytes], room: int, digest: str) -> None:
        expected = answer.headers.get("Content-Length")
        left = int(expected) if expected and expected.isdigit() else None
        while chunk := answer.read(min(_CHUNK, room + 1)):
            room -= len(chunk)
            if room < 0:
                file.truncate(0)
                raise TaskError(
                    f"the registry {self._reference.registry} sends more bytes than {digest} of {self._what} may have",
                    hint="the manifest says its size; push the image again, or use another registry",
                )
            file.write(chunk)
            left = None if left is None else left - len(chunk)
        if left:
            raise ConnectionResetError(f"{left} bytes are missing")

    def _manifest(self, name: str) -> Descriptor:
        """Fetch a manifest or an index by its tag or digest, and keep it by its digest."""
        if name.startswith("sha256:") and (path := self._path(name)).exists():
            return Descriptor(digest=name, size=path.stat().st_size)
        with self._reading(), self._open(f"/manifests/{name}", {"Accept": ", ".join(_MANIFESTS)}) as answer:
            data = answer.read(documents.MOST_BYTES + 1)
        if len(data) > documents.MOST_BYTES:
            raise TaskError(f"the manifest of {self._what} has more than {documents.MOST_BYTES >> 20} MiB")
        digest = hashlib.sha256(data).hexdigest()
        if name.startswith("sha256:") and name != f"sha256:{digest}":
            raise self._lied(name, digest)
        path = self._path(digest)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_bytes(data)
        unfinished.rename(path)
        return Descriptor(digest=f"sha256:{digest}", size=len(data))

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(error) from None

    def _open(self, path: str, headers: dict[str, str]) -> Any:
        """An answer with status 200 or 206. TaskError says what the registry refuses; OSError: it is worth a try."""
        for number in range(_TRIES):
            given = {"Authorization": self._authorization} if self._authorization else {}
            request = urllib.request.Request(self._base + path, headers=headers | given)  # noqa: S310  HTTP or HTTPS
            try:
                return self._opener.open(request, timeout=_TIMEOUT_S)
            except urllib.error.HTTPError as error:
                with error:
                    if error.code == 401 and number == 0:
                        self._authorization = self._authorize(error.headers)
                    elif error.code in _BUSY and number < _TRIES - 1:
                        time.sleep(_pause(error.headers, number))
                    else:
                        raise self._refused(error.code, path) from None
        raise ConnectionError("it is too busy")

    def _authorize(self, headers: email.message.Message) -> str:
        """What to answer when a registry asks who is there: a token, or name and password."""
        wanted = headers.get("WWW-Authenticate", "")
        credentials = find_credentials(self._reference.registry)
        scheme, _, rest = wanted.partition(" ")
        if scheme.lower() == "basic" and credentials is not None:
            return _basic(credentials)
        parameters = dict(_PARAMETER.findall(rest))
        realm = parameters.get("realm", "")
        if scheme.lower() != "bearer" or not _is_safe(realm, self._here):
            raise self._refused(401, "")
        scope = parameters.get("scope") or f"repository:{self._reference.name}:pull"
        query = urllib.parse.urlencode({"service": parameters.get("service", ""), "scope": scope})
        address = f"{realm}{'&' if '?' in realm else '?'}{query}"
        request = urllib.request.Request(address)  # noqa: S310  `_is_safe` has looked
        if credentials is not None:
            request.add_header("Authorization", _basic(credentials))
        try:
            with self._opener.open(request, timeout=_TIMEOUT_S) as answer:
                facts = json.loads(answer.read(documents.MOST_BYTES))
            token = facts.get("token") or facts.get("access_token")
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error.code, "") from None
        except (ValueError, AttributeError):
            token = None
        if not isinstance(token, str) or not token.isprintable():
            raise TaskError(f"the registry {self._reference.registry} gives no token for {self._what}")
        return f"Bearer {token}"

    def _path(self, digest: str) -> Path:
        return self._blobs / digest.removeprefix("sha256:")

    def _lied(self, wanted: str, found: str) -> TaskError:
        return TaskError(
            f"the registry {self._reference.registry} sent sha256:{found} for {wanted} of {self._what}",
            hint="it is damaged or not to be trusted; push the image again, or use another registry",
        )

    def _gone(self, error: BaseException) -> TaskError:
        reason = getattr(error, "reason", None) or error
        return TaskError(
            f"the registry {self._reference.registry} does not answer for {self._what}: {reason}",
            hint="is its name right, and does it run? `rollmill images pull` continues where this stopped",
        )

    def _refused(self, status: int, path: str) -> TaskError:
        registry = self._reference.registry
        if status in (401, 403):
            return TaskError(
                f"the registry {registry} does not give {self._what} to you (status {status})",
                hint=f"`docker login {registry}` or `podman login {registry}`; or ROLLMILL_REGISTRY={registry}, "
                "ROLLMILL_REGISTRY_USER and ROLLMILL_REGISTRY_PASSWORD",
            )
        if status == 404:
            return TaskError(
                f"the registry {registry} has no {path.lstrip('/')} of {self._what}",
                hint="is the name right? `skopeo list-tags` shows the tags of an image",
            )
        return TaskError(f"the registry {registry} refuses {self._what} with status {status}", hint="try again later")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Blobs often lie elsewhere. Who asks is told to nobody but the registry."""

    def __init__(self, here: bool) -> None:
        self._here = here

    def redirect_request(
        self,
        request: urllib.request.Request,
        file: IO[bytes],
        code: int,
        message: str,
        headers: http.client.HTTPMessage,
        new: str,
    ) -> urllib.request.Request | None:
        if not _is_safe(new, self._here):
            raise urllib.error.URLError(f"it leads to {new[:200]!r}, which is not HTTPS")
        led = super().redirect_request(request, file, code, message, headers, new)
        if led is not None and led.host != request.host:
            led.remove_header("Authorization")
        return led


def _basic(credentials: Credentials) -> str:
    return "Basic " + base64.b64encode(f"{credentials.user}:{credentials.password}".encode()).decode()


def _pause(headers: email.message.Message, number: int) -> float:
    wanted = headers.get("Retry-After", "")
    return min(float(wanted), 30.0) if wanted.isdigit() else _PAUSE_S * 2**number


def _is_safe(url: str, here: bool) -> bool:
    """Where a registry may lead: by HTTPS to any other computer. Only a registry on this computer may lead to it."""
    parts = urllib.parse.urlsplit(url)
    if _is_here(parts.netloc):
        return here and parts.scheme in ("http", "https")
    return parts.scheme == "https"


def _is_here(host: str) -> bool:
    """Whether a host, with or without a port, is this computer."""
    name = urllib.parse.urlsplit(f"//{host}").hostname or ""
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
