"""The JSON documents of an OCI image: index, manifest, configuration. All of it is untrusted.

Docker's own media types have the same fields, so both are read by the same classes.
"""

from __future__ import annotations

import platform
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from rollmill.errors import TaskError

MOST_BYTES = 4 << 20  # of one document
DIGEST = r"^sha256:[0-9a-f]{64}$"
_ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}  # as OCI has them, as `uname -m` prints them
MOST_LAYERS = 200  # the options of a mount have no room for more


class Document(BaseModel):
    model_config = ConfigDict(frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _absent(cls, value: object, info: object) -> object:
        """Some writers say `null` for what is not there."""
        if value is None:
            return cls.model_fields[info.field_name].get_default()  # type: ignore[attr-defined]
        return value


class Platform(Document):
    architecture: str = ""
    os: str = ""


class Descriptor(Document):
    mediaType: str = ""
    digest: str = Field(pattern=DIGEST)
    size: int = Field(0, ge=0)
    platform: Platform = Platform()
    annotations: dict[str, str] = {}

    @property
    def tag(self) -> str:
        return self.annotations.get("org.opencontainers.image.ref.name", "")


class Index(Document):
    manifests: tuple[Descriptor, ...] = Field(min_length=1, max_length=256)


class Manifest(Document):
    config: Descriptor
    layers: tuple[Descriptor, ...] = Field(max_length=1000)


class Defaults(Document):
    User: str = ""
    WorkingDir: str = ""
    Env: tuple[str, ...] = ()
    Entrypoint: tuple[str, ...] = ()
    Cmd: tuple[str, ...] = ()


class RootFs(Document):
    diff_ids: tuple[Annotated[str, Field(pattern=DIGEST)], ...] = ()


class Configuration(Document):
    architecture: str = ""
    os: str = "linux"
    config: Defaults = Defaults()
    rootfs: RootFs = RootFs()


D = TypeVar("D", bound=Document)


def read(kind: type[D], data: bytes, what: str) -> D:
    """TaskError names the document and what is wrong in it."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise TaskError(f"{what} is damaged: {where}: {first['msg']}") from None


def is_index(data: bytes, what: str) -> bool:
    class Kind(Document):
        manifests: tuple[object, ...] = ()

    return bool(read(Kind, data, what).manifests)


def choose(index: Index, what: str, tag: str = "") -> Descriptor:
    """The image of this host's architecture, and of that tag if one is asked for."""
    found = [each for each in index.manifests if not tag or each.tag in (tag, f"{what}:{tag}")]
    if not found:
        tags = ", ".join(sorted({each.tag for each in index.manifests} - {""})) or "none"
        raise TaskError(f"the image {what} has no tag {tag!r}", hint=f"its tags: {tags}")
    own = [each for each in found if _runs_here(each.platform)]
    if not own:
        raise _elsewhere(what, {f"{each.platform.os}/{each.platform.architecture}" for each in found})
    if len({each.digest for each in own}) > 1 and not any(each.platform.architecture for each in own):
        tags = ", ".join(sorted(each.tag for each in own))
        raise TaskError(f"the image {what} has several images", hint=f"name one: {what}:TAG; its tags: {tags}")
    return own[0]


def check_architecture(configuration: Configuration, what: str) -> str:
    """The architecture of an image, as `uname -m` prints it. TaskError: its programs cannot run here."""
    own = Platform(architecture=configuration.architecture, os=configuration.os)
    if not _runs_here(own):
        raise _elsewhere(what, {f"{own.os}/{own.architecture}"})
    return platform.machine()


def _runs_here(its: Platform) -> bool:
    if its.os not in ("", "linux"):
        return False
    return not its.architecture or _ARCHITECTURES.get(its.architecture, its.architecture) == platform.machine()


def _elsewhere(what: str, there: set[str]) -> TaskError:
    own = next((oci for oci, name in _ARCHITECTURES.items() if name == platform.machine()), platform.machine())
    return TaskError(
        f"the image {what} is for {', '.join(sorted(there))}, and this host is linux/{own}",
        hint=f"build it for this host (`buildah build --platform linux/{own}`), or use a host that it is for",
    )
