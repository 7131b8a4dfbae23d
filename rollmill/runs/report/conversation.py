"""A trajectory as a conversation to read: turns, tool calls, results, and which weights sampled which token.

All text here was written by a model, a tool or a task. It reaches the page only through `markup`, which escapes it.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollmill.runs.report.markup import Markup, tag
from rollmill.runs.report.scales import number, percent
from rollmill.types import CUT, PolicyRef, Reward, Segment, Span, Trajectory

Decode = Callable[[Sequence[int]], str]
MAX_TEXT, MAX_TURNS, MAX_TOKENS = 6000, 200, 4000
ROLES = {"system": "System", "user": "Task", "assistant": "Model", "tool": "Tool", "context": "Prompt"}
CAUSES = {
    "start": "the first",
    "summary": "begins with a summary of the one before",
    "edit": "an earlier message was changed",
    "sub_agent": "a sub-agent",
    "retry": "an answer was asked for again",
    "fork": "a branch",
}


@dataclass(frozen=True)
class SampledTurn:
    """One turn of the model: tokens[start:end] of its segment."""

    segment: Segment
    spans: tuple[Span, ...]

    @property
    def start(self) -> int:
        return self.spans[0].start

    @property
    def end(self) -> int:
        return self.spans[-1].end

    def policies(self) -> list[PolicyRef | None]:
        known = self.segment.policies
        indices = self.segment.policy[self.start : self.end].tolist()
        return [known[index] if 0 <= index < len(known) else None for index in indices]


def conversation(title: str, trajectory: Trajectory, decode: Decode | None = None) -> Markup:
    """One trajectory to read. With `decode` (token ids to text) each answer also shows its exact tokens."""
    answers = list(_answers(trajectory))
    versions = sorted({(ref.line, ref.number) for answer in answers for ref in answer.policies() if ref})
    colours = {version: index % 6 for index, version in enumerate(versions)}
    forgotten = len(trajectory.segments) > 1 and _spoken(trajectory) != len(answers)  # messages are of the last context
    show = _contexts if forgotten and decode is not None else _turns
    return tag(
        "article",
        tag("header", tag("h3", title), _facts(trajectory, answers), _legend(versions, colours)),
        show(trajectory, answers, colours, decode),
        _rewards(trajectory),
        class_="trajectory",
    )


def _answers(trajectory: Trajectory) -> Iterator[SampledTurn]:
    """Spans that touch are one turn, which another engine continued."""
    for segment in trajectory.segments:
        joined: list[Span] = []
        for span in sorted(segment.spans, key=lambda span: span.start):
            if joined and joined[-1].end != span.start:
                yield SampledTurn(segment, tuple(joined))
                joined = []
            joined.append(span)
        if joined:
            yield SampledTurn(segment, tuple(joined))


def _spoken(trajectory: Trajectory) -> int:
    return sum(message.get("role") == "assistant" for message in trajectory.messages)


def _facts(trajectory: Trajectory, answers: Sequence[SampledTurn]) -> Markup:
    sampled = sum(answer.end - answer.start for answer in answers)
    tokens = sum(len(segment.tokens) for segment in trajectory.segments)
    facts = [
        tag("code", trajectory.id, title="`rollmill trajectories show` takes this id"),
        trajectory.task_id,
        *(f"{key} {trajectory.provenance[key]}" for key in ("family", "split", "mode") if key in trajectory.provenance),
        f"{number(tokens)} tokens, {number(sampled)} sampled",
    ]
    if len(trajectory.segments) > 1:
        causes = Counter(segment.cause for segment in trajectory.segments[1:])
        listed = ", ".join(f"{count} by {cause}" for cause, count in causes.items())
        facts.append(f"{len(trajectory.segments)} contexts ({listed})")
    return tag(
        "p",
        [tag("span", fact if isinstance(fact, Markup) else _cut(fact, 120)) for fact in facts if fact],
        class_="facts",
    )


def _legend(versions: Sequence[tuple[str, int]], colours: Mapping[tuple[str, int], int]) -> Markup:
    if not versions:
        return Markup("")
    chips = [tag("span", f"{line} v{n}", class_=f"version policy{colours[line, n]}") for line, n in versions]
    return tag("p", "Sampled by ", chips, class_="legend")


def _turns(
    trajectory: Trajectory,
    answers: Sequence[SampledTurn],
    colours: Mapping[tuple[str, int], int],
    decode: Decode | None,
) -> Markup:
    """The n-th answer belongs to the n-th assistant message. If their numbers differ, the tokens are shown apart."""
    messages = trajectory.messages[:MAX_TURNS]
    spoken = _spoken(trajectory)
    waiting = iter(answers if spoken == len(answers) else ())
    turns = []
    for message in messages:
        answer = next(waiting, None) if message.get("role") == "assistant" else None
        turns.append(_turn(message, answer, colours, decode))
    if len(trajectory.messages) > len(messages):
        turns.append(tag("li", f"{len(trajectory.messages) - len(messages)} more turns are left out.", class_="note"))
    if spoken != len(answers):
        turns.extend(
            _turn({"role": "assistant", "content": None}, answer, colours, decode) for answer in answers[:MAX_TURNS]
        )
    return tag("ol", turns, class_="turns")


def _contexts(
    trajectory: Trajectory,
    answers: Sequence[SampledTurn],
    colours: Mapping[tuple[str, int], int],
    decode: Decode | None,
) -> Markup:
    """Several contexts, each as the model saw it: the text of its prompts from the tokens, and its answers. The part
    that a context shares with the one before is shown once."""
    assert decode is not None
    turns: list[Markup] = []
    for index, segment in enumerate(trajectory.segments):
        if len(turns) > MAX_TURNS:
            left = len(trajectory.segments) - index
            turns.append(tag("li", f"{left} more contexts are left out.", class_="note"))
            break
        about = tag("small", CAUSES.get(segment.cause, segment.cause))
        turns.append(tag("li", tag("b", f"Context {index + 1} of {len(trajectory.segments)}"), about, class_="context"))
        reached = segment.parent[1] if segment.parent else 0
        own = [answer for answer in answers if answer.segment is segment]
        for answer in own[:MAX_TURNS]:
            text = decode(segment.tokens[reached : answer.start].tolist()) if answer.start > reached else ""
            turns += [_turn({"role": "context", "content": text}, None, colours, decode)] if text else []
            turns.append(_turn({"role": "assistant"}, answer, colours, decode))
            reached = answer.end
        if len(own) > MAX_TURNS:
            turns.append(tag("li", f"{len(own) - MAX_TURNS} more turns are left out.", class_="note"))
    return tag("ol", turns, class_="turns")


def _turn(
    message: Mapping[str, Any],
    answer: SampledTurn | None,
    colours: Mapping[tuple[str, int], int],
    decode: Decode | None,
) -> Markup:
    role = str(message.get("role", ""))
    calls = message.get("tool_calls")
    body = [_text_block(_content(message))]
    body.extend(_call(call) for call in (calls if isinstance(calls, list) else []))
    if answer is not None and decode is not None:
        body.append(_tokens(answer, colours, decode))
    note = _answer_note(answer) if answer is not None else str(message.get("name") or "")
    head = tag("div", tag("b", ROLES.get(role, role)), tag("small", _cut(note, 200)), class_="who")
    return tag("li", head, tag("div", body, class_="said"), class_=f"turn {role if role in ROLES else 'other'}")


def _content(message: Mapping[str, Any]) -> str:
    """Text of a message; OpenAI also allows a list of typed parts."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


def _text_block(text: str) -> Markup:
    return tag("pre", _cut(text, MAX_TEXT)) if text.strip() else Markup("")


def _call(call: Any) -> Markup:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return _text_block(str(call))
    arguments = str(function.get("arguments", ""))
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        arguments_block = _pairs(parsed, MAX_TEXT)
    else:
        arguments_block = _text_block(arguments)  # what the model wrote, though it is no JSON object
    return tag("div", tag("code", _cut(str(function.get("name", "")), 80)), arguments_block, class_="call")


def _pairs(values: Mapping[Any, Any], limit: int) -> Markup:
    terms = []
    for key, value in values.items():
        try:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        except RecursionError:
            text = "a value too deep to show"
        terms += [tag("dt", _cut(str(key), 80)), tag("dd", _cut(text, limit))]
    return tag("dl", terms) if terms else Markup("")


def _answer_note(answer: SampledTurn) -> str:
    logprobs = [value for value in answer.segment.logprobs[answer.start : answer.end].tolist() if math.isfinite(value)]
    parts = [f"{answer.end - answer.start} tokens"]
    if logprobs:
        parts.append("mean log-prob " + f"{sum(logprobs) / len(logprobs):.2f}".replace("-", "−"))
    parts.append(" → ".join(dict.fromkeys(span.engine for span in answer.spans)))
    if answer.spans[-1].finish != "stop":
        parts.append({"length": CUT, "abort": "aborted"}[answer.spans[-1].finish])
    return " · ".join(parts)


def _tokens(answer: SampledTurn, colours: Mapping[tuple[str, int], int], decode: Decode) -> Markup:
    """The exact tokens, underlined by the version that sampled them; a mark stands where the weights changed."""
    ids = answer.segment.tokens[answer.start : answer.end].tolist()
    logprobs = answer.segment.logprobs[answer.start : answer.end].tolist()
    children: list[Markup] = []
    before: PolicyRef | None = None
    for token, logprob, policy in list(zip(ids, logprobs, answer.policies(), strict=True))[:MAX_TOKENS]:
        if policy and before and policy != before:
            children.append(tag("span", f"v{policy.number}", class_="switched", data_tip=_switch_tip(before, policy)))
        before = policy or before
        children.append(_token(decode([token]), token, logprob, policy, colours))
    if len(ids) > MAX_TOKENS:
        children.append(tag("span", f"… {len(ids) - MAX_TOKENS} more", class_="note"))
    return tag("div", children, class_="tokens", aria_label="exact tokens of this answer")


def _token(
    text: str, token: int, logprob: float, policy: PolicyRef | None, colours: Mapping[tuple[str, int], int]
) -> Markup:
    known = math.isfinite(logprob)
    tip = [f"token {token}"]
    if known:
        tip.append(
            f"probability {percent(math.exp(min(logprob, 0.0)), 1)}, log-prob {logprob:.3f}".replace("-0.000", "0")
        )
    if policy:
        tip.append(f"{policy.line} v{policy.number} {policy.form} {policy.digest[:8]}")
    # heat: 0 for a certain token, 10 from about one chance in fifty
    heat = max(0, min(10, round(-2.5 * logprob))) if known else 0
    version = f" policy{colours[policy.line, policy.number]}" if policy else ""
    return tag(
        "span",
        _cut(text, 80).replace("\n", "⏎") or "␣",
        class_=f"token{version}{f' heat{heat}' if heat else ''}",  # no style attribute: the dashboard forbids them
        data_tip="\n".join(tip),
    )


def _switch_tip(before: PolicyRef, after: PolicyRef) -> str:
    return f"weights changed in mid-answer\n{before.line} v{before.number} → {after.line} v{after.number}"


def _rewards(trajectory: Trajectory) -> Markup:
    if trajectory.rewards:
        return tag("footer", [_reward(reward) for _, reward in trajectory.rewards])
    reason = f" ({trajectory.reason})" if trajectory.reason else ""
    return tag("footer", tag("p", f"Not graded: {trajectory.state.value}{_cut(reason, 300)}"))


def _reward(reward: Reward) -> Markup:
    parts = [f"{_cut(str(name), 60)} {number(float(value))}" for name, value in reward.parts.items()]
    evidence = tag("details", tag("summary", "Evidence"), _pairs(reward.evidence, 1500)) if reward.evidence else ""
    return tag(
        "div",
        tag("b", f"Reward {number(reward.value)}", class_="good" if reward.value > 0 else "bad"),
        [tag("span", part) for part in parts],
        tag("small", _cut(reward.grader, 80)),
        evidence,
        class_="reward",
    )


def _cut(text: str, limit: int) -> str:
    """Long text keeps its beginning and end: errors tend to stand last."""
    if len(text) <= limit:
        return text
    head, tail = limit * 2 // 3, limit // 3
    return f"{text[:head]}\n… {number(len(text) - head - tail)} characters left out …\n{text[-tail:]}"
