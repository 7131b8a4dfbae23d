"""What `image = "oci:…"` names: an image of a registry, a layout directory, or an archive.

    oci:REGISTRY/NAME:TAG, oci:REGISTRY/NAME@sha256:…     of a registry; no tag: `latest`
    oci:localhost/NAME                                    built on this host from a Dockerfile
    oci:PATH, oci:PATH:TAG                                a layout directory, or an archive of one image or several

The first folder decides: with a dot, with a port, or `localhost` it is a registry. Such a directory of this host is
written with `./` before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from rollmill.errors import TaskError

PREFIX = "oci:"
_REGISTRY = re.compile(r"(localhost|[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+|[A-Za-z0-9-]+(?=:)|\[[0-9a-f:]+\])(:[0-9]{1,5})?")
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_NAME = re.compile(rf"{_PART}(?:/{_PART})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Reference:
    text: str  # as it was given, without `oci:`
    registry: str = ""  # with its port; "": it is a path
    name: str = ""  # in the registry
    path: Path | None = None
    tag: str = ""
    digest: str = ""  # sha256:…


def is_oci(image: str) -> bool:
    return image.startswith(PREFIX)


def parse(image: str) -> Reference:
    """TaskError: it is no reference; the field that is wrong and the remedy."""
    text = image.removeprefix(PREFIX)
    registry, slash, rest = text.partition("/")
    if slash and _REGISTRY.fullmatch(registry):
        return _of_registry(text, registry, rest)
    if not text or "\0" in text:
        raise _refused(text, "it names nothing")
    path, colon, tag = text.rpartition(":")
    if not colon or Path(text).exists():
        return Reference(text, path=Path(text))
    if not _TAG.fullmatch(tag):
        raise _refused(text, f"the tag {tag!r} is none")
    return Reference(text, path=Path(path), tag=tag)


def _of_registry(text: str, registry: str, rest: str) -> Reference:
    name, _, digest = rest.partition("@")
    if "@" in rest and not _DIGEST.fullmatch(digest):
        raise _refused(text, f"the digest {digest!r} is not sha256: and 64 digits")
    name, colon, tag = name.partition(":")
    if not _NAME.fullmatch(name) or len(name) > 255:
        raise _refused(text, f"the name {name!r} is none")
    if colon and not _TAG.fullmatch(tag):
        raise _refused(text, f"the tag {tag!r} is none")
    return Reference(text, registry, name, None, tag or ("" if digest else "latest"), digest)


def _refused(text: str, why: str) -> TaskError:
    hint = "oci:REGISTRY/NAME:TAG, oci:REGISTRY/NAME@sha256:…, oci:PATH/OF/LAYOUT or oci:ARCHIVE.tar"
    return TaskError(f"the image 'oci:{text[:300]}' is no reference: {why}", hint=hint)
