"""`rollmill images build | autoinstall | list | push | pull | rm | gc`: machine images of your own."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from rollmill.errors import ConfigError, TaskError

app = typer.Typer()

Store = Annotated[
    str, typer.Argument(metavar="STORE", help="a directory, or a URL such as s3://BUCKET/PREFIX", show_default=False)
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="the name that tasks give in `image`", show_default=False)]
Directory = Annotated[
    Path | None, typer.Option(help="files that are in the work directory of every machine", show_default=False)
]
Requirements = Annotated[
    Path | None, typer.Option(help="a pip requirements file; machines can import what it names", show_default=False)
]
Repository = Annotated[
    Path | None, typer.Option(help="a git repository; its history ends at --commit", show_default=False)
]
OciFiles = Annotated[
    Path | None,
    typer.Option(help="an OCI layout or archive; its files below --inside are taken", show_default=False),
]
Dockerfile = Annotated[
    Path | None,
    typer.Option(help="a Dockerfile: buildah builds the image oci:localhost/NAME", show_default=False),
]
BuildContext = Annotated[
    Path | None,
    typer.Option(help="of the Dockerfile: the files that it copies", show_default="the Dockerfile's directory"),
]
EgressNames = Annotated[
    list[str] | None,
    typer.Option(help="a name that RUN steps of the Dockerfile may reach by a proxy; repeatable"),
]
EgressInside = Annotated[
    bool, typer.Option("--egress-inside", help="these names may lead to a private network, as to a mirror of it")
]
Mirror = Annotated[
    list[str] | None,
    typer.Option(help="REGISTRY=PLACE: where its images are fetched instead, for FROM; repeatable"),
]
DebianSuite = Annotated[
    str | None,
    typer.Option(help="a Debian suite, such as bookworm, instead of this host's programs", show_default=False),
]
DebianPackage = Annotated[
    list[str] | None, typer.Option(help="a Debian package of the suite; repeatable", show_default=False)
]
Architecture = Annotated[
    str | None,
    typer.Option(help="of the suite: x86_64 or aarch64; others are verified in qemu", show_default="this host's"),
]
ServicesFile = Annotated[
    Path | None,
    typer.Option(help="a TOML file with [[services]] that run in every machine", show_default=False),
]
Checks = Annotated[
    list[str] | None, typer.Option(help="a shell command that must pass in a machine of the image; repeatable")
]
PythonVersion = Annotated[
    str | None, typer.Option(help="Python version of the packages: must be that of this host", show_default=False)
]


@app.command("build")
def build(
    name: Name,
    directory: Directory = None,
    requirements: Requirements = None,
    repository: Repository = None,
    commit: Annotated[str, typer.Option(help="of the repository: machines see it and its history")] = "HEAD",
    oci: OciFiles = None,
    inside: Annotated[str, typer.Option(help="directory of the OCI image, such as /app")] = "/",
    dockerfile: Dockerfile = None,
    context: BuildContext = None,
    egress: EgressNames = None,
    egress_inside: EgressInside = False,
    mirror: Mirror = None,
    timeout: Annotated[float, typer.Option(help="seconds that the Dockerfile may take")] = 1800.0,
    disk_mb: Annotated[int, typer.Option(help="MiB that the Dockerfile may write, its base included")] = 16384,
    suite: DebianSuite = None,
    program: DebianPackage = None,
    architecture: Architecture = None,
    services: ServicesFile = None,
    verify: Checks = None,
    kind: Annotated[str, typer.Option(help="kind of machine that verifies: namespace or qemu")] = "namespace",
    python: PythonVersion = None,
) -> None:
    """Build an image from requirements, a repository, files of an OCI image, a directory, or several.

    For example:

        rollmill images build mini --requirements requirements.txt
        rollmill images build shop --repository src/shop --commit v1.2 --verify "make test"
        rollmill images build app --oci app.tar --inside /app
        rollmill images build app --dockerfile Dockerfile --egress deb.debian.org --mirror docker.io=mirror.example
        rollmill images build tools --suite bookworm --program ripgrep --program nginx
        rollmill images build intel --suite bookworm --architecture x86_64 --verify "make test"
        rollmill images build shop-db --repository src/shop --services services.toml --verify "make test"

    Each source is a layer; images share the layers that are the same. Building the same content again gives the same
    digest. Records of runs name the digest. If a --verify command fails, the name keeps what it had. Of a repository,
    machines see the commit and its history: no later commit, branch, tag, remote or reflog. Of an OCI image only files
    are taken: machines run the programs and the Python of this host, so packages are installed for that version.

    A Dockerfile is built whole, as `image = "oci:localhost/NAME"`, and takes no other source. It is untrusted: its
    commands run as users that own nothing of this host, and reach no network but the names of --egress.
    """
    from rollmill.machines.images.build import check_python

    others = (directory, requirements, repository, oci, services, suite)
    if dockerfile is not None:
        if any(each is not None for each in (*others, verify)):
            hint = "an image of a Dockerfile has no other source; put them into the Dockerfile"
            raise ConfigError("--dockerfile was given with another source or --verify", hint=hint)
        limits = {"egress": egress or [], "egress_inside": egress_inside, "timeout_s": timeout, "disk_mb": disk_mb}
        return _build_dockerfile(name, dockerfile, context, mirror or [], limits)
    if all(each is None for each in others):
        raise ConfigError(
            "no source for the image was given",
            hint="--directory, --requirements, --repository, --oci, --dockerfile, --suite or --services",
        )
    check_python(python)
    sources: dict[str, Any] = {
        "directory": directory,
        "requirements": requirements,
        "repository": repository,
        "commit": commit,
    }
    sources |= {"archive": oci, "inside": inside, "suite": suite, "programs": program or []}
    sources |= {"architecture": architecture}
    _build(name, sources, services, verify, kind)


def _build_dockerfile(
    name: str, dockerfile: Path, context: Path | None, mirrors: list[str], limits: dict[str, Any]
) -> None:
    from rollmill.config import validate_config
    from rollmill.machines.images.image import images_directory
    from rollmill.machines.oci.build_image import BuildConfig, Recipe
    from rollmill.machines.oci.kept_images import Kept

    pairs = dict(each.partition("=")[::2] for each in mirrors)
    if not all(pairs.values()):
        raise ConfigError(f"--mirror {mirrors} is not REGISTRY=PLACE", hint="--mirror docker.io=mirror.example/docker")
    settings = validate_config(BuildConfig, {"mirrors": pairs, **limits}, "the command line")
    place = dockerfile.absolute()
    recipe = Recipe(dockerfile=place, context=(context or place.parent).absolute(), settings=settings)
    image = f"oci:localhost/{name}"
    kept = Kept(images_directory()).build(image, recipe)
    typer.echo(f"{image}@{kept.digest}  {_size(kept.bytes)}, in {images_directory()}")


def _build(name: str, sources: dict[str, Any], services: Path | None, verify: list[str] | None, kind: str) -> None:
    from rollmill.machines.finish_image import build_verified, build_with_services
    from rollmill.machines.images.build import build_image
    from rollmill.machines.images.image import images_directory
    from rollmill.machines.images.services import read_services

    make: Callable[[str], Any] = functools.partial(build_image, **sources)
    if services is not None:
        make = functools.partial(build_with_services, services=read_services(services), make=make)
    if sources["architecture"] not in (None, platform.machine()):  # only a virtual machine shows that it works
        kind, verify = "qemu", verify or ["true"]
    record = build_verified(name, verify, kind, make) if verify else make(name)
    typer.echo(f"{name}@{record.digest[:12]}  {_size(record.bytes)}, in {images_directory()}")


@app.command("autoinstall")
def autoinstall(
    repository: Annotated[
        Path, typer.Argument(metavar="REPOSITORY", help="a git repository on this host", show_default=False)
    ],
    verify: Annotated[
        list[str],
        typer.Option(help="a shell command that must pass when all is set up; repeatable", show_default=False),
    ],
    model: Annotated[str, typer.Option(help="URL of an OpenAI-compatible endpoint, with /v1", show_default=False)],
    name: Annotated[
        str | None, typer.Option(help="name of the image", show_default="the directory of the repository")
    ] = None,
    commit: Annotated[str, typer.Option(help="the commit that machines see, with its history")] = "HEAD",
    requirements: Annotated[
        Path | None, typer.Option(help="a pip requirements file, installed beforehand", show_default=False)
    ] = None,
    model_name: Annotated[str, typer.Option(help="the model to ask for")] = "rollmill",
    key_env: Annotated[str, typer.Option(help="environment variable with the endpoint's key")] = "OPENAI_API_KEY",
    kind: Annotated[str, typer.Option(help="kind of machine: namespace or qemu")] = "namespace",
    attempts: Annotated[int, typer.Option(min=1, help="how many times the agent may try")] = 3,
) -> None:
    """Let an agent install a repository, and keep its recipe and an image of the result.

    For example:

        rollmill images autoinstall src/shop --requirements dev.txt --verify "make test" --model http://HOST/v1

    The agent has a shell in a machine without network. The commands that it ran are replayed in two clean machines, and
    the --verify commands must pass in both; otherwise it tries again and reads why. The image keeps the work directory
    after the recipe. recipe.json and transcript.json are beside its record, below the directory of the images.
    """
    import asyncio

    from rollmill.machines.images.image import images_directory
    from rollmill.rollouts.agent_endpoint import Endpoint
    from rollmill.rollouts.autoinstall import install_repository

    endpoint = Endpoint(model, os.environ.get(key_env, ""), model_name)
    chosen = name or repository.resolve().name
    done = asyncio.run(
        install_repository(chosen, repository, commit, requirements, verify, endpoint, kind=kind, attempts=attempts)
    )
    for command in done.recipe.commands:
        typer.echo(f"$ {command}")
    typer.echo(f"{chosen}@{done.record.digest[:12]}: verified twice; {images_directory()}/objects/{done.record.digest}")


@app.command("push")
def push(name: Name, store: Store) -> None:
    """Write an image to an object store, where other hosts find it.

    For example:

        rollmill images push mini s3://bucket/images
        rollmill images push oci:registry.example/shop:v1 s3://bucket/images

    Layers that the store has are not written again. Machines fetch an image when they first need it if `image_store`
    of [machine] names the store.
    """
    from rollmill.machines.images.image import images_directory, push_image
    from rollmill.machines.oci.image_reference import is_oci
    from rollmill.machines.oci.kept_images import Kept

    if is_oci(name):
        kept = Kept(images_directory(), store).fetch(name)
        typer.echo(f"{name}@{kept.digest[:19]} written to {store}")
        return
    typer.echo(f"{name}: {len(push_image(name, store))} layers written to {store}")


@app.command("pull")
def pull(
    name: Name,
    store: Annotated[
        str | None,
        typer.Argument(
            metavar="STORE", help="a directory or a URL, where `rollmill images push` wrote it; none for oci:"
        ),
    ] = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Take an operating system from there too: parts of it run outside machines.")
    ] = False,
) -> None:
    """Get an image from an object store, or an OCI image from its registry.

    For example:

        rollmill images pull mini s3://bucket/images
        rollmill images pull oci:registry.example/shop:v1

    Every layer is checked against its digest. An image with an operating system of its own needs --trust, on each host;
    an OCI image does not, because nothing of it runs outside machines. What a tag of a registry leads to is looked up
    once: this command looks again.
    """
    from rollmill.machines.images.image import fetch_image, images_directory
    from rollmill.machines.oci.image_reference import is_oci
    from rollmill.machines.oci.kept_images import Kept

    if is_oci(name):
        kept = Kept(images_directory(), store).fetch(name, again=store is None)
        typer.echo(f"{name}@{kept.digest[:19]}  {_size(kept.bytes)}")
        return
    if store is None:
        raise ConfigError(f"no store for the image {name!r}", hint=f"rollmill images pull {name} STORE")
    record = fetch_image(name, store, trust=trust)
    if record is None:
        raise TaskError(f"{store} has no image {name!r}", hint="`rollmill images push` writes one")
    typer.echo(f"{name}@{record.digest[:12]}  {_size(record.bytes)}")


@app.command("list")
def list_all() -> None:
    """List the images that were built here: name, digest, size, what for.

    For example:

        rollmill images list

    The last column is the distance that `rollmill machines fidelity` measured.
    """
    from rich.console import Console
    from rich.table import Table

    from rollmill.machines.images.build import list_images
    from rollmill.machines.images.image import images_directory
    from rollmill.machines.oci.image_reference import PREFIX
    from rollmill.machines.oci.kept_images import Kept

    images, whole = list_images(), Kept(images_directory()).all()
    if not images and not whole:
        typer.echo(f"no image in {images_directory()} ($ROLLMILL_IMAGES); `rollmill images build` makes one")
        return
    table = Table("name", "digest", "size", "Python", "requirements", "fidelity")
    for name, record in images:
        if record is None:
            table.add_row(name, "damaged", "", "", f"`rollmill images rm {name}`, then build it again", "")
            continue
        wanted = [line.strip() for line in record.requirements if line.strip() and not line.startswith("#")]
        scores = ", ".join(f"{kind} {distance:.2f}" for kind, distance in record.fidelity.items())
        row = (record.digest[:12], _size(record.bytes), record.python, ", ".join(wanted), scores)
        table.add_row(name, *(cell or "-" for cell in row))
    for found, image in whole:
        if image is not None:
            table.add_row(f"{PREFIX}{found.reference}", found.digest[7:19], _size(image.bytes), "-", "-", "-")
    Console(highlight=False, markup=False).print(table)
    typer.echo(f"in {images_directory()} ($ROLLMILL_IMAGES)")


@app.command("rm")
def remove(name: Name) -> None:
    """Remove an image. Its content is deleted when no other image uses it.

    For example:

        rollmill images rm mini
        rollmill images rm oci:registry.example/shop:v1
    """
    from rollmill.machines.images.build import remove_image
    from rollmill.machines.images.image import images_directory
    from rollmill.machines.oci.image_reference import is_oci
    from rollmill.machines.oci.kept_images import Kept

    freed = Kept(images_directory()).remove(name) if is_oci(name) else remove_image(name)
    typer.echo(f"removed {name}, {_size(freed)} freed")


@app.command("gc")
def collect() -> None:
    """Remove what no OCI image needs: layers that no name leads to, and what killed processes left.

    For example:

        rollmill images gc

    While machines of an OCI image run, or an image is fetched, nothing is removed.
    """
    from rollmill.machines.images.image import images_directory
    from rollmill.machines.oci.kept_images import Kept

    typer.echo(f"{_size(Kept(images_directory()).collect())} freed")


def _size(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
