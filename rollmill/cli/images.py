"""`rollmill images build | list | rm`: machine images of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Build, list and remove machine images.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="the name that tasks give in `image`", show_default=False)]


@app.command("build")
def build(
    name: Name,
    directory: Annotated[
        Path | None, typer.Option(help="files that are in the work directory of every machine", show_default=False)
    ] = None,
    requirements: Annotated[
        Path | None, typer.Option(help="a pip requirements file; machines can import what it names", show_default=False)
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(
            help="the version that the packages are for, such as 3.12; only the one of this host", show_default=False
        ),
    ] = None,
) -> None:
    """Build an image from a directory, from Python requirements, or from both. For example:

        rollmill images build mini --requirements requirements.txt
        rollmill images build shop --directory shop/

    Building the same content again gives the same digest. Records of runs name the digest. Machines run the Python that
    Rollmill runs on, so packages are installed for that version.
    """
    from rollmill.environments.machines.build_image import build_image, check_python
    from rollmill.environments.machines.images import images_directory
    from rollmill.errors import ConfigError

    if directory is None and requirements is None:
        raise ConfigError("an image of what?", hint="--directory DIR, --requirements FILE, or both")
    check_python(python)
    record = build_image(name, directory=directory, requirements=requirements)
    typer.echo(f"{name}@{record.digest[:12]}  {_size(record.bytes)}, in {images_directory()}")


@app.command("list")
def list_all() -> None:
    """List the images that were built here: name, digest, size, what for. For example:

        rollmill images list

    The last column is the distance that `rollmill machines fidelity` measured.
    """
    from rich.console import Console
    from rich.table import Table

    from rollmill.environments.machines.build_image import list_images
    from rollmill.environments.machines.images import images_directory

    table = Table("name", "digest", "size", "Python", "requirements", "fidelity")
    for name, record in list_images():
        if record is None:
            table.add_row(name, "damaged", "", "", f"`rollmill images rm {name}`, then build it again", "")
            continue
        wanted = [line.strip() for line in record.requirements if line.strip() and not line.startswith("#")]
        scores = ", ".join(f"{kind} {distance:.2f}" for kind, distance in record.fidelity.items())
        row = (record.digest[:12], _size(record.bytes), record.python, ", ".join(wanted), scores)
        table.add_row(name, *(cell or "-" for cell in row))
    Console(highlight=False, markup=False).print(table)
    typer.echo(f"in {images_directory()} ($ROLLMILL_IMAGES)")


@app.command("rm")
def remove(name: Name) -> None:
    """Remove an image. Its content goes when no other name has it. For example:

    rollmill images rm mini
    """
    from rollmill.environments.machines.build_image import remove_image

    typer.echo(f"removed {name}, {_size(remove_image(name))} freed")


def _size(count: int) -> str:
    return f"{count / (1 << 20):.1f} MiB"
