"""Texts, tables and bars that the commands share.

Names of tensors, texts of models and the like come from a store and are untrusted: they are printed as text, never as
markup, and without control characters.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn
    from rich.table import Table
    from rich.text import Text

_UNBOUNDED = 10_000  # columns
_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def console() -> Console:
    """For the output of a command. In a pipe or a file lines are not cut to a screen width."""
    from rich.console import Console

    made = Console(highlight=False)
    return made if made.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=_UNBOUNDED)


def errors() -> Console:
    """For progress, on stderr, because the output may be piped to a program."""
    from rich.console import Console

    return Console(highlight=False, stderr=True)


def safe(text: object, style: str = "") -> Text:
    from rich.text import Text

    return Text(_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", str(text)), style)


def labelled(label: str, style: str, text: object) -> Text:
    from rich.text import Text

    return Text.assemble((label, style), " ", safe(text))


def table(*columns: str, title: str | None = None, numbers: Iterable[str] = ()) -> Table:
    """A plain table; `numbers` are the right-aligned columns."""
    from rich import box
    from rich.table import Table

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
    from rich.table import Table
    from rich.text import Text

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
    from rich import filesize

    return filesize.decimal(int(count))


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


def when(at: float, pattern: str = "%m-%d %H:%M") -> str:
    return datetime.fromtimestamp(at).astimezone().strftime(pattern)


@contextmanager
def progress(out: Console, *, sizes: bool = True) -> Iterator[Progress]:
    """Progress bars with the time left. They are removed at the end."""
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    counted: ProgressColumn = DownloadColumn() if sizes else MofNCompleteColumn()
    columns = TextColumn("{task.description}"), BarColumn(), counted, TimeRemainingColumn()
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bars:
        yield bars
