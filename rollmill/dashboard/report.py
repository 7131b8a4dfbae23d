"""Writes `report.html` and `report.json` of a run: self-contained, no network, safe to open from disk."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from rollmill import telemetry
from rollmill.dashboard.chapters import chapters
from rollmill.dashboard.conversation import Decode, conversation, readings
from rollmill.dashboard.cycles import living_chapter, living_lead
from rollmill.dashboard.figures import RunEvents, figures, find_eval
from rollmill.dashboard.loans import LoanRecord, loan_figures, loans_chapter
from rollmill.dashboard.render import render, static
from rollmill.errors import StorageError
from rollmill.types import Trajectory


def write_report(
    run_dir: Path,
    *,
    seed: int | None = None,
    trajectories: Mapping[str, Trajectory] | None = None,
    decode: Decode | None = None,
    living: Mapping[str, Any] | None = None,
    user_conversation: tuple[Trajectory, Decode] | None = None,
    loans: Sequence[LoanRecord] = (),
) -> Path:
    """Write the report of a run, which may be unfinished.

    `trajectories` are shown under their titles ("Solved", "Failed", "Before training"); `decode` turns token ids into
    text, so that each answer shows the tokens as sampled. `living` is what users taught the run, `user_conversation`
    one of the conversations with them; `loans` are the engines that production lent to it.
    """
    run = RunEvents.of(telemetry.read_events(run_dir / "events"))
    summary = {**figures(run, name=run_dir.name, seed=seed), "living": living, "loans": loan_figures(loans)}
    read = ""
    if user_conversation is not None:
        contexts = len(user_conversation[0].segments)
        more = f", in {contexts} contexts" if contexts > 1 else ""
        read = conversation(f"One of the conversations{more}", *user_conversation)
    body = (
        *chapters(run, summary).values(),
        loans_chapter(loans),
        living_chapter(living, read),
        readings(trajectories or {}, decode),
        incidents(run),
        every_figure(summary),
    )
    script = static("report.js")
    # The content security policy allows only this script, by its digest: no other script in the page could run.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    head = lead(summary) + living_lead(living) + tiles(summary)
    page = render("report", "page", run_dir.name, head, body, static("report.css"), script, digest)
    _write(run_dir / "report.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
    _write(run_dir / "report.html", page)
    return run_dir / "report.html"


def example_trajectories(run_dir: Path) -> dict[str, str]:
    """Titles and ids of trajectories worth reading, as the evaluations named them: before training, failed, solved."""
    run = RunEvents.of(telemetry.read_events(run_dir / "events"))
    before, after = find_eval(run, "before") or {}, find_eval(run, "after") or {}
    chosen = {
        "Before training": before.get("example_unsolved") or before.get("example_solved"),
        "After training, failed": after.get("example_unsolved"),
        "After training, solved": after.get("example_solved"),
    }
    return {title: str(trajectory) for title, trajectory in chosen.items() if trajectory}


def lead(summary: Mapping[str, Any]) -> Markup:
    """The result of the run in one sentence."""
    low, high = summary["gain_interval"] or (0.0, 0.0)
    return render("chapters", "lead", summary, "rose" if low > 0 else "fell" if high < 0 else "went")


def tiles(summary: Mapping[str, Any]) -> Markup:
    speeds = [engine["tokens_per_s"] for engine in summary["engines"].values() if engine["tokens_per_s"] is not None]
    return render("chapters", "tiles", summary, speeds)


def incidents(run: RunEvents) -> Markup:
    lines = [
        f"{event.get('target')} was started again after exit code {event.get('exit_code')}" for event in run.restarts
    ]
    lines += [str(event.get("text")) for event in run.all if event["kind"] == "warning"]
    lines += [
        f"balance: {event.get('before')} → {event.get('engines')} engines"
        f"{'' if event.get('done') else ' would be better'}: {event.get('reason')}"
        for event in run.all
        if event["kind"] == "balance" and event.get("before") != event.get("engines")
    ]
    return render("chapters", "incidents", [line[:300] for line in lines[:100]])


def every_figure(summary: Mapping[str, Any]) -> Markup:
    return render("chapters", "every_figure", _flatten(summary))


def _flatten(tree: Any, prefix: str = "") -> list[tuple[str, str]]:
    if isinstance(tree, Mapping):
        return [
            row for key, value in tree.items() for row in _flatten(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    if isinstance(tree, list) and any(isinstance(item, Mapping) for item in tree):
        return [row for index, value in enumerate(tree) for row in _flatten(value, f"{prefix}[{index}]")]
    if isinstance(tree, list):
        return [(prefix, ", ".join(_scalar(item) for item in tree))]
    return [(prefix, _scalar(tree))]


def _scalar(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _write(path: Path, text: str) -> None:
    """Replace a file atomically: a reader never sees half a report."""
    part = path.with_suffix(path.suffix + ".part")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise StorageError(
            f"{path} cannot be written: {error.strerror}", hint="make room and write it again"
        ) from error
