"""Writes `report.html` and `report.json` of a run: self-contained, no network, safe to open from disk."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from rollmill import __version__, telemetry
from rollmill.errors import StorageError
from rollmill.runs.report import sections
from rollmill.runs.report.conversation import Decode, conversation
from rollmill.runs.report.figures import RunEvents, figures, find_eval
from rollmill.runs.report.living import living as living_chapter
from rollmill.runs.report.living import living_lead
from rollmill.runs.report.loans import LoanRecord, loan_figures, loans_chapter
from rollmill.runs.report.markup import Markup, escape, join, tag
from rollmill.runs.report.scales import GAP, duration, number, percent
from rollmill.runs.report.solving import solving
from rollmill.types import Trajectory


def write_report(
    run_dir: Path,
    *,
    seed: int | None = None,
    seconds: float | None = None,
    trajectories: Mapping[str, Trajectory] | None = None,
    decode: Decode | None = None,
    reproduce: str | None = None,
    living: Mapping[str, Any] | None = None,
    user_conversation: tuple[Trajectory, Decode] | None = None,
    loans: Sequence[LoanRecord] = (),
) -> Path:
    """Write the report of a run, which may be unfinished.

    `seconds` is the run's wall time where the events do not tell it (a resumed run). `trajectories` are shown under
    their titles ("Solved", "Failed", "Before training"); `decode` turns token ids into text, so that each answer shows
    the tokens as sampled. `reproduce` is the command that makes this run again. `living` is what users taught it,
    `user_conversation` one of the conversations with them; `loans` are the engines that production lent to it.
    """
    run = RunEvents.of(telemetry.read_events(run_dir / "events"))
    summary = {**figures(run, name=run_dir.name, seed=seed, seconds=seconds), "living": living}
    summary["loans"] = loan_figures(loans)
    body = join(
        _hero(summary),
        tag(
            "main",
            chapters(run, summary).values(),
            loans_chapter(loans),
            living_chapter(living, _user_conversation(user_conversation)),
            readings(trajectories or {}, decode),
            incidents(run),
            every_figure(summary),
            id="content",
        ),
        _foot(summary, reproduce),
    )
    _write(run_dir / "report.json", json.dumps(summary, indent=2, allow_nan=False) + "\n")
    _write(run_dir / "report.html", _page(f"{run_dir.name} · Rollmill", body))
    return run_dir / "report.html"


def chapters(run: RunEvents, summary: Mapping[str, Any]) -> dict[str, Markup]:
    """The figures of a run by chapter, empty where there is nothing to show yet."""
    return {
        "solving": solving(run),
        "learning": sections.learning(run),
        "asynchrony": sections.asynchrony(run),
        "timelines": sections.timelines(run),
        "numerics": sections.numerics(run),
        "weights": sections.weights(run, summary["engines"]),
    }


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


def _page(title: str, body: Markup) -> str:
    assets = resources.files(__package__) / "assets"
    script = (assets / "page.js").read_text(encoding="utf-8")
    # The content security policy allows only this script, by its digest: no other script in the page could run.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Template((assets / "page.html").read_text(encoding="utf-8")).substitute(
        title=escape(title),
        style=(assets / "style.css").read_text(encoding="utf-8"),
        script=script,
        script_digest=f"sha256-{digest}",
        body=body,
    )


def _hero(summary: Mapping[str, Any]) -> Markup:
    return tag(
        "header",
        tag("p", "Rollmill run", class_="kicker"),
        tag("h1", summary["name"]),
        lead(summary),
        living_lead(summary["living"]),
        tiles(summary),
        class_="hero",
    )


def lead(summary: Mapping[str, Any]) -> Markup:
    took = tag("b", duration(summary["seconds"]))
    if summary["gain"] is None:
        return tag("p", "This run has not been evaluated before and after training. It took ", took, ".", class_="lead")
    before, after, gain = summary["solve_rate_before"], summary["solve_rate_after"], summary["gain"]
    low, high = summary["gain_interval"]
    moved = "rose" if low > 0 else "fell" if high < 0 else "went"
    return tag(
        "p",
        f"The solve rate on held-out tasks {moved} from ",
        tag("b", percent(before, 1)),
        " to ",
        tag("b", percent(after, 1)),
        ", ",
        tag("b", f"{_signed(gain)} points", class_="main"),
        f" (95{GAP}% interval {_signed(low)} to {_signed(high)}), in ",
        took,
        ".",
        class_="lead",
    )


def _signed(share: float) -> str:
    return f"{100 * share:+.1f}".replace("-", "−")


def tiles(summary: Mapping[str, Any]) -> Markup:
    return tag("dl", [tile(*facts) for facts in _tile_facts(summary)], class_="tiles")


def _tile_facts(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    training, rollouts, staleness = summary["training"], summary["rollouts"], summary["staleness"]
    weights, engines = summary["weights"], summary["engines"].values()
    in_flight = sum(engine["switches_in_flight"] for engine in engines)
    speed = [engine["tokens_per_s"] for engine in engines if engine["tokens_per_s"] is not None]
    return [
        ("Optimizer steps", number(training["steps"]), f"{number(training['tokens'])} tokens"),
        ("Rollouts", number(rollouts["total"]), f"{number(rollouts['failed'])} failed"),
        ("Staleness, mean", _or_dash(staleness["mean"]), f"at most {_or_dash(staleness['max'])} versions"),
        ("Delta, of full size", _or_dash(weights["delta_ratio"], True), f"{number(weights['deltas'])} deltas sent"),
        ("Weight switches", number(summary["pauses"]["count"]), f"{number(in_flight)} in mid-answer"),
        ("Tokens/s", number(round(sum(speed))) if speed else "–", f"sampled, engines: {len(speed)}"),
        ("Restarts", number(summary["restarts"]), "of processes"),
        ("Seed", "–" if summary["seed"] is None else str(summary["seed"]), ""),
    ]


def tile(name: str, value: str, note: str) -> Markup:
    return tag("div", tag("dt", name), tag("dd", value, tag("small", note) if note else ""))


def _or_dash(value: float | None, share: bool = False) -> str:
    if value is None:
        return "–"
    return percent(value, 1) if share else number(round(value, 2))


def readings(trajectories: Mapping[str, Trajectory], decode: Decode | None) -> Markup:
    """Whole trajectories to read, under their titles."""
    if not trajectories:
        return Markup("")
    shown = [conversation(title, trajectory, decode) for title, trajectory in trajectories.items()]
    switch = tag("label", "Show how sure the policy was of each token (hovering over an answer does too)", for_="heat")
    return tag(
        "section",
        tag("h2", "Read for yourself"),
        tag(
            "p",
            "Whole trajectories. Underlines are the weights that sampled a token; a dark badge stands where they "
            "changed in the middle of an answer.",
            class_="about",
        ),
        tag("input", type="checkbox", id="heat", class_="heat") if decode else "",
        switch if decode else "",
        tag("div", shown, class_="trajectories"),
    )


def _user_conversation(found: tuple[Trajectory, Decode] | None) -> Markup:
    if found is None:
        return Markup("")
    contexts = len(found[0].segments)
    title = f"One of the conversations, in {contexts} contexts" if contexts > 1 else "One of the conversations"
    shown = tag("div", conversation(title, *found), class_="trajectories")
    return tag("details", tag("summary", "Read one of the conversations"), shown)


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
    listed = tag("ul", [tag("li", line[:300]) for line in lines[:100]], class_="incidents") if lines else ""
    return sections.section(
        "What went wrong, and was mended",
        "Restarts and warnings, in order, and changes of the number of engines.",
        listed,
    )


def every_figure(summary: Mapping[str, Any]) -> Markup:
    rows = [tag("tr", tag("td", key), tag("td", value)) for key, value in _flatten(summary)]
    table = tag("div", tag("table", tag("tbody", rows)), class_="scroll")
    return tag(
        "section",
        tag("h2", "Every figure"),
        tag("p", "The same figures, for programs, are in report.json.", class_="about"),
        tag("details", tag("summary", f"Show {len(rows)} figures"), table),
    )


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


def _foot(summary: Mapping[str, Any], reproduce: str | None) -> Markup:
    again = join(" · again: ", tag("code", reproduce)) if reproduce else Markup("")
    return tag("footer", f"Rollmill {__version__} · {summary['name']}", again, class_="foot")


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
