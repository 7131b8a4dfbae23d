"""`rollmill weights diff`: what changed between two versions of any lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmill.cli import display
from rollmill.cli.weights.places import (
    Form,
    Json,
    LineOfNumber,
    Place,
    Token,
    Where,
    find_form,
    find_version,
    open_place,
)

if TYPE_CHECKING:
    from rich.table import Table

    from rollmill.weights.format.manifest import Manifest
    from rollmill.weights.reading.compare import Comparison, TensorChange

_VERSION = "a version: LINE@NUMBER, a number if there is only one line, or a channel such as live"
_COLUMNS = ("changed", "share", "±1 ULP", "largest", "max |Δ|")


def diff(
    where: Where,
    old: Annotated[str, typer.Argument(metavar="OLD", help=_VERSION)],
    new: Annotated[str, typer.Argument(metavar="NEW", help="the version to compare with OLD")],
    line: LineOfNumber = None,
    form: Form = None,
    top: Annotated[int, typer.Option("--top", min=1, help="how many tensors to list")] = 12,
    json: Json = False,
    token: Token = None,
) -> None:
    """Show what changed between two versions, tensor by tensor, and the bytes to send. Both are loaded into memory.

    For example:

        rollmill weights diff runs/demo rl@3 rl@7
    """
    from rollmill.cli.weights import version_figures as figures

    place = open_place(where, token)
    manifests = [_manifest(place, text, line, form) for text in (old, new)]
    out = display.console()
    found = _compare(place, manifests[0], manifests[1])
    wire = _wire(place, manifests[0], manifests[1])
    if json:
        display.print_json(_as_json(manifests, found, wire))
        return
    names = " → ".join(f"{manifest.version} ({manifest.form})" for manifest in manifests)
    for word, names_of in (("added", found.added), ("removed", found.removed), ("reshaped", found.reshaped)):
        for name in names_of:
            out.print(display.safe(f"{word}: ", "yellow") + display.safe(name))
    if found.same:
        out.print(display.safe(f"{names}: same weights, bit for bit"))
    else:
        out.print(_table(found, top, names))
    way = ", ".join(wire["legs"]) if len(wire["legs"]) <= 4 else f"{len(wire['legs'])} legs"
    if wire["legs"]:
        saved = figures.ratio(manifests[1].full_bytes / wire["bytes"])
        out.print(display.safe(f"on the wire: {display.size(wire['bytes'])} ({saved} less than all of it): {way}"))


def _manifest(place: Place, text: str, line: str | None, form: str | None) -> Manifest:
    version = find_version(place, text, line)
    return place.store.manifest(version, find_form(place.store, version, form))


def _compare(place: Place, old: Manifest, new: Manifest) -> Comparison:
    from rollmill.cli.weights import version_figures as figures
    from rollmill.weights.reading.compare import compare

    with display.progress(display.errors()) as bars:
        task = bars.add_task("comparing", total=new.full_bytes)
        return compare(
            old,
            new,
            lambda: figures.load(bars, place.store, old),
            lambda: figures.load(bars, place.store, new),
            lambda count: bars.advance(task, count),
        )


def _wire(place: Place, old: Manifest, new: Manifest) -> dict[str, Any]:
    """What an engine that holds the old version downloads to serve the new one."""
    legs = place.store.route(new.version, new.form, old.digest)
    return {"bytes": sum(leg.bytes for leg in legs), "legs": [f"{leg.kind} of {leg.manifest.version}" for leg in legs]}


def _as_json(manifests: list[Manifest], found: Comparison, wire: dict[str, Any]) -> dict[str, Any]:
    sides = ({"version": str(one.version), "form": one.form, "digest": one.digest} for one in manifests)
    return {
        **dict(zip(("old", "new"), sides, strict=True)),
        "same": found.same,
        "added": list(found.added),
        "removed": list(found.removed),
        "reshaped": list(found.reshaped),
        "total": _change(found.total),
        "tensors": [{"name": one.name, "dtype": one.dtype, **_change(one)} for one in found.tensors if one.changed],
        "wire": wire,
    }


def _change(change: TensorChange) -> dict[str, Any]:
    return {
        "elements": change.elements,
        "changed": change.changed,
        "share": change.share,
        "by_one_ulp": change.by_one,
        "largest_ulp": change.largest_ulp,
        "largest_value": change.largest_value,
        "not_finite": change.not_finite,
    }


def _table(found: Comparison, top: int, title: str) -> Table:
    changed = sorted((one for one in found.tensors if one.changed), key=lambda one: (-one.changed, one.name))
    not_finite = found.total.not_finite > 0
    columns = (*_COLUMNS, "not finite") if not_finite else _COLUMNS
    made = display.table("tensor", *columns, title=title, numbers=columns)
    for one in changed[:top]:
        made.add_row(display.safe(one.name), *_cells(one, not_finite))
    if len(changed) > top:
        made.add_row(display.safe(f"and {len(changed) - top} more", "dim"))
    unchanged = len(found.tensors) - len(changed)
    if unchanged:
        made.add_row(display.safe(f"{unchanged} unchanged", "dim"))
    made.add_section()
    made.add_row(f"all {len(found.tensors)}", *_cells(found.total, not_finite))
    return made


def _cells(change: TensorChange, not_finite: bool) -> list[str]:
    cells = [
        f"{change.changed:,}",
        display.share(change.share),
        display.share(change.by_one / max(change.changed, 1)) if change.changed else "",
        f"{change.largest_ulp:,} ULP",
        f"{change.largest_value:.3g}",
    ]
    return [*cells, f"{change.not_finite:,}"] if not_finite else cells
