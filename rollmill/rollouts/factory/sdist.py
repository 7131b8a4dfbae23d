"""The sdist of a package from the index that pip uses, as files in memory.

Nothing of it is run and nothing is unpacked on this host. `pip download` would run the package's build backend here.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import os
import platform
import subprocess
import sys
import urllib.request
import zlib
from html.parser import HTMLParser
from pathlib import PurePosixPath
from typing import IO, NamedTuple, cast
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import InvalidSdistFilename, canonicalize_name, parse_sdist_filename
from packaging.version import Version

from rollmill.environments.tasks.git_files import MAX_BYTES
from rollmill.errors import TaskError
from rollmill.machines.oci.tar import ArchiveError, Tar, safe_path
from rollmill.tls import own_context

_INDEX = "https://pypi.org/simple"
_TIMEOUT_S = 60.0  # without a byte
_LARGEST_PAGE, _LARGEST_SDIST = 1 << 26, 1 << 28
_MOST_FILES = 100_000


class Sdist(NamedTuple):
    name: str
    version: str
    files: dict[str, bytes]


def parse_requirement(line: str) -> Requirement:
    """A requirement that names packages of the index alone. TaskError for addresses, paths and options of pip."""
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        requirement = None
    if requirement is None or requirement.url is not None:
        raise TaskError(
            f"{line[:200]!r} is no requirement of a package in the index",
            hint="a name with versions, such as `attrs>=23`: a project may name no address and no file of this host",
        )
    return requirement


def get_sdist(line: str) -> Sdist:
    """The newest one that fits a requirement and this Python. TaskError if the index has none, or another content."""
    requirement = parse_requirement(line)
    name = canonicalize_name(requirement.name)
    index, authorization = _index()
    page, base = _get(f"{index}/{name}/", _LARGEST_PAGE, authorization)
    found = dict(_sdists(page.decode("utf-8", "replace"), base, name))
    version = max(requirement.specifier.filter(found), default=None)
    if version is None:
        hint = "is there a directory of this name? Else give a directory, or the URL of its repository"
        raise TaskError(f"the package index has no sdist of {line} for this Python", hint=hint)
    url, fragment = urldefrag(found[version])
    data, _ = _get(url, _LARGEST_SDIST, authorization if urlsplit(url).netloc == urlsplit(index).netloc else None)
    if fragment != f"sha256={hashlib.sha256(data).hexdigest()}":
        raise TaskError(f"the sdist of {line} is not what the index names by SHA-256", hint="try again later")
    return Sdist(name, str(version), _unpack(data, line))


def _index() -> tuple[str, str | None]:
    """Its URL without credentials, and the header with them."""
    command = [sys.executable, "-P", "-m", "pip", "config", "get", "global.index-url"]
    configured = (
        os.environ.get("PIP_INDEX_URL")
        or subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False).stdout.strip()
    )
    url = urlsplit(configured or _INDEX)
    address = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl().rstrip("/")
    if url.username is None:
        return address, None
    given = f"{unquote(url.username)}:{unquote(url.password or '')}"
    return address, f"Basic {base64.b64encode(given.encode()).decode()}"


def _get(url: str, most: int, authorization: str | None) -> tuple[bytes, str]:
    """What lies at a URL, and where it led."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise TaskError(f"the package index names {url[:200]!r}", hint="an index answers by HTTP or HTTPS")
    request = urllib.request.Request(url, headers={"Accept": "text/html"})  # noqa: S310  looked at
    if authorization is not None:
        request.add_unredirected_header("Authorization", authorization)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=own_context()) as answer:  # noqa: S310
            data: bytes = answer.read(most + 1)
            led: str = answer.url
    except OSError as error:
        hint = "is the name right, and does the network allow it? A directory or the URL of a repository do without"
        raise TaskError(f"the package index does not answer for {url}: {error}", hint=hint) from None
    if len(data) > most:
        raise TaskError(f"{url} has more than {most >> 20} MiB", hint="clone its repository instead")
    return data, led


class _Links(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[dict[str, str]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.found.append({name: value or "" for name, value in attrs})


def _sdists(page: str, base: str, name: str) -> list[tuple[Version, str]]:
    """The sdists of a page of the index (PEP 503) that are for this Python and not withdrawn."""
    listed = []
    for link in _Links(page).found:
        url = urljoin(base, link.get("href", ""))
        try:
            its_name, version = parse_sdist_filename(PurePosixPath(unquote(urlsplit(url).path)).name)
            fits = SpecifierSet(link.get("data-requires-python", "")).contains(platform.python_version())
        except (InvalidSdistFilename, InvalidSpecifier, ValueError):
            continue
        if its_name == name and fits and "data-yanked" not in link and ".tar.gz" in url:
            listed.append((version, url))
    return listed


def _unpack(data: bytes, line: str) -> dict[str, bytes]:
    """Regular files below the archive's one folder."""
    found: dict[str, bytes] = {}
    try:
        with gzip.open(io.BytesIO(data)) as stream:
            tar = Tar(cast(IO[bytes], stream), most_bytes=MAX_BYTES, most_entries=_MOST_FILES)
            for entry in tar:
                path = safe_path(entry.name)
                if path is not None and entry.kind == "file" and not entry.sparse:
                    found[path.partition("/")[2]] = tar.read()
    except (ArchiveError, EOFError, OSError, zlib.error) as error:
        raise TaskError(f"the sdist of {line} cannot be unpacked: {error}", hint="clone its repository") from None
    return {path: content for path, content in found.items() if path}
