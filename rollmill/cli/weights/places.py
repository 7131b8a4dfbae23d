"""The arguments that the commands share: where the weights are, and which version.

WHERE is a run directory, a store directory or the URL of an object store. VERSION is LINE@NUMBER, as every command
prints it; a number alone if there is only one line, or with `--line`; or the name of a channel.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rollmill.errors import WeightsError

if TYPE_CHECKING:
    from rollmill.storage.objects import Objects
    from rollmill.types import Version
    from rollmill.weights.reading.weight_store import WeightStore

Where = Annotated[
    str, typer.Argument(metavar="WHERE", help="run directory, store directory, or object store URL (s3://…, http://…)")
]
Which = Annotated[
    str,
    typer.Argument(
        metavar="VERSION", help="LINE@NUMBER, a number if there is only one line, or a channel such as live"
    ),
]
Line = Annotated[str | None, typer.Option("--line", help="only this line; default: all")]
LineOfNumber = Annotated[str | None, typer.Option("--line", help="the line of a VERSION that is only a number")]
Form = Annotated[str | None, typer.Option("--form", help="which form; default: the only one, or bf16")]
Forms = Annotated[str | None, typer.Option("--form", help="only this form; default: all")]
Token = Annotated[str | None, typer.Option("--token", envvar="ROLLMILL_STORE_TOKEN", help="for an http(s):// store")]
Json = Annotated[bool, typer.Option("--json", help="for programs: JSON instead of tables")]

_VERSION = re.compile(r"(?P<line>[^@]+)@(?P<number>\d{1,10})")


@dataclass(frozen=True)
class Place:
    store: WeightStore
    run: Path | None  # the run directory, if it is one

    @property
    def objects(self) -> Objects:
        return self.store.objects


def open_place(where: str, token: str | None, *, create: bool = False) -> Place:
    """`create` makes a store that does not exist yet, but never inside a directory with other content."""
    from rollmill.runs.opening import open_run
    from rollmill.storage.objects import Objects
    from rollmill.weights.reading.weight_store import WeightStore

    if "://" in where:
        return Place(WeightStore(Objects.open(where, token=token)), None)
    path = Path(where)
    if (path / "run.json").is_file() and isinstance(home := open_run(path).home_store, str):
        return Place(WeightStore(Objects.open(home)), path)
    run = path if (path / "run.json").is_file() or (path / "store").is_dir() else None
    if run is not None:
        path = path / "store"
    if not (path / "weights").is_dir() and not create:
        raise WeightsError(f"no weights in {where}", hint="give a run directory (runs/NAME) or an object store")
    if run is None and not _could_be_store(path):
        raise WeightsError(
            f"{where} exists and has no weights", hint="name a run, a store, or a directory that does not exist"
        )
    return Place(WeightStore(Objects.open(path)), run)


def _could_be_store(path: Path) -> bool:
    """Whether the directory is a store or can become one: it contains nothing but objects of a store."""
    if not path.exists() or (path / "weights").is_dir():
        return True
    return path.is_dir() and all(inside.name == ".staging" for inside in path.iterdir())


def begun_lines(store: WeightStore) -> list[str]:
    """The lines that have a version. A writer that died before its first version leaves only a name."""
    return [line for line in store.lines() if store.begun(line)]


def chosen(store: WeightStore, line: str | None, form: str | None = None) -> list[tuple[str, str]]:
    """The selected lines and forms."""
    lines = begun_lines(store)
    if line is not None and line not in lines:
        raise WeightsError(f"no line {line!r} in {store.objects.url}", hint=f"lines here: {', '.join(lines) or 'none'}")
    pairs = [(name, one) for name in ([line] if line else lines) for one in store.forms(name)]
    kept = [(name, one) for name, one in pairs if form in (None, one)]
    if form is not None and pairs and not kept:
        there = ", ".join(sorted({one for _, one in pairs}))
        raise WeightsError(f"no form {form!r} in {store.objects.url}", hint=f"forms here: {there}")
    return kept


def find_version(place: Place, text: str, line: str | None = None) -> Version:
    """Parses the user's text as a version. Whether it exists is checked when it is read."""
    from rollmill.types import Version
    from rollmill.weights.format.object_keys import valid_name
    from rollmill.weights.reading.channels import Channels

    if found := _VERSION.fullmatch(text):
        return Version(valid_name(found["line"]), int(found["number"]))
    if text.isascii() and text.isdecimal() and len(text) <= 10:
        lines = [line] if line else begun_lines(place.store)
        if len(lines) == 1:
            return Version(valid_name(lines[0]), int(text))
        these = ", ".join(f"{name}@{text}" for name in lines) or "this store has no lines"
        raise WeightsError(f"{text} could belong to any line", hint=f"name one: {these}")
    channels = Channels(place.objects)
    version = channels.get(text) if re.fullmatch(r"[\w.-]+", text) else None
    if version is None:
        names, lines = channels.names(), begun_lines(place.store)
        hint = (
            f"channels here: {', '.join(names) or 'none'} (`rollmill weights channel set` makes one); "
            f"lines: {', '.join(lines) or 'none'}"
        )
        raise WeightsError(f"{text!r} is neither LINE@NUMBER nor a channel", hint=hint)
    return version


def find_form(store: WeightStore, version: Version, form: str | None) -> str:
    """The form to use: the requested one, the only one there is, or bf16."""
    if form is not None:
        return form
    forms = [one for one in store.forms(version.line) if store.exists(version, one)]
    if not forms:
        numbers = {number for one in store.forms(version.line) for number in store.numbers(version.line, one)}
        lines = ", ".join(begun_lines(store)) or "none"
        hint = f"{version.line} has {min(numbers)} to {max(numbers)}" if numbers else f"lines here: {lines}"
        raise WeightsError(f"{version} does not exist in {store.objects.url}", hint=hint)
    if len(forms) > 1 and "bf16" not in forms:
        raise WeightsError(f"{version} has the forms {', '.join(forms)}", hint="choose one with --form")
    return "bf16" if "bf16" in forms else forms[0]
