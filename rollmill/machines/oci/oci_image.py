"""An OCI image as machines use it: its layers, unpacked on this host, and how its programs are started.

Kept below `images_directory()`, shared by all images that have a layer in common:

    oci/blobs/sha256/DIGEST     manifests, configurations and layers as they came, each verified
    oci/trees/DIFF_ID/          one unpacked layer, as an overlay takes it: real owners, modes, links; whiteouts are
                                character devices 0:0, an opaque directory has the attribute trusted.overlay.opaque
    oci/images/DIGEST.json      an OciImage, by the digest of its manifest; written last
    oci/names/HASH.json         which digest a name led to, when it was looked up
"""

from __future__ import annotations

from pydantic import Field

from rollmill.config import Config

_DIGEST = r"^sha256:[0-9a-f]{64}$"


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
