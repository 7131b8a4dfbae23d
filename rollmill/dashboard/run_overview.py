"""The parts of the overview as HTML. Charts and figures are the report's; what only a live page has is made here."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import urlencode

from rollmill.dashboard.queries import Queue, RecentWork, Served, StepCost
from rollmill.dashboard.run_status import Channel, Process, ServingEngine
from rollmill.feedback.collect import PRODUCTION
from rollmill.runs.cycle_journal import Move
from rollmill.runs.report.charts import Axes, Point, Series, line_chart
from rollmill.runs.report.figures import Event, finite
from rollmill.runs.report.markup import Markup, join, tag
from rollmill.runs.report.page import tile
from rollmill.runs.report.scales import duration, number, percent
from rollmill.runs.report.sections import figure, section
from rollmill.runs.status import RunState
from rollmill.types import Version

STATES = {"training": "live", "finished": "done", "stopped": "still"}
LEDGER = {
    "trained": "trained on",
    "leased": "in the step that runs",
    "admitted": "not decided yet",
    "no_signal": "taught nothing",
    "stale": "too old",
    "dropped": "dropped",
}


def moment(at: float) -> Markup:
    """A point in time. The page's script writes beside it how long ago that is."""
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(at))
    return tag("time", text, datetime=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(at)), data_since=f"{at:.0f}")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> Markup:
    """The first `words` columns are text; the others are numbers and stand right."""
    header = tag("thead", tag("tr", [tag("th", head, scope="col") for head in heads]))
    body = tag("tbody", [tag("tr", [tag("td", cell) for cell in row]) for row in rows])
    return tag("div", tag("table", header, body, class_=f"words{words}"), class_="scroll")


def progress(state: RunState, evaluation: Event | None, resume: str) -> Markup:
    """What the run does now, and how far it is."""
    done, total = state.step or 0, state.steps
    words = f"Stage {state.stage}: step {number(done)} of {number(total)}." if state.stage else "It has no stages."
    left = (finite(evaluation.get("total"), 0.0) - finite(evaluation.get("done"), 0.0)) if evaluation else 0.0
    if state.word == "training" and evaluation and left > 0:
        done, total = int(finite(evaluation.get("done"), 0.0)), int(finite(evaluation.get("total"), 1.0))
        words = f"Evaluation “{evaluation.get('label')}”: {number(done)} of {number(total)} attempts."
    elif state.word == "finished":
        words = "Every stage is trained and evaluated."
    hint = tag("p", "To continue: ", tag("code", resume), class_="about") if state.word == "stopped" else ""
    bar = tag("progress", max=max(total, 1), value=min(done, max(total, 1)), aria_label=words)
    return tag("div", tag("p", words, class_="lead"), bar, hint)


def hero(kicker: str, mood: str, name: str, *content: str) -> Markup:
    badge = tag("p", tag("i", class_=f"mood {mood}"), kicker, class_="kicker")
    return tag("header", badge, tag("h1", name), *content, class_="hero")


def processes(found: Sequence[Process]) -> Markup:
    rows = []
    for process in found:
        words, colour = ("running", "good") if process.pid is not None else ("not running", "off")
        since = moment(process.since) if process.since is not None else "–"
        restarts = tag("b", number(process.restarts), class_="bad") if process.restarts else "0"
        rows.append(
            [
                process.name,
                tag("span", words, class_=colour),
                since,
                "–" if process.pid is None else str(process.pid),
                restarts,
            ]
        )
    if not rows:
        return Markup("")
    listed = table(("Process", "State", "Since", "Process id", "Restarts"), rows, words=3)
    if all(process.pid is None for process in found):
        listed = tag("details", tag("summary", f"None of its {len(found)} processes runs now"), listed)
    return section(
        "What is running",
        "The processes of the run on this machine. A process that dies is started again and goes on where it was.",
        listed,
    )


def queue(stage: str, found: Queue | None, engines: Sequence[ServingEngine]) -> Markup:
    tiles = []
    if found is not None and (found.most_open or found.groups):
        open_groups = found.groups.total()
        tiles = [
            tile("Groups open", f"{number(open_groups)} of {number(found.most_open)}", "as the staleness bound allows"),
            tile("Groups running", number(found.groups["running"]), "rollouts not finished"),
            tile("Groups waiting", number(found.groups["waiting"]), "ready for a step"),
            tile("Groups in a step", number(found.groups["leased"]), "being trained on"),
            tile("Groups due", number(found.due), f"must be in step {number(found.committed + 1)}"),
        ]
    if any(engine.alive for engine in engines):
        asked = sum(engine.running for engine in engines), sum(engine.waiting for engine in engines)
        tiles += [
            tile("Requests running", number(asked[0]), "at the engines"),
            tile("Requests waiting", number(asked[1]), "at the engines"),
        ]
    entries = found.ledger if found is not None else {}
    kept = [f"{number(entries[state])} {words}" for state, words in LEDGER.items() if entries.get(state)]
    told = f"Trajectories of stage {stage}: {', '.join(kept)}." if kept else ""
    return section(
        "Queues",
        "A group starts only while fewer groups are open than the bound on staleness allows.",
        tag("dl", tiles, class_=f"tiles of{len(tiles)}") if tiles else "",
        tag("p", told, class_="about") if told else "",
    )


def costs(steps: Mapping[int, StepCost], trained: Mapping[int, float], busy: Iterable[Event]) -> Markup:
    """`trained`: when each step ended, in seconds since the epoch; step 0: when the stage began."""
    solved = {step: cost.solved for step, cost in steps.items() if cost.solved}
    if not solved:
        return Markup("")
    tokens: list[Point] = [(step, steps[step].tokens / solved[step]) for step in sorted(solved)]
    engine, trainer = ({step: of[step] for step in steps if step in of} for of in _seconds(trained, busy))
    series = [
        Series(name, [(step, seconds[step] / solved[step]) for step in sorted(solved) if step in seconds], colour, True)
        for name, seconds, colour in (("engines", engine, "steel"), ("trainer", trainer, "ember"))
    ]
    series = [one for one in series if one.points]
    everything = sum(solved.values())
    last = sorted(solved)[-max(1, len(solved) // 10) :]
    recent = sum(steps[step].tokens for step in last) / sum(solved[step] for step in last)
    tiles = [
        tile("Solved", number(everything), f"of {number(sum(cost.attempts for cost in steps.values()))} attempts"),
        tile("Tokens per solved attempt", number(round(sum(c.tokens for c in steps.values()) / everything)), "sampled"),
        tile("Lately", number(round(recent)), f"{'steps' if len(last) > 1 else 'step'} {_span(last)}"),
        tile("Engine time", duration(sum(engine.values()) / everything), "per solved attempt"),
        tile("Trainer time", duration(sum(trainer.values()) / everything), "per solved attempt"),
    ]
    charts = [
        figure(
            "Tokens per solved attempt",
            "All tokens sampled for a step's groups, failed attempts too, over the attempts that were solved.",
            line_chart(
                [Series("", tokens, "plum", smooth=True)], Axes("step", "tokens", floor=0.0), "Tokens per solved"
            ),
        )
    ]
    if series:
        charts.append(
            figure(
                "Time per solved attempt",
                "Seconds that engines decoded and the trainer worked. An engine or a rank has one device: on GPUs "
                "these are GPU-seconds.",
                line_chart(series, Axes("step", "seconds", duration, floor=0.0), "Busy seconds per solved attempt"),
            )
        )
    return section(
        "What a solved attempt costs",
        "In training, by the step that decided on it; groups that were closed count too.",
        tag("dl", tiles, class_=f"tiles of{len(tiles)}"),
        tag("div", charts, class_="grid"),
    )


def _span(steps: Sequence[int]) -> str:
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def _seconds(trained: Mapping[int, float], busy: Iterable[Event]) -> tuple[dict[int, float], dict[int, float]]:
    """Busy seconds of engines and trainers, by the step that ended next. Evaluations before and after do not count."""
    order = sorted((step for step in trained if step), key=lambda step: trained[step])
    ends = [trained[step] for step in order]
    engines: dict[int, float] = {}
    trainers: dict[int, float] = {}
    for event in busy:
        process, start, end = str(event.get("process")), finite(event.get("start")), finite(event.get("end"))
        found = engines if process.startswith("engine") else trainers if process.startswith("trainer") else None
        place = bisect_left(ends, end)
        if (
            found is None
            or event.get("what") == "wait"
            or not end > start >= trained.get(0, 0.0)
            or place == len(order)
        ):
            continue
        found[order[place]] = found.get(order[place], 0.0) + end - start
    return engines, trainers


def regions(
    engines: Sequence[ServingEngine], channels: Sequence[Channel], heads: Sequence[Version], lent: Mapping[str, str]
) -> Markup:
    """`lent`: engines of production that work for training now → the line."""
    rows = [
        [
            join(engine.name, tag("small", f" lent to {lent[engine.name]}") if engine.name in lent else ""),
            engine.region,
            tag("code", engine.version),
            moment(engine.since) if engine.since is not None else "–",
            number(engine.running) if engine.alive else "–",
            number(engine.waiting) if engine.alive else "–",
        ]
        for engine in engines
    ]
    serving = table(("Engine", "Region", "Serves", "Since", "Running", "Waiting"), rows, words=4) if rows else ""
    if any(not engine.alive for engine in engines):
        serving = join(serving, tag("p", "An engine that does not run shows what it served last.", class_="about"))
    newest = ""
    if heads:
        names = [tag("code", str(version)) for version in heads]
        newest = tag("p", "Newest version of each line: ", *_comma(names), class_="about")
    moved = [
        [
            tag("b", channel.name),
            tag("code", str(channel.entries[0].version)),
            moment(channel.entries[0].at),
            _history(channel),
        ]
        for channel in channels
        if channel.entries
    ]
    pointers = table(("Channel", "Points at", "Since", "History"), moved, words=4) if moved else ""
    return section(
        "Regions and versions", "Which engine serves what, and where channels point.", serving, pointers, newest
    )


def _comma(parts: Sequence[Markup]) -> list[str]:
    return [each for part in parts for each in (part, ", ")][:-1]


def _history(channel: Channel) -> Markup:
    entries = [
        tag("li", f"{entry.number}: ", tag("code", str(entry.version)), " ", moment(entry.at))
        for entry in channel.entries
    ]
    return tag(
        "details",
        tag("summary", f"{len(entries)} {'move' if len(entries) == 1 else 'moves'}"),
        tag("ul", entries, class_="incidents"),
    )


def cycles(found: Mapping[int, Sequence[Move]]) -> Markup:
    """Real-time RL: where the newest cycle is and why, and how the ones before ended."""
    listed: list[Markup] = []
    for cycle, moves in found.items():
        last = moves[-1]
        rows = [[move.state.replace("_", " "), move.reason[:1000], moment(move.at)] for move in moves]
        colour = {"promoted": "good", "held": "bad", "rolled_back": "bad"}.get(last.state, "live-text")
        state = tag("b", last.state.replace("_", " "), class_=colour)
        head = tag("summary", f"Cycle {cycle}: ", state, f" – {last.reason[:300]}")
        listed.append(tag("details", head, table(("State", "Why", "Since"), rows, words=3), open=not listed))
    about = "Learning from live users: collect, distil, train, gate, canary, then promote, hold or roll back."
    return section("The cycle", about, *listed)


def users(found: Mapping[str, Served], most: int) -> Markup:
    """Production: which version answered how many conversations, and what users did with the answers."""
    if not found:
        return Markup("")
    rows = [
        [
            tag("code", version),
            ", ".join(f"{kind[:40]} {number(count)}" for kind, count in served.signals.most_common(6)) or "–",
            number(served.conversations),
            number(round(served.contexts / served.conversations, 1)) if served.contexts else "–",
            number(served.judged),
        ]
        for version, served in found.items()
    ]
    total = sum(served.conversations for served in found.values())
    link = tag("a", "Read them", href=f"/trajectories?{urlencode({'run': PRODUCTION})}")
    about = "Conversations of production"
    if total >= most:
        about = f"The newest {number(most)} conversations of production"
    heads = ("Version", "What users reported", "Conversations", "Contexts each", "With a report")
    return section("Users", f"{about}, by the version that answered.", table(heads, rows, words=2), tag("p", link))


def recent(found: Sequence[RecentWork], most: int) -> Markup:
    """Of a database alone: what each run did last."""
    rows = []
    for work in found:
        per_solved = number(round(work.tokens / work.solved)) if work.solved else "–"
        rows.append(
            [
                tag("a", work.key, href=f"/trajectories?{urlencode({'run': work.key})}"),
                moment(work.newest),
                number(work.trajectories) + ("+" if work.trajectories == most else ""),
                number(work.graded),
                percent(work.solved / work.graded) if work.graded else "–",
                "–" if work.reward is None else number(round(work.reward, 3)),
                per_solved,
            ]
        )
    heads = ("Run", "Newest", "Trajectories", "Graded", "Solved", "Mean reward", "Tokens per solved")
    if not rows:
        return Markup("")
    about = f"Stages and evaluations of every run in the database. Figures are of the newest {number(most)} of each."
    return section("Runs", about, table(heads, rows, words=2))
