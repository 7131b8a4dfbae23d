"""The report: figures that add up, a page that stands alone, and text from models that stays text."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import escape

from rollmill import dashboard
from rollmill.dashboard.charts import NARROW, WIDE, Axes, Series, column_chart, line_chart, smooth, stacked_chart
from rollmill.dashboard.conversation import MAX_TURNS, conversation
from rollmill.dashboard.figures import RunEvents, figures
from rollmill.dashboard.render import render
from rollmill.dashboard.report import example_trajectories, write_report
from rollmill.dashboard.scales import clock, clock_ticks, duration, linear, logarithmic, number, power, size
from rollmill.dashboard.timeline import Stretch, busy_share, lanes
from rollmill.errors import StorageError
from rollmill.types import Grade, Trajectory, TrajectoryState
from tests.evals.synthetic import FULL_BYTES, PHASES, Script, decode, demo_run, trajectories, trajectory

VOID = frozenset({"br", "hr", "img", "input", "meta", "link"})
HOSTILE = "</pre></script><script>alert(1)</script><img src=x onerror=alert(2)>\" onmouseover='alert(3)' &amp; ]]>"


class Page(HTMLParser):
    """Parses a page as a browser would and notes what it holds."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs") / "demo"
    demo_run().write(directory / "events")
    write_report(directory, seed=2, trajectories=trajectories(), decode=decode)
    return directory


@pytest.fixture(scope="module")
def summary(run: Path) -> dict[str, Any]:
    return json.loads((run / "report.json").read_text())


@pytest.fixture(scope="module")
def page(run: Path) -> Page:
    return Page((run / "report.html").read_text())


def report(tmp_path: Path, events: Script, **options: Any) -> tuple[dict[str, Any], str]:
    events.write(tmp_path / "events")
    path = write_report(tmp_path, **options)
    return json.loads((tmp_path / "report.json").read_text()), path.read_text()


# --- figures


def test_headline_figures(summary: dict[str, Any]) -> None:
    assert (summary["name"], summary["seed"], summary["format"]) == ("demo", 2, 2)
    assert (summary["solve_rate_before"], summary["solve_rate_after"]) == (0.418, 0.867)
    low, high = summary["solve_rate_after_interval"]
    assert low < 0.867 < high
    assert summary["gain"] == pytest.approx(0.449) and summary["gain_interval"][0] > 0.35
    assert len(summary["evals"]) == 6 and len(summary["gains"]) == 3
    assert list(summary["phases"]) == PHASES
    assert sum(summary["phases"].values()) == pytest.approx(summary["seconds"], rel=0.01)


def test_every_part_of_the_run_is_summed_up(summary: dict[str, Any]) -> None:
    assert summary["training"]["steps"] == 60 and summary["training"]["trained_tokens"] == 60 * 1800
    assert summary["training"]["solve_rate_last"] > summary["training"]["solve_rate_first"] + 0.25
    assert summary["rollouts"]["total"] == summary["rollouts"]["graded"] + summary["rollouts"]["failed"] == 480
    counts = summary["staleness"]["counts"]
    assert summary["staleness"]["max"] == 3 and list(counts) == ["0", "1", "2", "3"]
    weighted = sum(int(level) * count for level, count in counts.items())
    assert summary["staleness"]["mean"] == pytest.approx(weighted / sum(counts.values()))
    assert summary["weights"]["deltas"] == 60 and summary["weights"]["snapshots"] == 2  # the base line has one too
    assert summary["weights"]["delta_ratio"] == pytest.approx(summary["weights"]["delta_bytes"] / FULL_BYTES)
    assert summary["engines"]["engine-away"]["region"] == "away"
    assert summary["engines"]["engine-home"]["switches_in_flight"] == 60
    assert summary["pauses"]["count"] == 120 and summary["restarts"] == 1
    mismatch, drift = summary["mismatch"], summary["drift"]
    assert 0 < mismatch["k3"]["mean"] < mismatch["p99"]["mean"] < 1e-2
    assert mismatch["tokens"] == 60 * 150 and list(mismatch["left_out"].values()) == [60 * 30]
    assert mismatch["k3"]["worst"] < drift["k3"]["mean"] < drift["k3"]["worst"] and 0.9 < drift["ess"] < 1


def test_a_step_that_ran_again_after_a_crash_counts_once() -> None:
    script = demo_run(steps=6)
    once = figures(RunEvents.of(script.events), name="x", seed=0)
    again = [event for event in script.events if event["kind"] in ("step", "publish") and event.get("version") == 4]
    twice = figures(RunEvents.of([*script.events, *again]), name="x", seed=0)
    assert once["training"] == twice["training"] and once["weights"] == twice["weights"]


def test_gain_is_paired_by_task_where_outcomes_are_known(tmp_path: Path) -> None:
    script = Script()
    for label, solved in (("before", [True, False]), ("after", [True, True])):
        by_task = {f"t{index}": solved for index in range(30)}
        rates = {"solved": 30 * sum(solved), "attempts": 60, "rate": sum(solved) / 2, "low": 0.0, "high": 1.0}
        script.emit("main", "eval", label=label, split="heldout", mode="sampled", by_task=by_task, **rates)
    summary, _ = report(tmp_path, script)
    low, high = summary["gain_interval"]
    assert summary["gain"] == 0.5 and 0.3 < low < 0.5 < high < 0.7, "unpaired it would be far wider"


def test_an_evaluation_without_interval_gets_wilsons(tmp_path: Path) -> None:
    script = Script()
    script.emit("main", "eval", label="before", split="heldout", mode="sampled", solved=81, attempts=263)
    summary, _ = report(tmp_path, script)
    assert summary["solve_rate_before_interval"] == [pytest.approx(0.2553, abs=1e-4), pytest.approx(0.3662, abs=1e-4)]
    assert summary["gain"] is None


@pytest.mark.parametrize("kept", [0, 1, 30, 120])
def test_an_unfinished_run_has_a_report_too(tmp_path: Path, kept: int) -> None:
    script = demo_run(steps=10)
    script.events = sorted(script.events, key=lambda event: event["at"])[:kept]
    summary, text = report(tmp_path, script)
    assert summary["solve_rate_after"] is None and "nan" not in text.lower().replace("nanos", "")
    Page(text)


def test_odd_numbers_in_events_become_null_not_nan(tmp_path: Path) -> None:
    script = Script()
    for step in range(1, 8):
        odd: dict[str, Any] = {"loss": float("nan"), "reward_mean": None, "solve_rate": "high"}
        odd["mismatch_k3"] = float("inf")
        odd["mismatch_left_out"] = {"x": None} if step % 2 else "many"
        script.emit("trainer", "step", step=step, steps=7, seconds=1.0, staleness_counts={"0": 5, "x": 1}, **odd)
    summary, text = report(tmp_path, script)
    assert summary["training"]["reward_last"] is None and summary["mismatch"]["k3"]["mean"] is None
    assert "NaN" not in (tmp_path / "report.json").read_text() and "NaN" not in text


def test_a_run_without_any_difference_says_so(tmp_path: Path) -> None:
    script = demo_run(steps=10)
    said = "agree bit for bit: 1,500 sampled tokens were computed again, and no log-prob differs"
    assert said not in report(tmp_path / "fast", script)[1]
    for event in script.events:
        event |= {f"mismatch_{name}": 0.0 for name in ("k1", "k3", "p99", "max") if f"mismatch_{name}" in event}
    assert said in report(tmp_path / "exact", script)[1]


def test_examples_are_those_the_evaluations_named(tmp_path: Path) -> None:
    script = Script()
    for label in ("before", "after"):
        named = {"example_solved": f"{label}-good", "example_unsolved": f"{label}-bad"}
        script.emit("main", "eval", label=label, split="heldout", mode="sampled", solved=1, attempts=2, **named)
    script.write(tmp_path / "events")
    assert list(example_trajectories(tmp_path).values()) == ["before-bad", "after-bad", "after-good"]
    assert example_trajectories(tmp_path / "empty") == {}


# --- the page


def test_the_page_stands_alone(run: Path, page: Page) -> None:
    text = (run / "report.html").read_text()
    assert not page.open, "every element is closed"
    for name, attributes in page.tags:
        assert name not in ("link", "img", "iframe", "object", "base", "form")
        assert not any(key.startswith("on") for key in attributes)
        assert all(not str(attributes.get(key, "#")).strip("#").startswith(("http", "//")) for key in ("src", "href"))
    assert "http://" not in text and "https://" not in text and "@import" not in text and "url(" not in text
    policy = next(one["content"] for one in page.named("meta") if one.get("http-equiv") == "Content-Security-Policy")
    assert policy and "default-src 'none'" in policy and re.search(r"script-src 'sha256-[A-Za-z0-9+/=]{44}'", policy)
    assert len(page.named("script")) == 1
    assert len(text) < 1_500_000


def test_the_page_has_every_chart_in_two_widths(page: Page) -> None:
    drawings = page.named("svg")
    labels = {one["aria-label"] for one in drawings}
    assert len(drawings) == 2 * len(labels) and all(one["role"] == "img" for one in drawings)
    wanted = ("Reward", "Solve rate in training", "Staleness", "Log-prob mismatch", "Bytes published", "Density")
    wanted += ("From publish to engine", "Pause", "Timeline of the run", "held-out solve rates")
    for words in wanted:
        assert any(words in str(label) for label in labels), words


def test_the_page_says_what_happened(page: Page) -> None:
    words = " ".join(" ".join(page.text).replace("\N{NO-BREAK SPACE}", " ").split())
    assert "rose from 41.8 % to 86.7 % , +44.9 points" in words
    assert "engine-away was started again" in words
    assert "Before training" in words and "Solved" in words and "calls 1" in words
    assert "Every version (60)" in words and "To away" in words and "Longest pause" in words


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    script = demo_run(steps=6)
    for event in script.events:
        for key in ("engine", "region", "what", "task", "phase", "split", "label", "target"):
            if isinstance(event.get(key), str):
                event[key] += HOSTILE
    script.emit("trainer", "warning", text=HOSTILE)
    hostile = trajectory(True, [1, 2])
    hostile.task_id = hostile.provenance["family"] = HOSTILE
    for message in hostile.messages:
        message["content"] = HOSTILE
        message["name"] = HOSTILE
    call = {"function": {"name": HOSTILE, "arguments": json.dumps({HOSTILE: [HOSTILE]})}}
    hostile.messages[2]["tool_calls"] = [call, {"function": {"name": "x", "arguments": HOSTILE}}, HOSTILE, None]
    hostile.rewards = [(1, Grade(1.0, {HOSTILE: 1.0}, {HOSTILE: {HOSTILE: HOSTILE}}, HOSTILE))]
    shown = {HOSTILE: hostile}
    _, text = report(tmp_path, script, trajectories=shown, decode=lambda ids: HOSTILE)
    page = Page(text)
    assert not page.open and len(page.named("script")) == 1 and not page.named("img")
    assert not any(key.startswith("on") for _, attributes in page.tags for key in attributes)
    assert "alert(1)" in " ".join(page.text)  # it is shown, as text


def test_a_report_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    (tmp_path / "report.json").mkdir()
    with pytest.raises(StorageError, match="cannot be written"):
        write_report(tmp_path)
    assert not list(tmp_path.glob("*.part"))


# --- trajectories


def test_answers_show_which_weights_sampled_each_token() -> None:
    text = conversation("Solved", trajectory(True, [58, 59, 60]), decode)
    for version in (58, 59, 60):
        assert f"demo v{version}" in text
    assert text.count('class="switched"') == 2  # both changes happen inside the second answer
    tokens = Page(text).named("span")
    assert sum("token" in str(one.get("class")) for one in tokens) == 22
    assert "probability" in text and re.search(r"token policy\d heat\d", text) and "mean log-prob −" in text


def test_the_whole_id_is_shown_and_can_be_selected_with_one_click() -> None:
    one = replace(trajectory(True, [58]), id="run-0123abcd-g000017-3-" + "f" * 150)
    assert f">{one.id}</code>" in conversation("Solved", one)


def test_values_too_deep_for_json_do_not_break_the_page() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    call = {"function": {"name": "edit", "arguments": "[" * 100_000}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    rewards = [(1, Grade(0.0, evidence={"outcome": deep}))]
    one = replace(trajectory(False, [58]), messages=[message], rewards=rewards)
    assert "too deep to show" in conversation("Failed", one)


def test_without_a_tokenizer_the_conversation_is_still_there() -> None:
    text = conversation("Solved", trajectory(True, [3]))
    assert 'class="tokens"' not in text and "demo v3" in text and "return ( x - 8 )" in text


def test_tokens_are_not_pinned_on_the_wrong_message() -> None:
    told = trajectory(True, [3])
    del told.messages[-1]  # three assistant messages, four answers
    text = conversation("Odd", told, decode)
    assert text.count('class="tokens"') == 4
    assert text.index("1 passed") < text.index('class="tokens"')


def test_a_chain_of_contexts_is_read_from_its_tokens() -> None:
    """The messages are those of the last context; the earlier ones are in the tokens only."""
    chain = trajectory(True, [3])
    first = chain.segments[0]
    second = replace(first, id="t0.1", cause="summary", parent=(first.id, 2))
    chain.segments.append(second)
    text = conversation("Long", chain, decode)
    assert text.index("Context 1 of 2") < text.index("Context 2 of 2") < text.index("a summary of the one before")
    assert text.count('class="tokens"') == 8 and "2 contexts (1 by summary)" in text
    prompts = [part.split("</pre>")[0].removeprefix("<pre>") for part in text.split('"turn context">')[1:]]
    start = first.spans[0].start
    told = [escape(decode(first.tokens[begin:start].tolist())) for begin in (0, 2)]
    assert told[0] in prompts[0] and told[1] in prompts[len(prompts) // 2], "what both share is shown once"
    assert "Context 1" not in conversation("Long", chain), "without a tokenizer: the messages"
    chain.segments += [second] * 1000
    assert "more contexts are left out" in conversation("Long", chain, decode)


def test_a_context_of_many_turns_is_cut() -> None:
    chain = trajectory(True, [3])
    first = chain.segments[0]
    chain.segments[0] = replace(first, spans=[first.spans[0]] * (MAX_TURNS + 7))
    chain.segments.append(replace(first, id="t0.1", cause="summary"))
    text = conversation("Long", chain, decode)
    assert text.count('class="tokens"') == MAX_TURNS and "7 more turns are left out" in text
    assert "1 more contexts are left out" in text


def test_an_answer_that_was_cut_off_names_what_limits_it() -> None:
    cut = trajectory(True, [3])
    assert "max_answer_tokens" not in conversation("Whole", cut, decode)
    cut.segments[0].spans[-1].finish = "length"
    assert "cut off by rollouts.max_answer_tokens, the request" in conversation("Cut", cut, decode)


def test_an_answer_continued_elsewhere_is_one_answer() -> None:
    moved = trajectory(True, [3])
    spans = moved.segments[0].spans
    first = spans[1]
    spans[1:2] = [
        type(first)(**{**vars(first), "end": first.start + 5, "finish": "abort"}),
        type(first)(**{**vars(first), "start": first.start + 5, "engine": "engine-away"}),
    ]
    text = conversation("Moved", moved, decode)
    assert "engine-home → engine-away" in text and text.count('class="tokens"') == 4


def test_long_output_is_cut_in_the_middle() -> None:
    long = trajectory(True, [3])
    long.messages[3]["content"] = "head " + "x" * 5_000_000 + " tail"
    long.messages += [{"role": "tool", "content": "again"}] * 1000
    text = conversation("Long", long, decode)
    assert len(text) < 200_000 and "head" in text and " tail" in text and "characters left out" in text
    assert "more turns are left out" in text


def test_an_ungraded_trajectory_says_why() -> None:
    failed = Trajectory("t", [], state=TrajectoryState.failed, reason="the machine <died>")
    assert "Not graded: failed (the machine &lt;died&gt;)" in conversation("Failed", failed)


# --- drawing


def parse(drawing: str) -> ElementTree.Element:
    return ElementTree.fromstring(drawing)


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("points", [0, 1, 2, 5000])
def test_charts_are_well_formed_and_inside_their_frame(width: float, points: int) -> None:
    values = [(float(index), abs(float(np.sin(index)))) for index in range(points)]
    axes = Axes("step", "share", floor=0.0)
    cloud = [Series("a", values, "ember", smooth=True), Series("b", values, "steel", dots=True)]
    charts = [
        line_chart(cloud, axes),
        line_chart([Series("a", values, "ember")], Axes("step", "share", log=True)),
        stacked_chart([(at, {0: 1.0, 3: value}) for at, value in values], axes),
    ]
    if points:
        charts.append(column_chart([(at, value, "ember") for at, value in values], axes))
    drawings = [chart(width, "x") for chart in charts]
    assert max(map(len, drawings)) < 250_000
    for drawing in map(parse, drawings):
        for rect in drawing.iter("rect"):
            left, right = float(rect.attrib["x"]), float(rect.attrib["x"]) + float(rect.attrib["width"])
            assert -0.5 * width <= left <= right <= 1.5 * width and float(rect.attrib["height"]) >= 0


def test_smoothing_keeps_straight_lines_straight() -> None:
    line = [(float(at), 3.0 * at - 7) for at in range(50)]
    assert [value for _, value in smooth(line)] == pytest.approx([value for _, value in line])
    noisy = [(at, value + (-1) ** index) for index, (at, value) in enumerate(line)]
    assert max(abs(a[1] - b[1]) for a, b in zip(smooth(noisy)[2:-2], line[2:-2], strict=True)) < 0.5


def test_lanes_and_busy_share() -> None:
    run = RunEvents.of(demo_run(steps=6).events)
    assert list(lanes(run)) == ["trainer", "dispatcher", "engine-away", "engine-home"]
    stretches = [
        Stretch("step", 0.0, 2.0),
        Stretch("publish", 1.0, 3.0),
        Stretch("wait", 3.0, 9.0),
        Stretch("step", 9.0, 20.0),
    ]
    assert busy_share(stretches, 0.0, 10.0) == pytest.approx(0.4)


def test_text_is_escaped_and_only_text_that_can_be_shown_is_shown() -> None:
    assert render("pieces", "bold", "<i>", '"x"') == '<b class="&#34;x&#34;">&lt;i&gt;</b>'
    assert render("pieces", "bold", render("pieces", "code", "x")) == "<b><code>x</code></b>"
    assert render("pieces", "code", "a\x00b\u202ec\ud800d\r\n") == "<code>a\ufffdb\ufffdc\ufffdd\n</code>"
    assert render("pieces", "code", "tab\tand\nline") == "<code>tab\tand\nline</code>"


def test_no_template_prints_text_as_markup() -> None:
    for template in (Path(dashboard.__file__).parent / "templates").iterdir():
        assert not re.search(r"\|\s*(safe|forceescape)|autoescape|Markup", template.read_text()), template.name


def test_axes_have_round_numbers() -> None:
    assert linear([0.12, 0.87], 0, 1, floor=0.0).ticks() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert linear([5.0, 5.0], 0, 1).high > 5 and linear([], 0, 1).ticks()
    scale = logarithmic([3e-7, 2e-3], 100, 0)
    assert scale.ticks() == pytest.approx([1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2][::2]) and scale(1e-7) == 100
    assert clock_ticks(3.0, 200.0, 8) == [30, 60, 90, 120, 150, 180]


def test_numbers_read_well() -> None:
    words = [
        number(12345),
        number(0.1234),
        power(4.2e-6),
        power(1e-3),
        size(1_912_000),
        duration(252),
        duration(0.0123),
    ]
    plain = [re.sub("[\N{NO-BREAK SPACE}\N{NARROW NO-BREAK SPACE}]", " ", word) for word in words]
    assert plain == ["12 345", "0.123", "4.2·10⁻⁶", "10⁻³", "1.91 MB", "4 min 12 s", "12.3 ms"]
    assert [clock(65), clock(7230.5)] == ["1:05", "2:00:30.5"]


def test_losses_are_drawn_by_stage_and_held_out_ones_by_source(tmp_path: Path) -> None:
    script = Script()
    for stage, losses in (("midtrain", [3.0, 2.0, 1.0]), ("sft", [4.0, 3.5])):
        for step, loss in enumerate(losses, 1):
            script.now += 1
            script.emit("trainer", "document_step", stage=stage, step=step, steps=3, loss=loss, tokens=10)
            script.emit("trainer", "heldout_loss", stage=stage, source="<odd>", step=step, loss=loss + 0.5)
    script.write(tmp_path / "events")
    write_report(tmp_path, seed=0, trajectories={}, decode=decode)
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["midtraining"] == {"steps": 5, "tokens": 50, "loss_first": 3.0, "loss_last": 3.5}
    assert found["heldout_losses"] == [
        {"stage": "midtrain", "source": "<odd>", "first": 3.5, "last": 1.5},
        {"stage": "sft", "source": "<odd>", "first": 4.5, "last": 4.0},
    ]
    page = (tmp_path / "report.html").read_text()
    assert "Loss of midtrain" in page and "Loss of sft" in page and "&lt;odd&gt;" in page and "<odd>" not in page


# --- faults of a small run


def test_a_smoothed_line_stays_where_its_points_are() -> None:
    points = [(float(step), value) for step, value in enumerate([0.5, 0.25, 0.0, 0.0, 0.0, 0.0])]
    assert min(level for _, level in smooth(points)) >= 0.0
    assert max(level for _, level in smooth([(at, 1 - value) for at, value in points])) <= 1.0


def test_labels_of_equal_levels_stand_apart() -> None:
    axes = Axes("step", "solved", references={"before": 0.5, "after": 0.5, "other": 0.51})
    drawing = ElementTree.fromstring(line_chart([Series("", [(0, 0.0), (1, 1.0)], "ember")], axes)(WIDE, "chart"))
    heights = sorted(float(one.attrib["y"]) for one in drawing.iter("text") if one.text in axes.references)
    assert len(heights) == 3 and min(np.diff(heights)) >= 12


def test_four_attempts_that_agree_do_not_make_a_gain_certain(tmp_path: Path) -> None:
    script = Script()
    for label in ("before", "after"):
        outcomes = {f"t{number}": [number == 0] for number in range(4)}
        script.emit(
            "main", "eval", label=label, split="heldout", mode="sampled", solved=1, attempts=4, by_task=outcomes
        )
    summary, text = report(tmp_path, script)
    low, high = summary["gain_interval"]
    assert low < -0.2 and high > 0.2 and "+0.0 to +0.0" not in text
    assert "never occur in training" not in text, "no sentence about families that were not measured"


def test_the_time_in_which_a_run_was_stopped_is_no_part_of_its_duration(tmp_path: Path) -> None:
    script = Script()
    for phase, stop in (("sft", 0.0), ("rl", 3000.0), ("rl", 500.0)):  # rl is stopped in its middle and goes on
        script.now += stop
        script.emit("main", "phase", phase=phase, state="start")
        for _ in range(5):
            script.now += 20.0
            script.emit("trainer", "step", stage=phase, step=1)
        if phase == "sft":
            script.emit("main", "phase", phase=phase, state="end")
    summary, _ = report(tmp_path, script)
    assert summary["seconds"] == pytest.approx(300.0)


def test_each_environment_is_shown_apart(tmp_path: Path) -> None:
    script = Script()
    for index in range(12):
        name = "repairs" if index < 8 else "<tickets>"
        facts = {"trajectory": f"r{index}", "group": f"g{index // 4}", "environment": name, "split": "train"}
        solved = {"state": "graded", "reward": float(index % 2), "solved": bool(index % 2)}
        script.emit("dispatcher", "rollout", **facts, **solved, turns=2, tokens=40 + index, seconds=3.0)
    conduct = {task: [{"solved": task == "a", "lost": False}] for task in ("a", "b")}
    where = {"label": "after", "split": "heldout", "mode": "sampled", "solved": 1, "attempts": 2}
    script.emit("main", "eval", **where, conduct=conduct, environments={"a": "repairs", "b": "<tickets>"})
    summary, text = report(tmp_path, script)
    assert list(summary["environments"]) == ["<tickets>", "repairs"]
    own = summary["environments"]["repairs"]
    assert (own["groups"], own["total"], own["graded"], own["solve_rate"], own["tokens"]) == (2, 8, 8, 0.5, 43.5)
    assert own["share"] == pytest.approx(2 / 3) and own["reward"] == 0.5
    cells = [words for words in Page(text).text if words.strip()]
    assert cells.count("repairs") == cells.count("<tickets>") == 2 and "43.5" in cells


def test_evaluations_are_shown_by_family_and_with_their_mean_reward(tmp_path: Path) -> None:
    script = Script()
    conduct = {
        "a": [{"solved": False, "reward": 0.8, "lost": False}, {"solved": False, "reward": None, "lost": True}],
        "b": [{"solved": True, "reward": 1.0, "lost": False}],
    }
    rates = {"solved": 1, "attempts": 2, "rate": 0.5, "low": 0.1, "high": 0.9, "k": 2, "solved_once": 0.5}
    rewards = {"reward": 0.9, "reward_low": 0.4, "reward_high": 1.0, "families": {"a": "sums", "b": "<b>"}}
    script.emit("main", "eval", label="after", split="heldout", mode="sampled", conduct=conduct, **rates, **rewards)
    summary, text = report(tmp_path, script)
    assert summary["evals"][0]["reward"] == 0.9 and summary["evals"][0]["solved_once"] == 0.5
    cells = [words for words in Page(text).text if words.strip()]
    script.emit("main", "eval", label="even", **rates, **{**rewards, "reward_low": 0.9, "reward_high": 0.9})
    assert "0.9" in Page(report(tmp_path, script)[1]).text  # no interval where nothing differs
    for words in ("sums", "<b>", "0.8", "0.9 (0.4 to 1)", "50.0\N{NO-BREAK SPACE}% (k = 2)"):
        assert words in cells, words


def test_evaluations_while_training_are_a_curve_over_versions(tmp_path: Path) -> None:
    script = demo_run(steps=20)
    for event in script.events:
        if event["kind"] == "eval":
            event["stage"] = "rl"
    for version in (5, 10, 15):
        for split, k, oldest, newest in (("heldout", 4, version, version), ("tickets", 1, version, version + 2)):
            rate = 0.4 + version / 50
            script.emit(
                *("evaluator", "eval"),
                **{"label": f"during-rl-{version}", "stage": "rl", "split": split, "mode": "sampled"},
                **{"version": version, "oldest": oldest, "newest": newest, "seconds": 1.0, "k": k},
                **{"solved": 20, "attempts": 50, "rate": rate, "low": rate - 0.1, "high": rate + 0.1},
                **{"reward": rate, "reward_low": rate - 0.1, "reward_high": rate + 0.1},
                **{"solved_once": min(1.0, rate + 0.2) if k > 1 else None},
            )
    summary, text = report(tmp_path, script)
    page = Page(text)
    labels = [svg["aria-label"] for svg in page.named("svg")]
    assert {"pass@1 over versions", "pass@k over versions", "mean reward over versions"} <= set(labels)
    (curve, _) = re.findall(r'<svg[^>]*aria-label="pass@1 over versions".*?</svg>', text, re.DOTALL)
    # a version that engines have left meanwhile stands between the versions that sampled; both ends belong to the curve
    for position in ("version 0", "version 5", "version 6", "version 20"):
        assert f"{position}\n" in curve or f"{position}&#10;" in curve, position
    assert "tickets" in curve and "5 to 7" in page.text
    kept = [one for one in summary["evals"] if one["label"] == "during-rl-10" and one["split"] == "tickets"]
    assert [(one["version"], one["oldest"], one["newest"], one["stage"]) for one in kept] == [(10, 10, 12, "rl")]
    assert summary["solve_rate_after"] == pytest.approx(0.867)
