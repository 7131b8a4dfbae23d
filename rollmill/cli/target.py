"""Which weights `serve`, `eval` and `train --from` mean: versions as a user writes them, checkpoint directories."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.cli.weights.places import Place, find_form, find_version
from rollmill.errors import WeightsError

if TYPE_CHECKING:
    from rollmill.launch.services import Target
    from rollmill.runs.run import RunDirectory

VersionOption = Annotated[
    str | None,
    typer.Option(
        "--version",
        metavar="VERSION",
        help="a number (7), a stage and a number (rl@7), or a channel (live); default: the newest of the last stage",
    ),
]


def find_target(run: RunDirectory, text: str | None) -> Target:
    """The version, channel or line that is meant. Raises WeightsError if it is not there."""
    from rollmill.launch.services import Target
    from rollmill.types import Version
    from rollmill.weights.reading.channels import Channels

    store, line = run.weights(), run.config.line
    form: str = run.config.form if run.config.stages else "bf16"  # imported weights have no other form
    if text is None:
        number = store.head(line, form)
        if number is None:
            hint = f"`rollmill train --resume {run.path}` trains it"
            raise WeightsError(f"line {line!r} has no version yet", hint=hint)
        return Target("line", line, Version(line, number), form)
    version = find_version(Place(store, run.path), text, line)
    if not store.exists(version, form):
        form = find_form(store, version, None)
    if text in Channels(store.objects).names():
        return Target("channel", text, version, form)
    return Target("version", str(version), version, form)


def start_settings(directory: Path, text: str) -> list[str]:
    """The [start] of a run that starts from a version of the run in `directory`, or at that URL, as overrides."""
    from rollmill.runs.opening import open_run
    from rollmill.runs.saved import url_of

    run, name = open_run(directory), url_of(directory) or str(directory.absolute())
    target = find_target(run, text)
    settings = {"run": name, "id": run.id, "version": str(target.version), "form": target.form}
    return [f"start.{name}={json.dumps(value)}" for name, value in settings.items()]


def is_checkpoint(directory: Path) -> bool:
    return (directory / "config.json").is_file() and not (directory / "run.json").exists()


def checkpoint_run(root: Path, directory: Path) -> RunDirectory:
    """A run that only holds an imported checkpoint. A checkpoint that changes gets a new one."""
    from rollmill.config import validate_config
    from rollmill.launch.supervise import import_weights
    from rollmill.runs.import_checkpoint import check_checkpoint
    from rollmill.runs.opening import open_run
    from rollmill.runs.run import RunConfig, RunDirectory

    directory = directory.absolute()
    files = sorted((path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in directory.iterdir())
    label = re.sub("[^a-z0-9_-]+", "-", directory.name.lower()).strip("-_")[:40] or "model"
    name = f"served-{label}-{hashlib.sha256(repr((str(directory), files)).encode()).hexdigest()[:8]}"
    if not (root / name / "run.json").exists():
        config = validate_config(RunConfig, {"name": name, "checkpoint": str(directory)}, str(directory))
        check_checkpoint(config)
        RunDirectory.create(root, config)
    run = open_run(root / name)
    import_weights(run)
    return run
