"""A trajectory in a terminal: its facts, the conversation or the exact tokens, its grades.

Everything printed here may come from a model, a tool or a user, so it goes through `safe`: none of it can move the
cursor, recolour the screen or hide behind control characters.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollmill.chat.tokenizer import Tokenizer
from rollmill.trajectories.table_rows import FeedbackRow, LedgerEntry, TrajectoryRow
from rollmill.types import CUT, Grade, Segment, Span, Trajectory

STATES = {
    "running": "blue",
    "finished": "cyan",
    "graded": "green",
    "failed": "red",
    "quarantined": "magenta",
    "deleted": "dim",
}
_ROLES = {"system": "magenta", "user": "cyan", "assistant": "green", "tool": "yellow"}
# C0 and C1 controls except tab and line feed, changes of direction, half characters
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_HEAT = ((-0.2, "green"), (-1.0, "yellow"), (-3.0, "dark_orange"), (-math.inf, "red"))

SampledAnswer = tuple[Segment, list[Span]]


def safe(text: str, style: str = "") -> Text:
    return Text(_CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text), style)


def print_facts(
    console: Console, row: TrajectoryRow, group: Sequence[TrajectoryRow], entries: Sequence[LedgerEntry] = ()
) -> None:
    sampled = "" if row.tokens is None else f"{row.tokens}, {row.sampled_tokens} of them sampled"
    facts = {
        "task": " · ".join(part for part in (row.task_id, row.family, row.split) if part),
        "run": f"{row.run} · {row.traffic}",
        "tokens": sampled,
        "segments": f"{row.segments} ({row.causes})" if row.segments and row.causes else "",
        "sampled by": versions(row),
        "took": "" if row.finished_at is None else duration(row.finished_at - row.created_at),
        "reason": row.reason or "",
    }
    told = {"family", "split", "run"}
    facts |= {str(key): _as_text(value) for key, value in row.provenance.items() if key not in told}
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in (*facts.items(), *(("ledger", _entry_line(entry)) for entry in entries)):
        if value:
            table.add_row(safe(name), safe(value))
    if group:
        table.add_row("group", _group_line(row, group))
    title = safe(f"{row.id} ", "bold") + safe(f"{row.state} ", STATES[row.state])
    console.print(title + reward_text(row.reward), soft_wrap=True)  # a rule would cut a long id
    console.print(table)


def _entry_line(entry: LedgerEntry) -> str:
    step = f"in step {entry.step}" if entry.step is not None else ""
    origin = f"admitted from {entry.origin}" if entry.origin else ""
    return " · ".join(part for part in (entry.run, f"{entry.state} {step}".strip(), entry.reason, origin) if part)


def _group_line(row: TrajectoryRow, group: Sequence[TrajectoryRow]) -> Text:
    """The rewards of the whole group, this one underlined: how it compares is what it is trained on."""
    line = safe(f"{row.group_id} ")
    for member in group:
        reward = safe(member.state, "dim") if member.reward is None else reward_text(member.reward)
        if member.id == row.id:
            reward.stylize("underline bold")
        line += Text(" ") + reward
    return line


def print_conversation(console: Console, trajectory: Trajectory, longest: float) -> None:
    spoken = sum(message.get("role") == "assistant" for message in trajectory.messages)
    answers = _answers_told(trajectory, spoken)
    waiting = iter(answers or ())
    for message in trajectory.messages:
        answer = next(waiting, None) if message.get("role") == "assistant" else None
        _print_message(console, message, _answer_note(answer) if answer else str(message.get("name") or ""), longest)
    if answers is None:
        # the client rewrote its history: better apart than beside the wrong words
        console.print(safe("\nanswers, in the order of their segments", "dim"))
        for segment in trajectory.segments:
            for spans in segment.answers():
                console.print(safe(f"  {segment.id} ({segment.cause})  {_answer_note((segment, spans))}", "dim"))


def print_messages(console: Console, messages: Sequence[Mapping[str, Any]], longest: float) -> None:
    """A conversation that has no record of tokens."""
    for message in messages:
        _print_message(console, message, "", longest)


def _print_message(console: Console, message: Mapping[str, Any], note: str, longest: float) -> None:
    role = str(message.get("role", "?"))
    console.print()
    console.print(safe(role, f"bold {_ROLES.get(role, 'white')}") + safe(f"  {note}" if note else "", "dim"))
    for part in _body(message):
        style = _ROLES["assistant"] if role == "assistant" else ""
        console.print(safe(_cut(part, longest), style), soft_wrap=True)


def print_tokens(console: Console, trajectory: Trajectory, tokenizer: Tokenizer) -> None:
    """What the trainer gets: context dim, sampled tokens from green (certain) to red (a surprise)."""
    for segment in trajectory.segments:
        shared = segment.parent[1] if segment.parent else 0
        line, before = Text(), -1
        for position in range(shared, len(segment.tokens)):
            index = int(segment.policy[position])
            if index not in (-1, before):
                line.append(f"⟨{segment.policies[index].line}@{segment.policies[index].number}⟩", "bold blue")
                before = index
            style = _heat(float(segment.logprobs[position])) if segment.sampled[position] else "dim"
            line.append_text(safe(tokenizer.decode([int(segment.tokens[position])]), style))
        origin = f", after {shared} tokens of {segment.parent[0]}" if segment.parent else ""
        console.print(safe(f"\nsegment {segment.id} ({segment.cause}{origin})", "bold"))
        console.print(line, soft_wrap=True)


def print_grades(
    console: Console, rewards: Sequence[tuple[int, Grade]], feedback: Sequence[FeedbackRow], longest: float
) -> None:
    for reward_id, reward in rewards:
        parts = [f"{name} {value:g}" for name, value in reward.parts.items()]
        note = "".join(f"  {part}" for part in (reward.grader, ", ".join(parts)) if part)
        console.print(Text(f"\nreward #{reward_id}  ", "bold") + reward_text(reward.value) + safe(note, "dim"))
        for name, value in reward.evidence.items():
            console.print(safe(f"  {name}: ", "dim") + safe(_cut(_as_text(value), longest)), soft_wrap=True)
    for said in feedback:
        value = "" if said.value is None else f" {said.value:g}"
        console.print(safe(f"\nfeedback  {said.kind}{value}  ", "bold") + safe(_cut(_as_text(said.data), longest)))


def reward_text(reward: float | None) -> Text:
    return safe("" if reward is None else f"{reward:g}", "green" if (reward or 0) > 0 else "red")


def versions(row: TrajectoryRow) -> str:
    if row.newest_version is None:
        return ""
    oldest = f"{row.oldest_version}–" if row.oldest_version != row.newest_version else ""
    return f"{row.line}@{oldest}{row.newest_version}"


def duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _answers_told(trajectory: Trajectory, spoken: int) -> list[SampledAnswer] | None:
    """The answers on the path to the segment whose conversation the messages are, if one has as many as they do."""
    known = {segment.id: segment for segment in trajectory.segments}
    for segment in reversed(trajectory.segments):
        path: list[SampledAnswer] = []
        at: Segment | None = segment
        limit = len(segment.tokens)
        while at is not None:
            path = [(at, spans) for spans in at.answers() if spans[-1].end <= limit] + path
            limit = min(limit, at.parent[1]) if at.parent else 0
            at = known[at.parent[0]] if at.parent else None
        if len(path) == spoken:
            return path
    return None


def _answer_note(answer: SampledAnswer) -> str:
    segment, spans = answer
    start, end = spans[0].start, spans[-1].end
    used = [segment.policies[index] for index in dict.fromkeys(segment.policy[start:end].tolist())]
    parts = [" → ".join(f"{policy.line}@{policy.number}" for policy in used), f"{end - start} tokens"]
    if end > start:
        parts.append(f"mean probability {math.exp(float(segment.logprobs[start:end].mean())):.2f}")
    parts += dict.fromkeys(f"{span.engine} ({span.region})" for span in spans)
    parts.append(duration(spans[-1].ended_at - spans[0].started_at))
    parts.append({"stop": "", "length": CUT, "abort": "aborted"}[spans[-1].finish])
    return " · ".join(part for part in parts if part)


def _body(message: Mapping[str, Any]) -> Iterator[str]:
    content = message.get("content")
    if isinstance(content, list):  # OpenAI's typed parts
        content = "\n".join(str(part.get("text", part)) if isinstance(part, dict) else str(part) for part in content)
    if content:
        yield str(content)
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            yield f"▶ {function.get('name')}{_arguments(function.get('arguments'))}"
        else:
            yield f"▶ {_as_text(call)}"


def _arguments(raw: object) -> str:
    """One line an argument, text as it reads; what is not JSON stays as the model wrote it."""
    try:
        parsed = json.loads(str(raw))
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        return f" {raw}"
    lines = []
    for name, value in parsed.items():
        text = _as_text(value)
        indented = text if "\n" not in text else "".join(f"\n      {line}" for line in text.splitlines())
        lines.append(f"\n    {name}: {indented}")
    return "".join(lines)


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _cut(text: str, longest: float) -> str:
    """Long text keeps its beginning and its end: errors tend to stand last."""
    if len(text) <= longest:
        return text
    head, tail = int(longest * 2 / 3), int(longest / 3)
    return f"{text[:head]}\n… {len(text) - head - tail} characters left out, --full shows them …\n{text[-tail:]}"


def _heat(logprob: float) -> str:
    return next(style for floor, style in _HEAT if logprob >= floor)
