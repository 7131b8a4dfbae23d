"""Maps versions of other lines to numbers on the trained line, so that staleness is one subtraction.

A line begins at a first number and may have a parent in another line. Numbers of an ancestor are shifted so that the
parent version gets the number it became:

    base:   … 480 ── 500                 base@500 became main@0:   base@500 counts as 0, base@480 as −20
    main:             0 ── 1 ── 2 ── 3
    main.2:                2 ── 3 ── 4   main@2 became main.2@2:   the abandoned main@3 counts as 3
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollmill.errors import TrainingError
from rollmill.training.config import FORM
from rollmill.types import Version
from rollmill.weights.format.manifest import Manifest
from rollmill.weights.reading.weight_store import WeightStore, newest_line


@dataclass(frozen=True)
class Lineage:
    line: str
    offsets: Mapping[str, int]  # line → what to add to its numbers; the line itself and its ancestors only

    def position(self, line: str, number: int) -> int | None:
        """The number that a version counts as on this line; None if it is on no ancestor."""
        offset = self.offsets.get(line)
        return None if offset is None else number + offset


def trace_lineage(weights: WeightStore, line: str, form: str = FORM) -> Lineage:
    """Follow each line back to its parent. A line without versions has no ancestors."""
    offsets = {line: 0}
    newest = _newest(weights, line, form)
    while newest is not None and newest.origin is not None and newest.origin.line not in offsets:
        origin = newest.origin
        offsets[origin.line] = offsets[newest.line] + newest.first - origin.number
        newest = _newest(weights, origin.line, form)
    return Lineage(line, offsets)


def form_held(weights: WeightStore, version: Version, form: str) -> str:
    """The form a version is read in: the run's form, or FORM for an imported checkpoint, which has no other."""
    return form if weights.exists(version, form) else FORM


def form_before_import(weights: WeightStore, version: Version, form: str) -> str | None:
    """The form that another run had rounded a version to before it was imported in `form` (runs/start.py)."""
    origin = weights.manifest(version, form).metadata.get("imported_from")
    return str(origin.get("form")) if isinstance(origin, dict) else None


def _newest(weights: WeightStore, line: str, form: str) -> Manifest | None:
    """The head: every version says where its line began, and the head is never collected."""
    for each in dict.fromkeys((form, FORM)):  # see form_held
        head = weights.head(line, each)
        if head is not None:
            return weights.manifest(Version(line, head), each)
    return None


def next_line(weights: WeightStore, line: str) -> str:
    """A name that no published line has yet: `line`.2, `line`.3 …"""
    newest = newest_line(weights, line)
    return f"{line}.{2 if newest == line else int(newest.rpartition('.')[2]) + 1}"


def published_since(weights: WeightStore, line: str, form: str, step: int) -> dict[int, int]:
    """step → version number, from the newest version that `step` includes to the head of the line."""
    found: dict[int, int] = {}
    for number in reversed(weights.numbers(line, form)):
        published = weights.manifest(Version(line, number), form).step
        found[number if published is None else published] = number
        if min(found) <= step:
            return found
    if found:  # a line begins with the version of its first checkpoint, so older versions were collected
        raise TrainingError(
            f"the newest checkpoint of line {line!r} is of step {step}, and its versions up to step {min(found) - 1} "
            "were collected: steps that run again could not be compared with them",
            hint="start another line from the head; keep more versions than there are steps between two checkpoints",
        )
    return found
