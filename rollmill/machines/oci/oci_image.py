"""An OCI image as machines use it: its layers, unpacked on this host, and how its programs are started.

Kept below `images_directory()`, shared by all images that have a layer in common:

    oci/trees/DIFF_ID/          one unpacked layer, as an overlay takes it (unpack_layers.py)
    oci/images/DIGEST.json      an OciImage, by the digest of its manifest; written last
    oci/names/HASH.json         which digest a name led to, when it was looked up
    oci/recipes/HASH.json       what a name of `localhost` is built from (build_image.py)
    oci/blobs/sha256/DIGEST     manifests, configurations and layers of registries, each verified; a layer only until it
                                is unpacked

Only this process's user may enter `oci`: files of images have the rights that their image gives them.
"""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field

from rollmill.config import Config
from rollmill.machines.guest.image_root import ImageRoot
from rollmill.machines.oci.unpack_layers import tree_of

_DIGEST = r"^sha256:[0-9a-f]{64}$"
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ACCOUNT = re.compile(rb"^([^:\n]*):[^:\n]*:([0-9]+):([^:\n]*)(?::[^:\n]*:([^:\n]*):[^:\n]*)?$", re.MULTILINE)
_MOST_ACCOUNTS = 1 << 20  # bytes of /etc/passwd and of /etc/group


class OciImage(Config):
    """One image for one architecture."""

    reference: str = Field(description="What it was asked for as, without `oci:`.")
    digest: str = Field(pattern=_DIGEST, description="Of its manifest.")
    architecture: str = Field(description="Of its programs, as `uname -m` prints it.")
    layers: tuple[str, ...] = Field(description="Diff ids (sha256:…) of its layers, the lowest first.")
    bytes: int = Field(0, description="Of the unpacked layers.")
    user: str = Field("", description="USER: name, number, or either with a group. Empty: root.")
    directory: str = Field("/", description="WORKDIR.")
    environment: dict[str, str] = Field({}, description="ENV.")
    entrypoint: tuple[str, ...] = Field((), description="ENTRYPOINT. Commands of an agent do not run through it.")
    command: tuple[str, ...] = Field((), description="CMD.")

    def root(self, trees: Path) -> ImageRoot:
        """What the agent of a machine needs to know of it. ValueError: its USER is nobody it knows."""
        newest_first = dict.fromkeys(reversed(self.layers))  # a layer that is there twice counts where it is highest
        places = [str(tree_of(layer, trees)) for layer in reversed(newest_first)]
        user, group, groups, home = _account(self.user, places)
        variables = {"PATH": _PATH, "HOME": home, **self.environment}
        return ImageRoot(tuple(places), user, group, groups, self.directory, tuple(variables.items()))


def _account(user: str, trees: list[str]) -> tuple[int, int, tuple[int, ...], str]:
    """Numbers of user, group and further groups, and the home directory."""
    people, bands = (_rows(_read(f"etc/{name}", trees)) for name in ("passwd", "group"))
    name, _, band = user.partition(":")
    row = next((row for row in people if name in (row[0], str(row[1]))), None) if name else ("root", 0, "0", "/root")
    if row is None and not name.isdigit():
        raise ValueError(f"its USER {user!r} is not in its /etc/passwd")
    number = int(name) if row is None else row[1]
    group = int(row[2]) if row is not None and row[2].isdigit() else 0
    further = tuple(each[1] for each in bands if row is not None and row[0] in each[2].split(","))
    if band:
        found = next((each[1] for each in bands if band in (each[0], str(each[1]))), None)
        if found is None and not band.isdigit():
            raise ValueError(f"the group of its USER {user!r} is not in its /etc/group")
        group, further = int(band) if found is None else found, ()
    if max(number, group, *further) > 65535:
        raise ValueError(f"its USER {user!r} has a number above 65535")
    return number, group, further[:64], (row[3] if row is not None else "") or "/"


def _rows(text: bytes) -> list[tuple[str, int, str, str]]:
    found = (match.groups(b"") for match in _ACCOUNT.finditer(text))
    return [
        (name.decode("utf-8", "replace"), int(number), rest.decode("utf-8", "replace"), home.decode("utf-8", "replace"))
        for name, number, rest, home in found
        if len(number) < 10
    ]


def _read(path: str, trees: list[str]) -> bytes:
    """A regular file of an image: of its newest layer that has it. Empty if it has none, or reaches it by a link."""
    folder, _, _ = path.partition("/")
    for tree in reversed(trees):
        if Path(tree, folder).is_symlink():
            return b""
        place = Path(tree, path)
        if place.is_symlink() or (place.exists() and not place.is_file()):
            return b""
        if place.is_file():
            with place.open("rb") as file:
                return file.read(_MOST_ACCOUNTS)
    return b""
