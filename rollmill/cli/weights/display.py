"""Texts and tables that the commands share. Imports rich, so commands import it when they are called.

Names of tensors, writers and lines come from a store and are untrusted: they are printed as text, never as markup, and
without control characters.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from rich import box, filesize
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from rollmill.storage.objects import Objects
from rollmill.weights.format.manifest import Anchor, Encoding, Manifest, Pack
from rollmill.weights.format.tensors import HostTensor
from rollmill.weights.reading.weight_store import WeightStore

_UNBOUNDED = 10_000  # columns
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def console() -> Console:
    """For the output of a command. In a pipe or a file lines are not cut to a screen width."""
    made = Console(highlight=False)
    return made if made.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=_UNBOUNDED)


def errors() -> Console:
    """For progress, on stderr, because the output may be piped to a program."""
    return Console(highlight=False, stderr=True)


def safe(text: object, style: str = "") -> Text:
    return Text(_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", str(text)), style)


def labelled(label: str, style: str, text: object) -> Text:
    return Text.assemble((label, style), " ", safe(text))


def table(*columns: str, title: str | None = None, numbers: Iterable[str] = ()) -> Table:
    """A plain table; `numbers` are the right-aligned columns."""
    made = Table(
        title=None if title is None else safe(title, "bold"),
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        header_style="dim",
    )
    for column in columns:
        made.add_column(column, justify="right" if column in set(numbers) else "left", no_wrap=True)
    return made


def fitted(out: Console, make: Callable[[list[str]], Table], columns: list[str], spare: Iterable[str]) -> Table:
    """The table with as many columns as fit the screen. Columns of `spare` are dropped first, in their order."""
    wide = out.options.update(width=_UNBOUNDED)
    for column in spare:
        if out.measure(make(columns), options=wide).maximum <= out.width:
            break
        columns = [one for one in columns if one != column]
    return make(columns)


def facts(told: Mapping[str, object]) -> Table:
    """Names and values, one per line. Empty values are left out."""
    made = Table(box=None, show_header=False, pad_edge=False)
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in told.items():
        if value not in (None, ""):
            made.add_row(name, value if isinstance(value, Text) else safe(value))
    return made


def count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, allow_nan=False, ensure_ascii=False))


def size(count: float) -> str:
    return filesize.decimal(int(count))


def ratio(times: float | None) -> str:
    """How many times less was sent than all of it. None: nothing was sent."""
    if times is None:
        return "unchanged"
    return f"{times:.1f}×" if times < 100 else f"{times:.0f}×"


def share(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1%}" if value >= 0.1 or value == 0 else f"{value:.2%}"


def seconds(value: float | None) -> str:
    if value is None:
        return ""
    if value >= 120:
        return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"
    if value < 1:
        return milliseconds(1000 * value)
    return f"{value:.0f} s" if value >= 10 else f"{value:.1f} s"


def milliseconds(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f} ms" if value >= 10 else f"{value:.1f} ms"


def region(row: Mapping[str, Any]) -> str:
    """The time until a region served a version; in brackets if it is only stored there; with ~ if clocks disagree."""
    mark = "~" if row["skewed"] else ""
    if row["serving_seconds"] is not None:
        return mark + seconds(row["serving_seconds"])
    return f"({mark}{seconds(row['arrived_seconds'])})" if row["arrived_seconds"] is not None else ""


def when(at: float, pattern: str = "%m-%d %H:%M") -> str:
    return datetime.fromtimestamp(at).astimezone().strftime(pattern)


def coding_bytes(encoding: Encoding) -> dict[str, int]:
    """Bytes by coding, largest first."""
    sizes: Counter[str] = Counter()
    for payload in encoding.payloads:
        sizes[payload.coding] += payload.bytes
    return dict(sizes.most_common())


def coding_mix(encoding: Encoding) -> str:
    """The codings by share of bytes: `sparse`, or `sparse 91% dense 9%`."""
    sizes = coding_bytes(encoding)
    total = max(sum(sizes.values()), 1)
    if len(sizes) < 2:
        return next(iter(sizes), "")
    return " ".join(f"{coding} {count / total:.0%}" for coding, count in sizes.items())


@contextmanager
def progress(out: Console, *, sizes: bool = True) -> Iterator[Progress]:
    """Progress bars with the time left. They are removed at the end."""
    counted: ProgressColumn = DownloadColumn() if sizes else MofNCompleteColumn()
    columns = TextColumn("{task.description}"), BarColumn(), counted, TimeRemainingColumn()
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bars:
        yield bars


def load(bars: Progress, store: WeightStore, manifest: Manifest) -> dict[str, HostTensor]:
    """The verified weights of a version, with a bar for the bytes read."""
    total = sum(leg.bytes for leg in store.route(manifest.version, manifest.form))
    task = bars.add_task(f"reading {manifest.version}", total=total)
    counted = _CountedStore(store.objects, lambda count: bars.advance(task, count))
    tensors = counted.load(manifest.version, manifest.form)
    bars.update(task, completed=total)
    return tensors


class _CountedStore(WeightStore):
    """Reports every pack it has read."""

    def __init__(self, objects: Objects, advance: Callable[[int], object]) -> None:
        super().__init__(objects)
        self._advance = advance

    def read_pack(self, manifest: Manifest | Anchor, pack: Pack) -> bytes:
        data = super().read_pack(manifest, pack)
        self._advance(len(data))
        return data
