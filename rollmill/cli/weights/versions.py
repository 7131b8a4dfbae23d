"""`rollmill weights log | show | verify`: lists versions, shows one, and checks all."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rollmill.cli import display
from rollmill.cli.display import console, labelled
from rollmill.cli.weights.places import (
    Form,
    Forms,
    Json,
    Line,
    LineOfNumber,
    Token,
    Where,
    Which,
    chosen,
    find_form,
    find_version,
    open_place,
)
from rollmill.errors import RollmillError, StorageError, WeightsError
from rollmill.telemetry import read_events

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rollmill.weights.format.manifest import Encoding, Manifest
    from rollmill.weights.reading.weight_store import WeightStore

_NUMBERS = ("version", "bytes", "ratio", "density", "epoch", "pause")
Top = Annotated[int, typer.Option("--top", min=1, help="how many tensors to list")]


def log(where: Where, line: Line = None, form: Forms = None, token: Token = None) -> None:
    """List the versions of every line. For a run, also when each region served them, and the longest pause.

    Kind "both": a snapshot with a delta beside it. Ratio: full size over what an engine one version behind downloads.
    A time in brackets: stored, not served yet.

    For example:

        rollmill weights log runs/demo
        rollmill weights log runs/demo --line main
    """
    place, out = open_place(where, token), console()
    arrived = _arrivals(place.run)
    lines = chosen(place.store, line, form)
    if not lines:
        out.print("no version yet")
    for name, one in lines:
        manifests, damaged = _read_manifests(place.store, name, one)
        if manifests:
            _print_log(out, manifests, damaged, arrived)
        for message in damaged.values():
            out.print(labelled("damaged", "red", message), soft_wrap=True)


def show(
    where: Where,
    version: Which,
    line: LineOfNumber = None,
    form: Form = None,
    top: Top = 12,
    json: Json = False,
    token: Token = None,
) -> None:
    """Show one version: its parent, its contents, and how much its delta changes each tensor.

    For example:

        rollmill weights show runs/demo rl@7
    """
    place = open_place(where, token)
    wanted = find_version(place, version, line)
    manifest = place.store.manifest(wanted, find_form(place.store, wanted, form))
    told = _describe(place.store, manifest)
    if json:
        display.print_json(told)
        return
    out = display.console()
    out.print(_fact_table(told))
    out.print(_tensor_table(told["tensors"][:top], len(told["tensors"])))


def verify(where: Where, line: Line = None, form: Forms = None, token: Token = None) -> None:
    """Read every version, every anchor and the files beside them, and check every digest. Exits with 1 if something is
    wrong.

    For example:

        rollmill weights verify runs/demo
    """
    store = open_place(where, token).store
    out = display.console()
    lines = chosen(store, line, form)
    if not lines:
        out.print("no version yet")
        return
    checked = wrong = 0
    with display.progress(out, sizes=False) as bars:
        for name, one in lines:
            task = bars.add_task(f"{name} ({one})", total=len(store.numbers(name, one)))
            for version, ok, why in store.verify(name, one):
                checked, wrong = checked + 1, wrong + (not ok)
                if not ok or why:
                    label, style = ("note", "yellow") if ok else ("wrong", "bold red")
                    out.print(display.labelled(label, style, f"{version} ({one}): {why}"), soft_wrap=True)
                bars.advance(task)
    damaged = _damaged_companions(store, sorted({name for name, _ in lines}))
    for message in damaged:
        out.print(display.labelled("wrong", "bold red", message), soft_wrap=True)
    if wrong:
        told = f"{wrong} of {display.count(checked, 'version')} {'is' if wrong == 1 else 'are'} wrong in"
        out.print(display.labelled(told, "bold red", store.objects.url), soft_wrap=True)
    if wrong or damaged:
        raise typer.Exit(1)
    told = f"all {checked:,} versions" if checked > 1 else "1 version"
    out.print(f"[green]{told} verified[/], every chunk and every root digest")


def _damaged_companions(store: WeightStore, lines: list[str]) -> list[str]:
    """The faults of config.json, tokenizer and the like, by line."""
    from rollmill.weights.files.companions import kept_companions

    found = []
    for line in lines:
        try:
            kept_companions(store.objects, line)
        except (StorageError, WeightsError) as error:
            found.append(f"companions of {line}: {error.message}")
    return found


def _arrivals(run: Path | None) -> dict[tuple[str, int], dict[str, Any]]:
    from rollmill.weights.regions.arrivals import Arrivals

    if run is None or not (run / "events").is_dir():
        return {}
    rows = Arrivals(keep=1 << 30).fold(read_events(run / "events"))
    return {(row["line"], row["version"]): row for row in rows}


def _read_manifests(store: WeightStore, line: str, form: str) -> tuple[list[Manifest], dict[int, str]]:
    """All readable manifests of a line, and the faults of the others."""
    from rollmill.types import Version

    manifests, damaged = [], {}
    numbers = store.numbers(line, form)
    with display.progress(display.errors(), sizes=False) as bars:
        for number in bars.track(numbers, description=f"{line} ({form})"):
            try:
                manifests.append(store.manifest(Version(line, number), form))
            except RollmillError as error:
                damaged[number] = error.message
    return manifests, damaged


def _print_log(
    out: Console, manifests: list[Manifest], damaged: dict[int, str], arrived: dict[tuple[str, int], dict[str, Any]]
) -> None:
    first = manifests[0]
    origin = f" from {first.origin}" if first.origin else ""
    title = f"{first.line} ({first.form}){origin}, epoch {manifests[-1].epoch}"
    told = {one.number: arrived.get((one.line, one.number), {}).get("regions", {}) for one in manifests}
    regions = [f"→ {name}" for name in sorted({name for one in told.values() for name in one})]
    rows = {one.number: _log_cells(one, told[one.number]) for one in manifests}
    rows |= {number: {"version": str(number), "kind": "damaged"} for number in damaged}

    def make(columns: list[str]) -> Table:
        made = display.table(*columns, title=title, numbers=[*_NUMBERS, *regions])
        for number, cells in sorted(rows.items()):
            made.add_row(*(cells.get(column, "") for column in columns), style="red" if number in damaged else "")
        return made

    columns = ["version", "parent", "kind", "bytes", "ratio", "density", "coding", "epoch", *regions]
    columns += ["pause", "digest", "when"] if regions else ["digest", "when"]
    if all(_follows(one) for one in manifests):
        columns.remove("parent")
    if len({one.epoch for one in manifests}) == 1:
        columns.remove("epoch")  # the title has it; if there are several writers, each row has it
    out.print(display.fitted(out, make, columns, ("when", "digest", "coding", "kind", "density")))


def _follows(manifest: Manifest) -> bool:
    """Whether its parent is the expected one: the version before, or the origin of its line."""
    parent = manifest.parent
    if manifest.number == manifest.first:
        return parent == manifest.origin
    return parent is not None and (parent.line, parent.number) == (manifest.line, manifest.number - 1)


def _log_cells(manifest: Manifest, regions: dict[str, Any]) -> dict[str, Any]:
    from rollmill.cli.weights import version_figures as figures

    pauses = [one["pause_ms_max"] for one in regions.values() if one["pause_ms_max"] is not None]
    return {
        "version": str(manifest.number),
        "parent": display.safe(manifest.parent or ""),
        "kind": "both" if manifest.snapshot and manifest.delta else manifest.kind,
        "bytes": display.size(manifest.bytes),
        "ratio": figures.ratio(_ratio(manifest)),
        "density": display.share(manifest.density),
        "coding": figures.coding_mix(_fetched(manifest)),
        "epoch": str(manifest.epoch),
        **{f"→ {name}": figures.region(one) for name, one in regions.items()},
        "pause": display.milliseconds(max(pauses, default=None)),
        "digest": manifest.digest[:8],
        "when": display.when(manifest.created_at),
    }


def _fetched(manifest: Manifest) -> Encoding:
    """What an engine that is up to date downloads: the delta, even if the version also has a snapshot."""
    fetched = manifest.delta or manifest.snapshot
    assert fetched is not None
    return fetched


def _ratio(manifest: Manifest) -> float | None:
    """All bytes by those that an engine downloads; None if it downloads none, because nothing has changed."""
    sent = _fetched(manifest).bytes
    return manifest.full_bytes / sent if sent else None


def _describe(store: WeightStore, manifest: Manifest) -> dict[str, Any]:
    """One version as plain JSON."""
    from rollmill.cli.weights import version_figures as figures

    try:
        anchor = store.anchor(manifest.version, manifest.form)
    except WeightsError:
        anchor = None  # damaged: `verify` reports it, and the rest can be shown without it
    encodings = {"snapshot": manifest.snapshot, "delta": manifest.delta, "anchor": anchor.snapshot if anchor else None}
    return {
        "line": manifest.line,
        "number": manifest.number,
        "form": manifest.form,
        "digest": manifest.digest,
        "parent": str(manifest.parent) if manifest.parent else None,
        "step": manifest.step,
        "metadata": manifest.metadata,
        "writer": manifest.writer,
        "epoch": manifest.epoch,
        "created_at": manifest.created_at,
        "bytes": manifest.bytes,
        "full_bytes": manifest.full_bytes,
        "ratio": _ratio(manifest),
        "density": manifest.density,
        "encodings": {
            name: {
                "bytes": encoding.bytes,
                "packs": len(encoding.packs),
                "payloads": len(encoding.payloads),
                "base": f"{manifest.line}@{encoding.base.number}" if encoding.base else None,
                "codings": figures.coding_bytes(encoding),
            }
            for name, encoding in encodings.items()
            if encoding is not None
        },
        "anchors": store.anchors(manifest.line, manifest.form),
        "tensors": _tensor_facts(manifest),
    }


def _tensor_facts(manifest: Manifest) -> list[dict[str, Any]]:
    """The tensors, largest first, with their share of the delta. If a payload covers several tensors, its bytes and
    changed elements are divided by size. A tensor without payload has not changed."""
    sent: dict[str, float] = {}
    delta = manifest.delta
    for payload in delta.payloads if delta else ():
        run = manifest.chunks[payload.first : payload.first + payload.chunks]
        whole = max(sum(chunk.size() for chunk in run), 1)
        for chunk in run:
            sent[chunk.tensor.name] = sent.get(chunk.tensor.name, 0.0) + payload.bytes * chunk.size() / whole
    total = max(sum(sent.values()), 1.0)
    told = []
    for entry in manifest.tensors:
        elements = entry.bytes // entry.width
        part = sent.get(entry.name, 0.0)
        changed = delta.changed_elements * part / total / max(elements, 1) if delta else None
        fact = {"name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape), "bytes": entry.bytes}
        share = None if changed is None else min(changed, 1.0)
        told.append({**fact, "delta_bytes": round(part) if delta else None, "changed_share_estimate": share})
    return sorted(told, key=lambda one: (-one["bytes"], one["name"]))


def _fact_table(told: dict[str, Any]) -> Table:
    from rollmill.cli.weights import version_figures as figures

    encodings = {}
    for name, one in told["encodings"].items():
        base = f" from {one['base']}" if one["base"] else ""
        codings = ", ".join(f"{coding} {display.size(count)}" for coding, count in one["codings"].items())
        encodings[name] = (
            f"{display.size(one['bytes'])}{base} in {display.count(one['packs'], 'pack')}: {codings or 'nothing'}"
        )
    metadata = {name: value for name, value in told["metadata"].items() if name != "step"}
    near = [number for number in told["anchors"] if number <= told["number"]]
    return display.facts(
        {
            "version": f"{told['line']}@{told['number']} ({told['form']})",
            "digest": told["digest"],
            "parent": told["parent"],
            "step": told["step"],
            "published": display.when(told["created_at"], "%Y-%m-%d %H:%M:%S %Z"),
            "writer": f"{told['writer']}, epoch {told['epoch']}",
            "size": f"{display.size(told['full_bytes'])} in {len(told['tensors'])} tensors",
            "ratio": figures.ratio(told["ratio"]),
            "density": display.share(told["density"]),
            **encodings,
            "nearest anchor": f"{told['line']}@{near[-1]}" if near else "",
            **{f"  {name}": value for name, value in metadata.items()},
        }
    )


def _tensor_table(tensors: list[dict[str, Any]], count: int) -> Table:
    title = f"the {len(tensors)} largest of {count} tensors" if len(tensors) < count else None
    made = display.table(
        "tensor", "dtype", "shape", "bytes", "in the delta", "changed",
        title=title, numbers=("bytes", "in the delta", "changed"),
    )  # fmt: skip
    for one in tensors:
        changed = one["changed_share_estimate"]
        made.add_row(
            display.safe(one["name"]),
            one["dtype"],
            "×".join(map(str, one["shape"])) or "scalar",
            display.size(one["bytes"]),
            "" if one["delta_bytes"] is None else display.size(one["delta_bytes"]),
            "" if changed is None else "none" if not changed else f"≈ {display.share(changed)}",
        )
    return made
