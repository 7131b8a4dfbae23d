"""The keys of all objects in a store. FORMAT.md lists them."""

from __future__ import annotations

import re

from rollmill.errors import WeightsError
from rollmill.types import Version
from rollmill.weights.format.manifest import Anchor, Manifest, Pack

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


def valid_name(name: str) -> str:
    """Returns `name`, or raises: names of lines, forms and channels become folders."""
    if not _NAME.fullmatch(name):
        raise WeightsError(
            f"{name!r} cannot name a line, a form or a channel",
            hint="at most 100 letters, digits, '_', '-' and '.', not starting with a dot",
        )
    return name


def form_folder(line: str, form: str) -> str:
    return f"weights/{valid_name(line)}/{valid_name(form)}"


def manifest_key(version: Version, form: str) -> str:
    return f"{form_folder(version.line, form)}/manifests/{version.number:010d}.manifest"


def anchor_key(version: Version, form: str) -> str:
    return f"{form_folder(version.line, form)}/anchors/{version.number:010d}.anchor"


def epoch_key(line: str, form: str, number: int) -> str:
    return f"{form_folder(line, form)}/epochs/{number:010d}.json"


def pack_prefix(line: str, form: str, number: int) -> str:
    """The common prefix of the keys of a version's packs; a digest follows it."""
    return f"{form_folder(line, form)}/packs/{number:010d}-"


def pack_key(manifest: Manifest | Anchor, pack: Pack) -> str:
    return pack_prefix(manifest.line, manifest.form, manifest.number) + pack.digest
