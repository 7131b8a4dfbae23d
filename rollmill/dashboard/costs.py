"""What a solved attempt costs: tokens sampled for it, and seconds of engines and trainers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping

from markupsafe import Markup

from rollmill.dashboard.charts import Axes, Point, Series, line_chart
from rollmill.dashboard.figures import Event, finite
from rollmill.dashboard.queries import StepCost
from rollmill.dashboard.render import render
from rollmill.dashboard.scales import duration, number


def costs_chapter(steps: Mapping[int, StepCost], trained: Mapping[int, float], busy: Iterable[Event]) -> Markup:
    """Empty if nothing was solved. `trained`: when each step ended, in seconds since the epoch; step 0: when the stage
    began."""
    solved = {step: cost.solved for step, cost in sorted(steps.items()) if cost.solved}
    if not solved:
        return Markup("")
    tokens: list[Point] = [(step, steps[step].tokens / solved[step]) for step in solved]
    engine, trainer = ({step: of[step] for step in steps if step in of} for of in _seconds(trained, busy))
    series = [
        Series(name, [(step, seconds[step] / solved[step]) for step in solved if step in seconds], colour, True)
        for name, seconds, colour in (("engines", engine, "steel"), ("trainer", trainer, "ember"))
    ]
    series = [one for one in series if one.points]
    everything = sum(solved.values())
    last = list(solved)[-max(1, len(solved) // 10) :]
    recent = sum(steps[step].tokens for step in last) / sum(solved[step] for step in last)
    when = f"steps {last[0]} to {last[-1]}" if len(last) > 1 else f"step {last[0]}"
    tiles = [
        ("Solved", number(everything), f"of {number(sum(cost.attempts for cost in steps.values()))} attempts"),
        ("Tokens per solved attempt", number(round(sum(c.tokens for c in steps.values()) / everything)), "sampled"),
        ("Lately", number(round(recent)), when),
        ("Engine time", duration(sum(engine.values()) / everything), "per solved attempt"),
        ("Trainer time", duration(sum(trainer.values()) / everything), "per solved attempt"),
    ]
    per_attempt = line_chart([Series("", tokens, "plum", smooth=True)], Axes("step", "tokens", floor=0.0))
    times = line_chart(series, Axes("step", "seconds", duration, floor=0.0)) if series else None
    return render("overview", "costs", tiles, per_attempt, times)


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
        counted = event.get("what") != "wait" and end > start >= trained.get(0, 0.0) and place < len(order)
        if found is not None and counted:
            found[order[place]] = found.get(order[place], 0.0) + end - start
    return engines, trainers
